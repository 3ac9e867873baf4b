"""What lies in a store may be made up, with a right checksum: each kind of record is refused by name, or valid."""

from __future__ import annotations

import copy
import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bagelplane
from bagelplane.errors import SnapshotError
from bagelplane.sidecar.fingerprint import Fingerprint, read_fingerprint, write_fingerprint
from bagelplane.sidecar.lease import Identity, LeaseTimes, RunLease
from bagelplane.sidecar.runs import RUN_FORMAT, Origin, Run, RunFolder, parse_run
from bagelplane.sidecar.snapshot_format import (
    FORMAT_VERSION,
    MAX_OBJECT_BYTES,
    RANK_FORMAT,
    Manifest,
    RankFile,
    StreamTopology,
    check_rank_content,
    compress,
    decompress,
    parse_manifest,
    rank_name,
    seal,
    unseal,
)
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.sidecar.whereabouts import Whereabouts
from bagelplane.storage import StorageSettings, open_storage

TWO_RANKS = StreamTopology(2, 1)
STORAGE = open_storage(StorageSettings())
MANIFEST = Manifest(
    "place/step-000000000010", 10, "a" * 64, "demo", TWO_RANKS,
    tuple(RankFile(rank_name(rank, TWO_RANKS), "b" * 64, 100) for rank in (0, 1)),
    {"python": "3.12"}, "0123abcd", {"groups": []}, "c" * 64,
)  # fmt: skip
RUN = Run(3, "0123abcd", "demo", "a" * 64, "c" * 64, "job", "host", "2026-01-01", Origin("4567abcd", 10))
RANK = {
    "format": RANK_FORMAT, "version": FORMAT_VERSION, "step": 10, "rank": 0, "spec_hash": "a" * 64,
    "world_size": 2, "num_workers": 1,
    "state": {"known_bad": {"picture": "truncated"}, "drops": {"t2i": {"too_long": 3}}},
}  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
Content = dict[str, Any]


def _read_manifest(content: Content) -> None:
    found = parse_manifest(seal(content), "place", 10)
    assert json.loads(json.dumps(found.as_json())).keys() <= MANIFEST.as_json().keys()


def _read_run(content: Content) -> None:
    found = parse_run(unseal(seal(content), "place/run", RUN_FORMAT, "mend"), "place/run", 3)
    assert found.as_json().keys() == RUN.as_json().keys()


def _read_rank(content: Content) -> None:
    found = decompress(compress(content), "place/rank", RANK_FORMAT)
    check_rank_content(found, "place/rank", 10, 0, "a" * 64, TWO_RANKS)
    assert all(type(reason) is str for reason in found["state"].get("known_bad", {}).values())


class _Stored:
    """Records that are read through the classes that wrote them, out of a store in memory."""

    def __init__(self, write: Callable[[str], None], read: Callable[[str], object]) -> None:
        self._write, self._read = write, read
        uri = _new_place()
        write(uri)
        self._is_sealed, self.content = self._find(uri)[1:]

    def _find(self, uri: str) -> tuple[str, bool, Content]:
        [folder] = STORAGE.list_folders(uri)
        # Of a lease and a run's record the lease; where there is one object, that.
        found = min(STORAGE.list_files(folder), key=lambda info: ".member-" not in info.uri).uri
        data = STORAGE.read_bytes(found)
        if not data.startswith(b"{"):
            import zstandard

            return found, False, json.loads(zstandard.ZstdDecompressor().decompress(data))
        content = json.loads(data)
        del content["sha256"]
        return found, True, content

    def __call__(self, content: Content) -> None:
        uri = _new_place()
        self._write(uri)
        STORAGE.write_bytes(self._find(uri)[0], seal(content) if self._is_sealed else compress(content))
        self._read(uri)


def _new_place() -> str:
    return f"memory://place/{uuid.uuid4().hex}"


def _store(uri: str) -> SnapshotStore:
    return SnapshotStore(STORAGE, uri, "a" * 64)


DATA = Fingerprint({"s3://bucket/a.parquet": (1000, "abc"), "s3://bucket/b.parquet": (1, "d")})


def _read_known_bad(uri: str) -> None:
    assert all(type(reason) is str for reason in _store(uri).load_known_bad().values())
    _store(uri).write_known_bad(0, 7, {"b": "no image"})


def _lease(uri: str, host: str) -> RunLease:
    where, now = Whereabouts(host, boot_id=f"boot of {host}", pid=1, start_ticks=1), [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    identity = Identity("demo", "a" * 64, where)
    return RunLease(RunFolder(STORAGE, uri), identity, times=LeaseTimes(0.2), clock=lambda: now[0], wait=wait)


def _begin(uri: str) -> None:
    _lease(uri, "host-a").acquire(lambda lineage: None)


def _take_over(uri: str) -> None:
    lease = _lease(uri, "host-b")
    lease.acquire(lambda lineage: None)
    lease.claim(0)


def _claim(uri: str) -> None:
    RunFolder(STORAGE, uri).claim(RUN, "0123abcd", 0, 1)


def _read_claims(uri: str) -> None:
    folder = RunFolder(STORAGE, uri)
    for claim in folder.look().claims.values():
        assert type(folder.claimant(claim)) is str


KINDS: dict[str, tuple[Content, Callable[[Content], object]]] = {
    "manifest": (MANIFEST.as_json(), _read_manifest),
    "run": (RUN.as_json(), _read_run),
    "rank": (RANK, _read_rank),
    **{
        name: (stored.content, stored)
        for name, stored in {
            "known-bad": _Stored(
                lambda uri: _store(uri).write_known_bad(0, 7, {"a": "truncated"}), _read_known_bad
            ),
            "data": _Stored(
                lambda uri: write_fingerprint(STORAGE, uri, DATA),
                lambda uri: read_fingerprint(STORAGE, uri, DATA.digest),
            ),
            "lease": _Stored(_begin, _take_over),
            "claim": _Stored(_claim, _read_claims),
        }.items()
    },
}


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of each value inside."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data(), anything=ANYTHING, change=st.sampled_from(["replace", "remove", "add"]))
def test_a_made_up_value_anywhere_is_refused_by_name_or_valid(
    kind: str, data: st.DataObject, anything: Any, change: str
) -> None:
    whole, read = KINDS[kind]
    content = json.loads(json.dumps(whole))
    container, key = data.draw(st.sampled_from(_places(content)))
    if change == "remove":
        del container[key]
    elif change == "add" and isinstance(container, dict):
        container[data.draw(st.text(max_size=8))] = anything
    else:
        container[key] = anything
    _read_or_refuse(read, content)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(content=st.dictionaries(st.text(max_size=8), ANYTHING, max_size=4))
def test_any_json_under_our_format_is_refused_by_name_or_valid(kind: str, content: Content) -> None:
    whole, read = KINDS[kind]
    _read_or_refuse(read, {**content, "format": whole["format"], "version": whole["version"]})


def _read_or_refuse(read: Callable[[Content], object], content: Content) -> None:
    named = "place/"
    try:
        read(copy.deepcopy(content))
    except SnapshotError as refused:
        named = str(refused)
    assert "place/" in named


def test_a_mapping_that_is_none_and_lists_that_are_no_entries_are_named() -> None:
    known_bad, data = KINDS["known-bad"], KINDS["data"]
    for content, read, named in (
        ({**known_bad[0], "images": ["a"]}, known_bad[1], r"images is \['a'\]"),
        ({**known_bad[0], "images": {"a": 3}}, known_bad[1], "reason of image a is 3"),
        ({**data[0], "objects": {"a": [1]}}, data[1], r"size and version of a are \[1\]"),
        ({**data[0], "objects": {"a": [1, "b"]}}, data[1], "not that of its name"),
    ):
        with pytest.raises(SnapshotError, match=rf"place/.*has a wrong field.*{named}"):
            read(content)


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    store = SnapshotStore(STORAGE, str(tmp_path), "a" * 64)
    with pytest.raises(SnapshotError, match=rf"too large to be stored.*at most {MAX_OBJECT_BYTES}"):
        store.write_rank(10, 0, StreamTopology(1, 1), {"text": "a" * MAX_OBJECT_BYTES})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"), [("spec", "abc"), ("step", float("inf")), ("world_size", True), ("versions", [])]
)
def test_a_wrong_type_in_a_manifest_is_named(name: str, value: object) -> None:
    with pytest.raises(SnapshotError, match=rf"place/manifest.json has a wrong field.*{name} is"):
        parse_manifest(seal({**MANIFEST.as_json(), name: value}), "place", 10)


def test_a_manifest_names_no_objects_outside_its_folder() -> None:
    content = MANIFEST.as_json()
    content["ranks"][0]["name"] = "../../elsewhere/rank-00000.json.zst"
    with pytest.raises(SnapshotError, match="a state has the name"):
        parse_manifest(seal(content), "place", 10)


def test_an_origin_without_end_in_the_record_of_a_run_is_refused() -> None:
    content = {**RUN.as_json(), "origin": {"run": "4567abcd", "step": float("inf")}}
    with pytest.raises(SnapshotError, match=r"place/run has a wrong field.*step is inf"):
        parse_run(content, "place/run", 3)


def test_nothing_of_ours_is_read_from_a_store_without_a_limit() -> None:
    package = Path(bagelplane.__file__).parent
    unlimited = [
        f"{path.name}: {line.strip()}"
        for folder in ("sidecar", "lineage")
        for path in sorted((package / folder).rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"\.read_bytes\(", line) and "limit_bytes=" not in line
    ]
    assert unlimited == []
