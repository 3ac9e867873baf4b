"""Parquet files of a group: which there are, and their row groups, by columns and in slices."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bagelplane.errors import DataError
from bagelplane.storage import FileInfo, Storage
from bagelplane.storage.ahead import Part, ReadAhead

_OPEN_FILES = 4  # handles kept; rows are walked in order, so few suffice
_KEPT_FOOTERS = 16
_FOOTERS_AT_ONCE = 16
SLICE_BYTES = 8 * 2**20
"""Rows of a row group that are decoded together: so many bytes of them, however large the row group is."""
_BUFFER_BYTES = 1024 * 1024
"""What is read of a column at a time, where it was not fetched ahead."""
_GAP_BYTES = 4096
"""Columns that lie so near each other are fetched together."""


def list_parquet(storage: Storage, uri: str) -> list[FileInfo]:
    """The folder's own `.parquet` files, sorted. Raises DataError when there are none.

    From now on they are read in the versions found here.
    """
    files = storage.list_files(uri, suffix=".parquet")
    storage.pin(files)
    if not files:
        raise DataError(
            f"{uri} holds no Parquet files",
            got="0 objects ending in .parquet",
            expected="at least one, directly in this folder",
            fix="look at the data set's uri; folders below it are not searched",
        )
    return files


def ahead_of(storage: Storage, uris: Sequence[str]) -> ReadAhead | None:
    """Where units of these data sets are read ahead: there is no gain in that for local files."""
    return storage.ahead if any(map(storage.is_remote, uris)) else None


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
    metadata = ParquetReader(storage, []).footer(uri)
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
    """Row groups of files, the needed columns only. Keeps a few files open; used by one thread, but for `parts_of`,
    `footer` and what asks for it.
    """

    def __init__(self, storage: Storage, columns: Sequence[str], slice_bytes: int = SLICE_BYTES) -> None:
        self._storage, self._columns, self._slice_bytes = storage, list(columns), slice_bytes
        self._files: OrderedDict[str, pq.ParquetFile] = OrderedDict()
        # Streams are dropped rather than closed (a drop-in iterator has no end); their files go with them.
        weakref.finalize(self, _close_all, self._files)
        self._begin()

    def _begin(self) -> None:
        self.process = os.getpid()
        self._lock, self.reading = threading.Lock(), threading.Lock()
        self._footers: OrderedDict[str, Future[pq.FileMetaData]] = OrderedDict()

    def schema(self, uri: str) -> pa.Schema:
        return self.footer(uri).schema.to_arrow_schema()

    def num_row_groups(self, uri: str) -> int:
        return int(self.footer(uri).num_row_groups)

    def row_group_counts(self, uris: Sequence[str]) -> dict[str, int]:
        """By file. Footers are read at the same time where they are far away."""
        if not any(map(self._storage.is_remote, uris)):
            return {uri: self.num_row_groups(uri) for uri in uris}
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE, thread_name_prefix="footers") as pool:
            return dict(zip(uris, pool.map(self.num_row_groups, uris), strict=True))

    def footer(self, uri: str) -> pq.FileMetaData:
        """A file's metadata. Whoever comes while it is being read waits for it. Raises DataError, StorageError."""
        with self._lock:
            future = self._footers.get(uri)
            if future is None:
                while len(self._footers) >= _KEPT_FOOTERS:
                    self._footers.popitem(last=False)
                mine = self._footers[uri] = Future()
            else:
                self._footers.move_to_end(uri)
        if future is not None:
            return future.result()
        try:
            mine.set_result(self._read_footer(uri))
        except BaseException as error:
            with self._lock:
                self._footers.pop(uri, None)
            mine.set_exception(error)
            raise
        return mine.result()

    def _read_footer(self, uri: str) -> pq.FileMetaData:
        with self._storage.open_binary(uri) as handle:
            try:
                metadata = pq.read_metadata(handle)
                names = metadata.schema.to_arrow_schema().names
            except (pa.ArrowException, OSError) as error:
                raise _unreadable(uri, str(error)) from error
        missing = [name for name in self._columns if name not in names]
        if missing:
            raise DataError(
                f"{uri} lacks the column {', '.join(missing)}",
                got=f"columns {', '.join(names)}",
                expected=f"columns {', '.join(self._columns)}",
                fix="rename the columns, or take the file out of the folder",
            )
        return metadata

    def read_row_group(self, uri: str, row_group: int) -> RowGroup | None:
        """The columns of one row group; None past the last one."""
        self._check_process()
        metadata = self.footer(uri)
        if row_group >= metadata.num_row_groups:
            return None
        rows = metadata.row_group(row_group).num_rows
        size_bytes = sum(column.total_uncompressed_size for column in self._chunks(metadata, row_group))
        slice_rows = max(1, min(rows, rows * self._slice_bytes // max(1, size_bytes)))
        return RowGroup(self, uri, row_group, rows, slice_rows)

    def batches(self, uri: str, row_group: int, slice_rows: int) -> Iterator[pa.RecordBatch]:
        """A row group's rows from the first one on, so many at a time."""
        batches: Iterator[pa.RecordBatch] = self._open(uri).iter_batches(
            slice_rows, row_groups=[row_group], columns=self._columns, use_threads=False
        )
        return batches

    def parts_of(self, uri: str, row_groups: Sequence[int] | None, first: int = 0) -> list[Part]:
        """What is read of these row groups (None: of all from `first` on), in this order: for reading ahead."""
        metadata = self.footer(uri)
        version, part_bytes = self._storage.pinned_version(uri), self._storage.ahead.part_bytes
        parts = []
        for number in range(first, metadata.num_row_groups) if row_groups is None else row_groups:
            ranges = [_range_of(chunk) for chunk in self._chunks(metadata, number)]
            pieces = sorted(_pieces(ranges, part_bytes))
            parts += [Part(uri, start, end, version) for _, start, end in pieces]
        return parts

    def _chunks(self, metadata: pq.FileMetaData, row_group: int) -> Iterator[pq.ColumnChunkMetaData]:
        """Those of the needed columns."""
        group = metadata.row_group(row_group)
        for number in range(group.num_columns):
            chunk = group.column(number)
            path = chunk.path_in_schema
            if any(path == name or path.startswith(f"{name}.") for name in self._columns):
                yield chunk

    def _check_process(self) -> None:
        if self.process != os.getpid():
            # After a fork both sides would move one and the same file position; locks may be the parent's.
            _close_all(self._files)
            self._begin()

    def _open(self, uri: str) -> pq.ParquetFile:
        self._check_process()
        if uri in self._files:
            self._files.move_to_end(uri)
            return self._files[uri]
        while len(self._files) >= _OPEN_FILES:
            self._files.popitem(last=False)[1].close(force=True)
        metadata = self.footer(uri)
        handle = self._storage.open_binary(uri, window_bytes=0)  # a column's end is another one's beginning
        try:
            file = pq.ParquetFile(handle, metadata=metadata, buffer_size=_BUFFER_BYTES)
        except (pa.ArrowException, OSError) as error:
            handle.close()
            raise _unreadable(uri, str(error)) from error
        self._files[uri] = file
        return file


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


def read_row_group(file: pq.ParquetFile, uri: str, row_group: int, columns: Sequence[str]) -> WholeRows:
    """The columns of one row group. Raises DataError."""
    try:
        return WholeRows(file.read_row_group(row_group, columns=list(columns), use_threads=False))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(uri, f"row group {row_group}: {error}") from error


def _range_of(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        start = min(start, chunk.dictionary_page_offset)
    return start, start + chunk.total_compressed_size


def _pieces(ranges: Sequence[tuple[int, int]], part_bytes: int) -> Iterator[tuple[float, int, int]]:
    """(share of its column that lies before, start, end). Columns are walked side by side, however long they are."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start - merged[-1][1] <= _GAP_BYTES and end - merged[-1][0] <= part_bytes:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    for start, end in merged:
        for at in range(start, end, part_bytes):
            yield (at - start) / (end - start), at, min(at + part_bytes, end)


def _close_all(files: OrderedDict[str, pq.ParquetFile]) -> None:
    while files:
        files.popitem()[1].close(force=True)


def _unreadable(uri: str, cause: str) -> DataError:
    return DataError(
        f"{uri} cannot be read as Parquet",
        got=cause.splitlines()[0] if cause else "an empty error",
        fix="write the file anew, or take it out of the folder",
    )


class RowGroup:
    """Rows that are walked forwards: decoded slice by slice, the last two kept. Going further back begins anew."""

    def __init__(self, reader: ParquetReader, uri: str, number: int, num_rows: int, slice_rows: int) -> None:
        self._reader, self._uri, self._number, self._slice_rows = reader, uri, number, slice_rows
        self.num_rows = num_rows
        self._process = -1

    def slice_with(self, row: int) -> tuple[pa.RecordBatch, int]:
        """Rows that are decoded together with this one, and the number of the first of them. Raises DataError."""
        with self._reader.reading:  # files have one position
            return self._slice_with(row)

    def _slice_with(self, row: int) -> tuple[pa.RecordBatch, int]:
        if self._process != os.getpid() or row < self._slices[0][1]:
            self._process, self._next_row = os.getpid(), 0
            self._slices: list[tuple[pa.RecordBatch, int]] = []
            self._batches: Iterator[pa.RecordBatch] | None = None
        try:
            if self._batches is None:
                self._batches = self._reader.batches(self._uri, self._number, self._slice_rows)
            while row >= self._next_row:
                batch = next(self._batches)
                self._slices = [*self._slices[-1:], (batch, self._next_row)]
                self._next_row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            self._process = -1
            raise _unreadable(self._uri, f"row group {self._number}: {error}") from error
        except StopIteration:
            self._process = -1
            raise _unreadable(self._uri, f"row group {self._number} ends before row {row}") from None
        except BaseException:
            self._process = -1  # the store's trouble: begin anew
            raise
        return next(found for found in self._slices if row >= found[1] and row < found[1] + found[0].num_rows)


class WholeRows:
    """Rows that were read at once."""

    def __init__(self, table: pa.Table) -> None:
        self._table, self.num_rows = table, int(table.num_rows)

    def slice_with(self, row: int) -> tuple[pa.Table, int]:
        return self._table, 0


class Column:
    """One column of a row group, read value by value: image columns are too large to convert at once."""

    __slots__ = ("_name", "_rows")

    def __init__(self, rows: RowGroup | WholeRows, name: str) -> None:
        self._rows, self._name = rows, name

    def __getitem__(self, row: int) -> Any:
        """The value as Python has it. Raises ValueError where Python has none, DataError where the file is broken."""
        batch, first = self._rows.slice_with(row)
        try:
            return batch.column(self._name)[row - first].as_py()
        except (ArithmeticError, ImportError, pa.ArrowException) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
