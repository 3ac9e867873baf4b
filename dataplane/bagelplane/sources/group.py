"""The engine's Group over stored units: walk the worker's own list of units, row by row, for ever."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from bagelplane.engine.rng import Draws, LiveDraws, ReplayedDraws, StreamRandom, each_outcome
from bagelplane.engine.rows import RowPlace
from bagelplane.engine.samples import PlanContext, RowDropped, Sample
from bagelplane.errors import DataError
from bagelplane.storage.ahead import Part, ReadAhead

_UNITS_EXPECTED = 16
_CACHED_BLOCKS = 2  # the one being walked, and one for replaying buffered rows


class Block(Protocol):
    """Rows read together: a row group, or one line."""

    def __len__(self) -> int: ...

    def plan(self, row: int, context: PlanContext, draws: Draws) -> Sample:
        """Row `row` as a sample. Raises RowDropped."""
        ...


class UnitReader(Protocol):
    """How the units of one group type are read."""

    ahead: ReadAhead | None
    """Where parts of units to come are fetched ahead; None where that gains nothing."""
    units_ahead: int
    """Of how many units ahead the parts are looked up."""

    def parts_of(self, unit: Any, block: int) -> Sequence[Part]:
        """What will be read of a unit from a block on, in that order. Called by other threads."""
        ...

    def read_block(self, unit: Any, block: int) -> Block | None:
        """Block `block` of a unit; None when the unit has no such block."""
        ...

    def expect(self, units: Sequence[Any]) -> None:
        """Says which units come next."""
        ...

    def data_indexes(self, unit: int, block: int, row: int) -> Any:
        """What the yielded `data_indexes` of a row are; `unit` counts in the worker's own list."""
        ...

    def locate(self, unit: Any, block: int, row: int) -> RowPlace | None:
        """Where a row is stored; None for units that do not say it."""
        ...

    def describe(self, unit: Any, block: int, row: int) -> str:
        """Where a row is, so that somebody who reads of it finds it."""
        ...


class StoredGroup:
    """One group's rows for one logical worker. A position is [unit, block, row] of the row to come."""

    def __init__(
        self,
        *,
        name: str,
        type_name: str,
        weight: float,
        mandatory: bool,
        units: Sequence[Any],
        reader: UnitReader,
        context: PlanContext,
        worker_id: int,
    ) -> None:
        self.name, self.weight, self.mandatory = name, weight, mandatory
        self._type_name, self._worker_id = type_name, worker_id
        self._units, self._reader, self._context = units, reader, context
        self._position = (0, 0, 0)
        self._blocks: OrderedDict[tuple[int, int], Block | None] = OrderedDict()
        self._lane = None
        if reader.ahead is not None:
            self._lane = reader.ahead.lane(
                lambda number, block: reader.parts_of(units[number], block), len(units), reader.units_ahead
            )
        if self._lane is not None:
            weakref.finalize(self, self._lane.close)

    def mark(self) -> list[int]:
        return list(self._position)

    def restore(self, mark: Sequence[int]) -> None:
        unit, block, row = (int(number) for number in mark)
        if not 0 <= unit < len(self._units) or block < 0 or row < 0:
            raise ValueError(
                f"group {self.name}: position {list(mark)} lies outside of {len(self._units)} units"
            )
        self._position = (unit, block, row)

    def draw(self, rng: StreamRandom) -> Sample:
        unit, block, row = self._next_row()
        # The position moves first: a row that is dropped is not read again.
        self._position = (unit, block, row + 1)
        return self._plan(unit, block, row, LiveDraws(rng))

    def _plan(self, unit: int, block: int, row: int, draws: Draws) -> Sample:
        rows = self._block(unit, block)
        assert rows is not None
        place = self._reader.locate(self._units[unit], block, row)
        try:
            sample = rows.plan(row, self._context, draws)
        except RowDropped as dropped:
            where = self._reader.describe(self._units[unit], block, row)
            message = dropped.message if where in dropped.message else f"{where}: {dropped.message}"
            raise RowDropped(dropped.reason, message, place) from None
        sample.group, sample.worker_id = self._type_name, self._worker_id
        sample.data_indexes, sample.place = self._reader.data_indexes(unit, block, row), place
        sample.reference = {"row": [unit, block, row], "draws": draws.outcomes}
        return sample

    def _next_row(self) -> tuple[int, int, int]:
        """The first row at or after the position, over the end of the list and on from its beginning."""
        unit, block, row = self._position
        wraps = 0
        while True:
            if self._lane is not None:
                self._lane.stand_at(unit, block)
            rows = self._block(unit, block)
            if rows is None:
                unit, block, row = unit + 1, 0, 0
                if unit == len(self._units):
                    unit, wraps = 0, wraps + 1
                if wraps > 1:
                    raise DataError(
                        f"group {self.name} has no rows",
                        got=f"{len(self._units)} files or row groups for this worker, all empty",
                        fix="look at the files; they hold a schema and nothing else",
                    )
            elif row >= len(rows):
                block, row = block + 1, 0
            else:
                return unit, block, row

    def _block(self, unit: int, block: int) -> Block | None:
        key = (unit, block)
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        while len(self._blocks) >= _CACHED_BLOCKS:
            self._blocks.popitem(last=False)
        self._reader.expect(self._units[unit + 1 : unit + 1 + _UNITS_EXPECTED])
        rows = self._reader.read_block(self._units[unit], block)
        self._blocks[key] = rows
        return rows

    def from_reference(self, reference: dict[str, Any]) -> Sample:
        unit, block, row = self._checked(reference["row"])
        return self._plan(unit, block, row, ReplayedDraws(list(reference["draws"])))

    def samples_of(self, position: Sequence[int], limit: int) -> Iterator[Sample]:
        """All samples that the row at a position may become, by other draws; the first `limit` of them.

        Those that would be dropped are left out. Raises ValueError when there is no such row.
        """
        unit, block, row = self._checked(position)
        for draws in itertools.islice(each_outcome(), limit):
            with contextlib.suppress(RowDropped):
                yield self._plan(unit, block, row, draws)

    def _checked(self, position: Sequence[int]) -> tuple[int, int, int]:
        unit, block, row = (int(number) for number in position)
        if (
            not 0 <= unit < len(self._units)
            or (rows := self._block(unit, block)) is None
            or not 0 <= row < len(rows)
        ):
            raise ValueError(f"group {self.name}: buffered row {list(position)} does not exist")
        return unit, block, row
