"""t2i_pretrain: Parquet files with an `image` (encoded bytes) and `captions` (JSON object of texts) a row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bagelplane.engine.drops import DropReason
from bagelplane.engine.rng import Draws
from bagelplane.engine.rows import RowPlace
from bagelplane.engine.samples import (
    PlanContext,
    RowDropped,
    Sample,
    TextToImageRow,
    plan_text_to_image,
)
from bagelplane.engine.sharding import repeat_to_count
from bagelplane.sources.blocks import ParquetBlocks, seen_parquet
from bagelplane.sources.config import DatasetConfig, GroupConfig
from bagelplane.sources.facts import RowColumns, RowFacts, block_name
from bagelplane.sources.index import DatasetIndex
from bagelplane.sources.parquet import (
    ColumnKind,
    check_columns,
    is_bytes,
    is_image,
    is_list,
    is_text,
    list_parquet,
)
from bagelplane.storage import Storage
from bagelplane.storage.ahead import Part

ROW_COLUMNS = RowColumns("image", "captions", has_image_list=False)
_COLUMNS = {
    "image": ColumnKind("an encoded image a row (binary)", is_bytes),
    "captions": ColumnKind("a JSON object of captions a row, as text (string)", is_text),
}
_STRICT_COLUMNS = {
    "image": ColumnKind("an encoded image a row (binary, or a struct with binary `bytes`)", is_image),
    "captions": ColumnKind(
        "the captions of a row (string: JSON or the caption itself; or list<string>)",
        lambda kind: is_text(kind) or is_list(kind, is_text),
    ),
}


def list_units(
    config: GroupConfig, storage: Storage, _rng: random.Random, index: DatasetIndex | None = None
) -> list[Any]:
    """File URIs, repeated or cut to each data set's `num_used`."""
    units = []
    for dataset in config.datasets:
        files = seen_parquet(storage, dataset.uri, config.type, index)
        units += repeat_to_count(files, len(files) if dataset.num_used is None else dataset.num_used)
    return units


def look(dataset: DatasetConfig, storage: Storage, _enough: int) -> int:
    """Looks into the first file; how many units there are. Raises DataError for what is no such file."""
    files = list_parquet(storage, dataset.uri)
    check_columns(storage, files[0].uri, _STRICT_COLUMNS if dataset.profile.reads_other_shapes else _COLUMNS)
    return len(files) if dataset.num_used is None else dataset.num_used


class TextToImageReader:
    """Row groups of a file are blocks; `data_indexes` are [file, row group, row]."""

    def __init__(self, config: GroupConfig, storage: Storage, index: DatasetIndex | None = None) -> None:
        self._blocks = ParquetBlocks(config, storage, index, ROW_COLUMNS)
        self.ahead = self._blocks.ahead

    units_ahead = 4

    def parts_of(self, unit: str, block: int) -> list[Part]:
        return self._blocks.parts_of(unit, None, first=block)

    def read_block(self, unit: str, block: int) -> TextToImageBlock | None:
        facts = self._blocks.read(unit, block)
        return None if facts is None else TextToImageBlock(facts, block_name(unit, block))

    def expect(self, units: Sequence[str]) -> None:
        self._blocks.expect(units)

    def data_indexes(self, unit: int, block: int, row: int) -> list[int]:
        return [unit, block, row]

    def locate(self, unit: str, block: int, row: int) -> RowPlace:
        return RowPlace(unit, block, row)

    def describe(self, unit: str, block: int, row: int) -> str:
        return f"{unit}#{block}/{row}"


class TextToImageBlock:
    def __init__(self, facts: RowFacts, name: str) -> None:
        self._facts, self._name = facts, name

    def __len__(self) -> int:
        return len(self._facts)

    def plan(self, row: int, context: PlanContext, draws: Draws) -> Sample:
        key = f"{self._name}/{row}"
        try:
            images = self._facts.images(row)
        except ValueError as error:
            raise RowDropped(DropReason.T2I_IMAGE_PARSE, f"{key}: {error}") from None
        try:
            captions = self._facts.text(row)
        except ValueError as error:  # a text that is no UTF-8, for one
            raise RowDropped(DropReason.T2I_CAPTION_PARSE, f"{key}: {error}") from None
        assert images is not None
        context = replace(context, encode=self._facts.encoder(row, context.encode))
        return plan_text_to_image(TextToImageRow(images[0], captions), context, draws)
