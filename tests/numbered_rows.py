"""A group for tests of the planner that reads nothing: its rows are numbers, its samples texts of given sizes."""

from __future__ import annotations

from typing import Any

from bagelplane.engine.rng import StreamRandom
from bagelplane.engine.samples import LEARNT_TEXT, RowDropped, Sample


class NumberedRows:
    """Rows of `sizes` tokens in turn, start and end token included; those of size 0 are dropped as they are drawn."""

    def __init__(self, name: str, sizes: list[int], *, mandatory: bool = False, weight: float = 1.0) -> None:
        self.name, self.mandatory, self.weight = name, mandatory, weight
        self._sizes, self.drawn = sizes, 0

    def draw(self, rng: StreamRandom) -> Sample:
        row, self.drawn = self.drawn, self.drawn + 1
        size = self._sizes[row % len(self._sizes)]
        if size == 0:
            raise RowDropped("unreadable", f"row {row}")
        sample = Sample(data_indexes=row, reference={"row": row})
        sample.add_text(LEARNT_TEXT, [7] * max(0, size - 2))
        return sample

    def mark(self) -> int:
        return self.drawn

    def restore(self, mark: Any) -> None:
        self.drawn = mark

    def from_reference(self, reference: Any) -> Sample:
        here, self.drawn = self.drawn, reference["row"]
        sample = self.draw(StreamRandom(0))
        self.drawn = here
        return sample
