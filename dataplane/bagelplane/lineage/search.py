"""What became of one row: in which packs it is, why it was dropped, whether it still waits.

Only those ranks (or streams) are planned whose share of the data holds the row's file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from bagelplane.engine.planner import PackPlan
from bagelplane.engine.rows import RowPlace
from bagelplane.errors import SpecError
from bagelplane.lineage.explanation import describe_reason
from bagelplane.lineage.replay import OnProgress, PackAddress, Reader, Replay
from bagelplane.settings import StreamSettings, units_of
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.sources.conversation import count_lines
from bagelplane.sources.parquet import rows_by_group
from bagelplane.spec import BagelDataset
from bagelplane.storage import Storage, same_object
from bagelplane.stream import check_sources, departure_of


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


def search_row(
    dataset: BagelDataset, search: Search, until: int, *, store: SnapshotStore | None,
    verify: bool = False, decode_threads: int = 1, on_progress: OnProgress = lambda _: None,
) -> tuple[list[Sighting], bool]:  # fmt: skip
    """What becomes of the row before step `until` (with elastic sharding: that position); whether that is for sure.

    Plans all packs of those that read its file, from their start. In profile Strict the images of the row's own
    samples are decoded, so it is always sure; in profile Automodel as `Replay` has it.
    """
    found: list[Sighting] = []
    is_sure = True
    for reader in search.readers:
        count, workers = reader.packs_behind(until), max(1, reader.topology(dataset).num_workers)
        replay = Replay(dataset, reader, 0, store=store, verify=verify, decode_threads=decode_threads)
        last: dict[int, _Planned] = {}
        with closing(replay):
            for number in range(count):
                worker, pack = number % workers, reader.address(number, search.world_size)
                last[worker] = _Planned(replay.plan(), pack, worker)
                found += _met(dataset, search.place, last[worker])
                on_progress(1)
            is_sure = is_sure and replay.is_sure(count - 1)
        for planned in last.values():
            found += _waiting(dataset, search.place, planned)
    return sorted(found, key=lambda one: (one.pack.step, one.pack.rank, one.fate != "dropped")), is_sure


@dataclass(frozen=True, slots=True)
class _Planned:
    plan: PackPlan
    pack: PackAddress
    worker: int


def _met(dataset: BagelDataset, place: RowPlace, planned: _Planned) -> Iterator[Sighting]:
    """Where a pack has the row, and where it was dropped on the way to it."""
    pack, worker = planned.pack, planned.worker
    for drop in planned.plan.drops:
        if drop.place == place:
            yield Sighting("dropped", pack, worker, drop.group, reason=drop.reason, message=drop.message)
    for number, placed in enumerate(planned.plan.pack.placed):
        if placed.sample.place != place:
            continue
        group = dataset.spec.groups[placed.sample.group_index].name
        departure = departure_of(placed) if dataset.spec.profile == "Strict" else None
        if departure is None:
            tokens = placed.end - placed.start
            yield Sighting("trained", pack, worker, group, sample=number, tokens=tokens)
        else:
            yield Sighting("dropped", pack, worker, group, reason=departure[0], message=departure[1])


def _waiting(dataset: BagelDataset, place: RowPlace, planned: _Planned) -> Iterator[Sighting]:
    after = planned.plan.after
    for sample in (*after.buffer, after.carried):
        if sample is not None and sample.place == place:
            group = dataset.spec.groups[sample.group_index].name
            yield Sighting("buffered", planned.pack, planned.worker, group, tokens=sample.size)


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
