"""Row groups of a group's Parquet files: from the index where it knows them, else from the data."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

from bagelplane.errors import DataError
from bagelplane.sources.config import GroupConfig
from bagelplane.sources.facts import RowColumns, RowFacts, StoredFacts, block_name
from bagelplane.sources.index import DatasetIndex, NotIndexedError
from bagelplane.sources.parquet import ParquetReader, ahead_of, list_parquet
from bagelplane.storage import Storage
from bagelplane.storage.ahead import Part
from bagelplane.storage.uris import show

_LATE_SLICE_BYTES = 256 * 2**20


def seen_parquet(storage: Storage, uri: str, kind: str, index: DatasetIndex | None) -> list[str]:
    """URIs of the folder's own Parquet files, sorted, of which the index is told."""
    files = list_parquet(storage, uri)
    if index is not None:
        for info in files:
            index.see(kind, info)
    return [info.uri for info in files]


class ParquetBlocks:
    """Used by one thread."""

    def __init__(
        self, config: GroupConfig, storage: Storage, index: DatasetIndex | None, columns: RowColumns
    ) -> None:
        self._config, self._index, self._columns = config, index, columns
        self._parquet = ParquetReader(storage, columns.names)
        # What an index knows is read when its pixels are needed, by whichever thread decodes them, and kept for the
        # rows of it that wait in the buffer.
        self._late = ParquetReader(storage, columns.names, _LATE_SLICE_BYTES)
        self._late_lock = threading.Lock()
        self.ahead = ahead_of(storage, [dataset.uri for dataset in config.datasets])

    def parts_of(self, uri: str, row_groups: Sequence[int] | None, first: int = 0) -> list[Part]:
        """What is to be read of these row groups (None: of all from `first` on), for reading ahead."""
        return self._parquet.parts_of(uri, row_groups, first)

    def expect(self, uris: Iterable[str]) -> None:
        """Says which files are asked for soon."""
        if self._index is not None:
            self._index.expect(self._config.type, uris)

    def read(self, uri: str, row_group: int) -> RowFacts | None:
        """None past the last row group."""
        if self._index is not None:
            with suppress(NotIndexedError):
                return self._index.facts(
                    self._config.type, uri, row_group, self._columns, lambda: self._read_late(uri, row_group)
                )
        return self._facts(self._parquet, uri, row_group)

    def _read_late(self, uri: str, row_group: int) -> RowFacts:
        with self._late_lock:
            facts = self._facts(self._late, uri, row_group)
        if facts is None:
            raise DataError(
                f"{show(uri)} was replaced since it was indexed",
                got=f"no row group {row_group}",
                fix="run `bagelplane index` again, and start again",
            )
        return facts

    def _facts(self, reader: ParquetReader, uri: str, row_group: int) -> RowFacts | None:
        rows = reader.read_row_group(uri, row_group)
        if rows is None:
            return None
        return StoredFacts(rows, block_name(uri, row_group), self._columns, self._config.profile)
