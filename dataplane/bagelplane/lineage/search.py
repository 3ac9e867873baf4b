"""What became of one row: in which packs it is, why it was dropped, whether it still waits.

Only those ranks (or streams) are looked at whose share of the data holds the row's file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from bagelplane.engine.pack_rows import PackRows, RowFate, rows_of
from bagelplane.engine.rows import RowPlace
from bagelplane.errors import SpecError
from bagelplane.lineage.explanation import describe_reason
from bagelplane.lineage.log import RowLog
from bagelplane.lineage.replay import OnProgress, PackAddress, Reader, Replay
from bagelplane.settings import StreamSettings, units_of
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.sources.conversation import count_lines
from bagelplane.sources.parquet import rows_by_group
from bagelplane.spec import BagelDataset
from bagelplane.storage import Storage, same_object
from bagelplane.stream import check_sources, without_undecodable


@dataclass(frozen=True, slots=True)
class Sighting:
    """A pack that the row went into, or on the way to which it was dropped; or after which it still waits."""

    fate: Literal["trained", "dropped", "buffered"]
    pack: PackAddress
    worker: int
    group: str
    sample: int | None = None
    """Number of its sample in the pack."""
    tokens: int | None = None
    reason: str = ""
    message: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "fate": self.fate,
            **self.pack.as_json(),
            "worker_id": self.worker,
            "group": self.group,
            "sample": self.sample,
            "tokens": self.tokens,
            "reason": self.reason or None,
            "description": describe_reason(self.reason) or None,
            "message": self.message or None,
        }


@dataclass(frozen=True, slots=True)
class Search:
    """A row that is looked for, and who reads its file."""

    place: RowPlace
    """In the spelling of the resource."""
    readers: tuple[Reader, ...]
    """Those that have its file (editing: its row group; conversations: its line) in their share. None: it lies
    in the tail that is too short to be shared out, or beyond `numUsedData`."""
    world_size: int

    def packs(self, until: int) -> int:
        """How many packs have to be planned to look at all before that step or position."""
        return sum(reader.packs_behind(until) for reader in self.readers)


def start_search(
    dataset: BagelDataset, object_uri: str, row: int, row_group: int | None, world_size: int
) -> Search:
    """Find the row in the data. Without `row_group` a Parquet file's rows are counted from its first on.

    Raises SpecError when the resource reads no such file, or the file has no such row.
    """
    check_sources(dataset, world_size)
    settings = StreamSettings.from_resource(dataset)
    spelling = _spelling_of(settings, object_uri)
    place = _place_of(settings.storage, spelling, row, row_group)
    return Search(place, tuple(_readers_of(dataset, settings.for_streams(), place, world_size)), world_size)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search gave, and what it rests on."""

    sightings: list[Sighting]
    is_sure: bool
    logged_packs: int
    """Read from the log of rows."""
    planned_packs: int
    """Planned again, since the log does not have them."""


def search_row(
    dataset: BagelDataset, search: Search, until: int, *, store: SnapshotStore | None,
    row_log: RowLog | None = None, verify: bool = False, decode_threads: int = 1,
    on_progress: OnProgress = lambda _: None,
) -> Found:  # fmt: skip
    """What becomes of the row before step `until` (with elastic sharding: that position).

    Packs that `row_log` has are read there. All others of those that read its file are planned, from their start or
    a snapshot. In profile Strict the images of the row's own packs are decoded, so it is always sure; in profile
    Automodel as `Replay` has it.
    """
    sightings: list[Sighting] = []
    is_sure, logged_packs, planned_packs = True, 0, 0
    for reader in search.readers:
        count = reader.packs_behind(until)
        if not count:
            continue
        logged = row_log.fates(search.place, reader, count) if row_log is not None else {}
        for number, fates in logged.items():
            sightings += _sightings(dataset, search, reader, number, fates)
        on_progress(len(logged))
        replays = _Replays(dataset, reader, store, verify, decode_threads)
        with closing(replays):
            for number in range(count):
                if number not in logged:
                    rows = replays.rows_with(search.place, number)
                    sightings += _sightings(dataset, search, reader, number, rows.fates_of(search.place))
                    on_progress(1)
            replay = replays.at(count)
            is_sure = is_sure and replay.is_sure(count - 1)
            sightings += _waiting(dataset, search, reader, replay)
        logged_packs += len(logged)
        planned_packs += count - len(logged)
    sightings.sort(key=lambda one: (one.pack.step, one.pack.rank, one.fate != "dropped"))
    return Found(sightings, is_sure, logged_packs, planned_packs)


class _Replays:
    """One reader's packs in rising order; what is not asked for is planned, unless a snapshot leads past it."""

    def __init__(
        self, dataset: BagelDataset, reader: Reader, store: SnapshotStore | None, verify: bool,
        decode_threads: int,
    ) -> None:  # fmt: skip
        self._dataset, self._reader, self._store = dataset, reader, store
        self._verify, self._decode_threads = verify, decode_threads
        self._groups = [group.name for group in dataset.spec.groups]
        self._replay: Replay | None = None

    def at(self, number: int) -> Replay:
        """A replay that stands before that pack."""
        if self._replay is None or self._replay.number < number:
            self.close()
            self._replay = Replay(
                self._dataset, self._reader, number, store=self._store, verify=self._verify,
                decode_threads=self._decode_threads,
            )  # fmt: skip
            self._replay.skip_to(number, lambda _: None)
        return self._replay

    def rows_with(self, place: RowPlace, number: int) -> PackRows:
        """The rows of a pack; as it was handed over, if it has that row."""
        plan = self.at(number).plan()
        is_in = any(placed.sample.place == place for placed in plan.pack.placed)
        if is_in and self._dataset.spec.profile == "Strict":
            plan = without_undecodable(plan, lambda sample: self._groups[sample.group_index])
        return rows_of(plan, self._groups)

    def close(self) -> None:
        if self._replay is not None:
            self._replay.close()


def _sightings(
    dataset: BagelDataset, search: Search, reader: Reader, number: int, fates: Iterable[RowFate]
) -> Iterator[Sighting]:
    """Of one pack of the reader."""
    pack, worker = reader.address(number, search.world_size), number % _workers(dataset, reader)
    for fate in fates:
        yield Sighting(
            fate.fate, pack, worker, fate.group, fate.sample, fate.tokens, fate.reason, fate.message
        )


def _waiting(dataset: BagelDataset, search: Search, reader: Reader, replay: Replay) -> Iterator[Sighting]:
    """Where the row waits in a buffer, before the pack that the replay plans next."""
    workers = _workers(dataset, reader)
    for worker, waiting in enumerate(replay.waiting()):
        last = replay.number - 1 - (replay.number - 1 - worker) % workers
        for sample in waiting if last >= 0 else ():
            if sample.place == search.place:
                pack, group = reader.address(last, search.world_size), dataset.spec.groups[sample.group_index]
                yield Sighting("buffered", pack, worker, group.name, tokens=sample.size)


def _workers(dataset: BagelDataset, reader: Reader) -> int:
    return max(1, reader.topology(dataset).num_workers)


def _spelling_of(settings: StreamSettings, object_uri: str) -> str:
    """The file as the units name it."""
    files = {
        file for config in settings.groups for unit in settings.list_units(config) if (file := _file_of(unit))
    }
    found = sorted(file for file in files if same_object(file, object_uri))
    if found:
        return found[0]
    name = object_uri.rpartition("/")[2]
    alike = sorted(file for file in files if file.rpartition("/")[2] == name) or sorted(files)
    raise SpecError(
        f"no group of this resource reads {object_uri}",
        got=f"{len(files)} files that are read, among them {', '.join(alike[:3])}",
        expected="a Parquet or JSONL file of one of its data sets",
        fix="give the file's URI as `explain` shows it",
    )


def _file_of(unit: Any) -> str | None:
    """A unit is a Parquet file, (file, row group), or a line with the file and the number of it."""
    if isinstance(unit, str):
        return unit
    return str(unit[2]) if len(unit) == 4 else str(unit[0])


def _place_of(storage: Storage, uri: str, row: int, row_group: int | None) -> RowPlace:
    if uri.endswith(".parquet"):
        return _parquet_place(uri, rows_by_group(storage, uri), row, row_group)
    if row_group is not None:
        raise SpecError(f"{uri} has lines, no row groups", fix="leave --row-group out")
    count = count_lines(storage, uri)
    if row >= count:
        raise SpecError(f"{uri} has no line {row}", got=f"{count} lines", fix="lines count from 0")
    return RowPlace(uri, None, row)


def _parquet_place(uri: str, counts: Sequence[int], row: int, row_group: int | None) -> RowPlace:
    if row_group is not None:
        if row_group < len(counts) and row < counts[row_group]:
            return RowPlace(uri, row_group, row)
        rows = f"{counts[row_group]} rows in it" if row_group < len(counts) else f"{len(counts)} row groups"
        raise SpecError(
            f"{uri} has no row {row} in row group {row_group}",
            got=rows,
            fix="rows and row groups count from 0",
        )
    below = row
    for number, count in enumerate(counts):
        if below < count:
            return RowPlace(uri, number, below)
        below -= count
    raise SpecError(
        f"{uri} has no row {row}",
        got=f"{sum(counts)} rows in {len(counts)} row groups",
        fix="rows count from 0",
    )


def _readers_of(
    dataset: BagelDataset, settings: StreamSettings, place: RowPlace, world_size: int
) -> Iterator[Reader]:
    sharding = dataset.spec.sharding
    elastic = sharding.mode == "Elastic"
    for number in range(sharding.streams if elastic else world_size):
        reader = Reader(number, sharding.streams if elastic else world_size, elastic)
        topology = reader.topology(dataset)
        shares = (
            units_of(settings, config, topology, worker)[0]
            for config in settings.groups
            for worker in range(max(1, topology.num_workers))
        )
        if any(_may_hold(unit, place) for units in shares for unit in units):
            yield reader


def _may_hold(unit: Any, place: RowPlace) -> bool:
    if isinstance(unit, str):
        return unit == place.object
    if len(unit) == 4:
        return bool((unit[2], unit[3]) == (place.object, place.row) and place.row_group is None)
    return bool(unit == (place.object, place.row_group))
