"""Row groups of a group's Parquet files: from the index where it knows them, else from the data."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress

from bagelplane.errors import DataError
from bagelplane.sources.config import GroupConfig
from bagelplane.sources.facts import RowColumns, RowFacts, StoredFacts, block_name
from bagelplane.sources.index import DatasetIndex, NotIndexedError
from bagelplane.sources.parquet import ParquetReader, list_parquet
from bagelplane.storage import Storage
from bagelplane.storage.uris import show


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
        # What an index knows is read when its pixels are needed, by whichever thread decodes them.
        self._late, self._late_lock = ParquetReader(storage, columns.names), threading.Lock()

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
        table = reader.read_row_group(uri, row_group)
        if table is None:
            return None
        return StoredFacts(table, block_name(uri, row_group), self._columns, self._config.profile)
