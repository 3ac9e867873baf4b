"""Snapshots: complete or not there, whole or refused, and each refusal names both sides."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bagelplane.errors import ObjectExistsError, SnapshotError
from bagelplane.sidecar.retention import Retention
from bagelplane.sidecar.snapshots import SnapshotStore, StreamTopology
from bagelplane.storage import FileInfo, Storage, StorageSettings, open_storage

TWO_RANKS = StreamTopology(2, 1)
FOUR_RANKS = StreamTopology(4, 1)


class DyingStorage:
    """A local folder whose writer is gone after so many writes and deletes: the next one never happens."""

    class Died(Exception):
        pass

    def __init__(self, inner: Storage, lives: int) -> None:
        self._inner = inner
        self._lives = lives

    def _spend(self) -> None:
        if self._lives == 0:
            raise self.Died
        self._lives -= 1

    def list_files(self, uri: str, suffix: str = "", *, missing_ok: bool = False) -> Sequence[FileInfo]:
        return self._inner.list_files(uri, suffix, missing_ok=missing_ok)

    def list_folders(self, uri: str, *, missing_ok: bool = False) -> Sequence[str]:
        return self._inner.list_folders(uri, missing_ok=missing_ok)

    def exists(self, uri: str) -> bool:
        return self._inner.exists(uri)

    def read_bytes(self, uri: str, *, limit_bytes: int | None = None) -> bytes:
        return self._inner.read_bytes(uri, limit_bytes=limit_bytes)

    def write_bytes(self, uri: str, data: bytes, *, only_if_absent: bool = False) -> None:
        self._spend()
        self._inner.write_bytes(uri, data, only_if_absent=only_if_absent)

    def delete(self, uri: str) -> None:
        self._spend()
        self._inner.delete(uri)


def make_store(folder: Path, spec_hash: str = "a" * 64, dataset: str = "demo") -> SnapshotStore:
    return SnapshotStore(open_storage(StorageSettings()), str(folder), spec_hash, dataset=dataset)


def state_of(step: int, rank: int) -> dict[str, Any]:
    return {"step": step, "rank": rank, "draws": list(range(50)), "big": 2**80, "text": "æøå"}


def write_all(store: SnapshotStore, step: int, topology: StreamTopology = TWO_RANKS) -> list[bool]:
    return [
        store.write_rank(step, rank, topology, state_of(step, rank)) for rank in range(topology.world_size)
    ]


def test_the_last_rank_completes_it_and_every_state_comes_back(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert write_all(store, 100, FOUR_RANKS) == [False, False, False, True]
    manifest = store.load("latest", FOUR_RANKS)
    assert manifest is not None
    assert (manifest.step, manifest.topology, manifest.dataset) == (100, FOUR_RANKS, "demo")
    assert set(manifest.versions) >= {"bagelplane", "numpy", "pillow", "python"}
    assert [store.load_state(manifest, rank) for rank in range(4)] == [
        state_of(100, rank) for rank in range(4)
    ]


def test_the_order_of_the_ranks_does_not_matter(tmp_path: Path) -> None:
    for number, order in enumerate(itertools.permutations(range(3))):
        store = make_store(tmp_path / str(number))
        done = [store.write_rank(7, rank, StreamTopology(3, 1), state_of(7, rank)) for rank in order]
        assert done == [False, False, True]


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_all(make_store(tmp_path / name), 5)
    paths = [tmp_path / name / "step-000000000005" / "rank-00001.json.zst" for name in ("one", "two")]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_writing_a_complete_step_again_changes_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write_all(store, 5)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert store.write_rank(5, 0, TWO_RANKS, {"another": "state"})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_without_a_manifest_nothing_counts(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write_all(store, 10)
    store.write_rank(20, 0, TWO_RANKS, state_of(20, 0))
    manifest = store.load("latest")
    assert manifest is not None
    assert manifest.step == 10
    assert [(entry.step, entry.condition) for entry in store.entries()] == [
        (10, "complete"),
        (20, "incomplete"),
    ]
    with pytest.raises(SnapshotError, match=r"no complete snapshot of step 20.*got steps 10"):
        store.load(20)


def test_a_snapshot_is_found_at_whatever_step_it_was_written(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for step in (0, 10**12 - 1, 10**12, 10**15):
        write_all(store, step)
    assert [entry.step for entry in store.entries()] == [0, 10**12 - 1, 10**12, 10**15]
    (tmp_path / "step-0000000000010").mkdir()  # thirteen digits of which none is needed: not ours
    assert len(store.entries()) == 4


def test_a_left_over_state_of_another_run_is_replaced_and_never_named(tmp_path: Path) -> None:
    make_store(tmp_path, "b" * 64).write_rank(10, 0, TWO_RANKS, {"foreign": True})
    folder = tmp_path / "step-000000000010"
    (folder / "rank-00001.json.zst").write_bytes(b"torn")
    store = make_store(tmp_path)
    assert write_all(store, 10) == [False, True]
    manifest = store.load(10, TWO_RANKS)
    assert manifest is not None
    assert [store.load_state(manifest, rank) for rank in (0, 1)] == [state_of(10, 0), state_of(10, 1)]


def test_nearest_is_the_newest_at_or_below(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for step in (10, 20, 30):
        write_all(store, step)
    found = {step: store.nearest(step) for step in (9, 10, 29, 30, 31)}
    assert {step: manifest and manifest.step for step, manifest in found.items()} == {
        9: None,
        10: 10,
        29: 20,
        30: 30,
        31: 30,
    }


def test_retention_keeps_the_newest_complete_ones_and_clears_what_was_torn_before(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.write_rank(5, 0, TWO_RANKS, state_of(5, 0))
    for step in (10, 20, 30):
        write_all(store, step)
    store.write_rank(40, 0, TWO_RANKS, state_of(40, 0))
    assert store.prune(Retention(2)) == [5, 10]
    assert [entry.step for entry in store.entries()] == [20, 30, 40]
    assert store.prune(Retention(1)) == [20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000030", "step-000000000040"]


def test_retention_never_takes_the_only_complete_one_nor_another_runs(tmp_path: Path) -> None:
    write_all(make_store(tmp_path, "b" * 64), 1)
    store = make_store(tmp_path)
    write_all(store, 10)
    store.write_rank(20, 0, TWO_RANKS, state_of(20, 0))
    assert store.prune(Retention(1)) == []
    assert [entry.condition for entry in store.entries()] == ["unusable", "complete", "incomplete"]


def test_of_each_long_stretch_the_first_snapshot_stays_for_ever(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for step in (50, 100, 150, 210, 250, 300, 350):
        write_all(store, step)
        store.prune(Retention(1, keep_every=100))
    # 210 is the first of its stretch; what lies before 100 is soon reached from the start.
    assert [entry.step for entry in store.entries()] == [100, 210, 300, 350]


def test_stretches_are_counted_in_steps_of_the_world_that_wrote(tmp_path: Path) -> None:
    store = SnapshotStore(open_storage(StorageSettings()), str(tmp_path), "a" * 64, streams=4)
    for position in (20, 40, 60, 80):
        write_all(store, position, StreamTopology(2, 0, 4))
    assert store.prune(Retention(1, keep_every=20)) == [20, 60]


# ---- refusals


@pytest.mark.parametrize(
    "name", ["step-000000000001-my-model", "position-000000000001-ABCDEF01", "step-٠٠٠٠٠٠٠٠٠٠٠١"]
)
def test_a_folder_with_a_name_that_we_do_not_write_is_nobody_s_snapshot(tmp_path: Path, name: str) -> None:
    foreign = tmp_path / name / "weights.pt"
    foreign.parent.mkdir()
    foreign.write_bytes(b"of somebody else")
    store = make_store(tmp_path)
    for step in (10, 20):
        write_all(store, step)
    assert [entry.step for entry in store.entries()] == [10, 20]
    assert store.prune(Retention(1)) == [10]
    assert foreign.read_bytes() == b"of somebody else"


def test_deleting_a_snapshot_leaves_the_files_beside_it(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for step in (10, 20):
        write_all(store, step)
    folder = tmp_path / "step-000000000010"
    (folder / "rank-00001.json.zst.copy").write_bytes(b"of somebody else")
    assert store.prune(Retention(1)) == [10]
    assert [path.name for path in folder.iterdir()] == ["rank-00001.json.zst.copy"]


def test_nothing_is_deleted_through_a_symbolic_link(tmp_path: Path) -> None:
    elsewhere = make_store(tmp_path / "elsewhere")
    write_all(elsewhere, 3)
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    store = make_store(tmp_path / "snapshots")
    for step in (10, 20):
        write_all(store, step)
    (tmp_path / "snapshots" / "step-000000000003").symlink_to(tmp_path / "elsewhere" / "step-000000000003")
    [linked, *_] = store.entries()
    assert store.prune(Retention(1)) == [10]
    with pytest.raises(SnapshotError, match=r"step-000000000003 is not deleted.*symbolic link"):
        store.delete(linked)
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before


def test_another_spec_is_refused_and_both_are_named(tmp_path: Path) -> None:
    write_all(make_store(tmp_path, "b" * 64, "theirs"), 10)
    store = make_store(tmp_path, "a" * 64, "ours")
    for attempt in (lambda: store.load("latest"), lambda: store.load(10), lambda: write_all(store, 10)):
        with pytest.raises(SnapshotError, match=r"another dataset spec; got .*b{16}.*theirs.*a{16}.*ours"):
            attempt()


def test_another_topology_is_refused_and_both_are_named(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write_all(store, 10)
    for other in (FOUR_RANKS, StreamTopology(2, 8)):
        for attempt in (
            lambda other=other: store.load("latest", other),
            lambda other=other: store.write_rank(10, 0, other, {}),
        ):
            with pytest.raises(
                SnapshotError, match=f"got {TWO_RANKS}; expected {other}. Fix: run with {TWO_RANKS}"
            ):
                attempt()


def test_a_missing_rank_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write_all(store, 10)
    manifest = store.load(10)
    assert manifest is not None
    (tmp_path / "step-000000000010" / "rank-00001.json.zst").unlink()
    assert store.load_state(manifest, 0) == state_of(10, 0)
    with pytest.raises(SnapshotError, match=r"rank 1 is missing.*rank-00001.json.zst; expected \d+ bytes"):
        store.load_state(manifest, 1)


def test_states_that_changed_places_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write_all(store, 10)
    manifest = store.load(10)
    assert manifest is not None
    folder = tmp_path / "step-000000000010"
    shutil.copy(folder / "rank-00001.json.zst", folder / "rank-00000.json.zst")
    with pytest.raises(SnapshotError, match="damaged"):
        store.load_state(manifest, 0)
    shutil.copytree(folder, tmp_path / "step-000000000011")
    with pytest.raises(SnapshotError, match=r"not that of its folder; got step 10.*expected step 11"):
        store.load(11)


@pytest.mark.parametrize("name", ["rank-00000.json.zst", "manifest.json"])
@given(data=st.data())
def test_any_flipped_bit_and_any_truncation_is_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    if not folder.exists():
        write_all(make_store(folder), 10)
    path = folder / "step-000000000010" / name
    whole = path.read_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:position]
    else:
        flipped = whole[position] ^ (1 << data.draw(st.integers(0, 7)))
        damaged = whole[:position] + bytes([flipped]) + whole[position + 1 :]
    path.write_bytes(damaged)
    store = make_store(folder)
    try:
        # White space between the manifest's values carries nothing; everything else is under its checksum.
        if name == "manifest.json" and _is_same_json(whole, damaged):
            return
        with pytest.raises(SnapshotError) as caught:
            _load(store, 10, 0)
        assert name in str(caught.value) or caught.value.got
        assert caught.value.fix
    finally:
        path.write_bytes(whole)


def _load(store: SnapshotStore, step: int, rank: int) -> dict[str, Any]:
    manifest = store.load(step)
    assert manifest is not None
    return store.load_state(manifest, rank)


def _is_same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write_all(store, 10)
    path = tmp_path / "step-000000000010" / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "version": 2}))
    with pytest.raises(SnapshotError, match=r"got version 2; expected version 1\. Fix: install"):
        store.load("latest")


def test_what_decompresses_without_end_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    (tmp_path / "known-bad").mkdir()
    bomb = zstandard.ZstdCompressor().compress(bytes(200 * 1024 * 1024))
    (tmp_path / "known-bad" / "rank-00000-000000000001.json.zst").write_bytes(bomb)
    with pytest.raises(SnapshotError, match="damaged: 209715200 bytes after decompression"):
        store.load_known_bad()


# ---- a writer that dies between objects


def test_a_writer_that_dies_between_objects_leaves_the_snapshot_before_in_force(tmp_path: Path) -> None:
    inner = open_storage(StorageSettings())
    for lives in range(20):
        folder = tmp_path / str(lives)
        write_all(make_store(folder), 10, FOUR_RANKS)
        store = SnapshotStore(DyingStorage(inner, lives), str(folder), "a" * 64, dataset="demo")
        try:
            write_all(store, 20, FOUR_RANKS)
            store.prune(Retention(1))
            died = False
        except DyingStorage.Died:
            died = True
        again = make_store(folder)
        manifest = again.load("latest", FOUR_RANKS)
        assert manifest is not None
        assert manifest.step == (20 if lives > 4 else 10), lives
        assert [again.load_state(manifest, rank) for rank in range(4)] == [
            state_of(manifest.step, rank) for rank in range(4)
        ]
        assert died == (lives < 10), "five objects written, five deleted"
        # The next run of the same writer mends it.
        write_all(again, 20, FOUR_RANKS)
        assert again.prune(Retention(1)) in ([], [10])
        assert [entry.condition for entry in again.entries()] == ["complete"]


@given(
    order=st.permutations([(step, rank) for step in (10, 20, 30) for rank in (0, 1)]), lives=st.integers(0, 9)
)
def test_whatever_the_order_of_writers_and_the_moment_of_death_only_complete_sets_are_used(
    tmp_path_factory: pytest.TempPathFactory, order: list[tuple[int, int]], lives: int
) -> None:
    folder = tmp_path_factory.mktemp("order")
    store = SnapshotStore(DyingStorage(open_storage(StorageSettings()), lives), str(folder), "a" * 64)
    complete: set[int] = set()
    try:
        for step, rank in order:
            if store.write_rank(step, rank, TWO_RANKS, state_of(step, rank)):
                complete.add(step)
    except DyingStorage.Died:
        pass
    manifest = make_store(folder).nearest(None, TWO_RANKS)
    assert (manifest.step if manifest else None) == max(complete, default=None)
    shutil.rmtree(folder)


# ---- images that do not decode


def test_known_bad_images_of_all_ranks_come_together(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert store.load_known_bad() == {}
    store.write_known_bad(0, 7, {"a": "truncated"})
    store.write_known_bad(0, 7, {"b": "no image"})
    store.write_known_bad(1, 7, {"c": "no image"})
    make_store(tmp_path, "b" * 64).write_known_bad(2, 7, {"d": "of another run"})
    assert store.load_known_bad() == {"a": "truncated", "b": "no image", "c": "no image"}
    assert store.entries() == []


def test_a_conditional_write_that_was_lost_to_another_pod_is_a_success(tmp_path: Path) -> None:
    class Racing(DyingStorage):
        def write_bytes(self, uri: str, data: bytes, *, only_if_absent: bool = False) -> None:
            super().write_bytes(uri, data, only_if_absent=only_if_absent)
            if only_if_absent and uri.endswith("manifest.json"):
                raise ObjectExistsError("another pod was first")

    store = SnapshotStore(Racing(open_storage(StorageSettings()), 100), str(tmp_path), "a" * 64)
    assert write_all(store, 10) == [False, True]
