"""Which snapshot store a resource names, and what is kept there."""

from __future__ import annotations

from bagelplane.settings import storage_settings
from bagelplane.sidecar.retention import Retention
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.spec import BagelDataset, spec_hash
from bagelplane.storage import Storage, open_storage


def open_snapshot_store(dataset: BagelDataset, storage: Storage | None = None) -> SnapshotStore | None:
    """The store at `snapshots.uri`, None without one. Nothing is read yet."""
    uri = dataset.spec.snapshots.uri
    if uri is None:
        return None
    storage = storage or open_storage(storage_settings(dataset))
    sharding = dataset.spec.sharding
    streams = sharding.streams if sharding.mode == "Elastic" else 0
    return SnapshotStore(storage, uri, spec_hash(dataset), dataset=dataset.metadata.name, streams=streams)


def retention_of(dataset: BagelDataset) -> Retention:
    """Which of its snapshots stay."""
    snapshots = dataset.spec.snapshots
    return Retention(snapshots.keep_last, snapshots.keep_every)
