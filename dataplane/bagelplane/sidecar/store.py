"""Which snapshot store a resource names."""

from __future__ import annotations

import os

from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.spec import BagelDataset, spec_hash
from bagelplane.storage import StorageSettings, open_storage

CREDENTIALS_DIR_VARIABLE = "BAGELPLANE_CREDENTIALS_DIR"
"""Where the operator mounts the Secret that `storage.secretRef` names."""


def storage_settings(dataset: BagelDataset) -> StorageSettings:
    """How the resource's store is reached; credentials that the operator mounted come before the file's."""
    storage = dataset.spec.storage
    folder = os.environ.get(CREDENTIALS_DIR_VARIABLE) or storage.credentials_dir
    return StorageSettings(
        endpoint_url=storage.endpoint_url,
        region=storage.region,
        credentials_dir=folder,
    )


def open_snapshot_store(dataset: BagelDataset) -> SnapshotStore | None:
    """The store at `snapshots.uri`, None without one. Nothing is read yet."""
    uri = dataset.spec.snapshots.uri
    if uri is None:
        return None
    storage = open_storage(storage_settings(dataset))
    return SnapshotStore(storage, uri, spec_hash(dataset), dataset=dataset.metadata.name)
