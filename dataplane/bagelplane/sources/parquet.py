"""Parquet files of a group: which there are, and their row groups, by columns."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bagelplane.errors import DataError
from bagelplane.storage import FileInfo, Storage

_OPEN_FILES = 4  # footers and handles kept; rows are walked in order, so few suffice


def list_parquet(storage: Storage, uri: str) -> list[FileInfo]:
    """The folder's own `.parquet` files, sorted. Raises DataError when there are none."""
    files = storage.list_files(uri, suffix=".parquet")
    if not files:
        raise DataError(
            f"{uri} holds no Parquet files",
            got="0 objects ending in .parquet",
            expected="at least one, directly in this folder",
            fix="look at the data set's uri; folders below it are not searched",
        )
    return files


@dataclass(frozen=True, slots=True)
class ColumnKind:
    """What a column has to hold. `fits` judges its Arrow type; with another one no row of it could be used."""

    text: str
    fits: Callable[[pa.DataType], bool]


def check_columns(storage: Storage, uri: str, kinds: Mapping[str, ColumnKind]) -> None:
    """Reads one file's footer. Raises DataError when it is no Parquet, or its columns are others."""
    schema = ParquetReader(storage, list(kinds)).schema(uri)
    for name, kind in kinds.items():
        found = schema.field(name).type
        if not kind.fits(found):
            raise DataError(
                f"the column {name} of {uri} holds something else",
                got=str(found)[:200],
                expected=kind.text,
                fix="write the column so, or take the file out of the folder",
            )


def rows_by_group(storage: Storage, uri: str) -> list[int]:
    """How many rows each row group of a file has, from its footer. Raises DataError when it is no Parquet."""
    metadata = ParquetReader(storage, []).metadata(uri)
    return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values come out as bytes."""
    kind = _plain(kind)
    return any(
        check(kind) for check in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    ) or kind in _views("binary_view")


def is_text(kind: pa.DataType) -> bool:
    """Whether values come out as texts, or as bytes that may be read as such."""
    plain = _plain(kind)
    is_string = pa.types.is_string(plain) or pa.types.is_large_string(plain)
    return is_string or plain in _views("string_view") or is_bytes(kind)


def is_list(kind: pa.DataType, holds: Callable[[pa.DataType], bool] = lambda _: True) -> bool:
    """Whether values come out as lists of what `holds` takes."""
    kind = _plain(kind)
    checks = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(check(kind) for check in checks) and holds(kind.value_type)


def is_image(kind: pa.DataType) -> bool:
    """Whether values come out as bytes, or as {bytes, path} like those of Hugging Face."""
    plain = _plain(kind)
    if not pa.types.is_struct(plain):
        return is_bytes(kind)
    place = plain.get_field_index("bytes")
    return place >= 0 and is_bytes(plain.field(place).type)


def _plain(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _views(name: str) -> list[pa.DataType]:
    # Younger than the oldest pyarrow that we run with.
    make = getattr(pa, name, None)
    return [make()] if make is not None else []


class ParquetReader:
    """Row groups of files, the needed columns only. Keeps a few files open; used by one thread."""

    def __init__(self, storage: Storage, columns: Sequence[str]) -> None:
        self._storage, self._columns = storage, list(columns)
        self._files: OrderedDict[str, pq.ParquetFile] = OrderedDict()
        # Streams are dropped rather than closed (a drop-in iterator has no end); their files go with them.
        weakref.finalize(self, _close_all, self._files)
        self._process = os.getpid()

    def schema(self, uri: str) -> pa.Schema:
        return self._open(uri).schema_arrow

    def metadata(self, uri: str) -> pq.FileMetaData:
        return self._open(uri).metadata

    def num_row_groups(self, uri: str) -> int:
        return int(self._open(uri).num_row_groups)

    def read_row_group(self, uri: str, row_group: int) -> pa.Table | None:
        """The columns of one row group; None past the last one."""
        file = self._open(uri)
        if row_group >= file.num_row_groups:
            return None
        return read_row_group(file, uri, row_group, self._columns)

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
        self._files[uri] = open_parquet(self._storage.open_binary(uri), uri, self._columns)
        return self._files[uri]


def open_parquet(handle: Any, uri: str, columns: Sequence[str]) -> pq.ParquetFile:
    """The file behind a handle, which it takes over. DataError when it is no Parquet, or lacks a column."""
    try:
        file = pq.ParquetFile(handle)
    except (pa.ArrowException, OSError) as error:
        handle.close()
        raise _unreadable(uri, str(error)) from error
    missing = [name for name in columns if name not in file.schema_arrow.names]
    if missing:
        file.close(force=True)
        raise DataError(
            f"{uri} lacks the column {', '.join(missing)}",
            got=f"columns {', '.join(file.schema_arrow.names)}",
            expected=f"columns {', '.join(columns)}",
            fix="rename the columns, or take the file out of the folder",
        )
    return file


def read_row_group(file: pq.ParquetFile, uri: str, row_group: int, columns: Sequence[str]) -> pa.Table:
    """The columns of one row group. Raises DataError."""
    try:
        return file.read_row_group(row_group, columns=list(columns), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(uri, f"row group {row_group}: {error}") from error


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
