"""The index of a resource's data: which objects it knows, and their rows.

An index is believed as far as it is of the objects that are there now: one that was replaced since, or that the index
does not know whole, is planned from the data, and named once. So is one with a damaged part: an index comes from a
store, where anybody may have written it.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from bagelplane.errors import BagelplaneError
from bagelplane.sources.facts import RowColumns, RowFacts, block_name
from bagelplane.sources.index_format import (
    INVENTORY_NAME,
    INVENTORY_SCHEMA,
    LINES_A_PART,
    MAX_PART_BYTES,
    PARTS_FOLDER,
    UNUSABLE,
    IndexedObject,
    Looking,
    PartName,
    Summary,
    parse_part_name,
    summary_of,
    value_of,
)
from bagelplane.sources.indexed import IndexedFacts, IndexedLine, Knowledge
from bagelplane.storage import FileInfo, Storage
from bagelplane.storage.uris import parse_uri, show

log = logging.getLogger(__name__)

_CACHED_BYTES = 64 * 1024 * 1024
_OPEN_PARTS = 16
_FETCHED_AT_ONCE, _COMING_PARTS = 8, 64
_ROWS_READ_AT_ONCE = 1000
_FACT_COLUMNS = ["is_whole", "images", "images_problem", "text", "text_form", "token_keys", "token_counts"]
_LINE_COLUMNS = [name for name in _FACT_COLUMNS if not name.startswith("text")]
_MAX_SIDE = 2**31 - 1
_NAMED = 3

_Result = TypeVar("_Result")


class NotIndexedError(Exception):
    """The index does not know an object, or its part is damaged: the data have to be asked."""


@dataclass(slots=True)
class Coverage:
    """Which of the objects that were asked for an index knows, and which not, by URI."""

    indexed: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    """Known in another version, or as another release, profile or tokenizer looked at them."""
    partial: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    unverified: set[str] = field(default_factory=set)
    """Known, but for which images do not decode."""

    def add(self, uri: str, *, is_whole: bool, is_begun: bool, is_old: bool) -> None:
        """One more object: known, begun, or known as it was once."""
        place = self.absent
        if is_whole:
            place = self.indexed
        elif is_begun or is_old:
            place = self.partial if is_begun else self.stale
        place.add(uri)

    @property
    def knows_pixels(self) -> bool:
        """Whether all images were decoded for the index: what does not decode is known beforehand."""
        return self.is_whole and not self.unverified and bool(self.indexed)

    @property
    def is_whole(self) -> bool:
        return not (self.stale or self.partial or self.absent or self.damaged)

    def __str__(self) -> str:
        known = self.indexed - self.damaged
        total = len(self.indexed | self.stale | self.partial | self.absent)
        rest = [
            f"{len(uris)} {word} ({_some(uris)})"
            for word, uris in (
                ("changed since", self.stale),
                ("indexed in part", self.partial),
                ("not indexed", self.absent),
                ("with a damaged part", self.damaged),
            )
            if uris
        ]
        return f"{len(known)} of {total} objects are planned from the index" + "".join(
            f"; {text}" for text in rest
        )


def _some(uris: Iterable[str]) -> str:
    names = sorted(uris)
    return ", ".join(map(show, names[:_NAMED])) + (", ..." if len(names) > _NAMED else "")


class DatasetIndex:
    """What an index at `uri` knows of a resource's objects. For any thread."""

    def __init__(self, storage: Storage, uri: str, looking: Looking) -> None:
        """Lists the parts. Raises StorageError."""
        self.uri, self.looking, self._storage = uri.rstrip("/"), looking, storage
        self.coverage = Coverage()
        self._parts = _sorted_parts(storage.list_files(f"{self.uri}/{PARTS_FOLDER}", missing_ok=True))
        self._names: dict[IndexedObject, list[PartName]] = {}
        self._open: OrderedDict[PartName, _Part] = OrderedDict()
        self._lock = threading.RLock()
        self._told = False
        self._inventory: dict[str, Summary] | None = None
        self._coming: OrderedDict[PartName, Future[bytes]] = OrderedDict()
        # Of what is at hand, reading ahead gains nothing.
        self._fetchers = (
            None
            if parse_uri(self.uri).is_local
            else ThreadPoolExecutor(_FETCHED_AT_ONCE, thread_name_prefix="index-ahead")
        )

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def see(self, kind: str, info: FileInfo, images_uri: str = "") -> bool:
        """Tells of an object as it is now. Whether the index knows it, whole and in this version."""
        thing = IndexedObject(kind, info.uri, images_uri)
        if thing not in self._names:
            states = self._parts.get(thing.digest, {})
            found = states.get(self.looking.state_digest(info.version, info.size_bytes), {})
            whole = [parts for parts in found.values() if len(parts) == parts[0].count]
            # One whose pixels were looked at knows more.
            self._names[thing] = max(whole, key=lambda parts: parts[0].is_verified, default=[])
            if whole and not self._names[thing][0].is_verified:
                self.coverage.unverified.add(info.uri)
            self.coverage.add(info.uri, is_whole=bool(whole), is_begun=bool(found), is_old=bool(states))
        return bool(self._names[thing])

    def tell(self) -> None:
        """Says once, in a line, how much of the data is planned from the index."""
        if self._told or not (self.coverage.indexed or self.coverage.stale or self.coverage.partial):
            return
        self._told = True
        log.log(
            logging.INFO if self.coverage.is_whole else logging.WARNING,
            "index %s: %s",
            self.uri,
            self.coverage,
        )

    def expect(self, kind: str, uris: Iterable[str]) -> None:
        """Begins to read what is known of Parquet files that will be asked for soon, where that lies far away."""
        if self._fetchers is None:
            return
        with self._lock:
            for uri in uris:
                for name in self._names.get(IndexedObject(kind, uri), ()):
                    if name not in self._open and name not in self._coming:
                        self._coming[name] = self._fetchers.submit(
                            self._storage.read_bytes, self._address(name), limit_bytes=MAX_PART_BYTES
                        )
            while len(self._coming) > _COMING_PARTS:
                self._coming.popitem(last=False)[1].cancel()

    def _address(self, name: PartName) -> str:
        return f"{self.uri}/{PARTS_FOLDER}/{name}"

    def row_groups(self, kind: str, uri: str) -> list[int]:
        """Rows of each row group of a Parquet file. Raises NotIndexedError."""
        with self._lock:
            name = self._known(IndexedObject(kind, uri))[0]
            if self._inventory is None:
                # One object for all files, where a file at a time is asked for.
                self._inventory = read_inventory(self._storage, self.uri)
            summary = self._inventory.get(str(name)) or self._part(name, uri).summary
            return summary.row_groups

    def facts(
        self, kind: str, uri: str, row_group: int, columns: RowColumns, stored: Callable[[], RowFacts]
    ) -> IndexedFacts | None:
        """A row group of a Parquet file; None past the last one. Raises NotIndexedError."""
        with self._lock:
            name = self._known(IndexedObject(kind, uri))[0]
            part = self._part(name, uri)
            rows = self._guarded(part.uri, uri, lambda: part.group_rows(row_group, columns))
        if rows is None:
            return None
        return IndexedFacts(rows, block_name(uri, row_group), columns, self._knowledge(part), stored)

    def lines(self, kind: str, uri: str, images_uri: str) -> list[str]:
        """All lines of a JSONL file. Raises NotIndexedError."""
        found: list[str] = []
        with self._lock:
            for name in self._known(IndexedObject(kind, uri, images_uri)):
                part = self._part(name, uri)
                found += self._guarded(part.uri, uri, part.lines)
        return found

    def line(self, kind: str, uri: str, images_uri: str, number: int) -> IndexedLine:
        """One line of a JSONL file. Raises NotIndexedError."""
        with self._lock:
            names = self._known(IndexedObject(kind, uri, images_uri))
            if number >= len(names) * LINES_A_PART:
                raise NotIndexedError(uri)
            part = self._part(names[number // LINES_A_PART], uri)
            row = self._guarded(part.uri, uri, lambda: part.line(number % LINES_A_PART))
        if not row["is_whole"] or row["images"] is None:
            raise NotIndexedError(uri)
        return IndexedLine(row, self._knowledge(part))

    def _known(self, thing: IndexedObject) -> list[PartName]:
        names = self._names.get(thing)
        if not names:
            raise NotIndexedError(thing.uri)
        return names

    def _knowledge(self, part: _Part) -> Knowledge:
        return Knowledge(part.is_verified, drops_undecodable=self.looking.profile == "Automodel")

    def _part(self, name: PartName, uri: str) -> _Part:
        if name not in self._open:
            address, coming = self._address(name), self._coming.pop(name, None)

            def open_part() -> _Part:
                if coming is not None:
                    data = coming.result()
                else:
                    data = self._storage.read_bytes(address, limit_bytes=MAX_PART_BYTES)
                return _Part(address, data, is_verified=name.is_verified)

            self._open[name] = self._guarded(address, uri, open_part)
            while len(self._open) > _OPEN_PARTS:
                self._open.popitem(last=False)
        self._open.move_to_end(name)
        return self._open[name]

    def _guarded(self, part_uri: str, uri: str, action: Callable[[], _Result]) -> _Result:
        """NotIndexedError, and once a word about it, where a part is damaged: the data are there."""
        if uri in self.coverage.damaged:
            raise NotIndexedError(uri)
        try:
            return action()
        except (BagelplaneError, *UNUSABLE) as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            log.warning(
                "%s cannot be used, so %s is planned from the data: %s. Fix: delete that part, and run "
                "`bagelplane index` again",
                part_uri,
                show(uri),
                text,
            )
            self.coverage.damaged.add(uri)
            raise NotIndexedError(uri) from None


def _sorted_parts(files: Iterable[FileInfo]) -> dict[str, dict[str, dict[tuple[bool, int], list[PartName]]]]:
    """By object, state, and (is it verified, how many parts)."""
    found: dict[str, dict[str, dict[tuple[bool, int], list[PartName]]]] = {}
    for info in sorted(files, key=lambda info: info.uri):
        name = parse_part_name(info.uri.rpartition("/")[2])
        if name is not None and info.size_bytes <= MAX_PART_BYTES:
            states = found.setdefault(name.object_digest, {}).setdefault(name.state_digest, {})
            states.setdefault((name.is_verified, name.count), []).append(name)
    return found


def read_inventory(storage: Storage, uri: str) -> dict[str, Summary]:
    """What the inventory says of each part; nothing where there is none that can be read."""
    address = f"{uri}/{INVENTORY_NAME}"
    try:
        if not storage.exists(address):
            return {}
        data = storage.read_bytes(address, limit_bytes=MAX_PART_BYTES)
        table = pq.read_table(pa.BufferReader(data))
        if table.schema.remove_metadata() != INVENTORY_SCHEMA:
            raise ValueError("its columns are not those of an inventory")
        return {row["part"]: Summary.from_inventory(row) for row in table.to_pylist()}
    except (BagelplaneError, *UNUSABLE) as error:
        log.warning("%s cannot be used: %s", address, error)
        return {}


class _Part:
    """One file of an index. Row groups of it are read some at once, and kept as they are.

    Raises whatever pyarrow raises, and ValueError, TypeError or KeyError, for what is no part.
    """

    def __init__(self, uri: str, data: bytes, *, is_verified: bool) -> None:
        self.uri, self.is_verified = uri, is_verified
        # Whole: some megabytes by one request, and no file that is left open.
        self._file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        self.summary = summary_of(self._file.schema_arrow)
        self._tables: OrderedDict[tuple[int, int], pa.Table] = OrderedDict()
        counts = [self._file.metadata.row_group(n).num_rows for n in range(self._file.num_row_groups)]
        if sum(counts) != self.summary.rows:
            raise ValueError(f"{sum(counts)} rows instead of {self.summary.rows}")
        self._starts = [0, *itertools.accumulate(self.summary.row_groups)]
        self._batches, self._first_rows = _batches(counts)

    def group_rows(self, row_group: int, columns: RowColumns) -> list[dict[str, Any]] | None:
        if not 0 <= row_group < len(self.summary.row_groups):
            return None
        count = self.summary.row_groups[row_group]
        rows = self._rows(self._starts[row_group], count, _FACT_COLUMNS)
        for row in rows:
            _check_values(row, columns)
        return rows

    def line(self, number: int) -> dict[str, Any]:
        [row] = self._rows(number, 1, _LINE_COLUMNS)
        return row

    def lines(self) -> list[str]:
        columns = self._file.read(columns=["text", "text_form"]).to_pydict()
        values = [value_of(*pair) for pair in zip(columns["text_form"], columns["text"], strict=True)]
        if not all(isinstance(value, str) for value in values):
            raise ValueError("a line is no text")
        return values

    def _rows(self, start: int, count: int, columns: list[str]) -> list[dict[str, Any]]:
        """Rows of one row group of the data: they lie in one batch."""
        if count == 0:
            return []
        batch = bisect.bisect_right(self._first_rows, start) - 1
        table = self._table(batch, columns).slice(start - self._first_rows[batch], count)
        rows: list[dict[str, Any]] = table.to_pylist()
        if len(rows) != count:
            raise ValueError(f"{len(rows)} rows instead of {count}")
        for row in rows:
            _check_row(row)
        return rows

    def _table(self, batch: int, columns: list[str]) -> pa.Table:
        key = (len(columns), batch)
        if key not in self._tables:
            numbers = list(self._batches[batch])
            self._tables[key] = self._file.read_row_groups(numbers, columns=columns, use_threads=False)
            while len(self._tables) > 1 and sum(t.nbytes for t in self._tables.values()) > _CACHED_BYTES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]


def _batches(counts: Sequence[int]) -> tuple[list[range], list[int]]:
    """Row groups that are read together, and the first row of each such batch."""
    batches, first_rows, begin, row, first = list[range](), list[int](), 0, 0, 0
    for number, count in enumerate(counts):
        row += count
        if row - first >= _ROWS_READ_AT_ONCE or number == len(counts) - 1:
            batches.append(range(begin, number + 1))
            first_rows.append(first)
            begin, first = number + 1, row
    return batches, first_rows


def _check_row(row: Mapping[str, Any]) -> None:
    """ValueError for what no indexer of ours writes."""
    if len(row["token_keys"]) != len(row["token_counts"]):
        raise ValueError("a row has other numbers of texts than of token counts")
    for image in row["images"] or ():
        sides = (image["width"], image["height"])
        is_open = image["problem"] is None
        if is_open and not all(isinstance(side, int) and 1 <= side <= _MAX_SIDE for side in sides):
            raise ValueError("an image has no size")


def _check_values(row: Mapping[str, Any], columns: RowColumns) -> None:
    """What no planner could read, of a row of a Parquet file: as `_check_row`."""
    if row["is_whole"] and row["text_form"] != "error":
        value_of(row["text_form"], row["text"])
    is_image = not columns.has_image_list and row["is_whole"] and row["images_problem"] is None
    if is_image and len(row["images"] or ()) != 1:
        raise ValueError("a row has not one image")


def describe(index: DatasetIndex | None) -> str:
    """Where planning knows rows from, for people."""
    if index is None or not index.coverage.indexed:
        return "from headers and text alone"
    return "from the index alone" if index.coverage.is_whole else "from index and headers"
