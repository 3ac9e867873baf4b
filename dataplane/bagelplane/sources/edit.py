"""unified_edit: Parquet files with `image_list` (n encoded images) and `instruction_list` (n - 1 lists) a row."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from bagelplane.engine.drops import DropReason
from bagelplane.engine.rng import Draws
from bagelplane.engine.rows import RowPlace
from bagelplane.engine.samples import EditRow, PlanContext, RowDropped, Sample, plan_edit
from bagelplane.engine.sharding import repeat_to_count
from bagelplane.errors import SpecError
from bagelplane.sources.blocks import ParquetBlocks, seen_parquet
from bagelplane.sources.config import DatasetConfig, GroupConfig
from bagelplane.sources.facts import RowColumns, RowFacts, block_name
from bagelplane.sources.index import DatasetIndex, NotIndexedError
from bagelplane.sources.parquet import (
    ColumnKind,
    ParquetReader,
    check_columns,
    is_bytes,
    is_image,
    is_list,
    list_parquet,
)
from bagelplane.storage import Storage, join_uri
from bagelplane.storage.ahead import Part
from bagelplane.storage.uris import show

log = logging.getLogger(__name__)

ROW_COLUMNS = RowColumns("image_list", "instruction_list", has_image_list=True)
_COLUMNS = {
    "image_list": ColumnKind(
        "a list of encoded images a row (list<binary>)", lambda kind: is_list(kind, is_bytes)
    ),
    "instruction_list": ColumnKind("a list of phrasings for each step (list<list<string>>)", is_list),
}
_STRICT_COLUMNS = {
    "image_list": ColumnKind(
        "a list of encoded images a row (list<binary>, or of structs with binary `bytes`)",
        lambda kind: is_list(kind, is_image),
    ),
    "instruction_list": ColumnKind(
        "a list of phrasings, or one phrasing, for each step (list<list<string>> or list<string>)", is_list
    ),
}


def list_units(
    config: GroupConfig, storage: Storage, _rng: random.Random, index: DatasetIndex | None = None
) -> list[Any]:
    """(file, row group) pairs. Files are repeated or cut to `num_used` first."""
    units: list[Any] = []
    for dataset in config.datasets:
        files = seen_parquet(storage, dataset.uri, config.type, index)
        counts = _row_group_counts(dataset, files, storage, config.type, index)
        for file in repeat_to_count(files, len(files) if dataset.num_used is None else dataset.num_used):
            units += [(file, row_group) for row_group in range(counts.get(file, 0))]
    return units


def look(dataset: DatasetConfig, storage: Storage, enough: int) -> int:
    """Looks into the first file; how many units there are, counted to `enough`. Raises DataError."""
    files = list_parquet(storage, dataset.uri)
    check_columns(storage, files[0].uri, _STRICT_COLUMNS if dataset.profile.reads_other_shapes else _COLUMNS)
    reader, counts, count = ParquetReader(storage, list(_COLUMNS)), dataset.row_groups, 0
    for file in repeat_to_count(
        [info.uri for info in files], len(files) if dataset.num_used is None else dataset.num_used
    ):
        count += reader.num_row_groups(file) if counts is None else counts.get(file, 0)
        if count >= enough:
            break  # of the other files no footer need be read
    return count


def _row_group_counts(
    dataset: DatasetConfig, files: list[str], storage: Storage, kind: str, index: DatasetIndex | None
) -> dict[str, int]:
    if dataset.row_groups is None:
        reader = ParquetReader(storage, list(_COLUMNS))
        counts: dict[str, int] = {}
        if index is not None:
            for file in files:
                with suppress(NotIndexedError):
                    counts[file] = len(index.row_groups(kind, file))
        return counts | reader.row_group_counts([file for file in files if file not in counts])
    unknown = sorted(set(files) - set(dataset.row_groups))
    if unknown:
        log.warning(
            "data set %s: %d of %d files are not in its parquet info and are not read, the first is %s",
            dataset.name, len(unknown), len(files), unknown[0],
        )  # fmt: skip
    return dataset.row_groups


def read_row_group_counts(storage: Storage, uri: str, folder: str) -> dict[str, int]:
    """Row groups by file URI, from a `parquet_info` JSON file: `{path: {"num_row_groups": n, ...}}`.

    A path is a full URI, or relative to the info file or to the data set's folder.
    """
    try:
        info = json.loads(storage.read_bytes(uri))
        counts = {str(path): int(entry["num_row_groups"]) for path, entry in info.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SpecError(
            f"{uri} is no parquet info",
            got=f"{type(error).__name__}: {error}",
            expected='{"path of a file": {"num_row_groups": n}, ...}',
            fix="write it anew, or leave parquetInfo out: the files' footers are asked then",
        ) from None
    bases = (folder, uri.rsplit("/", 1)[0])
    by_uri: dict[str, int] = {}
    unmatched = set(counts)
    for file in (info.uri for info in list_parquet(storage, folder)):
        for path, count in counts.items():
            if file == path or any(file == join_uri(base, path.removeprefix("./")) for base in bases):
                by_uri[file] = count
                unmatched.discard(path)
    if unmatched:
        named = ", ".join(show(path) for path in sorted(unmatched))
        log.warning(
            "%s: %d of %d keys name no file of %s: %s", uri, len(unmatched), len(counts), folder, named
        )
    return by_uri


class EditReader:
    """One block a unit; `data_indexes` are [unit, row in its row group]."""

    def __init__(self, config: GroupConfig, storage: Storage, index: DatasetIndex | None = None) -> None:
        self._blocks = ParquetBlocks(config, storage, index, ROW_COLUMNS)
        self.ahead = self._blocks.ahead

    units_ahead = 8

    def parts_of(self, unit: tuple[str, int], block: int) -> list[Part]:
        return self._blocks.parts_of(unit[0], [unit[1]])

    def read_block(self, unit: tuple[str, int], block: int) -> EditBlock | None:
        if block > 0:
            return None
        facts = self._blocks.read(*unit)
        return None if facts is None else EditBlock(facts, block_name(*unit))

    def expect(self, units: Sequence[tuple[str, int]]) -> None:
        self._blocks.expect(uri for uri, _ in units)

    def data_indexes(self, unit: int, block: int, row: int) -> list[int]:
        return [unit, row]

    def locate(self, unit: tuple[str, int], block: int, row: int) -> RowPlace:
        return RowPlace(*unit, row)

    def describe(self, unit: tuple[str, int], block: int, row: int) -> str:
        return f"{unit[0]}#{unit[1]}/{row}"


class EditBlock:
    def __init__(self, facts: RowFacts, name: str) -> None:
        self._facts, self._name = facts, name

    def __len__(self) -> int:
        return len(self._facts)

    def plan(self, row: int, context: PlanContext, draws: Draws) -> Sample:
        try:
            images, instructions = self._facts.images(row), self._facts.text(row)
        except ValueError as error:
            raise RowDropped(DropReason.PARQUET_ROW_PARSE, f"{self._name}/{row}: {error}") from None
        context = replace(context, encode=self._facts.encoder(row, context.encode))
        return plan_edit(EditRow(images, instructions), context, draws)
