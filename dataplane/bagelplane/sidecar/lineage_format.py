"""The log of rows: how its parts look and what they are called. docs/reference/lineage.md is the same for users.

    <uri>/lineage/run-<id>/rank-<5 digits>-of-<5 digits>/steps-<12 digits>.parquet

A part holds the packs of one rank of a world, of PART_STEPS steps from the number in its name on, as far as they were
trained on. With elastic sharding a pack is named as `PackAddress` does it: step and rank are its number divided by
the world size. So a name is a function of run, world, rank and step, and what is written again replaces what was
there. Pure: bytes in, values out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bagelplane.engine.drops import Drop
from bagelplane.engine.pack_rows import PackRows, RowFate, TrainedRow, place_of, reason_of
from bagelplane.engine.rows import RowPlace
from bagelplane.errors import SnapshotError
from bagelplane.sidecar.snapshot_format import MAX_OBJECT_BYTES, NUMBER, base_name

LINEAGE_FORMAT = "bagelplane-lineage"
LINEAGE_VERSION = 1
PART_STEPS = 1000
"""Part of the names: another number would be another format."""
MAX_PART_ROWS = 10_000_000
"""No part of ours has more; what claims to is refused before it is decompressed."""
MAX_TABLE_BYTES = 1024 * 1024 * 1024
"""Nor in memory: a few kilobytes of Parquet may say one long text millions of times."""
_ROWS_READ_AT_ONCE = 16_384
_METADATA_KEY = b"bagelplane"
_RANK_FOLDER = re.compile(r"rank-([0-9]{5})-of-([0-9]{5})")
_PART_NAME = re.compile(rf"steps-{NUMBER}\.parquet")

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("step", "int64", "step of the rank, counted from 0; with elastic sharding position // world_size"),
    ("rank", "int32", "rank that took the pack; with elastic sharding position % world_size"),
    ("world_size", "int32", "ranks that trained"),
    ("position", "int64", "number of the pack in the run; null under Bagel sharding"),
    ("fate", "string", "trained: in the pack; dropped: met on the way to it and not trained on"),
    ("sample", "int32", "number of the sample in the pack, from 0; null if dropped"),
    ("group", "string", "name of the group in the resource"),
    (
        "object",
        "string",
        "URI of the Parquet or JSONL file; null if the group does not say where its rows are",
    ),
    ("row_group", "int32", "row group of a Parquet file; null in JSONL"),
    ("row", "int64", "row in its row group; in JSONL number of the line"),
    ("data_indexes", "string", "sample id: JSON of the trainer's batch_data_indexes entry; null if dropped"),
    ("worker", "int32", "logical worker (Bagel sharding); null if dropped"),
    ("tokens", "int32", "tokens of the sample in the pack; null if dropped"),
    ("reason", "string", "why it was dropped; null if trained"),
    ("message", "string", "what was found; null if trained"),
)
SCHEMA = pa.schema([(name, pa.type_for_alias(kind)) for name, kind, _ in COLUMNS])


@dataclass(frozen=True, slots=True)
class PartKey:
    """Which part: a name, and what its content says of itself."""

    run: str
    rank: int
    world_size: int
    first_step: int
    streams: int = 0
    """Elastic sharding; 0 is Bagel."""

    def uri(self, base: str) -> str:
        return f"{rank_uri(base, self.run, self.rank, self.world_size)}/steps-{self.first_step:012d}.parquet"

    def number(self, step: int) -> int:
        """Of the pack of that step: of the run with elastic sharding, else of the rank."""
        return step * self.world_size + self.rank if self.streams else step


def run_uri(base: str, run: str) -> str:
    return f"{base}/lineage/run-{run}"


def rank_uri(base: str, run: str, rank: int, world_size: int) -> str:
    return f"{run_uri(base, run)}/rank-{rank:05d}-of-{world_size:05d}"


def first_step_of(step: int) -> int:
    """First step of the part that holds a step."""
    return step // PART_STEPS * PART_STEPS


def parse_rank_folder(uri: str) -> tuple[int, int] | None:
    """(rank, world size) of a folder; None for one that is none of ours."""
    match = _RANK_FOLDER.fullmatch(base_name(uri))
    return None if match is None else (int(match[1]), int(match[2]))


def parse_part_name(uri: str) -> int | None:
    """The first step of a part; None for what is no part."""
    match = _PART_NAME.fullmatch(base_name(uri))
    return None if match is None else int(match[1])


def build_table(key: PartKey, packs: Mapping[int, PackRows]) -> pa.Table:
    """Rows of packs by step, as SCHEMA has them."""
    rows = [row for step in sorted(packs) for row in _rows(key, step, packs[step])]
    columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def merge(before: pa.Table, after: pa.Table) -> pa.Table:
    """Both, by step; of a step that both have what `after` says."""
    older = before.filter(pc.invert(pc.is_in(before["step"], value_set=after["step"].unique())))
    whole = pa.concat_tables([older, after])
    return whole.take(pc.sort_indices(whole, sort_keys=[("step", "ascending")]))  # stable


def steps_in(table: pa.Table) -> list[int]:
    steps: list[int] = table["step"].unique().to_pylist()
    return steps


def pack_at(table: pa.Table, step: int) -> PackRows | None:
    """The pack of one step of a part; None where the part does not have it. ValueError or RecursionError: a sample
    id in it is no JSON, which is looked at here alone, since a part has thousands.
    """
    rows = table.filter(pc.equal(table["step"], step)).to_pylist()
    trained = [row for row in rows if row["fate"] == "trained"]
    for row in trained:
        json.loads(row["data_indexes"])
    dropped = [row for row in rows if row["fate"] != "trained"]
    if not rows:
        return None
    return PackRows(
        tuple(
            TrainedRow(row["group"], _place_in(row), row["data_indexes"], row["worker"], row["tokens"])
            for row in trained
        ),
        tuple(
            Drop(row["group"], reason_of(row["reason"]), row["message"], _place_in(row)) for row in dropped
        ),
    )


def fates_at(table: pa.Table, place: RowPlace) -> dict[int, list[RowFate]]:
    """What a part says of one row, by step; dropped before trained."""
    row_group = table["row_group"]
    same_group = row_group.is_null() if place.row_group is None else pc.equal(row_group, place.row_group)
    same_row = pc.and_(pc.equal(table["object"], _plain(place.object)), pc.equal(table["row"], place.row))
    fates: dict[int, list[RowFate]] = {}
    for row in table.filter(pc.and_(same_row, same_group)).sort_by("fate").to_pylist():
        if row["fate"] == "trained":
            fate = RowFate("trained", row["group"], row["sample"], row["tokens"])
        else:
            reason = reason_of(row["reason"])
            fate = RowFate("dropped", row["group"], reason=reason, message=row["message"])
        fates.setdefault(row["step"], []).append(fate)
    return fates


def _place_in(row: Mapping[str, Any]) -> RowPlace | None:
    return place_of(row["object"], row["row_group"], row["row"])


def encode_part(key: PartKey, table: pa.Table, about: Mapping[str, str]) -> bytes:
    """A part as it is stored; `about` goes into its metadata, for people."""
    content = {"format": LINEAGE_FORMAT, "version": LINEAGE_VERSION, **asdict(key), **about}
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata({_METADATA_KEY: json.dumps(content)}),
        sink,
        compression="zstd",
        compression_level=6,
        write_page_checksum=True,
        write_statistics=["step", "object"],
    )
    data: bytes = sink.getvalue().to_pybytes()
    return data


def decode_part(data: bytes, key: PartKey, uri: str) -> pa.Table:
    """The table in a part. SnapshotError for what is damaged, or is not that part."""
    try:
        if len(data) > MAX_OBJECT_BYTES:
            raise ValueError(f"{len(data)} bytes")
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        if file.metadata.num_rows > MAX_PART_ROWS:
            raise ValueError(f"{file.metadata.num_rows} rows")
        content = json.loads((file.metadata.metadata or {}).get(_METADATA_KEY, b"null"))
        _check_part(content, key)
        if file.schema_arrow.remove_metadata() != SCHEMA:
            raise ValueError(f"columns {', '.join(file.schema_arrow.names)[:200]}")
        table = _read(file)
        _check_rows(table, key)
    except (pa.ArrowException, OSError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise SnapshotError(
            f"the part {uri} of the log of rows is damaged or none of ours: {str(error)[:300]}",
            got=f"{len(data)} bytes",
            expected=f"{LINEAGE_FORMAT} version {LINEAGE_VERSION}, of {key}",
            fix="restore the object, or delete it: its steps are planned again then",
        ) from None
    return table


def _read(file: pq.ParquetFile) -> pa.Table:
    """All rows, in one chunk a column. ValueError as soon as they are too many bytes, or where some are missing: the
    headers of pages have no checksum, and one that is changed may end the file early.
    """
    batches, size_bytes = [], 0
    for batch in file.iter_batches(_ROWS_READ_AT_ONCE, use_threads=False):
        batches.append(batch)
        size_bytes += batch.nbytes
        if size_bytes > MAX_TABLE_BYTES:
            raise ValueError(f"more than {MAX_TABLE_BYTES} bytes in memory")
    table = pa.Table.from_batches(batches, SCHEMA).combine_chunks()
    if table.num_rows != file.metadata.num_rows:
        raise ValueError(f"{table.num_rows} of {file.metadata.num_rows} rows")
    return table


def _check_rows(table: pa.Table, key: PartKey) -> None:
    """ValueError for rows that no sidecar of ours writes into that part."""
    trained = table.filter(pc.equal(table["fate"], "trained"))
    dropped = table.filter(pc.equal(table["fate"], "dropped"))
    steps, tokens = pc.min_max(table["step"]).as_py(), pc.min_max(trained["tokens"]).as_py()
    needed = [table[name] for name in ("step", "group")]
    needed += [trained[name] for name in ("sample", "data_indexes", "worker", "tokens")]
    needed += [dropped[name] for name in ("reason", "message")]
    if len(trained) + len(dropped) != len(table) or any(column.null_count for column in needed):
        raise ValueError("a row is neither a trained nor a dropped one")
    if len(table) and not key.first_step <= steps["min"] <= steps["max"] < key.first_step + PART_STEPS:
        raise ValueError(f"steps {steps['min']} to {steps['max']}")
    if len(trained) and tokens["min"] < 0:
        raise ValueError(f"{tokens['min']} tokens")


def _check_part(content: Any, key: PartKey) -> None:
    wanted = {"format": LINEAGE_FORMAT, "version": LINEAGE_VERSION, **asdict(key)}
    found = {name: content.get(name) for name in wanted} if isinstance(content, dict) else {}
    if found != wanted:
        raise ValueError(f"it says of itself {json.dumps(found)[:200]}")


def _rows(key: PartKey, step: int, pack: PackRows) -> Iterator[tuple[Any, ...]]:
    """In the order of COLUMNS."""
    position = key.number(step) if key.streams else None
    head = (step, key.rank, key.world_size, position)
    for number, row in enumerate(pack.trained):
        where = _where(row.group, row.place)
        yield (*head, "trained", number, *where, _plain(row.data_indexes), row.worker, row.tokens, None, None)
    for drop in pack.dropped:
        why = (_plain(str(drop.reason)), _plain(drop.message))
        yield (*head, "dropped", None, *_where(drop.group, drop.place), None, None, None, *why)


def _where(group: str, place: RowPlace | None) -> tuple[Any, ...]:
    if place is None:
        return _plain(group), None, None, None
    return _plain(group), _plain(place.object), place.row_group, place.row


def _plain(text: str) -> str:
    """Texts of rows may hold halves of surrogate pairs, which UTF-8 has no form for."""
    return text.encode("utf-8", "backslashreplace").decode()
