"""Make the index of a resource's data: look at each object once, and write down what planning needs of it.

An object's part is written once and whole, under a name that says of which version of it. So an indexer that was
killed goes on where it was, one that runs again reads what has changed and nothing else, and several may share the
work: each lists all objects and takes every n-th part. What they wrote together is what one alone would have written,
byte for byte.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bagelplane.errors import BagelplaneError, StorageError
from bagelplane.images import configure_pillow
from bagelplane.settings import StreamSettings, stored_type
from bagelplane.sources import edit, text_to_image
from bagelplane.sources.conversation import ConversationBlock, ImageFolder, split_lines
from bagelplane.sources.facts import RowColumns, RowFacts, StoredFacts, block_name
from bagelplane.sources.group import Block
from bagelplane.sources.index import Coverage, read_inventory
from bagelplane.sources.index_format import (
    INVENTORY_NAME,
    INVENTORY_SCHEMA,
    LINES_A_GROUP,
    LINES_A_PART,
    PARTS_FOLDER,
    UNUSABLE,
    IndexedObject,
    PartName,
    Summary,
    parse_part_name,
    summary_of,
    with_summary,
)
from bagelplane.sources.looking import Looked, Looker
from bagelplane.sources.parquet import list_parquet, open_parquet, read_row_group
from bagelplane.storage import FileInfo
from bagelplane.storage.uris import parse_uri, show

log = logging.getLogger(__name__)

_READ_WHOLE_BYTES = 64 * 1024 * 1024
"""Parquet files up to here are read by one request; of larger ones the footer and the needed columns."""
_OBJECTS_AT_ONCE = 4

OnProgress = Callable[[int, int], None]
"""Is told, from any thread, how many objects and lines are done of how many."""
_BlockOf = Callable[[RowFacts, str], Block]

_PARQUET_TYPES: dict[str, tuple[RowColumns, _BlockOf]] = {
    "t2i_pretrain": (text_to_image.ROW_COLUMNS, text_to_image.TextToImageBlock),
    "unified_edit": (edit.ROW_COLUMNS, edit.EditBlock),
}


@dataclass(frozen=True, slots=True)
class _Task:
    """A part to be written."""

    name: PartName
    thing: IndexedObject
    info: FileInfo
    lines: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        return len(self.lines) or 1


@dataclass(slots=True)
class IndexReport:
    """What an indexer did, and what the index knows then."""

    uri: str
    shard: tuple[int, int]
    objects: int = 0
    parts: int = 0
    """Of the whole index."""
    written: int = 0
    kept: int = 0
    missing: int = 0
    """Parts that other shards have to write, or that could not be."""
    summaries: list[Summary] = field(default_factory=list)
    """Of the parts that are there."""
    problems: list[BagelplaneError] = field(default_factory=list)
    """Objects that could not be looked at."""
    seconds: float = 0.0

    @property
    def drops(self) -> Counter[str]:
        """Rows that are not trained on whatever is drawn, by reason."""
        return sum((Counter(summary.drops) for summary in self.summaries), Counter[str]())

    @property
    def undecodable_images(self) -> int | None:
        """None where not all images were decoded."""
        counts = [summary.undecodable_images for summary in self.summaries]
        return None if None in counts else sum(count or 0 for count in counts)

    def as_json(self) -> dict[str, Any]:
        return {
            "version": 1,
            "index": self.uri,
            "shard": f"{self.shard[0]}/{self.shard[1]}",
            "objects": self.objects,
            "parts": self.parts,
            "written": self.written,
            "kept": self.kept,
            "missing": self.missing,
            "rows": sum(summary.rows for summary in self.summaries),
            "images": sum(summary.images for summary in self.summaries),
            "image_bytes": sum(summary.image_bytes for summary in self.summaries),
            "undecodable_images": self.undecodable_images,
            "drops": dict(sorted(self.drops.items())),
            "problems": [str(problem) for problem in self.problems],
            "seconds": round(self.seconds, 3),
        }


def objects_of(settings: StreamSettings) -> list[tuple[IndexedObject, FileInfo]]:
    """What a resource names, each once, as it is now. Each folder is listed once. Raises StorageError, DataError."""
    listed: dict[str, list[FileInfo]] = {}
    found: dict[IndexedObject, FileInfo] = {}
    for config in settings.groups:
        stored_type(config)
        for data in config.datasets:
            if config.type in _PARQUET_TYPES:
                if data.uri not in listed:
                    listed[data.uri] = list_parquet(settings.storage, data.uri)
                found |= {IndexedObject(config.type, info.uri): info for info in listed[data.uri]}
            else:
                thing = IndexedObject(config.type, data.jsonl_uri, data.images_uri)
                found[thing] = settings.storage.info(data.jsonl_uri)
    return sorted(found.items(), key=lambda item: (item[0].type, item[0].uri, item[0].images_uri))


def coverage_of(settings: StreamSettings) -> Coverage | None:
    """How much of a resource's data its index knows; None without one. Lists them, and reads none."""
    index = settings.index
    if index is None:
        return None
    for thing, info in objects_of(settings):
        index.see(thing.type, info, thing.images_uri)
    return index.coverage


class Indexer:
    """Makes or completes the index at `uri`. `verify`: images are decoded, and those that do not are named."""

    def __init__(
        self, settings: StreamSettings, uri: str, *, verify: bool = False, threads: int = 16,
        on_progress: OnProgress = lambda done, total: None,
    ) -> None:  # fmt: skip
        self._settings, self._uri = settings, uri.rstrip("/")
        self._storage, self._verify, self._threads = settings.storage, verify, threads
        self._looker = Looker(settings.storage, settings.profile, settings.encode, verify)
        self._on_progress, self._lock = on_progress, threading.Lock()
        self._done = self._total = 0
        self._summaries: dict[str, Summary] = {}

    def run(self, shard: tuple[int, int] = (0, 1)) -> IndexReport:
        """Writes what is missing of this shard's parts. Objects that cannot be read become `problems`.

        Raises StorageError when the index cannot be written, or the data not be listed.
        """
        begun = time.monotonic()
        configure_pillow()
        report = IndexReport(self._uri, shard)
        things = objects_of(self._settings)
        present = self._present()
        states: dict[tuple[str, str], list[PartName]] = {}
        for name in sorted(present, key=str):
            states.setdefault((name.object_digest, name.state_digest), []).append(name)
        tasks = list[_Task]()
        for thing, info in things:
            try:
                tasks += self._tasks(thing, info, states)
            except (BagelplaneError, UnicodeError) as error:
                report.problems.append(_named(error, info.uri))
        # Shares of all parts, not of those that are missing: others write meanwhile.
        own = sorted(tasks, key=_order)[shard[0] :: shard[1]]
        names = [task.name for task in tasks]
        report.objects, report.kept = len(things), len(present.intersection(names))
        self._write_all([task for task in own if task.name not in present], report)
        self._finish(report, names, [thing for thing, _ in things])
        report.seconds = time.monotonic() - begun
        return report

    def _present(self) -> set[PartName]:
        files = self._storage.list_files(f"{self._uri}/{PARTS_FOLDER}", missing_ok=True)
        names = [parse_part_name(info.uri.rpartition("/")[2]) for info in files]
        return {name for name in names if name is not None}

    def _tasks(
        self, thing: IndexedObject, info: FileInfo, present: Mapping[tuple[str, str], Sequence[PartName]]
    ) -> Iterator[_Task]:
        """The parts of one object. One whose parts are all there is not read. `present` are those that are there, by
        digests of object and state.
        """
        state = self._settings.looking.state_digest(info.version, info.size_bytes)
        name = PartName(thing.digest, state, is_verified=self._verify)
        there = present.get((thing.digest, state), ())
        for known in sorted(there, key=lambda name: not name.is_verified):
            is_enough = known.is_verified or not self._verify
            if known.number == 0 and known.count <= len(there) and is_enough:
                whole = [replace(known, number=number) for number in range(known.count)]
                if set(there).issuperset(whole):
                    yield from (_Task(part, thing, info) for part in whole)
                    return
        if thing.type in _PARQUET_TYPES:
            yield _Task(name, thing, info)
            return
        with closing(self._storage.open_binary(info.uri, info)) as file:
            lines = split_lines(file)
        self._check_unchanged(info)
        count = max(1, -(-len(lines) // LINES_A_PART))
        for number in range(count):
            some = lines[number * LINES_A_PART : (number + 1) * LINES_A_PART]
            yield _Task(replace(name, number=number, count=count), thing, info, tuple(some))

    def _write_all(self, tasks: Sequence[_Task], report: IndexReport) -> None:
        self._total = sum(task.steps for task in tasks)
        self._on_progress(0, self._total)
        with (
            ThreadPoolExecutor(self._threads, thread_name_prefix="look") as lookers,
            ThreadPoolExecutor(min(_OBJECTS_AT_ONCE, self._threads), thread_name_prefix="index") as writers,
        ):
            jobs = {writers.submit(self._write, task, lookers): task for task in tasks}
            try:
                wait(jobs, return_when=FIRST_EXCEPTION)
                for job, task in jobs.items():
                    problem = job.result()
                    if problem is None:
                        report.written += 1
                    else:
                        report.problems.append(_named(problem, task.thing.uri))
            finally:
                for job in jobs:
                    job.cancel()
                lookers.shutdown(wait=False, cancel_futures=True)

    def _write(self, task: _Task, lookers: ThreadPoolExecutor) -> BagelplaneError | None:
        """Looks at what the part is about, and writes it; what is wrong with the data is returned."""
        try:
            looked, row_groups, group_rows = (
                self._look_at_parquet(task)
                if task.thing.type in _PARQUET_TYPES
                else self._look_at_lines(task, lookers)
            )
            self._check_unchanged(task.info)
        except BagelplaneError as error:
            return error
        summary = Summary(
            object=task.thing.uri.encode("utf-8", "backslashreplace").decode(),
            type=task.thing.type,
            images_uri=task.thing.images_uri,
            version=task.info.version,
            size_bytes=task.info.size_bytes,
            row_groups=row_groups,
            images=looked.images,
            image_bytes=looked.image_bytes,
            undecodable_images=looked.undecodable if self._verify else None,
            drops=dict(sorted(looked.drops.items())),
        )
        data = _as_parquet(with_summary(looked.table(), summary), group_rows)
        self._storage.write_bytes(f"{self._uri}/{PARTS_FOLDER}/{task.name}", data)
        self._summaries[str(task.name)] = summary
        if not task.lines:
            self._advance()
        return None

    def _look_at_parquet(self, task: _Task) -> tuple[Looked, list[int], list[int]]:
        columns, block_of = _PARQUET_TYPES[task.thing.type]
        looked, counts, uri = Looked(), list[int](), task.info.uri
        handle: Any = self._storage.open_binary(uri, task.info)
        if task.info.size_bytes <= _READ_WHOLE_BYTES:
            with handle:
                handle = pa.BufferReader(handle.read())
        file = open_parquet(handle, uri, columns.names)
        with closing(file):
            for number in range(file.num_row_groups):
                name = block_name(uri, number)
                table = read_row_group(file, uri, number, columns.names)
                facts = StoredFacts(table, name, columns, self._settings.profile)
                make = partial(_block, block_of, name)
                for row in range(len(facts)):
                    looked.add(self._looker.parquet_row(facts, name, columns, number, row, make))
                counts.append(len(facts))
        return looked, counts, [count for count in counts if count]

    def _look_at_lines(self, task: _Task, lookers: ThreadPoolExecutor) -> tuple[Looked, list[int], list[int]]:
        looked, first = Looked(), task.name.number * LINES_A_PART
        folder = ImageFolder(self._storage, task.thing.images_uri, self._settings.profile)

        def look(place: int) -> dict[str, Any]:
            line = task.lines[place]
            row = self._looker.line(
                first + place, line, folder, lambda asked: ConversationBlock(line, lambda: asked)
            )
            self._advance()
            return row

        for row in lookers.map(look, range(len(task.lines))):
            looked.add(row)
        count = len(task.lines)
        groups = [min(LINES_A_GROUP, count - begin) for begin in range(0, count, LINES_A_GROUP)]
        return looked, [count], groups

    def _check_unchanged(self, info: FileInfo) -> None:
        """A local file has no version that a read could ask for; StorageError when it is another one now."""
        if parse_uri(info.uri).is_local and self._storage.info(info.uri).version != info.version:
            raise StorageError(
                f"{show(info.uri)} was changed while it was indexed",
                fix="write new data under new names, and run `bagelplane index` again",
            )

    def _finish(
        self, report: IndexReport, names: Sequence[PartName], things: Sequence[IndexedObject]
    ) -> None:
        """The inventory, once all parts are there; then parts of what is no more are deleted."""
        present = self._present()
        there = [name for name in names if name in present]
        report.parts, report.missing = len(names), len(names) - len(there)
        known = read_inventory(self._storage, self._uri) if len(there) > len(self._summaries) else {}
        known |= self._summaries
        for name in map(str, there):
            if name not in known:
                known[name] = self._read_summary(name)
        report.summaries = [known[str(name)] for name in there]
        if report.missing and not report.problems:
            return  # another shard ends later, and writes it
        rows = [known[str(name)].as_inventory(str(name)) for name in there]
        rows.sort(key=lambda row: (row["type"], row["object"], row["part"]))
        table = pa.Table.from_pylist(rows, schema=INVENTORY_SCHEMA)
        self._storage.write_bytes(f"{self._uri}/{INVENTORY_NAME}", _as_parquet(table, [len(rows)]))
        if not report.problems:
            old, digests = present - set(names), {thing.digest for thing in things}
            for name in sorted(name for name in map(str, old) if name.partition("-")[0] in digests):
                self._storage.delete(f"{self._uri}/{PARTS_FOLDER}/{name}")

    def _read_summary(self, name: str) -> Summary:
        address = f"{self._uri}/{PARTS_FOLDER}/{name}"
        try:
            with closing(self._storage.open_binary(address)) as file:
                return summary_of(pq.read_schema(file))
        except UNUSABLE as error:
            raise StorageError(
                f"the part {address} of the index is damaged",
                got=str(error),
                fix="delete it, and run `bagelplane index` again",
            ) from None

    def _advance(self) -> None:
        with self._lock:
            self._done += 1
            done = self._done
        self._on_progress(done, self._total)


def _block(block_of: _BlockOf, name: str, facts: RowFacts) -> Block:
    return block_of(facts, name)


def _order(task: _Task) -> str:
    return str(task.name)


def _named(error: Exception, uri: str) -> BagelplaneError:
    """An error that says which object it is about."""
    if not isinstance(error, BagelplaneError):
        return StorageError(f"{show(uri)} cannot be read: {error}", fix="write it anew")
    if uri not in error.what and show(uri) not in error.what:
        error.what = f"{show(uri)}: {error.what}"
    return error


def _as_parquet(table: pa.Table, group_rows: Sequence[int]) -> pa.Buffer:
    """The same bytes for the same table. A row group of so many rows each."""
    sink = pa.BufferOutputStream()
    # Many small columns: packing each, with dictionary and statistics, would double the time of reading them.
    packed = {name: "zstd" for name in ("text", "drop_message") if name in table.schema.names}
    writer = pq.ParquetWriter(
        sink,
        table.schema,
        compression=packed or "zstd",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )
    with writer:
        starts = itertools.accumulate(group_rows, initial=0)
        for start, count in zip(starts, group_rows, strict=False):
            writer.write_table(table.slice(start, count), row_group_size=max(count, 1))
    return sink.getvalue()
