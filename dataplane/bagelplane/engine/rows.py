"""Where a row is stored, in terms that lead somebody to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowPlace:
    """A stored row. Numbers count from 0."""

    object: str
    """URI of the Parquet or JSONL file."""
    row_group: int | None
    """Of a Parquet file; None in JSONL."""
    row: int
    """Within its row group; in JSONL the number of the line, blank ones counted."""

    def __str__(self) -> str:
        if self.row_group is None:
            return f"{self.object}, line {self.row}"
        return f"{self.object}, row group {self.row_group}, row {self.row}"
