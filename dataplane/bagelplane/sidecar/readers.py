"""The readers of one data-parallel rank: a cursor each, and what all of them have behind them.

Processes with the same data-parallel rank (tensor, context or pipeline parallel) read the same packs from one ring. A
pack's slot is free when the slowest of all expected readers has released it; one that has not come yet counts as
standing where the group began. A reader that dies keeps its cursor. Pure: no clock, no connection, no process.
"""

from __future__ import annotations

from dataclasses import dataclass

from bagelplane.errors import BagelplaneError

MAX_APART_PACKS = 64
"""Readers of one rank step together. One that asks for a place farther off belongs to another run, or is early."""
RETURN_SECONDS = 5.0
"""How long readers that were sent away are awaited, before the group counts as gone."""


class BusyError(BagelplaneError):
    """Other clients stand in the way of this one. Passes when they end, or move to the same place."""

    reaction = "Wait until the other trainer process has ended."


@dataclass(slots=True)
class Cursor:
    """Where one reader stands."""

    next_step: int
    """The first pack that it has not released."""
    attached: bool = False
    client: str = ""
    since: float = 0.0
    """When it attached or, if it isn't attached, went."""
    waiting_since: float | None = None
    """Since when it has had nothing to take; None while it has."""
    returns: bool = False
    """It was sent away with the producer, so its process lives."""

    def describe(self, local_rank: int, now: float) -> str:
        doing = f"attached ({self.client})" if self.attached else "gone"
        return f"local rank {local_rank} at step {self.next_step}, {doing} for {now - self.since:.1f} s"


class Readers:
    """The cursors of one rank, by local rank."""

    def __init__(self, rank: int, first_step: int, expected: int) -> None:
        self.rank = rank
        self.expected = expected
        self.cursors: dict[int, Cursor] = {}
        self._floor = first_step
        """Where a reader stands that has not come yet."""

    @property
    def absent(self) -> int:
        """Expected readers that have not come yet."""
        return max(0, self.expected - len(self.cursors))

    @property
    def lowest(self) -> int:
        """All packs before this one are released by all."""
        steps = [cursor.next_step for cursor in self.cursors.values()]
        return min([*steps, self._floor] if self.absent else steps)

    @property
    def furthest(self) -> int:
        return max((cursor.next_step for cursor in self.cursors.values()), default=self._floor)

    def attached(self, *, but: int | None = None) -> dict[int, Cursor]:
        return {n: cursor for n, cursor in self.cursors.items() if cursor.attached and n != but}

    def admit(
        self, local_rank: int, step: int | None, *, expected: int, known_until: int, now: float
    ) -> int | None:
        """Gives a reader its cursor, at `step` (None: where it stood). Its step; None where only a new start of the
        rank leads. BusyError while other readers keep it from there.

        known_until: the first pack that was not made yet. While no reader of the group is attached, a new group
        begins with whoever comes: where the slowest of the old one stood. While not all have come, the group's place
        is not settled: a reader that asks for an earlier step has the group begin there. So they meet again after
        the sidecar was lost, coming one by one, each with the step that it needs.
        """
        others, mine = self.attached(but=local_rank), self.cursors.get(local_rank)
        if mine is not None and mine.attached:
            raise self.taken(local_rank)
        if not others and (step is None or expected != self.expected or (mine is None and not self.absent)):
            if step is None:
                self._await_returning(local_rank, now)
            self._floor, self.cursors, self.expected, mine = self.lowest, {}, expected, None
        if expected != self.expected:
            raise self._disagree(expected)
        if mine is None and not self.absent:
            raise self._full(local_rank)
        if step is None:
            step = self._floor if mine is None else mine.next_step
        if not self.lowest <= step <= max(known_until, self.furthest):
            if mine is not None and others:
                raise self._elsewhere(step)
            if not others or step < self.lowest:
                return None
            if step > max(known_until, self.furthest) + MAX_APART_PACKS:
                raise self._elsewhere(step)
        self.cursors[local_rank] = Cursor(step, since=now)
        return step

    def enter(self, local_rank: int, client: str, now: float, *, waits: bool) -> None:
        """The admitted reader is attached. `waits`: there is nothing for it to take yet."""
        cursor = self.cursors[local_rank]
        cursor.attached, cursor.client, cursor.since = True, client, now
        cursor.waiting_since = now if waits else None

    def leave(self, local_rank: int, now: float, *, returns: bool = False) -> None:
        """The reader is gone and keeps its cursor. `returns`: it was sent away, and will come back at once."""
        cursor = self.cursors.get(local_rank)
        if cursor is not None and cursor.attached:
            cursor.attached, cursor.since, cursor.waiting_since = False, now, None
            cursor.returns = returns

    def forget(self, local_rank: int) -> bool:
        """The reader reads for another rank now; whether it had read for this one.

        Who comes in its place begins where it stood, or before.
        """
        cursor = self.cursors.get(local_rank)
        if cursor is None:
            return False
        self._floor = min(cursor.next_step, self._floor) if self.absent else cursor.next_step
        del self.cursors[local_rank]
        return True

    def advance(self, local_rank: int, next_step: int) -> int:
        """The reader has released all before `next_step`. What all have behind them."""
        cursor = self.cursors[local_rank]
        cursor.next_step = max(cursor.next_step, next_step)
        return self.lowest

    def describe_holders(self, step: int, now: float) -> str:
        """Who keeps packs before `step` from being freed, in words; empty if nobody does."""
        if self.lowest >= step:
            return ""
        parts = [
            cursor.describe(local_rank, now)
            for local_rank, cursor in sorted(self.cursors.items())
            if cursor.next_step == self.lowest
        ]
        if self.absent and self._floor == self.lowest:
            came = ", ".join(map(str, sorted(self.cursors))) or "none"
            parts.append(
                f"{self.absent} of {self.expected} readers not here yet, awaited at step {self._floor} "
                f"(local ranks that came: {came})"
            )
        return "; ".join(parts)

    # -- refusals

    def _await_returning(self, local_rank: int, now: float) -> None:
        """A reader that comes anew belongs to those that are on their way back, not to a new group."""
        for other, cursor in self.cursors.items():
            if other != local_rank and cursor.returns and now - cursor.since < RETURN_SECONDS:
                raise BusyError(
                    f"readers of rank {self.rank} are coming back from their producer's end",
                    got=cursor.describe(other, now),
                )

    def _named(self) -> str:
        return ", ".join(f"local rank {n} ({cursor.client})" for n, cursor in sorted(self.attached().items()))

    def taken(self, local_rank: int) -> BusyError:
        return BusyError(
            f"rank {self.rank} is attached already, as local rank {local_rank}",
            got=self.cursors[local_rank].client,
            fix="end the other trainer process, or give this one its own RANK and LOCAL_RANK",
        )

    def _full(self, local_rank: int) -> BusyError:
        members = ", ".join(map(str, sorted(self.cursors)))
        if self.expected > 1:
            return BusyError(
                f"rank {self.rank} has its {self.expected} readers already, as local ranks {members}",
                got=f"local rank {local_rank}",
                fix="give all of them the number of processes of this pod that read this rank (readers=)",
            )
        return BusyError(
            f"rank {self.rank} is attached already, as local rank {members}",
            got=self._named(),
            fix="end the other trainer process, or give this one its own RANK and LOCAL_RANK. If both are to "
            "read the same packs (tensor, context or pipeline parallel), pass mesh=, or dp_rank=, dp_size= and "
            "readers=, the number of processes of this pod that read this rank",
        )

    def _disagree(self, expected: int) -> BusyError:
        return BusyError(
            f"readers of rank {self.rank} disagree about how many they are",
            got=f"readers={expected}",
            expected=f"{self.expected}, as {self._named()} said",
            fix="pass the same mesh= or readers= to all of them",
        )

    def _elsewhere(self, step: int) -> BusyError:
        return BusyError(
            f"other readers of rank {self.rank} are at another place",
            got=f"step {step}" if step >= 0 else "a place between its steps",
            expected=f"step {self.lowest} or a little after: {self._named()}",
            fix="have all readers of the rank load the same state, or end them",
        )
