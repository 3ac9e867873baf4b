"""SIGKILL at random instants while snapshots are written and pruned: the newest complete one is used, none is torn.

BAGELPLANE_KILL_ROUNDS=100 pytest tests/integration/test_snapshots_killed.py -s      # BAGELPLANE_KILL_SEED=N: again
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bagelplane.storage import StorageSettings
from tests.integration.snapshot_writer import TOPOLOGY, open_store, state_of, write_until_killed
from tests.services.s3 import serve_versitygw

ROUNDS = int(os.environ.get("BAGELPLANE_KILL_ROUNDS", "5"))
DEADLINE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    uri: str
    settings: StorageSettings
    longest_life_seconds: float


@pytest.fixture(params=["local", pytest.param("versitygw", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "local":
        yield Place(str(tmp_path / "snapshots"), StorageSettings(), 1.5)
        return
    with serve_versitygw(tmp_path / "s3") as server:
        yield Place(f"s3://{server.bucket}/snapshots", server.settings, 4.0)


@pytest.mark.timeout(900 + 20 * ROUNDS)  # the first use may build versitygw
def test_whenever_the_writer_is_killed_the_newest_complete_snapshot_is_used(place: Place) -> None:
    seed = int(os.environ.get("BAGELPLANE_KILL_SEED", "0")) or random.randrange(1, 1 << 32)
    print(f"{ROUNDS} rounds, BAGELPLANE_KILL_SEED={seed}")
    rng, context = random.Random(seed), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.snapshot_writer"])
    reader, newest = open_store(place.uri, place.settings), 0
    torn = 0
    for number in range(ROUNDS):
        ours, theirs = context.Pipe(duplex=False)
        writer = context.Process(target=write_until_killed, args=(place.uri, place.settings, theirs))
        writer.start()
        theirs.close()
        steps = []
        # Some die while they begin their run, the others somewhere in writing or pruning.
        if rng.random() < 0.9:
            assert ours.poll(DEADLINE_SECONDS), f"seed {seed}, round {number}: no snapshot was written"
            steps.append(ours.recv())
        time.sleep(rng.uniform(0.0, place.longest_life_seconds / 2))
        writer.kill()
        writer.join(DEADLINE_SECONDS)
        assert writer.exitcode == -9, f"seed {seed}, round {number}: it ended by itself, {writer.exitcode}"
        try:
            while True:
                steps.append(ours.recv())
        except EOFError:
            ours.close()
        where = f"seed {seed}, round {number}, told {steps}"
        newest = max(newest, *steps) if steps else newest
        manifest = reader.nearest(None, TOPOLOGY)
        # The last one may have been finished before it could be told.
        found = manifest.step if manifest is not None else 0
        assert newest <= found <= newest + 1, where
        newest = found
        entries = reader.entries()
        torn += sum(entry.condition == "incomplete" for entry in entries)
        assert {entry.condition for entry in entries} <= {"complete", "incomplete"}, where
        for entry in entries:
            if entry.manifest is not None:
                states = [reader.load_state(entry.manifest, rank) for rank in (0, 1)]
                assert states == [state_of(entry.step, rank) for rank in (0, 1)], where
    print(f"{newest} snapshots were written; after {torn} kills one was unfinished")
    assert newest > 0
