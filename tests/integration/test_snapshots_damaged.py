"""Stored objects that are cut, changed, gone, huge or of somebody else: refused by name, on a disk and in a store."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zstandard

from bagelplane.errors import SnapshotError
from bagelplane.sidecar.fingerprint import Fingerprint
from bagelplane.sidecar.lease import LeaseTimes
from bagelplane.sidecar.snapshot_format import compress, seal
from bagelplane.sidecar.snapshots import SnapshotStore, StreamTopology
from bagelplane.sidecar.store import begin_run
from bagelplane.storage import Storage, StorageSettings, open_storage
from tests.services.s3 import serve_versitygw

TOPOLOGY = StreamTopology(2, 1)
HUGE_BYTES = 1 << 40
"""Of a file of holes: nobody has the memory for it."""

pytestmark = pytest.mark.timeout(900)  # the first use may build versitygw


@dataclass(frozen=True, slots=True)
class Place:
    """Snapshots of steps 10 and 20 by one run that ended, with all that belongs to them."""

    storage: Storage
    uri: str
    folder: Path
    """Where the store keeps its objects."""

    def store(self, spec_hash: str = "a" * 64) -> SnapshotStore:
        store = SnapshotStore(self.storage, self.uri, spec_hash, dataset="demo")
        store.data = Fingerprint({"s3://bucket/a.parquet": (1000, "abc")})
        return store

    def find(self, pattern: str) -> str:
        """The URI of the one object whose path matches."""
        [found] = [path for path in self.folder.rglob("*") if re.search(pattern, str(path))]
        return f"{self.uri}/{found.relative_to(self.folder)}"

    def change(self, pattern: str, change: Callable[[bytes], bytes]) -> None:
        uri = self.find(pattern)
        self.storage.write_bytes(uri, change(self.storage.read_bytes(uri)))

    def enlarge(self, pattern: str) -> None:
        os.truncate(self.folder / self.find(pattern).removeprefix(f"{self.uri}/"), HUGE_BYTES)


@pytest.fixture(scope="module", params=["local", pytest.param("versitygw", marks=pytest.mark.slow)])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "local":
        yield Place(open_storage(StorageSettings()), str(folder), folder)
        return
    with serve_versitygw(folder) as server:
        yield Place(open_storage(server.settings), f"s3://{server.bucket}", server.root_dir / server.bucket)


@pytest.fixture
def place(root: Place) -> Place:
    name = uuid.uuid4().hex
    place = Place(root.storage, f"{root.uri}/{name}", root.folder / name)
    store = begin(place)
    for step in (10, 20):
        for rank in (0, 1):
            store.write_rank(step, rank, TOPOLOGY, {"step": step, "rank": rank, "draws": list(range(50))})
    store.write_known_bad(0, 7, {"picture": "truncated"})
    assert store.lease is not None
    store.lease.end()
    return place


def begin(place: Place) -> SnapshotStore:
    store = place.store()
    begin_run(
        store, job="", lock="", resume="latest", world_size=2, ranks_in_use=tuple, times=LeaseTimes(0.2)
    )
    return store


def read_all(place: Place, topology: StreamTopology = TOPOLOGY, spec_hash: str = "a" * 64) -> int:
    """What a sidecar reads that resumes: bad images, the newest snapshot and its data, the states of all ranks."""
    store = place.store(spec_hash)
    store.load_known_bad()
    manifest = store.load("latest", topology)
    assert manifest is not None
    store.read_data(manifest)
    for rank in (0, 1):
        assert store.load_state(manifest, rank)["rank"] == rank
    return manifest.step


MANIFEST = r"step-000000000020-\w+/manifest\.json$"
STATE = r"step-000000000020-\w+/rank-00001\.json\.zst$"
RUN = r"run-000001\.json$"
KNOWN_BAD = r"known-bad/rank-"
DATA = r"/data/\w+\.json\.zst$"
ALL = (MANIFEST, STATE, RUN, KNOWN_BAD, DATA)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def emptied(data: bytes) -> bytes:
    return b""


def flipped(data: bytes) -> bytes:
    """One bit, in the middle of what carries the content."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def replaced(data: bytes) -> bytes:
    """Well formed, and nothing of ours."""
    text = b'{"format": "of somebody else", "version": 1}'
    return text if data.startswith(b"{") else zstandard.ZstdCompressor().compress(text)


def newer(data: bytes) -> bytes:
    """What a later release would write: all its checksums are right."""
    is_json = data.startswith(b"{")
    content: dict[str, Any] = json.loads(data if is_json else zstandard.ZstdDecompressor().decompress(data))
    content.pop("sha256", None)
    content["version"] = 2
    return seal(content) if is_json else compress(content)


def test_what_is_whole_is_read(place: Place) -> None:
    assert read_all(place) == 20


@pytest.mark.parametrize("pattern", ALL)
@pytest.mark.parametrize("damage", [cut, emptied, flipped, replaced, newer])
def test_a_damaged_object_is_refused_by_name(
    place: Place, pattern: str, damage: Callable[[bytes], bytes]
) -> None:
    place.change(pattern, damage)
    with pytest.raises(SnapshotError) as caught:
        read_all(place)
    message = str(caught.value)
    assert any(re.search(pattern, word.rstrip(",:;")) for word in message.split()), message
    assert caught.value.fix
    if damage is newer and pattern != STATE:  # its manifest has its checksum
        assert "version 2" in message


@pytest.mark.parametrize("pattern", ALL)
def test_a_huge_object_is_refused_before_it_is_in_memory(place: Place, pattern: str) -> None:
    uri = place.find(pattern)
    place.enlarge(pattern)
    with pytest.raises(SnapshotError) as caught:
        read_all(place)
    assert uri in str(caught.value)
    assert f"{HUGE_BYTES} bytes" in str(caught.value)


def test_a_huge_lease_keeps_nobody_waiting_for_ever(place: Place) -> None:
    place.enlarge(r"run-000001\.member-")
    store = begin(place)
    assert store.lease is not None
    store.lease.end()
    assert (store.lease.run.number, read_all(place)) == (2, 20)


def test_a_missing_state_is_refused_and_a_missing_manifest_is_a_torn_snapshot(place: Place) -> None:
    place.storage.delete(place.find(STATE))
    with pytest.raises(SnapshotError, match=r"rank 1 is missing.*rank-00001.json.zst; expected \d+ bytes"):
        read_all(place)
    place.storage.delete(place.find(MANIFEST))
    assert read_all(place) == 10


def test_states_that_changed_places_are_refused(place: Place) -> None:
    other = place.storage.read_bytes(place.find(r"step-000000000010-\w+/rank-00001"))
    place.change(STATE, lambda data: other)
    with pytest.raises(SnapshotError, match="is damaged"):
        read_all(place)


def test_another_spec_and_another_topology_are_refused_and_both_are_named(place: Place) -> None:
    with pytest.raises(SnapshotError, match=r"another dataset spec.*a{16}.*b{16}"):
        read_all(place, spec_hash="b" * 64)
    for other in (StreamTopology(4, 1), StreamTopology(2, 8)):
        with pytest.raises(SnapshotError, match=f"got {TOPOLOGY}; expected {other}"):
            read_all(place, other)
