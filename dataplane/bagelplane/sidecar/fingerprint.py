"""What data a run reads: the objects behind a resource, with their sizes and versions.

By one listing for each data set; images that lie in folders of their own are not listed, there may be millions.
A stored object's version is its ETag, or what the store has like it. Of a local file it is a digest of its end, where
Parquet keeps its footer: times differ between copies, and pods may each have their own.

Kept by content below `<uri>/data/`, so that each state of the data is written once, whatever refers to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bagelplane.errors import ObjectExistsError, SnapshotError
from bagelplane.sidecar.runs import SnapshotStorage, read_object
from bagelplane.sidecar.snapshot_format import FORMAT_VERSION, canonical, compress, decompress, digest, take
from bagelplane.spec import BagelDataset, Dataset
from bagelplane.storage import FileInfo, Storage

DATA_FORMAT = "bagelplane-data"
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Size and version of each object, by URI."""

    objects: Mapping[str, tuple[int, str]]
    digest: str = field(init=False)
    """SHA-256 over all of it: the name by which manifests know it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest(canonical({"objects": self.objects})))

    @property
    def size_bytes(self) -> int:
        return sum(size for size, _ in self.objects.values())


def take_fingerprint(dataset: BagelDataset, storage: Storage) -> Fingerprint:
    """Looks the objects up. Raises StorageError."""
    found = [storage.info(dataset.spec.tokenizer.uri)]
    for group in dataset.spec.groups:
        for data in group.datasets:
            found += _objects(data, storage)
    by_uri = {info.uri: info for info in found}
    return Fingerprint(
        {uri: (by_uri[uri].size_bytes, _version(by_uri[uri], storage)) for uri in sorted(by_uri)}
    )


def _version(info: FileInfo, storage: Storage) -> str:
    if "://" in info.uri and not info.uri.startswith("file://"):
        return info.version
    with storage.open_binary(info.uri) as file:
        file.seek(max(0, info.size_bytes - _TAIL_BYTES))
        return digest(file.read())[:32]


def _objects(data: Dataset, storage: Storage) -> Iterator[FileInfo]:
    if data.jsonl_uri is not None:
        yield storage.info(data.jsonl_uri)
    else:
        yield from storage.list_files(data.uri, ".parquet")
    if data.parquet_info_uri is not None:
        yield storage.info(data.parquet_info_uri)


def write_fingerprint(storage: SnapshotStorage, uri: str, fingerprint: Fingerprint) -> None:
    """Keeps it where manifests find it."""
    content = {"format": DATA_FORMAT, "version": FORMAT_VERSION, "objects": fingerprint.objects}
    try:
        storage.write_bytes(_data_uri(uri, fingerprint.digest), compress(content), only_if_absent=True)
    except ObjectExistsError:
        return  # by its name it is the same


def read_fingerprint(storage: SnapshotStorage, uri: str, name: str) -> Fingerprint:
    """The one of that digest. SnapshotError, StorageError."""
    data_uri = _data_uri(uri, name)
    content = decompress(read_object(storage, data_uri), data_uri, DATA_FORMAT)
    try:
        found = Fingerprint(
            {uri: _parse_entry(uri, entry) for uri, entry in take(content, "objects", dict).items()}
        )
        if found.digest != name:
            raise ValueError(f"its objects have the digest {found.digest[:16]}, not that of its name")
    except (KeyError, ValueError) as error:
        raise SnapshotError(
            f"the fingerprint of the data {data_uri} has a wrong field or lacks one: {error}",
            fix="restore that object, or resume from a snapshot with another one",
        ) from None
    return found


def _parse_entry(uri: str, entry: Any) -> tuple[int, str]:
    if isinstance(entry, list) and [type(part) for part in entry] == [int, str]:
        return entry[0], entry[1]
    raise ValueError(f"size and version of {uri[:60]} are {repr(entry)[:60]}")


def _data_uri(uri: str, name: str) -> str:
    return f"{uri}/data/{name}.json.zst"
