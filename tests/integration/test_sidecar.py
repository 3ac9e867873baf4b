"""The sidecar as real processes: what it serves, what it survives, what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from bagelplane.client.reader import NumpyReader
from bagelplane.errors import BagelplaneError, DataError, ProtocolError, SnapshotError
from bagelplane.shm.protocol import (
    SIDECAR_MESSAGES,
    Ack,
    Attach,
    Attached,
    Error,
    Hello,
    Message,
    MessageSocket,
    Published,
    Resume,
    Welcome,
)
from bagelplane.sidecar.rundir import RunDirectory
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.spec import BagelDataset, spec_hash
from bagelplane.storage import StorageSettings, open_storage
from tests.integration.sidecar_harness import (
    DEADLINE_SECONDS,
    Sidecar,
    as_another_user,
    digest,
    fetch,
    free_port,
    make_dataset,
    processes_of,
    undisturbed,
    wait_for,
)

Start = Callable[..., Sidecar]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts sidecars in the test's folder. At the end all are ended, and nothing of theirs may be left."""
    started: list[Sidecar] = []

    def start_one(dataset: BagelDataset, **settings: Any) -> Sidecar:
        sidecar = Sidecar(tmp_path, dataset, **settings)
        started.append(sidecar)
        sidecar.wait_serving()
        return sidecar

    yield start_one
    for sidecar in started:
        sidecar.kill()
    wait_for(lambda: not processes_of(tmp_path / "run"), f"the end of {processes_of(tmp_path / 'run')}")


def take(reader: NumpyReader, count: int) -> list[str]:
    return [digest(*reader.next_pack()) for _ in range(count)]


def store_of(dataset: BagelDataset) -> SnapshotStore:
    assert dataset.spec.snapshots.uri is not None
    return SnapshotStore(open_storage(StorageSettings()), dataset.spec.snapshots.uri, spec_hash(dataset))


class RawClient:
    """Speaks the protocol by hand."""

    def __init__(self, directory: Path) -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(directory / "sidecar.sock"))
        self.messages = MessageSocket(sock, SIDECAR_MESSAGES)

    def send(self, message: Message) -> None:
        self.messages.send(message, timeout_seconds=DEADLINE_SECONDS)

    def receive(self, *kinds: type[Message]) -> Message:
        deadline = time.monotonic() + DEADLINE_SECONDS
        last: object = "nothing"
        while time.monotonic() < deadline:
            message = self.messages.receive(timeout_seconds=1.0)
            if isinstance(message, kinds):
                return message
            last = message or last
        raise AssertionError(f"no {kinds} in time; last seen: {last!r}")

    def attach(self, *, rank: int = 0, world_size: int = 1, generation: int = 0) -> Message:
        self.send(Hello(1, "raw"))
        self.receive(Welcome)
        self.send(Attach(rank, rank, world_size, generation, Resume()))
        return self.receive(Attached, Error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.messages.close()


# ---- serving


def test_two_ranks_get_their_undisturbed_streams_and_nothing_is_left(start: Start, tmp_path: Path) -> None:
    dataset = make_dataset(snapshots=tmp_path / "snapshots")
    sidecar = start(dataset)
    with sidecar.reader(0, 2) as first, sidecar.reader(1, 2) as second:
        seen: list[list[str]] = [[], []]
        for _ in range(60):
            seen[0] += take(first, 1)
            seen[1] += take(second, 1)
    assert seen == [undisturbed(dataset, rank, 2, 60) for rank in (0, 1)]
    assert sidecar.terminate() == 0, sidecar.tail()
    assert not sidecar.directory.exists()


def test_socket_ring_and_directory_are_for_this_user_alone(start: Start) -> None:
    sidecar = start(make_dataset(snapshots=None))
    with sidecar.reader() as reader:
        take(reader, 1)
        modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in sidecar.directory.iterdir()}
    assert modes == {"sidecar.sock": 0o600, "sidecar.lock": 0o600, "ring-0.bin": 0o600}
    assert stat.S_IMODE(sidecar.directory.stat().st_mode) == 0o700


def test_a_trainer_of_another_user_is_served_on_a_volume_of_the_pod() -> None:
    dataset = make_dataset(snapshots=None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        volume = folder / "run"
        volume.mkdir()
        volume.chmod(0o2777)
        before = os.umask(0o077)
        try:
            sidecar = Sidecar(folder, dataset, any_user=True)
        finally:
            os.umask(before)
        try:
            sidecar.wait_serving()
            with as_another_user(), sidecar.reader() as reader:
                assert take(reader, 20) == undisturbed(dataset, 0, 1, 20)
            modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in volume.iterdir()}
            assert modes == {"sidecar.sock": 0o666, "sidecar.lock": 0o600, "ring-0.bin": 0o666}
            assert sidecar.terminate() == 0, sidecar.tail()
            assert list(volume.iterdir()) == []
        finally:
            sidecar.kill()


@pytest.mark.slow
def test_a_second_sidecar_in_one_directory_is_refused_and_a_dead_ones_is_taken_over(
    start: Start, tmp_path: Path
) -> None:
    dataset = make_dataset(snapshots=None)
    first = start(dataset)
    second = Sidecar(tmp_path, dataset)
    assert second.wait() == 6
    assert f"another sidecar runs in {first.directory}; got process {first.pid}" in second.tail()
    assert (first.directory / "sidecar.sock").is_socket()
    first.kill()
    assert (first.directory / "sidecar.sock").is_socket(), "a killed one cannot clean up"
    third = start(dataset)
    with third.reader() as reader:
        assert take(reader, 3) == undisturbed(dataset, 0, 1, 3)


def test_what_makes_serving_impossible_is_said_before_a_trainer_comes(tmp_path: Path) -> None:
    dataset = make_dataset(snapshots=None, refuse="nothing below s3://bucket/t2i/")
    sidecar = Sidecar(tmp_path, dataset)
    assert sidecar.wait() == 5
    text = sidecar.log.read_text()
    assert "error: spec.groups[0].datasets[0]: nothing below s3://bucket/t2i/; got nothing; " in text
    assert "; expected something. Fix: another" in text
    assert "Traceback" not in text
    assert not sidecar.directory.exists()


def test_a_place_where_no_snapshot_can_be_written_is_said_before_a_trainer_comes(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sidecar = Sidecar(tmp_path, make_dataset(snapshots=tmp_path / "file" / "snapshots"))
    assert sidecar.wait() == 3, sidecar.tail()
    assert f"{tmp_path}/file/snapshots" in sidecar.log.read_text()
    assert "Traceback" not in sidecar.log.read_text()


def test_a_ring_larger_than_its_volume_is_refused_with_both_numbers(tmp_path: Path) -> None:
    data = make_dataset(snapshots=None).to_mapping()
    data["spec"]["dataplane"]["ring"]["size"] = str(2**50)
    sidecar = Sidecar(tmp_path, BagelDataset.from_mapping(data))
    assert sidecar.wait() == 6
    text = sidecar.log.read_text()
    assert "too small for the ring" in text
    assert str(2**50 + 4096) in text
    assert "bytes free" in text
    assert "Traceback" not in text
    assert not sidecar.directory.exists()


def test_an_error_of_the_stream_reaches_the_trainer_as_one(start: Start) -> None:
    sidecar = start(make_dataset(snapshots=None, fail_at="3"))
    with sidecar.reader() as reader:
        take(reader, 3)
        with pytest.raises(DataError, match="gives nothing but drops; got 1000 drops") as caught:
            take(reader, 1)
    assert caught.value.fix == "look at the data"
    assert "Traceback" not in sidecar.log.read_text()


@pytest.mark.slow
def test_a_producer_that_crashes_again_and_again_is_given_up(start: Start) -> None:
    sidecar = start(make_dataset(snapshots=None, crash_at="2"))
    with sidecar.reader(timeout_seconds=60) as reader:
        take(reader, 2)
        with pytest.raises(
            BagelplaneError, match=r"in a row without a pack.*ZeroDivisionError: made to fail"
        ):
            take(reader, 1)


def test_garbage_harms_only_who_sends_it(start: Start) -> None:
    dataset = make_dataset(snapshots=None)
    sidecar = start(dataset)
    with sidecar.reader() as reader:
        digests = take(reader, 2)
        for garbage in (b"\xff" * 100, struct.pack("<I", 3) + b"abc", struct.pack("<I", 2**31)):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(sidecar.directory / "sidecar.sock"))
                sock.sendall(garbage)
                sock.settimeout(DEADLINE_SECONDS)
                while sock.recv(65536):
                    pass  # an error message; what counts is the end of the connection
        with RawClient(sidecar.directory) as client:
            assert isinstance(client.attach(rank=1, world_size=2), Error), "another topology"
        digests += take(reader, 20)
    assert digests == undisturbed(dataset, 0, 1, 22)


def test_an_acknowledgement_of_what_was_never_given_is_refused(start: Start) -> None:
    sidecar = start(make_dataset(snapshots=None))
    with RawClient(sidecar.directory) as client:
        client.attach()
        client.receive(Published)
        client.send(Ack(1000))
        error = client.receive(Error)
        assert isinstance(error, Error)
        assert error.code == "protocol"
        assert "never given" in error.message


@pytest.mark.slow
def test_a_rank_that_is_taken_waits_and_then_says_busy(start: Start) -> None:
    sidecar = start(make_dataset(snapshots=None))
    with RawClient(sidecar.directory) as first, RawClient(sidecar.directory) as second:
        assert isinstance(first.attach(), Attached)
        error = second.attach()
        assert isinstance(error, Error)
        assert (error.code, error.fatal) == ("busy", False)


@pytest.mark.slow
def test_the_deadline_names_the_holder_of_the_rank_though_attaching_was_tried_again(start: Start) -> None:
    sidecar = start(make_dataset(snapshots=None))
    with RawClient(sidecar.directory) as holder, sidecar.reader(timeout_seconds=3.5) as reader:
        assert isinstance(holder.attach(), Attached)
        with pytest.raises(ProtocolError, match=r"rank 0 is attached already, as local rank 0; got raw"):
            take(reader, 1)


def test_a_trainer_of_another_generation_is_refused(start: Start) -> None:
    sidecar = start(make_dataset(snapshots=None), generation=4)
    with RawClient(sidecar.directory) as client:
        error = client.attach(generation=3)
        assert isinstance(error, Error)
        assert error.fatal
        assert "generation 3" in error.message
        assert "generation 4" in error.message


# ---- place in the stream


def test_a_trainer_that_comes_again_continues_with_the_next_unacknowledged_step(start: Start) -> None:
    dataset = make_dataset(snapshots=None)
    sidecar = start(dataset)
    with sidecar.reader() as reader:
        digests = take(reader, 7)
    with sidecar.reader() as reader:
        digests += take(reader, 7)
    assert digests == undisturbed(dataset, 0, 1, 14)


def test_ranks_that_attach_at_the_same_moment_are_all_served(start: Start, tmp_path: Path) -> None:
    sidecar = start(make_dataset(snapshots=tmp_path / "snapshots"))
    clients = [RawClient(sidecar.directory) for _ in range(4)]
    try:
        for client in clients:
            client.send(Hello(1, "raw"))
        for rank, client in enumerate(clients):
            client.send(Attach(rank, rank, 4, 0, Resume("none")))
        for client in clients:
            assert isinstance(client.receive(Attached, Error), Attached), sidecar.tail()
            client.receive(Published)
    finally:
        for client in clients:
            client.messages.close()


@pytest.mark.slow
def test_ranks_may_come_again_in_another_order(start: Start) -> None:
    dataset = make_dataset(snapshots=None)
    sidecar = start(dataset)
    for rank, local_rank in ((0, 0), (1, 1)):
        with sidecar.reader(rank, 2, local_rank=local_rank) as reader:
            take(reader, 5)
    for rank, local_rank in ((0, 1), (1, 0)):
        with sidecar.reader(rank, 2, local_rank=local_rank) as reader:
            assert take(reader, 5) == undisturbed(dataset, rank, 2, 10)[5:]


@pytest.mark.slow
def test_any_step_can_be_asked_for(start: Start, tmp_path: Path) -> None:
    dataset = make_dataset(snapshots=tmp_path / "snapshots", every=5)
    sidecar = start(dataset)
    with sidecar.reader() as reader:
        take(reader, 15)
        for step in (3, 14, 15, 17, 40, 0):
            reader.resume(step=step)
            assert take(reader, 5) == undisturbed(dataset, 0, 1, step + 5)[step:]


@pytest.mark.slow
def test_planning_far_forward_says_how_far_it_is(start: Start) -> None:
    dataset = make_dataset(snapshots=None, skip_seconds="0.05")
    sidecar = start(dataset)
    with sidecar.reader() as reader:
        reader.resume(step=220)  # eleven seconds
        assert take(reader, 1) == undisturbed(dataset, 0, 1, 221)[220:]
    lines = re.findall(
        r"rank 0: planned (\d+) of 220 packs, ([\d.]+) a second, (\d+) s left", sidecar.log.read_text()
    )
    assert 1 <= len(lines) <= 220
    for done, rate, left in lines:
        assert abs((220 - int(done)) / float(rate) - int(left)) < 2


def test_a_state_from_a_checkpoint_continues_in_a_new_sidecar(start: Start) -> None:
    dataset = make_dataset(snapshots=None)
    first = start(dataset)
    with first.reader() as reader:
        take(reader, 9)
        state = json.loads(json.dumps(reader.state_dict()))
    assert first.terminate() == 0
    second = start(dataset)
    with second.reader() as reader:
        reader.load_state_dict(state)
        assert take(reader, 4) == undisturbed(dataset, 0, 1, 13)[9:]


def test_a_state_under_another_step_is_refused_at_once(start: Start) -> None:
    sidecar = start(make_dataset(snapshots=None))
    with sidecar.reader() as reader:
        take(reader, 3)
        state = reader.state_dict()
        reader.load_state_dict({**state, "step": 500})
        with pytest.raises(SnapshotError, match="another step than it was saved under; got step 3"):
            take(reader, 1)


def test_another_topology_in_mid_run_is_refused_and_both_are_named(start: Start) -> None:
    sidecar = start(make_dataset(snapshots=None))
    with sidecar.reader(0, 2) as reader:
        take(reader, 3)
    with (
        sidecar.reader(0, 4) as reader,
        pytest.raises(SnapshotError, match=r"step 3.*world size 4.*world size 2"),
    ):
        take(reader, 1)


# ---- snapshots


def test_snapshots_are_written_every_n_acknowledged_steps_and_kept_as_asked(
    start: Start, tmp_path: Path
) -> None:
    dataset = make_dataset(snapshots=tmp_path / "snapshots", every=10, keep=2)
    sidecar = start(dataset)
    store = store_of(dataset)
    with sidecar.reader(0, 2) as first, sidecar.reader(1, 2) as second:
        # One after the other: a store that is behind, as on a busy machine, is spared those in between.
        for kept in ([10], [10, 20], [20, 30], [30, 40]):
            take(first, 10)
            take(second, 10)
            wait_for(
                lambda kept=kept: [entry.step for entry in store.entries()] == kept,
                f"the snapshots of steps {kept}",
            )
        take(first, 5)
        take(second, 5)
    manifest = store.load("latest")
    assert manifest is not None
    assert manifest.topology.world_size == 2
    assert store.load_state(manifest, 1)["step"] == 40


def test_a_snapshot_asked_for_is_complete_when_all_ranks_are_there(start: Start, tmp_path: Path) -> None:
    dataset = make_dataset(snapshots=tmp_path / "snapshots", every=1000)
    sidecar = start(dataset)
    store = store_of(dataset)
    with sidecar.reader(0, 2) as first, sidecar.reader(1, 2) as second:
        take(first, 7)
        take(second, 5)
        answer = first.snapshot()
        assert answer.step == 7
        assert answer.uri.startswith(f"{store.uri}/step-000000000007-"), "and the run's id"
        assert store.load("latest") is None, "rank 1 has not come so far"
        take(second, 2)
        wait_for(lambda: store.load("latest"), "the snapshot's completion")


def test_a_snapshot_without_a_place_for_it_is_an_error_that_says_so(start: Start) -> None:
    dataset = make_dataset(snapshots=None)
    sidecar = start(dataset)
    with sidecar.reader() as reader:
        digests = take(reader, 1)
        with pytest.raises(SnapshotError, match="names no place"):
            reader.snapshot()
        assert digests + take(reader, 2) == undisturbed(dataset, 0, 1, 3), "training goes on"


def test_sigterm_ends_with_a_snapshot_and_status_0_and_the_run_goes_on_there(
    start: Start, tmp_path: Path
) -> None:
    dataset = make_dataset(snapshots=tmp_path / "snapshots", every=1000)
    sidecar = start(dataset)
    with sidecar.reader(0, 2) as first, sidecar.reader(1, 2) as second:
        take(first, 12)
        take(second, 11)
        assert sidecar.terminate() == 0, sidecar.tail()
    manifest = store_of(dataset).load("latest")
    assert manifest is not None
    assert manifest.step == 11, "the newest step that both have taken"
    sidecar = start(dataset)
    for rank in (0, 1):
        with sidecar.reader(rank, 2) as reader:
            assert take(reader, 5) == undisturbed(dataset, rank, 2, 16)[11:]


def test_an_interrupt_is_a_wish_to_end_like_sigterm(start: Start) -> None:
    sidecar = start(make_dataset(snapshots=None))
    sidecar.popen.send_signal(signal.SIGINT)
    assert sidecar.wait() == 0, sidecar.tail()


def test_sigterm_ends_the_sidecar_while_trainers_wait_for_a_producer_that_crashes(start: Start) -> None:
    sidecar = start(make_dataset(snapshots=None, crash_at="0"))
    with RawClient(sidecar.directory) as first, RawClient(sidecar.directory) as second:
        for client in (first, second):
            client.send(Hello(1, "raw"))
            client.receive(Welcome)
            client.send(Attach(0, 0, 1, 0, Resume("none")))
        wait_for(lambda: "starting it again" in sidecar.log.read_text(), "the first crash")
        assert sidecar.terminate() == 0
    assert "Traceback" not in sidecar.log.read_text().partition("asked to stop")[2]


def test_sigterm_lets_every_connection_end_though_no_rank_holds_the_sidecar_up(start: Start) -> None:
    """Without a producer to wait for, the loop ended before the connections did: a traceback for each."""
    sidecar = start(make_dataset(snapshots=None))
    clients = [RawClient(sidecar.directory) for _ in range(20)]
    try:
        for client in clients[:10]:
            client.send(Hello(1, "raw"))
            client.receive(Welcome)
        assert sidecar.terminate() == 0
        for client in clients[:10]:
            error = client.receive(Error)
            assert isinstance(error, Error)
            assert (error.message, error.fatal) == ("the sidecar ends", False)
            with pytest.raises(ConnectionError):
                client.receive(Error)
    finally:
        for client in clients:
            client.messages.close()
    text = sidecar.log.read_text().partition("asked to stop")[2]
    assert "Exception" not in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_sigterm_ends_within_the_grace_period_when_the_store_is_away(start: Start, tmp_path: Path) -> None:
    snapshots = tmp_path / "snapshots"
    dataset = make_dataset(snapshots=snapshots, every=1000)
    sidecar = start(dataset, grace_seconds=8.0)
    with sidecar.reader() as reader:
        take(reader, 3)
        snapshots.rename(tmp_path / "away")
        snapshots.write_text("a file where the folder should be")
        begun = time.monotonic()
        assert sidecar.terminate() == 0, sidecar.tail()
    assert time.monotonic() - begun < 8.0
    assert "snapshot of step 3" in sidecar.log.read_text()


def test_the_last_acknowledgement_counts_though_the_trainer_leaves_at_once(start: Start) -> None:
    """A socket that is closed with doorbells unread is reset; what was acknowledged before stays so."""
    dataset = make_dataset(snapshots=None)
    sidecar = start(dataset)
    taken = []
    for number in range(60):
        reader = sidecar.reader()
        taken += take(reader, 1)
        if number % 2:
            reader.close()
        else:
            reader._connection._drop("as a process that exits")
    assert taken == undisturbed(dataset, 0, 1, len(taken))
    assert "the connection broke" not in sidecar.log.read_text()


@pytest.mark.slow
def test_resume_none_and_a_step_at_the_command_line(start: Start, tmp_path: Path) -> None:
    dataset = make_dataset(snapshots=tmp_path / "snapshots", every=10)
    sidecar = start(dataset)
    with sidecar.reader() as reader:
        take(reader, 25)
    assert sidecar.terminate() == 0
    for resume, step in (("latest", 25), (17, 17), ("none", 0)):
        sidecar = start(dataset, resume=resume)
        with sidecar.reader() as reader:
            assert take(reader, 2) == undisturbed(dataset, 0, 1, step + 2)[step:], resume
        sidecar.kill()


@pytest.mark.slow
def test_snapshots_of_another_spec_are_refused_before_a_trainer_comes(start: Start, tmp_path: Path) -> None:
    dataset = make_dataset(snapshots=tmp_path / "snapshots", every=5)
    sidecar = start(dataset)
    with sidecar.reader() as reader:
        take(reader, 5)
    assert sidecar.terminate() == 0
    data = dataset.to_mapping()
    data["spec"]["groups"][0]["weight"] = 2.0
    changed = BagelDataset.from_mapping(data)
    refused = Sidecar(tmp_path, changed)
    assert refused.wait() == 8
    text = refused.tail()
    assert "belongs to another dataset spec" in text
    assert spec_hash(dataset)[:16] in text
    assert spec_hash(changed)[:16] in text


@pytest.mark.slow
def test_a_trainer_s_state_of_another_spec_follows_the_rule_for_snapshots(
    start: Start, tmp_path: Path
) -> None:
    dataset = make_dataset(snapshots=tmp_path / "snapshots", every=5)
    sidecar, saved = start(dataset), {}
    with sidecar.reader() as reader:
        for step in (5, 7):
            take(reader, step - reader.step)
            saved[step] = reader.state_dict()
    assert sidecar.terminate() == 0  # with a snapshot of step 7
    data = dataset.to_mapping()
    data["spec"]["groups"][0]["weight"] = 2.0
    data["spec"]["resume"] = {"allowSpecChange": ["groups"]}
    allowed = BagelDataset.from_mapping(data)
    del data["spec"]["resume"]
    data["spec"]["snapshots"]["uri"] = str(tmp_path / "elsewhere")
    changed = BagelDataset.from_mapping(data)
    for spec, resume, step, refusal in (
        (changed, "none", 5, rf"another data set than 'fake'.*{spec_hash(dataset)[:16]}.*allowSpecChange"),
        (allowed, 5, 5, None),
        (allowed, 5, 7, "no snapshot says what changed since step 7"),
        (allowed, "none", 5, "no snapshot says what changed since step 5"),
    ):
        sidecar = start(spec, resume=resume)
        with sidecar.reader() as reader:
            reader.load_state_dict(saved[step])
            if refusal is None:
                assert take(reader, 1) == undisturbed(dataset, 0, 1, step + 1)[step:]
                assert reader.state_dict()["spec_hash"] == spec_hash(changed)
            else:
                with pytest.raises(SnapshotError, match=refusal):
                    next(reader)
        sidecar.kill()


@pytest.mark.slow
def test_bad_images_are_durable_before_a_pack_planned_with_them_is_given(
    start: Start, tmp_path: Path
) -> None:
    dataset = make_dataset(snapshots=tmp_path / "snapshots", every=1000, bad_at="4")
    sidecar = start(dataset)
    with sidecar.reader() as reader:
        assert take(reader, 5) == undisturbed(dataset, 0, 1, 5)
    assert store_of(dataset).load_known_bad() == {"fake-image": "does not decode"}
    sidecar.kill()
    sidecar = start(dataset)
    with sidecar.reader() as reader:
        take(reader, 5)
        assert reader.status()["known_bad_images"] == 1


# ---- status


def test_status_and_metrics_say_what_happens(start: Start) -> None:
    port = free_port()
    sidecar = start(make_dataset(snapshots=None), status_port=port)
    assert fetch(port, "/healthz")[0] == 200
    assert fetch(port, "/readyz")[0] == 200
    with sidecar.reader() as reader:
        take(reader, 6)
        code, text = fetch(port, "/v1/status")
        rank = json.loads(text)["ranks"][0]
        assert code == 200
        assert (rank["next_step"], rank["packs_acknowledged"], rank["attached"]) == (6, 6, True)
        assert 0 < rank["fill"] < 1
        assert set(rank["drops"]) == {"t2i"}
        metrics = fetch(port, "/metrics")[1]
        assert 'bagelplane_packs_acknowledged_total{rank="0"} 6.0' in metrics
        assert 'bagelplane_drops_total{group="t2i",rank="0",reason="t2i_image_parse"}' in metrics
        status = reader.status()
        assert status["ranks"][0]["next_step"] == 6
        assert status["resampler"].startswith(("native (", "pillow ("))
        assert status["jpeg_decoder"].startswith(("libjpeg-turbo (", "pillow ("))


# ---- deaths


def kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was ending anyway
        os.kill(pid, signal.SIGKILL)


def test_a_killed_producer_is_replaced_without_a_word_to_the_loop(start: Start) -> None:
    dataset = make_dataset(snapshots=None)
    sidecar = start(dataset)
    with sidecar.reader() as reader:
        digests = take(reader, 10)
        epoch = reader.status()["ranks"][0]["ring"]["epoch"]
        kill_process(reader.status()["ranks"][0]["producer_pid"])
        digests += take(reader, 10)
        rank = reader.status()["ranks"][0]
    assert digests == undisturbed(dataset, 0, 1, 20)
    assert rank["ring"]["epoch"] > epoch
    assert rank["restarts"] == 1


def test_a_socket_and_a_ring_that_somebody_deletes_are_made_again(start: Start) -> None:
    dataset = make_dataset(snapshots=None)
    sidecar = start(dataset)
    with sidecar.reader() as first:
        digests = take(first, 3)
        for path in sidecar.directory.iterdir():
            path.unlink()
        wait_for((sidecar.directory / "sidecar.sock").is_socket, "the socket")
        wait_for((sidecar.directory / "ring-0.bin").exists, "the ring")
        digests += take(first, 10)
    with sidecar.reader() as second:
        digests += take(second, 3)
        assert second.status()["problem"] == ""
    assert digests == undisturbed(dataset, 0, 1, 16)
    assert "sidecar.sock was deleted and is made again" in sidecar.log.read_text()
    assert "ring-0.bin was deleted" in sidecar.log.read_text()
    assert sidecar.terminate() == 0
    assert not sidecar.directory.exists()


def test_a_directory_that_another_sidecar_took_over_is_left_to_it(start: Start, tmp_path: Path) -> None:
    port = free_port()
    first = start(make_dataset(snapshots=None), status_port=port)
    for path in first.directory.iterdir():
        path.unlink()
    with RunDirectory(first.directory) as second:
        wait_for(lambda: json.loads(fetch(port, "/v1/status")[1])["problem"], "the problem")
        problem = json.loads(fetch(port, "/v1/status")[1])["problem"]
        assert f"another sidecar runs in {second.path}" in problem
        second.bind().close()
        assert first.terminate() == 0
        assert second.socket_path.is_socket(), "what is there is the other's"


def test_producers_die_with_their_supervisor(start: Start) -> None:
    sidecar = start(make_dataset(snapshots=None))
    with sidecar.reader() as reader:
        take(reader, 1)
        pid = reader.status()["ranks"][0]["producer_pid"]
        sidecar.kill()
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the producer's end")
