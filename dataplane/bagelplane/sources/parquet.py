"""Parquet files of a group: which there are, and their row groups, by columns."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bagelplane.errors import DataError
from bagelplane.storage import Storage

_OPEN_FILES = 4  # footers and handles kept; rows are walked in order, so few suffice


def list_parquet(storage: Storage, uri: str) -> list[str]:
    """URIs of the folder's own `.parquet` files, sorted. Raises DataError when there are none."""
    files = [info.uri for info in storage.list_files(uri, suffix=".parquet")]
    if not files:
        raise DataError(
            f"{uri} holds no Parquet files",
            got="0 objects ending in .parquet",
            expected="at least one, directly in this folder",
            fix="look at the data set's uri; folders below it are not searched",
        )
    return files


class ParquetReader:
    """Row groups of files, the needed columns only. Keeps a few files open; used by one thread."""

    def __init__(self, storage: Storage, columns: Sequence[str]) -> None:
        self._storage, self._columns = storage, list(columns)
        self._files: OrderedDict[str, pq.ParquetFile] = OrderedDict()
        # Streams are dropped rather than closed (a drop-in iterator has no end); their files go with them.
        weakref.finalize(self, _close_all, self._files)
        self._process = os.getpid()

    def num_row_groups(self, uri: str) -> int:
        return int(self._open(uri).num_row_groups)

    def read_row_group(self, uri: str, row_group: int) -> pa.Table | None:
        """The columns of one row group; None past the last one."""
        file = self._open(uri)
        if row_group >= file.num_row_groups:
            return None
        try:
            return file.read_row_group(row_group, columns=self._columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(uri, f"row group {row_group}: {error}") from error

    def _open(self, uri: str) -> pq.ParquetFile:
        if self._process != os.getpid():
            # After a fork both sides would move one and the same file position.
            _close_all(self._files)
            self._process = os.getpid()
        if uri in self._files:
            self._files.move_to_end(uri)
            return self._files[uri]
        while len(self._files) >= _OPEN_FILES:
            self._files.popitem(last=False)[1].close(force=True)
        handle = self._storage.open_binary(uri)
        try:
            file = pq.ParquetFile(handle)
        except (pa.ArrowException, OSError) as error:
            handle.close()
            raise _unreadable(uri, str(error)) from error
        missing = [name for name in self._columns if name not in file.schema_arrow.names]
        if missing:
            file.close(force=True)
            raise DataError(
                f"{uri} lacks the column {', '.join(missing)}",
                got=f"columns {', '.join(file.schema_arrow.names)}",
                expected=f"columns {', '.join(self._columns)}",
                fix="rename the columns, or take the file out of the folder",
            )
        self._files[uri] = file
        return file


def _close_all(files: OrderedDict[str, pq.ParquetFile]) -> None:
    while files:
        files.popitem()[1].close(force=True)


def _unreadable(uri: str, cause: str) -> DataError:
    return DataError(
        f"{uri} cannot be read as Parquet",
        got=cause.splitlines()[0] if cause else "an empty error",
        fix="write the file anew, or take it out of the folder",
    )


class Column:
    """One column of a row group, read value by value: image columns are too large to convert at once."""

    __slots__ = ("_values",)

    def __init__(self, table: pa.Table, name: str) -> None:
        self._values = table.column(name)

    def __getitem__(self, row: int) -> Any:
        """The value as Python has it. Raises ValueError where Python has none."""
        try:
            return self._values[row].as_py()
        except (ArithmeticError, ImportError, pa.ArrowException) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
