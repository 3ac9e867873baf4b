"""The log of rows that real sidecars write, over kills, resumes and failing stores, is what planning again gives."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bagelplane.client.reader import NumpyReader
from bagelplane.engine.pack_rows import PackRows, rows_of
from bagelplane.engine.rows import RowPlace
from bagelplane.lineage.log import RowLog
from bagelplane.lineage.replay import PackAddress, Reader, Replay
from bagelplane.lineage.search import Found, search_row, start_search
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.sidecar.store import open_snapshot_store
from bagelplane.spec import BagelDataset
from tests.golden.broken_images import make_data
from tests.golden.elastic_streams import resource
from tests.golden.recordings import load_recording, resource_of
from tests.integration.sidecar_harness import attached, leftovers, served, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PLANE = {"ring": {"packs": 2}, "decodeThreads": 1}


def logged(folder: Path, every: int) -> dict[str, Any]:
    return {"uri": str(folder / "snapshots"), "everySteps": every, "lineage": True}


def take(readers: list[NumpyReader], steps: int) -> None:
    for _ in range(steps):
        for reader in readers:
            next(reader)


def store_of(dataset: BagelDataset) -> SnapshotStore:
    store = open_snapshot_store(dataset)
    assert store is not None
    return store


def planned_rows(dataset: BagelDataset, reader: Reader, count: int) -> list[PackRows]:
    """A reader's first packs, planned from their start with all images decoded."""
    groups = [group.name for group in dataset.spec.groups]
    with closing(Replay(dataset, reader, 0, store=None, verify=True)) as replay:
        return [rows_of(replay.plan(whole=True), groups) for _ in range(count)]


def sightings(found: Found) -> list[str]:
    return [json.dumps(one.as_json()) for one in found.sightings]


def check_finds(dataset: BagelDataset, packs: list[PackRows], until: int, world_size: int) -> Found:
    """Rows that were trained on most, and some that were dropped: as found in the log, so by planning."""
    seen: dict[RowPlace, int] = {}
    for pack in packs:
        for row in (*pack.trained, *pack.dropped):
            assert row.place is not None
            seen[row.place] = seen.get(row.place, 0) + 1
    dropped = [drop.place for pack in packs for drop in pack.dropped if drop.place is not None]
    assert dropped, "the data have no row that is dropped"
    store = store_of(dataset)
    for place in [*sorted(seen, key=lambda place: (-seen[place], str(place)))[:2], dropped[0], dropped[-1]]:
        search = start_search(dataset, place.object, place.row, place.row_group, world_size)
        by_log = search_row(dataset, search, until, store=store, row_log=RowLog(store))
        by_plan = search_row(dataset, search, until, store=None, verify=True)
        assert sightings(by_log) == sightings(by_plan)
        assert by_log.is_sure
        assert by_log.sightings
        assert by_log.logged_packs + by_log.planned_packs == by_plan.planned_packs
    return by_log


def test_the_log_of_a_run_over_kills_and_world_sizes_is_what_planning_gives(tmp_path: Path) -> None:
    """Two ranks begin, four go on in mid-round, then one: elastic sharding over odd data, some of it dropped."""
    dataset = resource(12, "odd_default", dataplane=PLANE, snapshots=logged(tmp_path, 2))
    with served(tmp_path, dataset) as sidecar, attached(sidecar, 2) as readers:
        take(readers, 5)
        wait_for(lambda: readers[0].status()["snapshots"]["last_position"] == 8, "the snapshot of 8")
        saved = json.loads(json.dumps(readers[0].state_dict()))
        sidecar.kill()
    with served(tmp_path, dataset) as sidecar, attached(sidecar, 4) as readers:
        for reader in readers:
            reader.load_state_dict(saved)
        take(readers, 3)
        wait_for(lambda: readers[0].status()["snapshots"]["last_position"] == 18, "the snapshot of 18")
        sidecar.kill()
    with served(tmp_path, dataset) as sidecar, attached(sidecar, 1) as readers:
        assert readers[0].position == 18
        take(readers, 10)
        assert sidecar.terminate() == 0, sidecar.tail()
    by_stream = [planned_rows(dataset, Reader(stream, 12, elastic=True), 3) for stream in range(12)]
    packs = [by_stream[number % 12][number // 12] for number in range(28)]
    row_log, missing = RowLog(store_of(dataset)), []
    for number, pack in enumerate(packs):
        for size in (1, 4):  # whoever asks, by whatever world
            found = row_log.pack(PackAddress(number % size, size, number // size, 12))
            if found is None:
                missing.append(number)
            else:
                assert found.rows == pack, number
    assert set(missing) <= {8, 9}, "more is missing than what the killed sidecar had not written"
    assert row_log.pack(PackAddress(0, 1, 28, 12)) is None
    check_finds(dataset, packs, 28, 2)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("damaged") / "data")


ROUNDS = int(os.environ.get("BAGELPLANE_KILL_ROUNDS", "2"))


@pytest.mark.timeout(600 + 60 * ROUNDS)
def test_whenever_the_sidecar_is_killed_nothing_in_the_log_is_torn_doubled_or_wrong(
    damaged: Path, tmp_path: Path
) -> None:
    """Two ranks of Bagel sharding and profile Strict over damaged data; each goes on at the step that it knows."""
    seed = int(os.environ.get("BAGELPLANE_KILL_SEED", "0")) or random.randrange(1, 1 << 32)
    rng, recording = random.Random(seed), load_recording("odd_tight")
    parts = {"dataplane": PLANE, "snapshots": logged(tmp_path, 3), "profile": "Strict"}
    dataset = resource_of(recording, str(damaged), **parts)
    trainers = [BackgroundTrainer(tmp_path / "run", rank) for rank in (0, 1)]
    for number in range(ROUNDS + 1):
        with served(tmp_path, dataset) as sidecar:
            goals = [trainer.taken + rng.randrange(5, 12) for trainer in trainers]
            wait_for(
                lambda goals=goals: all(t.taken >= goal for t, goal in zip(trainers, goals, strict=True)),
                f"{goals} packs, seed {seed}, round {number}",
            )
            if number == ROUNDS:
                for trainer in trainers:
                    trainer.stop()
                assert sidecar.terminate() == 0, sidecar.tail()
            else:
                time.sleep(rng.uniform(0.0, 0.1))
                sidecar.kill()
        if rng.random() < 0.5:  # trainers that go back to a checkpoint
            for trainer in trainers:
                trainer.back = rng.randrange(1, 8)
    row_log, ranks, written = RowLog(store_of(dataset)), [], 0
    for rank, trainer in enumerate(trainers):
        count = trainer.step
        packs = planned_rows(dataset, Reader(rank, 2), count)
        found = [row_log.pack(PackAddress(rank, 2, step)) for step in range(count)]
        assert all(each is None or each.rows == packs[step] for step, each in enumerate(found)), (
            f"seed {seed}"
        )
        assert None not in found[-5:-1], f"seed {seed}: what SIGTERM wrote is not there"
        written += len(found) - found.count(None)
        ranks.append(packs)
    assert written > 12
    for path in (tmp_path / "snapshots" / "lineage").rglob("*.parquet"):
        table = pq.read_table(path)
        places = list(zip(*(table[name].to_pylist() for name in ("step", "fate", "sample")), strict=True))
        trained = [place for place in places if place[1] == "trained"]
        assert len(set(trained)) == len(trained), f"seed {seed}: {path} has a sample twice"
    assert not leftovers(tmp_path / "run", tmp_path / "snapshots")
    check_finds(dataset, ranks[0], len(ranks[0]), 2)


class BackgroundTrainer:
    """One rank that goes on whatever becomes of the sidecar."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.step = self.taken = self.back = 0
        """Packs behind it, packs that it ever took, and how many it is to go back by."""
        self._directory, self._rank = directory, rank
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        with NumpyReader(
            self._directory, rank=self._rank, local_rank=self._rank, world_size=2, timeout_seconds=120.0
        ) as reader:
            reader.resume(step=0)
            while not self._stopping.is_set():
                if self.back:
                    self.step, self.back = max(0, self.step - self.back), 0
                    reader.resume(step=self.step)
                next(reader)
                self.step, self.taken = reader.step, self.taken + 1

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(120.0)
        assert not self._thread.is_alive(), f"rank {self._rank} hangs at step {self.step}"


def test_a_store_that_takes_no_log_stops_neither_training_nor_snapshots_and_the_log_is_written_later(
    tmp_path: Path,
) -> None:
    dataset = resource(4, "odd_default", dataplane=PLANE, snapshots=logged(tmp_path, 2))
    blocked = tmp_path / "snapshots" / "lineage"
    blocked.parent.mkdir()
    blocked.write_text("no folder")
    with served(tmp_path, dataset) as sidecar, attached(sidecar, 1) as readers:
        take(readers, 6)
        wait_for(lambda: readers[0].status()["snapshots"]["last_position"] == 6, "the snapshot of 6")
        status = readers[0].status()["snapshots"]
        assert status["problem"] == ""
        assert status["lineage"]["failed"] > 0
        assert (status["lineage"]["written_packs"], status["lineage"]["waiting_packs"]) == (0, 6)
        assert "lineage" in status["lineage"]["problem"]
        blocked.unlink()
        take(readers, 3)
        assert sidecar.terminate() == 0, sidecar.tail()
    row_log = RowLog(store_of(dataset))
    assert [number for number in range(9) if row_log.pack(PackAddress(0, 1, number, 4)) is None] == []


def test_a_run_that_goes_on_earlier_takes_another_future(tmp_path: Path) -> None:
    """The rows past the place where the first run was left are not the history's, though its parts lie there."""
    dataset = resource(4, "odd_default", dataplane=PLANE, snapshots=logged(tmp_path, 2))
    with served(tmp_path, dataset) as sidecar, attached(sidecar, 1) as readers:
        take(readers, 8)
        assert sidecar.terminate() == 0, sidecar.tail()
    with served(tmp_path, dataset, resume=4) as sidecar, attached(sidecar, 1) as readers:
        assert readers[0].position == 4
        take(readers, 1)
        assert sidecar.terminate() == 0, sidecar.tail()
    row_log = RowLog(store_of(dataset))
    found = [row_log.pack(PackAddress(0, 1, number, 4)) for number in range(8)]
    assert [each is not None for each in found] == [True] * 5 + [False] * 3
    runs = [each.run for each in found if each is not None]
    assert len(set(runs[:4])) == 1
    assert runs[4] != runs[0]
    shutil.rmtree(tmp_path / "snapshots" / "lineage" / f"run-{runs[4]}")
    assert RowLog(store_of(dataset)).pack(PackAddress(0, 1, 4, 4)) is None
