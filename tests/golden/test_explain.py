"""Packs told of again hold the rows that the recordings have, and a row is found in just those packs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bagelplane.cli.explain import explain_pack
from bagelplane.engine.rows import RowPlace
from bagelplane.errors import SnapshotError, SpecError
from bagelplane.lineage.explanation import PackTold, tell_pack
from bagelplane.lineage.replay import PackAddress, Reader, Replay, address_of
from bagelplane.lineage.search import search_row, start_search
from bagelplane.sidecar.snapshots import SnapshotStore, StreamTopology
from bagelplane.sidecar.store import open_snapshot_store
from bagelplane.spec import BagelDataset
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology
from tests.golden.elastic_streams import resource
from tests.golden.recordings import load_recording, resource_of
from tests.golden.strict_streams import dataset_of

NAMES = ("a_default", "c_dropout", "d_workers", "e_tight", "odd_tight", "odd_workers")
PLACES = [(name, rank) for name in NAMES for rank in range(len(load_recording(name).ranks))]


def told_packs(dataset: BagelDataset, reader: Reader, count: int) -> Iterator[PackTold]:
    """A reader's first packs. Images are decoded: some of `odd` do not, which moves what follows."""
    with closing(Replay(dataset, reader, 0, store=None, verify=True)) as replay:
        for _ in range(count):
            yield tell_pack(replay.plan(whole=True), dataset)


def indexes_of(told: PackTold) -> list[dict[str, Any]]:
    """As `batch_data_indexes`; groups of recordings are named by their data sets."""
    types = {"t2i": "t2i_pretrain", "edit": "unified_edit", "vlm": "vlm_sft"}
    return [
        {
            "data_indexes": sample.data_indexes,
            "worker_id": sample.worker,
            "dataset_name": types[sample.group],
        }
        for sample in told.samples
    ]


@pytest.mark.parametrize(("name", "rank"), PLACES)
def test_every_recorded_pack_is_told_with_its_rows_lengths_and_splits(name: str, rank: int) -> None:
    recording = load_recording(name)
    packs = recording.ranks[rank]
    reader = Reader(rank, len(recording.ranks))
    for step, told in enumerate(told_packs(resource_of(recording), reader, len(packs))):
        recorded = packs[step]
        assert indexes_of(told) == recorded["batch_data_indexes"], step
        assert told.tokens == recorded["sequence_length"]
        assert sum(sample.tokens for sample in told.samples) == told.tokens
        if "split_lens" in recorded:  # flexible attention pads with a split of its own
            splits = [split for sample in told.samples for split in sample.splits]
            pad = len(recorded["split_lens"]) - len(splits)
            assert [tokens for tokens, _ in splits] == recorded["split_lens"][: len(splits)]
            assert [mode for _, mode in splits] == recorded["attn_modes"][: len(splits)]
            assert pad in (0, 1)
        shapes = [
            [item.size[1] // 16, item.size[0] // 16]
            for sample in told.samples
            for item in sample.items
            if item.kind == "vae_image" and item.size is not None and not item.left_out
        ]
        assert shapes == recorded.get("patchified_vae_latent_shapes", [])
        assert all(item.tokens == 0 for sample in told.samples for item in sample.items if item.left_out)


def test_a_place_leads_to_the_row() -> None:
    """Read by the place alone, a row has the turns, or as many images, that its sample has."""
    dataset, seen = resource_of(load_recording("a_default")), set()
    for told in told_packs(dataset, Reader(1, 2), 8):
        for sample in told.samples:
            place = sample.place
            assert place is not None
            if place.row_group is None:
                line = Path(place.object).read_text().splitlines()[place.row]
                answers = [turn for turn in json.loads(line)["conversations"] if turn["from"] == "gpt"]
                assert len(answers) == sum(item.has_loss for item in sample.items)
            else:
                table = pq.ParquetFile(place.object).read_row_group(place.row_group)
                images = table.column("image" if sample.group == "t2i" else "image_list")[place.row].as_py()
                keys = {item.image for item in sample.items if item.image}
                root = f"{place.object}#{place.row_group}/{place.row}"
                wanted = {root} if sample.group == "t2i" else {f"{root}/{n}" for n in range(len(images))}
                assert keys <= wanted
            assert sample.dataset == sample.group
            seen.add(sample.group)
    assert seen == {"t2i", "edit", "vlm"}


@pytest.mark.parametrize("name", ["a_default", "d_workers", "e_tight", "odd_tight"])
def test_a_row_is_found_in_just_the_packs_that_have_it(name: str) -> None:
    recording = load_recording(name)
    dataset, world_size = resource_of(recording), len(recording.ranks)
    steps = min(16, *(len(packs) for packs in recording.ranks))
    packed: dict[RowPlace, list[tuple[int, int]]] = defaultdict(list)
    dropped: dict[RowPlace, list[tuple[int, int, str]]] = defaultdict(list)
    for rank in range(world_size):
        for step, told in enumerate(told_packs(dataset, Reader(rank, world_size), steps)):
            assert indexes_of(told) == recording.ranks[rank][step]["batch_data_indexes"]
            for sample in told.samples:
                assert sample.place is not None
                packed[sample.place].append((step, rank))
            for drop in told.drops:
                assert drop.place is not None
                dropped[drop.place].append((step, rank, str(drop.reason)))
    chosen = sorted(packed, key=lambda place: (-len(packed[place]), str(place)))[:3]
    chosen += sorted(dropped, key=str)[:2]
    for place in chosen:
        search = start_search(dataset, place.object, place.row, place.row_group, world_size)
        assert search.place == place
        answer = search_row(dataset, search, steps, store=None, verify=True)
        assert answer.is_sure
        found = answer.sightings
        trained = [(one.pack.step, one.pack.rank) for one in found if one.fate == "trained"]
        assert trained == sorted(packed.get(place, []))
        lost = [(one.pack.step, one.pack.rank, str(one.reason)) for one in found if one.fate == "dropped"]
        assert lost == sorted(dropped.get(place, []))


def test_a_row_that_waits_is_found_in_the_buffer() -> None:
    recording = load_recording("e_tight")
    dataset = resource_of(recording)
    with closing(Replay(dataset, Reader(0, len(recording.ranks)), 0, store=None, verify=True)) as replay:
        while not (plan := replay.plan()).after.buffer:
            pass
        count = replay.number
    place = plan.after.buffer[0].place
    assert place is not None
    search = start_search(dataset, place.object, place.row, place.row_group, len(recording.ranks))
    found = search_row(dataset, search, count, store=None, verify=True).sightings
    assert ("buffered", count - 1) in [(one.fate, one.pack.step) for one in found]


def test_rows_of_a_whole_file_are_counted_over_its_row_groups() -> None:
    recording = load_recording("a_default")
    dataset = resource_of(recording)
    file = min((recording.data / "t2i").glob("*.parquet"))
    metadata = pq.ParquetFile(file).metadata
    first = metadata.row_group(0).num_rows
    assert start_search(dataset, f"file://{file}", first, None, 2).place == RowPlace(str(file), 1, 0)
    with pytest.raises(SpecError, match=r"has no row 99999.*Fix: rows count from 0"):
        start_search(dataset, str(file), 99999, None, 2)
    with pytest.raises(SpecError, match=r"no row 0 in row group 99.*row groups"):
        start_search(dataset, str(file), 0, 99, 2)
    lines = recording.data / "vlm" / "train.jsonl"
    with pytest.raises(SpecError, match=r"has no line 99999"):
        start_search(dataset, str(lines), 99999, None, 2)
    with pytest.raises(SpecError, match="has lines, no row groups"):
        start_search(dataset, str(lines), 0, 0, 2)


def test_a_file_that_no_group_reads_is_refused_with_one_that_is_read() -> None:
    dataset = resource_of(load_recording("a_default"))
    with pytest.raises(
        SpecError, match=r"no group of this resource reads /nowhere/x.parquet.*chunk-.*parquet"
    ):
        start_search(dataset, "/nowhere/x.parquet", 0, None, 2)


def with_snapshots(dataset: BagelDataset, folder: Path) -> BagelDataset:
    data = dataset.to_mapping()
    data["spec"]["snapshots"] = {"uri": str(folder)}
    return BagelDataset.from_mapping(data)


def store_of(dataset: BagelDataset) -> SnapshotStore:
    store = open_snapshot_store(dataset)
    assert store is not None
    return store


def take(dataset: BagelDataset, topology: Topology, steps: int, step_size: int = 1) -> dict[str, Any]:
    """A rank's state after so many packs, all images decoded as a run does."""
    with closing(open_rank_stream(dataset, topology, decode_threads=0)) as stream:
        for _ in range(steps):
            stream.plan_pack(verify=True)
        return stream.state()


@pytest.mark.parametrize("name", ["d_workers", "odd_tight"])
def test_planning_begins_at_the_nearest_snapshot(name: str, tmp_path: Path) -> None:
    recording = load_recording(name)
    dataset = with_snapshots(resource_of(recording), tmp_path)
    world_size, store = len(recording.ranks), store_of(dataset)
    for step in (3, 7):
        for rank in range(world_size):
            state = take(dataset, Topology(rank, world_size, recording.num_workers), step)
            store.write_rank(step, rank, StreamTopology(world_size, recording.num_workers), state)
            if state.get("known_bad"):
                store.write_known_bad(rank, step, state["known_bad"])
    for step, began in ((2, 0), (3, 3), (6, 3), (7, 7), (9, 7)):
        explained = explain_pack(dataset, PackAddress(0, world_size, step), store)
        assert explained.planned_from == began
        assert explained.is_sure == (step < 7)
        if explained.is_sure:
            assert indexes_of(explained.told) == recording.ranks[0][step]["batch_data_indexes"]
        elif name == "odd_tight":
            explained = explain_pack(dataset, PackAddress(0, world_size, step), store, verify=True)
            assert explained.is_sure
            assert indexes_of(explained.told) == recording.ranks[0][step]["batch_data_indexes"]


def test_snapshots_of_another_topology_are_refused_with_both_sides(tmp_path: Path) -> None:
    dataset = with_snapshots(resource_of(load_recording("a_default")), tmp_path)
    store = store_of(dataset)
    for rank in range(2):
        store.write_rank(1, rank, StreamTopology(2, 0), take(dataset, Topology(rank, 2, 0), 1))
    with pytest.raises(
        SnapshotError, match=r"world size 2 with 0 workers.*expected world size 4.*--from-start"
    ):
        explain_pack(dataset, PackAddress(0, 4, 2), store)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_elastic_pack_is_the_same_at_any_world_size_and_from_any_snapshot(
    world_size: int, tmp_path: Path
) -> None:
    dataset = with_snapshots(resource(4), tmp_path)
    store = store_of(dataset)
    for rank in range(2):
        state = take(dataset, Topology(rank, 2, 0), 3)  # position 6, in mid-round
        store.write_rank(6, rank, StreamTopology(2, 0, 4), state)
    for pack in (0, 3, 6, 9, 14):
        with closing(open_rank_stream(dataset, Topology(pack % 4, 4, 0), decode_threads=0)) as stream:
            for _ in range(pack // 4):
                stream.plan_pack()
            wanted = tell_pack(stream.plan_pack(), dataset)
        address = address_of(dataset, rank=0, world_size=world_size, position=pack)
        assert (address.step, address.rank) == divmod(pack, world_size)
        same = address_of(dataset, rank=address.rank, world_size=world_size, step=address.step)
        assert same == address
        explained = explain_pack(dataset, address, store)
        assert explained.told == wanted
        assert explained.planned_from == (0 if pack < 6 else len(range(pack % 4, 6, 4)))
        assert explain_pack(dataset, address, None).told == wanted


def test_an_elastic_row_is_found_where_every_stream_has_it() -> None:
    dataset = resource(4, profile="Strict")
    seen: dict[RowPlace, list[int]] = defaultdict(list)
    for stream in range(4):
        for number, told in enumerate(told_packs(dataset, Reader(stream, 4, elastic=True), 4)):
            for sample in told.samples:
                assert sample.place is not None
                seen[sample.place].append(number * 4 + stream)
    place = max(seen, key=lambda place: (len(seen[place]), str(place)))
    search = start_search(dataset, place.object, place.row, place.row_group, 2)
    answer = search_row(dataset, search, 16, store=None)
    assert answer.is_sure
    found = answer.sightings
    assert [one.pack.number for one in found if one.fate == "trained"] == sorted(seen[place])
    assert all((one.pack.step, one.pack.rank) == divmod(one.pack.number, 2) for one in found)


def test_a_sample_that_left_its_pack_is_told_as_a_drop(damaged: Path) -> None:
    dataset = dataset_of("odd_tight", damaged)
    reader, departed = Reader(0, len(load_recording("odd_tight").ranks)), None
    for step, told in enumerate(told_packs(dataset, reader, 12)):
        gone = [drop for drop in told.drops if drop.reason in ("image_undecodable", "image_truncated")]
        if gone:
            departed = step, gone[0].place
            assert gone[0].place not in {sample.place for sample in told.samples}
            break
    assert departed is not None
    step, place = departed
    assert place is not None
    search = start_search(dataset, place.object, place.row, place.row_group, reader.count)
    answer = search_row(dataset, search, step + 1, store=None)
    assert answer.is_sure
    [one] = [one for one in answer.sightings if (one.pack.step, one.pack.rank) == (step, 0)]
    assert (one.fate, one.sample) == ("dropped", None)
    assert one.reason in ("image_undecodable", "image_truncated")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.golden.broken_images import make_data

    return make_data(tmp_path_factory.mktemp("damaged") / "data")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rank": 2, "world_size": 2, "step": 1}, "the rank is outside its world.*rank from 0 to 1"),
        ({"rank": 0, "world_size": 2}, "one pack has to be named"),
        ({"rank": 0, "world_size": 2, "step": 1, "position": 2}, "one pack has to be named"),
        ({"rank": 0, "world_size": 2, "position": 2}, "a position names no pack under Bagel sharding"),
    ],
)
def test_what_names_no_pack_is_refused(asked: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        address_of(resource_of(load_recording("a_default")), **asked)


def test_a_world_that_does_not_divide_the_streams_is_refused() -> None:
    with pytest.raises(SpecError, match=r"3 ranks cannot share 4 streams.*1, 2, 4"):
        address_of(resource(4), rank=0, world_size=3, step=1)
