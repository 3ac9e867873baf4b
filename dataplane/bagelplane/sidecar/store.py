"""Which snapshot store a resource names, who writes to it, and what is kept there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from bagelplane.settings import storage_settings
from bagelplane.sidecar.lease import Identity, LeaseTimes, RunLease
from bagelplane.sidecar.retention import Retention
from bagelplane.sidecar.runs import Lineage
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.sidecar.whereabouts import Whereabouts
from bagelplane.spec import BagelDataset, spec_hash, stream_spec
from bagelplane.storage import Storage, open_storage


def open_snapshot_store(dataset: BagelDataset, storage: Storage | None = None) -> SnapshotStore | None:
    """The store at `snapshots.uri`, None without one. Nothing is read yet."""
    uri = dataset.spec.snapshots.uri
    if uri is None:
        return None
    storage = storage or open_storage(storage_settings(dataset))
    sharding = dataset.spec.sharding
    streams = sharding.streams if sharding.mode == "Elastic" else 0
    store = SnapshotStore(storage, uri, spec_hash(dataset), dataset=dataset.metadata.name, streams=streams)
    store.spec, store.allowed = stream_spec(dataset), dataset.spec.resume.allow_spec_change
    return store


def begin_run(
    store: SnapshotStore,
    *,
    job: str,
    lock: str,
    resume: Literal["latest", "none"] | int,
    world_size: int,
    ranks_in_use: Callable[[], Iterable[int]],
    times: LeaseTimes,
) -> None:
    """Takes this sidecar's place in a run: from now on the store writes for that run, and reads its history.

    `resume` says what of the history before is continued. Waits at most about a lease, for one that did not end in
    order. Raises RunTakenError while another run is alive, SnapshotError, StorageError.
    """
    data = store.keep_data()
    identity = Identity(store.dataset, store.spec_hash, Whereabouts.of_this_process(lock), job, data)
    lease = RunLease(store.runs, identity, ranks_in_use=ranks_in_use, times=times)
    named = resume * (world_size if store.streams else 1) if isinstance(resume, int) else None

    def find_origin(lineage: Lineage) -> int | None:
        nearest = None if resume == "none" else store.nearest(named, lineage=lineage)
        return None if nearest is None else named or nearest.step

    lease.acquire(find_origin, may_join=resume == "latest")
    lease.keep()
    store.lease = lease


def retention_of(dataset: BagelDataset) -> Retention:
    """Which of its snapshots stay."""
    snapshots = dataset.spec.snapshots
    return Retention(snapshots.keep_last, snapshots.keep_every)
