"""Which snapshots are kept: the newest few, and one of each long stretch for ever. Pure: it deletes nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagelplane.sidecar.snapshot_format import SnapshotEntry


@dataclass(frozen=True, slots=True)
class Retention:
    """The rule of `spec.snapshots`."""

    keep_last: int
    keep_every: int | None = None
    """Steps. Of each stretch of so many, from its second on, the first snapshot stays."""

    def doomed(self, entries: Sequence[SnapshotEntry]) -> list[SnapshotEntry]:
        """Those to be deleted, oldest first; `entries` are in order.

        Complete ones that no rule keeps, and what was torn before the oldest of the newest `keep_last`. Never the
        newest complete one, and never what cannot be used: it is of another run, or somebody should look at it.
        """
        complete = [entry for entry in entries if entry.condition == "complete"]
        if not complete:
            return []
        newest = sorted({entry.step for entry in complete})[-max(1, self.keep_last) :]
        kept = {*newest, *self._milestones(complete)}
        return [
            entry
            for entry in entries
            if entry.step < newest[0]
            and (
                entry.condition == "incomplete" or (entry.condition == "complete" and entry.step not in kept)
            )
        ]

    def _milestones(self, complete: Sequence[SnapshotEntry]) -> set[int]:
        if not self.keep_every:
            return set()
        first: dict[int, int] = {}
        for entry in complete:
            assert entry.manifest is not None
            first.setdefault(entry.manifest.steps // self.keep_every, entry.step)
        first.pop(0, None)  # the start needs no snapshot
        return set(first.values())
