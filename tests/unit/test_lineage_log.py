"""Parts of the log of rows: what is written comes back, what is not whole is refused, nothing is written unasked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagelplane.engine.drops import Drop, DropReason
from bagelplane.engine.pack_rows import PackRows, TrainedRow
from bagelplane.engine.rows import RowPlace
from bagelplane.errors import SnapshotError, TransientStorageError
from bagelplane.lineage.log import RowLog
from bagelplane.lineage.replay import PackAddress
from bagelplane.shm.record import record_size, write_record
from bagelplane.sidecar import lineage_log
from bagelplane.sidecar.lineage_format import (
    PART_STEPS,
    SCHEMA,
    PartKey,
    build_table,
    decode_part,
    encode_part,
    fates_at,
    pack_at,
    steps_in,
)
from bagelplane.sidecar.lineage_writing import WRITE_PACKS, LineageWriter
from bagelplane.sidecar.producer import Producer, ProducerSetup
from bagelplane.sidecar.runs import Lineage, Run
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.spec import BagelDataset
from bagelplane.storage import StorageSettings, open_storage
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology
from tests.golden.elastic_streams import resource

KEY = PartKey("0000000a", 3, 8, 2000)
ABOUT = {"dataset": "demo", "spec_hash": "a" * 64}
TEXTS = st.text(max_size=12)  # halves of surrogate pairs among them
PLACES = st.one_of(
    st.none(),
    st.builds(RowPlace, TEXTS, st.one_of(st.none(), st.integers(0, 2**31 - 1)), st.integers(0, 2**62)),
)
ROWS = st.builds(
    TrainedRow, TEXTS, PLACES, st.just("[0, 1]"), st.integers(-1, 2**31 - 1), st.integers(1, 2**31 - 1)
)
OWN_REASONS = TEXTS.filter(lambda text: text not in set(DropReason))  # of a group type of the user's own
DROPS = st.builds(Drop, TEXTS, st.one_of(st.sampled_from(DropReason), OWN_REASONS), TEXTS, PLACES)
PACKS = st.builds(
    PackRows, st.lists(ROWS, max_size=4).map(tuple), st.lists(DROPS, max_size=3).map(tuple)
).filter(lambda pack: pack.trained or pack.dropped)


@settings(max_examples=50)
@given(st.dictionaries(st.integers(2000, 2999), PACKS, max_size=4))
def test_what_is_written_comes_back_whatever_rows_say(packs: dict[int, PackRows]) -> None:
    through_the_pipe = {
        step: PackRows.from_json(json.loads(json.dumps(p.as_json()))) for step, p in packs.items()
    }
    assert through_the_pipe == packs
    table = decode_part(encode_part(KEY, build_table(KEY, packs), ABOUT), KEY, "part")
    assert sorted(steps_in(table)) == sorted(packs)
    for step, pack in packs.items():
        found = pack_at(table, step)
        assert found is not None
        assert len(found.trained) == len(pack.trained)
        assert [row.tokens for row in found.trained] == [row.tokens for row in pack.trained]
        assert [type(drop.reason) for drop in found.dropped] == [type(drop.reason) for drop in pack.dropped]
        if all(text.isascii() for text in (str(found), str(pack))) and "\\" not in str(pack):
            assert found == pack
        for place in {row.place for row in found.trained if row.place is not None}:
            assert fates_at(table, place)[step] == list(found.fates_of(place))
        places = {row.place for row in pack.trained} | {drop.place for drop in pack.dropped}
        for place in (place for place in places if place is not None):
            assert fates_at(table, place)[step], "a file is found by its own name, whatever that is"
    assert pack_at(table, 3000) is None


def part(count: int = 40) -> bytes:
    packs = {
        2000 + step: PackRows(
            tuple(
                TrainedRow("t2i", RowPlace("x.parquet", 0, row), str(row), 0, 100 + row) for row in range(9)
            ),
            (Drop("vlm", DropReason.JSONL_PARSE, "no JSON", RowPlace("y.jsonl", None, step)),),
        )
        for step in range(count)
    }
    return encode_part(KEY, build_table(KEY, packs), ABOUT)


def test_a_part_cut_anywhere_is_refused() -> None:
    whole = part(5)
    for length in range(0, len(whole), 7):
        with pytest.raises(SnapshotError, match=r"damaged or none of ours.*Fix: restore the object"):
            decode_part(whole[:length], KEY, "part")


@example(104, 1)  # in the header of a page: it ended the file early
@given(st.integers(0, 1 << 30), st.integers(1, 255))
def test_a_changed_byte_is_refused_and_never_changes_a_row(place: int, change: int) -> None:
    whole = bytearray(part())
    sound = decode_part(bytes(whole), KEY, "part")
    rows_end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")  # the footer has no checksum
    whole[place % len(whole)] ^= change
    with contextlib.suppress(SnapshotError):
        found = decode_part(bytes(whole), KEY, "part")
        assert place % len(whole) >= rows_end or found.equals(sound)


def with_column(name: str, value: Any) -> pa.Table:
    table = decode_part(part(3), KEY, "part")
    column = pa.array([value] * len(table), SCHEMA.field(name).type)
    return table.set_column(table.schema.get_field_index(name), SCHEMA.field(name), column)


MADE_UP: list[tuple[str, Any]] = [
    ("step", None), ("step", -1), ("step", 2**62), ("fate", None), ("fate", "lost"), ("group", None),
    ("sample", None), ("data_indexes", None), ("worker", None), ("tokens", None), ("tokens", -10),
    ("reason", None), ("message", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), MADE_UP)
def test_a_made_up_row_is_refused(name: str, value: Any) -> None:
    with pytest.raises(SnapshotError, match="damaged or none of ours"):
        decode_part(encode_part(KEY, with_column(name, value), ABOUT), KEY, "part")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "9" * 5_000])
def test_a_sample_id_that_is_no_json_is_warned_of_and_its_pack_planned(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer, _, lease = writer_over(tmp_path)
    key = PartKey(lease.run.id, 0, 1, 0)
    pack = PackRows((TrainedRow("t2i", RowPlace("x.parquet", 0, 1), text, 0, 5),), ())
    path = Path(key.uri(str(tmp_path)))
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_part(key, build_table(key, {4: pack}), ABOUT))
    assert RowLog(writer._log._store).pack(PackAddress(0, 1, 4)) is None
    assert "step 4" in caplog.text


def test_a_part_that_is_small_in_the_store_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x" * 10_000
    drops = tuple(Drop("t2i", DropReason.T2I_IMAGE_PARSE, text, None) for _ in range(2_000))
    data = encode_part(KEY, build_table(KEY, {2000: PackRows((), drops)}), ABOUT)
    assert len(data) < 100_000
    decode_part(data, KEY, "part")
    monkeypatch.setattr("bagelplane.sidecar.lineage_format.MAX_TABLE_BYTES", 10_000_000)
    with pytest.raises(SnapshotError, match="more than 10000000 bytes in memory"):
        decode_part(data, KEY, "part")


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, run="0000000b"),
        replace(KEY, rank=2),
        replace(KEY, world_size=4),
        replace(KEY, first_step=3000),
        replace(KEY, streams=64),
    ],
)
def test_a_part_under_another_name_is_refused(other: PartKey) -> None:
    with pytest.raises(SnapshotError, match="it says of itself"):
        decode_part(part(1), other, "part")


def test_names_are_a_function_of_run_world_rank_and_step() -> None:
    uri = "s3://bucket/snapshots/lineage/run-0000000a/rank-00003-of-00008/steps-000000002000.parquet"
    assert KEY.uri("s3://bucket/snapshots") == uri
    assert (KEY.number(2001), replace(KEY, streams=64).number(2001)) == (2001, 2001 * 8 + 3)
    assert PART_STEPS == 1000


class Lease:
    def __init__(self) -> None:
        self.run = Run(1, "0000000a", "demo", "a" * 64)
        self.lineage = Lineage({"0000000a": None})
        self.problem: SnapshotError | None = None

    def verify(self, rank: int) -> None:
        if self.problem is not None:
            raise self.problem


class Failing:
    """A store that fails while it is told to."""

    def __init__(self) -> None:
        self._inner = open_storage(StorageSettings())
        self.error: Exception | None = None

    def read_bytes(self, uri: str, *, limit_bytes: int | None = None) -> bytes:
        return self._inner.read_bytes(uri, limit_bytes=limit_bytes)

    def write_bytes(self, uri: str, data: bytes, *, only_if_absent: bool = False) -> None:
        if self.error is not None:
            raise self.error
        self._inner.write_bytes(uri, data, only_if_absent=only_if_absent)


def writer_over(folder: Path) -> tuple[LineageWriter, Failing, Lease]:
    storage, lease = Failing(), Lease()
    store = SnapshotStore(storage, str(folder), "a" * 64, dataset="demo")  # type: ignore[arg-type]
    store.lease = lease  # type: ignore[assignment]
    return LineageWriter(store), storage, lease


def rows(step: int) -> dict[str, Any]:
    return {"trained": [["t2i", "x.parquet", 0, step, "[0]", 0, 100]], "dropped": []}


def steps_stored(folder: Path) -> list[int]:
    return [
        step
        for path in sorted(folder.rglob("steps-*.parquet"))
        for step in pq.read_table(path)["step"].to_pylist()
    ]


def in_loop(body: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(body(), 60.0))


def test_packs_are_written_in_time_without_anybody_waiting(tmp_path: Path) -> None:
    writer, _, _ = writer_over(tmp_path)

    async def body() -> None:
        for step in range(WRITE_PACKS):
            writer.add(0, 1, step, rows(step))
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "log of rows"))
        assert (writer.health.written_packs, writer.waiting_packs) == (WRITE_PACKS, 0)

    in_loop(body)
    assert steps_stored(tmp_path) == list(range(WRITE_PACKS))


def test_what_a_failing_store_did_not_take_is_written_when_it_does_again(tmp_path: Path) -> None:
    writer, storage, _ = writer_over(tmp_path)

    async def body() -> None:
        writer.add(0, 1, 0, rows(0))
        storage.error = TransientStorageError("the store is away")
        assert await writer.write(0) is storage.error
        assert not await writer.drain(0.1)
        assert (writer.health.failed > 1, writer.waiting_packs) == (True, 1)
        assert "the store is away" in writer.health.problem
        writer.add(0, 1, 1, rows(1))
        storage.error = None
        assert await writer.drain(10.0)
        assert (writer.health.problem, writer.waiting_packs, writer.lost_packs) == ("", 0, 0)

    in_loop(body)
    assert steps_stored(tmp_path) == [0, 1]


def test_a_store_that_is_away_for_long_costs_no_more_memory_and_the_loss_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage_log, "MAX_UNWRITTEN_PARTS", 2)
    writer, storage, _ = writer_over(tmp_path)

    async def body() -> None:
        storage.error = TransientStorageError("the store is away")
        for number in range(5):
            writer.add(0, 1, number * PART_STEPS, rows(number))
            await writer.write(0)
        assert (writer.waiting_packs, writer.lost_packs) == (2, 3)
        storage.error = None
        assert await writer.drain(10.0)

    in_loop(body)
    assert steps_stored(tmp_path) == [3 * PART_STEPS, 4 * PART_STEPS]


def test_a_sidecar_whose_place_was_taken_writes_no_rows(tmp_path: Path) -> None:
    writer, _, lease = writer_over(tmp_path)

    async def body() -> None:
        writer.add(0, 1, 0, rows(0))
        lease.problem = SnapshotError("another run has taken over")
        assert await writer.write(0) is lease.problem
        assert not await writer.drain(10.0), "it waits for what never comes"

    in_loop(body)
    assert steps_stored(tmp_path) == []


def first_pack(dataset: BagelDataset) -> Any:
    stream = open_rank_stream(dataset, Topology(0, 1, 1), decode_threads=0)
    try:
        return stream.next_pack(lambda pack: write_record(pack, memoryview(bytearray(record_size(pack)))))
    finally:
        stream.close()


@pytest.mark.parametrize("lineage", [False, True])
def test_rows_travel_only_if_they_are_asked_for_and_never_in_the_record_of_the_ring(
    lineage: bool, tmp_path: Path
) -> None:
    snapshots = {"uri": str(tmp_path), "lineage": lineage}
    dataset = resource(4, "odd_default", snapshots=snapshots)
    pack = first_pack(dataset)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        setup = ProducerSetup(
            dataset=dataset.to_mapping(),
            rank=0,
            ring_number=0,
            world_size=1,
            ring_path=str(tmp_path / "ring"),
            ring_bytes=1 << 20,
            ring_mode=0o600,
            decode_threads=0,
            producers=1,
            start_step=0,
            target_step=0,
        )
        told = Producer(setup, ours)._rows_of(pack)
    assert (told is not None) == lineage
    assert pack.plan is not None
    assert record_size(pack) == record_size(replace(pack, plan=None))
    if told is not None:
        assert len(json.dumps(told)) < len(json.dumps(pack.state)), (
            "more than the state that goes the same way"
        )
        indexes = [json.loads(row[4]) for row in told["trained"]]
        assert indexes == [entry["data_indexes"] for entry in pack.scalars["batch_data_indexes"]]
