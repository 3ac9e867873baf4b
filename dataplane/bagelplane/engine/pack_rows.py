"""Which rows went into a pack, and which were dropped on the way to it: what a log of packs keeps of a plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bagelplane.engine.drops import Drop, DropReason
from bagelplane.engine.planner import PackPlan
from bagelplane.engine.rows import RowPlace

_REASONS = {str(reason): reason for reason in DropReason}


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """A row that is in a pack."""

    group: str
    """The group's name in the resource."""
    place: RowPlace | None
    """None where its group does not say it (group types of the user's own)."""
    data_indexes: str
    """JSON text of what the trainer gets in `batch_data_indexes`."""
    worker: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RowFate:
    """What became of one row in one pack, or on the way to it."""

    fate: Literal["trained", "dropped"]
    group: str
    sample: int | None = None
    """Number of its sample in the pack."""
    tokens: int | None = None
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class PackRows:
    """All rows of one pack, in order, and the rows that were met since the pack before it and not trained on."""

    trained: tuple[TrainedRow, ...]
    dropped: tuple[Drop, ...]

    def fates_of(self, place: RowPlace) -> Iterator[RowFate]:
        """Of one row, wherever it comes: a pack may hold a row several times."""
        for drop in self.dropped:
            if drop.place == place:
                yield RowFate("dropped", drop.group, reason=drop.reason, message=drop.message)
        for number, row in enumerate(self.trained):
            if row.place == place:
                yield RowFate("trained", row.group, number, row.tokens)

    def as_json(self) -> dict[str, Any]:
        """Short, for the way from the producer to the supervisor."""
        return {
            "trained": [
                [row.group, *_place_as_list(row.place), row.data_indexes, row.worker, row.tokens]
                for row in self.trained
            ],
            "dropped": [
                [drop.group, *_place_as_list(drop.place), str(drop.reason), drop.message]
                for drop in self.dropped
            ],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PackRows:
        """What `as_json` gave."""
        trained = (
            TrainedRow(group, place_of(*place), *rest) for group, *place, rest in _split(content["trained"])
        )
        dropped = (
            Drop(group, reason_of(rest[0]), rest[1], place_of(*place))
            for group, *place, rest in _split(content["dropped"])
        )
        return cls(tuple(trained), tuple(dropped))


def rows_of(plan: PackPlan, groups: Sequence[str]) -> PackRows:
    """The rows of a planned pack; `groups` are the names of the stream's groups, in order."""
    trained = []
    for placed in () if plan.pack.is_stand_in else plan.pack.placed:
        sample, entry = placed.sample, placed.sample.entry or {}
        # Texts that a group of the user's own gives may be anything: what is no JSON is told as Python shows it.
        indexes = json.dumps(entry.get("data_indexes", sample.data_indexes), default=repr)
        worker = int(entry.get("worker_id", sample.worker_id))
        tokens = placed.end - placed.start
        trained.append(TrainedRow(groups[sample.group_index], sample.place, indexes, worker, tokens))
    return PackRows(tuple(trained), tuple(plan.drops))


def reason_of(text: str) -> str:
    """The documented reason of that name; the text itself for one of a group type of the user's own."""
    return _REASONS.get(text, text)


def place_of(stored: str | None, row_group: int | None, row: int | None) -> RowPlace | None:
    return None if stored is None or row is None else RowPlace(stored, row_group, row)


def _place_as_list(place: RowPlace | None) -> list[Any]:
    return [None, None, None] if place is None else [place.object, place.row_group, place.row]


def _split(rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """(group, object, row group, row, the rest) of each."""
    return [(*row[:4], row[4:]) for row in rows]
