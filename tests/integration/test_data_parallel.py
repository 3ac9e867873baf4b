"""Processes with one data-parallel rank read one ring: each pack is made once, and whoever holds it up is named."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bagelplane.client.reader import NumpyReader
from bagelplane.errors import ProtocolError
from tests.integration.sidecar_harness import (
    Process,
    Sidecar,
    digest,
    make_dataset,
    processes_of,
    undisturbed,
    wait_for,
)

DEADLINE_SECONDS = 150.0
pytestmark = pytest.mark.timeout(600)
SCRIPT = Path(__file__).with_name("readers_of_a_mesh.py")
Start = Callable[..., Sidecar]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Sidecar] = []

    def start_one(**orders: Any) -> Sidecar:
        sidecar = Sidecar(tmp_path, make_dataset(snapshots=None, **orders), local_ranks=1)
        started.append(sidecar)
        sidecar.wait_serving(DEADLINE_SECONDS)
        return sidecar

    yield start_one
    for sidecar in started:
        sidecar.kill()
    wait_for(lambda: not processes_of(tmp_path / "run"), "the end of all processes", DEADLINE_SECONDS)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def reader_of(sidecar: Sidecar, local_rank: int, readers: int, **settings: Any) -> NumpyReader:
    settings = {"dp_rank": 0, "dp_size": 1, "timeout_seconds": DEADLINE_SECONDS, **settings}
    return NumpyReader(sidecar.directory, local_rank=local_rank, readers=readers, **settings)


def hurry(reader: NumpyReader, seconds: float) -> NumpyReader:
    """A short deadline from now on: the first pack may take long where the machine is busy."""
    reader._connection.timeout_seconds = seconds
    return reader


def take(reader: NumpyReader, count: int) -> list[str]:
    return [digest(*reader.next_pack()) for _ in range(count)]


def rank_status(reader: NumpyReader) -> dict[str, Any]:
    (rank,) = reader.status()["ranks"]
    assert isinstance(rank, dict)
    return rank


def test_readers_of_one_rank_see_the_same_packs_each_made_once(start: Start, stack: ExitStack) -> None:
    sidecar = start()
    readers = [stack.enter_context(reader_of(sidecar, n, 3)) for n in range(3)]
    seen: list[list[str]] = [[], [], []]
    for _ in range(4):  # by turns, so that nobody waits for a slower one of the same thread
        for reader, digests in zip(readers, seen, strict=True):
            digests.extend(take(reader, 2))
    assert seen[0] == seen[1] == seen[2] == undisturbed(make_dataset(snapshots=None), 0, 1, 8)
    rank = rank_status(readers[0])
    assert rank["next_step"] == rank["packs_acknowledged"] == 8
    assert 8 <= rank["packs_published"] < 3 * 8, "each pack was made once, and some lie ready"
    assert [(one["local_rank"], one["attached"], one["next_step"]) for one in rank["readers"]] == [
        (0, True, 8), (1, True, 8), (2, True, 8),
    ]  # fmt: skip


def test_a_reader_that_was_closed_goes_on_at_its_own_step_and_all_of_them_at_the_lowest(
    start: Start, stack: ExitStack
) -> None:
    sidecar = start()
    digests = undisturbed(make_dataset(snapshots=None), 0, 1, 8)
    first, second = (reader_of(sidecar, n, 2) for n in range(2))
    stack.callback(first.close)
    assert take(first, 3) == digests[:3]
    assert take(second, 2) == digests[:2]
    second.close()
    second = stack.enter_context(reader_of(sidecar, 1, 2))
    assert take(second, 2) == digests[2:4], "its own next step, the other one being there"
    first.close()
    second.close()
    for local_rank in (5, 4):  # another process layout, with nobody of the old one left
        reader = stack.enter_context(reader_of(sidecar, local_rank, 2))
        assert take(reader, 1) == digests[3:4], "where the slower one stood"


def test_a_producer_that_is_killed_comes_back_for_all_readers_each_at_its_step(
    start: Start, stack: ExitStack
) -> None:
    sidecar = start()
    digests = undisturbed(make_dataset(snapshots=None), 0, 1, 12)
    first, second = (stack.enter_context(reader_of(sidecar, n, 2)) for n in range(2))
    assert take(first, 5) == digests[:5]
    assert take(second, 3) == digests[:3]
    before = rank_status(first)
    os.kill(before["producer_pid"], signal.SIGKILL)
    wait_for(lambda: rank_status(first)["restarts"] == 1, "the producer's restart", DEADLINE_SECONDS)
    assert take(second, 4) == digests[3:7]
    assert take(first, 5) == digests[5:10]
    after = rank_status(first)
    assert after["ring"]["epoch"] > before["ring"]["epoch"]


def test_a_sidecar_that_is_lost_has_readers_meet_again_though_they_stood_apart(
    start: Start, stack: ExitStack
) -> None:
    sidecar = start()
    digests = undisturbed(make_dataset(snapshots=None), 0, 1, 12)
    ahead, behind = (stack.enter_context(reader_of(sidecar, n, 2)) for n in range(2))
    assert take(ahead, 5) == digests[:5]
    assert take(behind, 3) == digests[:3]
    sidecar.kill()
    start()
    assert take(ahead, 1) == digests[5:6]
    assert take(behind, 5) == digests[3:8], "earlier than the place that the first to come back asked for"
    assert take(ahead, 2) == digests[6:8]


def test_readers_that_load_another_place_together_all_get_there(start: Start, stack: ExitStack) -> None:
    sidecar = start()
    digests = undisturbed(make_dataset(snapshots=None), 0, 1, 42)
    first, second = (stack.enter_context(reader_of(sidecar, n, 2)) for n in range(2))
    for place in (0, 40, 1):
        for reader in (first, second):
            reader.resume(step=place)
        for reader in (first, second):
            assert take(reader, 2) == digests[place : place + 2]


def test_a_reader_alone_is_not_let_elsewhere_and_hears_who_is_in_its_way(
    start: Start, stack: ExitStack
) -> None:
    sidecar = start()
    first = stack.enter_context(reader_of(sidecar, 0, 2))
    second = stack.enter_context(reader_of(sidecar, 1, 2))
    take(first, 1)
    take(second, 1)
    hurry(second, 8).resume(step=40)
    with pytest.raises(
        ProtocolError, match=r"other readers of rank 0 are at another place; got step 40.*local rank 0"
    ):
        take(second, 1)


def test_a_second_process_that_nobody_told_of_hears_about_readers(start: Start, stack: ExitStack) -> None:
    sidecar = start()
    first = stack.enter_context(reader_of(sidecar, 0, 1))
    take(first, 1)
    second = stack.enter_context(
        NumpyReader(sidecar.directory, dp_rank=0, dp_size=1, local_rank=1, timeout_seconds=8)
    )
    with pytest.raises(ProtocolError, match=r"attached already, as local rank 0.*readers="):
        take(second, 1)


def test_a_reader_that_lags_or_dies_is_named_to_the_others(start: Start, stack: ExitStack) -> None:
    sidecar = start()
    waiting = stack.enter_context(reader_of(sidecar, 0, 2))
    lagging = reader_of(sidecar, 3, 2)
    stack.callback(lagging.close)
    take(lagging, 1)
    take(waiting, 1)
    hurry(waiting, 12)
    said = r"held by local rank 3 at step 1, attached \(bagelplane .*\) for"
    with pytest.raises(ProtocolError, match=said) as raised:
        take(waiting, 1000)
    held = int(re.findall(r"no room for step (\d+)", str(raised.value))[0])
    status = rank_status(waiting)
    assert [(one["local_rank"], one["next_step"], one["behind"]) for one in status["readers"]] == [
        (0, held, 0), (3, 1, held - 1),
    ]  # fmt: skip
    lagging.close()
    with pytest.raises(ProtocolError, match=r"held by local rank 3 at step 1, gone for"):
        take(waiting, 1)
    assert "held by local rank 3" in sidecar.log.read_text(), "and in the log"
    lagging = stack.enter_context(reader_of(sidecar, 3, 2))
    digests = undisturbed(make_dataset(snapshots=None), 0, 1, held + 1)
    assert take(lagging, held - 1) == digests[1:held]
    assert take(hurry(waiting, DEADLINE_SECONDS), 1) == digests[held:]


def test_a_reader_that_never_comes_is_missed_by_its_place(start: Start, stack: ExitStack) -> None:
    sidecar = start()
    waiting = stack.enter_context(reader_of(sidecar, 0, 3))
    take(waiting, 1)
    hurry(waiting, 8)
    with pytest.raises(
        ProtocolError, match=r"2 of 3 readers not here yet, awaited at step 0 \(local ranks that came: 0\)"
    ):
        take(waiting, 1000)


def test_a_stopped_producer_is_named_with_its_process(start: Start, stack: ExitStack) -> None:
    sidecar = start()
    reader = stack.enter_context(reader_of(sidecar, 0, 1))
    take(reader, 1)
    hurry(reader, 10)
    pid = rank_status(reader)["producer_pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ProtocolError, match=rf"process {pid}, was stopped by a signal.*kill -CONT {pid}"):
            take(reader, 1000)
        assert f"process {pid}, was stopped" in rank_status(reader)["problem"]
    finally:
        os.kill(pid, signal.SIGCONT)
    take(hurry(reader, DEADLINE_SECONDS), 5)
    assert rank_status(reader)["problem"] == ""


def test_ranks_in_another_order_take_over_the_rings_of_those_that_left(
    start: Start, stack: ExitStack
) -> None:
    sidecar = start()
    dataset = make_dataset(snapshots=None)
    for local_rank in range(2):
        take(stack.enter_context(reader_of(sidecar, local_rank, 2, dp_rank=0, dp_size=2)), 2)
    stack.close()
    readers = [
        stack.enter_context(reader_of(sidecar, local_rank, 2, dp_rank=1, dp_size=2))
        for local_rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        for digests in pool.map(lambda reader: take(reader, 2), readers):
            assert digests == undisturbed(dataset, 1, 2, 2)
    assert [rank["rank"] for rank in readers[0].status()["ranks"]] == [1]
    assert sorted(path.name for path in sidecar.directory.glob("ring-*")) == ["ring-0.bin"]


# ---- eight processes


class Mesh:
    """Eight processes, some of them started alone; each reads as many packs as it is allowed."""

    def __init__(self, folder: Path, directory: Path, ranks: range, *, alone: bool = False) -> None:
        self.folder = folder
        if not alone:
            self.allow(ranks, 0)
        self.process = Process(
            folder / "mesh.log",
            f"tests.integration.{SCRIPT.stem}",
            "alone" if alone else str(folder / "store"),
            str(directory),
            str(folder),
            *map(str, ranks),
        )

    def allow(self, ranks: Iterable[int], packs: int) -> None:
        for rank in ranks:
            fresh = self.folder / f"allowed-{rank}.new"
            fresh.write_text(str(packs))
            fresh.rename(self.folder / f"allowed-{rank}")

    def pid_of(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def lines(self, rank: int) -> list[str]:
        record = self.folder / f"record-{rank}"
        text = record.read_text() if record.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def await_packs(self, ranks: Iterable[int], packs: int) -> None:
        def look() -> bool:
            said = self.process.log.read_text()
            assert self.process.popen.poll() is None, said
            assert not any(line.startswith("process ") for line in said.splitlines()), said
            return all(len(self.lines(rank)) >= packs for rank in ranks)

        wait_for(look, f"{packs} packs at each of {ranks}; {self.process.tail()}", 2 * DEADLINE_SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_processes_of_a_mesh_are_two_ranks_of_four_and_one_killed_rejoins_at_its_step(
    stack: ExitStack, tmp_path: Path
) -> None:
    steps, everybody, victim = 12, range(8), 6
    others = [rank for rank in everybody if rank != victim]
    sidecar = Sidecar(tmp_path, make_dataset(snapshots=None), local_ranks=2)
    stack.callback(sidecar.kill)
    sidecar.wait_serving(DEADLINE_SECONDS)
    mesh = Mesh(tmp_path, sidecar.directory, everybody)
    stack.callback(mesh.process.kill)
    mesh.allow(everybody, 5)
    mesh.await_packs(everybody, 5)
    os.kill(mesh.pid_of(victim), signal.SIGKILL)
    mesh.allow(others, 6)
    mesh.await_packs(others, 6)
    back = Mesh(tmp_path, sidecar.directory, range(victim, victim + 1), alone=True)
    stack.callback(back.process.kill)
    mesh.allow(everybody, steps)
    mesh.await_packs(everybody, steps)
    for rank in everybody:
        digests = undisturbed(make_dataset(snapshots=None), rank // 4, 2, steps)
        assert mesh.lines(rank) == [f"{step} {digest}" for step, digest in enumerate(digests)], (
            f"process {rank}"
        )
    for started in (mesh, back):
        started.process.kill()
    with NumpyReader(sidecar.directory, dp_rank=0, dp_size=2, readers=4, local_rank=0) as reader:
        ranks = reader.status()["ranks"]
    assert [(rank["rank"], rank["readers_expected"]) for rank in ranks] == [(0, 4), (1, 4)]
    for rank in ranks:
        assert rank["restarts"] == 0
        assert steps <= rank["packs_published"] < 2 * steps, "made once for four readers, and some lie ready"
        assert rank["packs_acknowledged"] == steps
    print(f"\npacks made: {[rank['packs_published'] for rank in ranks]}, read: 8 x {steps}")
    assert sidecar.terminate() == 0
