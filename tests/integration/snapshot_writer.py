"""Writes snapshots until it is killed: the process that `test_snapshots_killed` kills."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from bagelplane.sidecar.lease import LeaseTimes
from bagelplane.sidecar.retention import Retention
from bagelplane.sidecar.snapshots import SnapshotStore, StreamTopology
from bagelplane.sidecar.store import begin_run
from bagelplane.storage import StorageSettings, open_storage

TOPOLOGY = StreamTopology(2, 1)
KEPT = Retention(2, keep_every=10)


def open_store(uri: str, settings: StorageSettings) -> SnapshotStore:
    return SnapshotStore(open_storage(settings), uri, "a" * 64, dataset="killed")


def state_of(step: int, rank: int) -> dict[str, Any]:
    """Large enough that a torn one would show, and a function of its place alone."""
    return {"step": step, "rank": rank, "padding": [(step * 31 + rank + n) % 1009 for n in range(4000)]}


def write_until_killed(uri: str, settings: StorageSettings, told: Connection) -> None:
    """Says each step once its snapshot is complete; begins after the newest one."""
    store = open_store(uri, settings)
    begin_run(
        store, job="", lock="", resume="latest", world_size=2, ranks_in_use=tuple, times=LeaseTimes(60.0)
    )
    newest = store.nearest(None, TOPOLOGY)
    step = newest.step if newest is not None else 0
    while True:
        step += 1
        for rank in (0, 1):
            store.write_rank(step, rank, TOPOLOGY, state_of(step, rank))
        told.send(step)
        store.prune(KEPT)
