"""The parts of the sidecar that need no process: sizes, progress, control frames, the run directory, commands."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagelplane.cli.app import main
from bagelplane.cli.run import expected_ranks, parse_resume
from bagelplane.errors import ProtocolError, RingError, SpecError
from bagelplane.sidecar import sizing
from bagelplane.sidecar.control import encode_frame, receive_frame, send_frame
from bagelplane.sidecar.rank import KEPT_STATES, Progress, RankFailedError, StartingPoint
from bagelplane.sidecar.readers import BusyError
from bagelplane.sidecar.rundir import RunDirectory
from bagelplane.sidecar.snapshots import SnapshotStore, StreamTopology
from bagelplane.sidecar.supervisor import SidecarSettings, Supervisor
from bagelplane.sidecar.tally import Tally
from bagelplane.spec_memory import largest_pack_bytes, ring_bytes
from bagelplane.storage import StorageSettings, open_storage
from tests.integration.sidecar_harness import as_another_user, make_dataset

# ---- sizes


def test_a_ring_holds_the_packs_asked_for_at_their_largest() -> None:
    data = make_dataset(snapshots=None).to_mapping()
    data["spec"]["dataplane"]["ring"] = {"packs": 3}
    dataset = type(make_dataset(snapshots=None)).from_mapping(data)
    largest = largest_pack_bytes(dataset)
    assert largest > 36_864 * 16 * 16 * 3, "every token an image's"
    assert ring_bytes(dataset) == 3 * largest
    data["spec"]["dataplane"]["pixelFormat"] = "float32"
    floats = largest_pack_bytes(type(dataset).from_mapping(data))
    assert floats == largest + 3 * (36_864 * 16 * 16 * 3), "pixels are four times as large, all else is not"


def test_a_ring_without_room_for_a_rank_nobody_told_of_is_a_matter_of_the_ranks(tmp_path: Path) -> None:
    told = RankFailedError("no room", fix="enlarge the volume", code="ring")
    with RunDirectory(tmp_path / "run") as directory:
        settings = SidecarSettings(directory.path, local_ranks=2)
        supervisor = Supervisor(make_dataset(snapshots=None), settings, directory)
        assert supervisor._explained(told, rings=2) is told
        fix = supervisor._explained(told, rings=3).fix
    assert "it was 2" in fix
    assert "nprocPerNode" in fix
    assert fix.endswith("enlarge the volume")


def test_whatever_ranks_clients_name_a_supervisor_serves_and_remembers_a_bounded_number(
    tmp_path: Path,
) -> None:
    async def attach_ranks_without_end(supervisor: Supervisor) -> None:
        for number in range(2000):
            async with supervisor._lock_of(f"local rank {number}"):
                supervisor._remember(number, Progress(StartingPoint()), Tally())

    with RunDirectory(tmp_path / "run") as directory:
        settings = SidecarSettings(directory.path, local_ranks=1)
        supervisor = Supervisor(make_dataset(snapshots=None), settings, directory)
        served: Any = dict.fromkeys(range(63), object())
        supervisor.servers = served
        asyncio.run(attach_ranks_without_end(supervisor))
        assert not supervisor._locks
        for table in (supervisor._progress, supervisor._tallies):
            assert set(table) >= {*range(63), *range(1744, 2000)}
            assert len(table) == 63 + 256
        supervisor._check_number()
        served[63] = object()
        with pytest.raises(BusyError, match="got 64 ranks; expected at most 64"):
            supervisor._check_number()


def test_threads_are_what_the_resource_says_else_the_cpus_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_dataset(snapshots=None)
    monkeypatch.setattr(sizing, "available_cpus", lambda: 7.5)
    assert [sizing.decode_threads(dataset, ranks) for ranks in (1, 2, 8)] == [7, 3, 1]
    data = dataset.to_mapping()
    data["spec"]["dataplane"]["decodeThreads"] = 5
    assert sizing.decode_threads(type(dataset).from_mapping(data), 8) == 5


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, 0.0),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_cgroups_quota_is_read_in_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: float
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sizing, "_CGROUP", tmp_path)
    assert sizing._cgroup_quota() == quota


# ---- progress


def test_only_acknowledged_states_may_be_stored() -> None:
    progress = Progress(StartingPoint())
    for step in range(1, 6):
        progress.keep(step, {"step": step})
    assert progress.acknowledged() == {}
    progress.advance(1)
    progress.advance(2)
    assert progress.acknowledged() == {1: {"step": 1}, 2: {"step": 2}}
    assert progress.starting_point() == StartingPoint(2, {"step": 2}, 2)
    assert progress.starting_point(4) == StartingPoint(4, {"step": 4}, 4)


def test_old_states_are_let_go() -> None:
    progress = Progress(StartingPoint())
    for step in range(1, 100):
        progress.keep(step, {"step": step})
        progress.advance(step)
    assert list(progress.acknowledged()) == list(range(100 - KEPT_STATES, 100))


def test_a_start_that_was_never_reached_is_begun_again_from_its_origin() -> None:
    origin = StartingPoint(100, {"step": 100}, 150)
    progress = Progress(origin)
    assert progress.next_step == 150
    assert progress.starting_point() == origin
    assert progress.starting_point(50) == StartingPoint(0, None, 50)
    progress.keep(150, {"step": 150})
    assert progress.starting_point() == StartingPoint(150, {"step": 150}, 150)


# ---- control frames


@given(st.dictionaries(st.text(), st.recursive(st.integers() | st.text() | st.none(), st.lists)))
def test_a_frame_comes_out_as_it_went_in(frame: dict[str, Any]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(ours, frame)
        assert receive_frame(theirs) == frame
        ours.close()
        assert receive_frame(theirs) is None


def test_half_a_frame_is_the_end_and_an_endless_one_an_error() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(encode_frame({"type": "ack"})[:-1])
        assert receive_frame(theirs) is None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(ProtocolError, match="too many bytes"):
            receive_frame(theirs)


# ---- the run directory


def test_a_run_directory_leaves_nothing_and_lets_nobody_else_in(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as directory:
        directory.check_room(2, 4096)
        sock = directory.bind()
        with sock, pytest.raises(RingError, match="another sidecar runs"):
            RunDirectory(tmp_path / "run")
        names = sorted(path.name for path in directory.path.iterdir())
        assert names == ["ring-0.bin", "ring-1.bin", "sidecar.lock", "sidecar.sock"]
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_was_there_stays_with_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    with RunDirectory(tmp_path) as directory:
        directory.check_room(1, 4096)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_path_too_long_for_a_socket_is_an_error_with_its_length(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / ("x" * 120)) as directory, pytest.raises(RingError, match="at most 107"):
        directory.bind()


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(RingError, match="cannot be made"):
        RunDirectory(tmp_path / "run")


def modes_in(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.lstat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize("mode", [0o777, 0o2777])
def test_any_user_opens_socket_and_rings_and_leaves_the_volume_as_it_is(tmp_path: Path, mode: int) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(mode)
    before = os.umask(0o077)
    try:
        with RunDirectory(volume, any_user=True) as directory:
            directory.check_room(1, 4096)
            with directory.bind():
                modes = modes_in(volume)
            assert stat.S_IMODE(volume.stat().st_mode) == mode
    finally:
        os.umask(before)
    assert modes == {"sidecar.sock": 0o666, "sidecar.lock": 0o600, "ring-0.bin": 0o666}
    assert list(volume.iterdir()) == []


def test_a_directory_made_for_any_user_lets_others_look_and_not_write(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", any_user=True) as directory:
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o755


def test_a_run_directory_that_may_not_be_looked_into_is_an_error_of_ours(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    with as_another_user(), pytest.raises(RingError, match="cannot be made: Permission denied"):
        RunDirectory(closed / "run")


def test_a_full_volume_is_an_error_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RingError, match=r"sidecar\.lock cannot be written: No space left"):
        RunDirectory(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


# ---- commands


def test_resume_is_parsed_or_refused() -> None:
    assert [parse_resume(text) for text in ("latest", "none", "0", "1234")] == ["latest", "none", 0, 1234]
    for text in ("", "-1", "new", "1.5", "²", "9" * 12 + "9"):
        with pytest.raises(SpecError, match="latest, none or a step"):
            parse_resume(text)


def test_fewer_ranks_than_processes_are_fewer_on_every_machine() -> None:
    environment = {"PET_NPROC_PER_NODE": "8", "PET_NNODES": "2"}
    assert expected_ranks(environment, 2) == (2, 4)
    assert expected_ranks(environment, 8) == (8, 16)
    assert expected_ranks({}, 3) == (3, 3)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (1, 1)),
        ({"PET_NPROC_PER_NODE": "auto", "PET_NNODES": "1:4"}, (1, 1)),
        ({"PET_NPROC_PER_NODE": "8", "PET_NNODES": "2"}, (8, 16)),
        ({"WORLD_SIZE": "4"}, (1, 4)),
    ],
)
def test_expected_ranks_are_hints(environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert expected_ranks(environment) == expected


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


def test_snapshots_are_listed_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = SnapshotStore(open_storage(StorageSettings()), str(tmp_path), "c" * 64, dataset="demo")
    for rank in (0, 1):
        state = {"step": 8, "drops": {"t2i": {"t2i_image_parse": 3}}}
        store.write_rank(8, rank, StreamTopology(2, 1), state)
    store.write_rank(16, 0, StreamTopology(2, 1), {})
    code, text, _ = run_command(capsys, "snapshots", "list", str(tmp_path), "-o", "json")
    assert code == 0
    conditions = [(entry["step"], entry["condition"]) for entry in json.loads(text)["snapshots"]]
    assert conditions == [(8, "complete"), (16, "incomplete")]
    code, text, _ = run_command(capsys, "snapshots", "show", str(tmp_path), "-o", "json")
    assert code == 0
    assert [state["step"] for state in json.loads(text)["states"]] == [8, 8]
    code, text, _ = run_command(capsys, "snapshots", "list", str(tmp_path))
    assert "incomplete" in text
    code, text, _ = run_command(capsys, "snapshots", "show", str(tmp_path), "8")
    assert "step 8 of dataset demo, world size 2 with 1 workers a rank" in text


def test_a_damaged_state_ends_show_with_status_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = SnapshotStore(open_storage(StorageSettings()), str(tmp_path), "c" * 64)
    store.write_rank(8, 0, StreamTopology(1, 1), {"step": 8})
    (tmp_path / "step-000000000008" / "rank-00000.json.zst").write_bytes(b"x")
    code, _, text = run_command(capsys, "snapshots", "show", str(tmp_path))
    assert code == 8
    assert text.startswith("error: the state ")
    assert "is damaged; got 1 bytes" in text
    assert text.count("\n") == 1


def test_a_damaged_record_of_a_run_is_shown_and_stops_nobody_who_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = SnapshotStore(open_storage(StorageSettings()), str(tmp_path), "c" * 64)
    for step in (8, 16):
        store.write_rank(step, 0, StreamTopology(1, 1), {"step": step})
    record = tmp_path / "runs" / "run-000001.json"
    record.parent.mkdir()
    record.write_bytes(b"")
    prune = ("prune", str(tmp_path), "--keep-last", "1")
    for arguments, wanted in ((("list", str(tmp_path)), 0), (("verify", str(tmp_path)), 8), (prune, 0)):
        code, text, _ = run_command(capsys, "snapshots", *arguments, "-o", "json")
        assert (code, [run["uri"] for run in json.loads(text)["damaged_runs"]]) == (wanted, [str(record)])
    assert not (tmp_path / "step-000000000008").exists()
    code, _, text = run_command(capsys, "snapshots", *prune, "--other-runs")
    assert (code, str(record) in text) == (8, True)
    assert record.exists()


@pytest.mark.parametrize("target", ["datset.yaml", "datset.yml", "datset.json", "s3://", "file://relative"])
def test_a_mistyped_place_of_snapshots_is_a_wrong_argument(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("list", "verify"):
        code, _, text = run_command(capsys, "snapshots", command, target)
        assert (code, target in text) == (2, True)
