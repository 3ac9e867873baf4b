"""Cursors of the readers of one rank: no pack is freed early, none is given twice, and who holds is named."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bagelplane.sidecar.readers import RETURN_SECONDS, BusyError, Readers


def group_of(expected: int, *, first_step: int = 0) -> Readers:
    return Readers(5, first_step, expected)


def come(
    readers: Readers, local_rank: int, step: int | None = None, *, now: float = 0.0, made: int = 100
) -> int:
    """An attach that is served by the running producer."""
    place = readers.admit(local_rank, step, expected=readers.expected, known_until=made, now=now)
    assert place is not None
    readers.enter(local_rank, f"trainer {local_rank}", now, waits=False)
    return place


def test_a_pack_is_freed_when_the_slowest_of_all_expected_has_released_it() -> None:
    readers = group_of(3)
    for local_rank in (0, 1):
        come(readers, local_rank)
        readers.advance(local_rank, 4)
    assert readers.lowest == 0, "the third has not come yet"
    assert come(readers, 2) == 0
    assert readers.advance(2, 3) == 3
    assert readers.advance(2, 9) == 4


def test_a_reader_that_dies_goes_on_at_its_own_step_while_others_live() -> None:
    readers = group_of(2)
    come(readers, 0)
    come(readers, 1)
    readers.advance(0, 7)
    readers.advance(1, 5)
    readers.leave(0, now=1.0)
    assert readers.lowest == 5
    assert come(readers, 0) == 7


def test_a_group_that_is_gone_begins_where_its_slowest_stood() -> None:
    readers = group_of(2)
    for local_rank, released in ((0, 7), (1, 5)):
        come(readers, local_rank)
        readers.advance(local_rank, released)
    for local_rank in (0, 1):
        readers.leave(local_rank, now=1.0)
    assert [come(readers, local_rank) for local_rank in (0, 1)] == [5, 5]


def test_readers_sent_away_with_their_producer_are_no_group_that_is_gone() -> None:
    readers = group_of(2)
    for local_rank, released in ((0, 7), (1, 5)):
        come(readers, local_rank)
        readers.advance(local_rank, released)
    readers.leave(0, now=1.0)  # died
    readers.leave(1, now=1.5, returns=True)
    with pytest.raises(BusyError, match=r"coming back.*local rank 1 at step 5"):
        come(readers, 0, now=2.0)
    assert come(readers, 1, 5, now=2.5) == 5
    assert come(readers, 0, now=3.0) == 7


def test_readers_that_do_not_return_are_awaited_no_longer() -> None:
    readers = group_of(2)
    come(readers, 0)
    come(readers, 1)
    readers.advance(0, 7)
    for local_rank in (0, 1):
        readers.leave(local_rank, now=1.0, returns=True)
    assert come(readers, 0, now=1.1 + RETURN_SECONDS) == 0


def test_another_place_waits_for_the_others_and_names_them() -> None:
    readers = group_of(2)
    for local_rank in (0, 1):
        come(readers, local_rank)
        readers.advance(local_rank, 10)
    readers.leave(0, now=1.0)
    for step in (3, 200, -1):
        with pytest.raises(BusyError, match=r"at another place.*local rank 1 \(trainer 1\)"):
            come(readers, 0, step)
    readers.leave(1, now=1.0)
    for step in (3, 200):
        assert readers.admit(0, step, expected=2, known_until=100, now=2.0) is None, "a new start leads there"


def test_a_far_place_is_no_cursor_of_a_group_that_stands_elsewhere() -> None:
    readers = group_of(2)
    come(readers, 0, made=4)
    with pytest.raises(BusyError, match="local rank 0"):
        come(readers, 1, 2000, made=4)
    readers.leave(0, now=1.0)
    assert readers.admit(1, 2000, expected=2, known_until=4, now=1.0) is None, "a new start leads there"
    assert readers.lowest == 0


def test_readers_that_come_one_by_one_after_a_loss_meet_at_the_lowest() -> None:
    readers = group_of(3, first_step=12)
    assert come(readers, 0, 12, made=12) == 12
    assert readers.admit(1, 11, expected=3, known_until=14, now=0.0) is None
    readers = group_of(3, first_step=11)
    assert come(readers, 1, 11, made=11) == 11
    assert come(readers, 0, 14, made=11) == 14, "ahead of what is made: the others are on their way there"
    assert come(readers, 2, 12, made=11) == 12
    assert readers.lowest == 11


def test_a_second_process_is_told_of_readers() -> None:
    readers = group_of(1)
    come(readers, 0)
    with pytest.raises(BusyError, match=r"attached already, as local rank 0; got trainer 0"):
        come(readers, 0)
    with pytest.raises(BusyError, match=r"as local rank 0; got local rank 0 \(trainer 0\).*readers="):
        come(readers, 1)
    with pytest.raises(BusyError, match=r"disagree.*readers=4; expected 1, as local rank 0"):
        readers.admit(1, None, expected=4, known_until=0, now=0.0)


def test_a_reader_too_many_is_refused_and_one_that_left_makes_room() -> None:
    readers = group_of(2)
    for local_rank in (0, 1):
        come(readers, local_rank)
        readers.advance(local_rank, 3 + local_rank)
    with pytest.raises(BusyError, match="has its 2 readers already, as local ranks 0, 1; got local rank 7"):
        come(readers, 7)
    readers.leave(1, now=1.0)
    assert readers.forget(1)
    assert not readers.forget(1)
    assert readers.lowest == 3
    assert come(readers, 7) == 4


def test_who_holds_packs_is_named_with_step_and_time() -> None:
    readers = group_of(3, first_step=2)
    come(readers, 0, now=10.0)
    come(readers, 1, now=10.0)
    readers.advance(0, 6)
    said = readers.describe_holders(6, now=14.5)
    assert "local rank 1 at step 2, attached (trainer 1) for 4.5 s" in said
    assert "1 of 3 readers not here yet, awaited at step 2 (local ranks that came: 0, 1)" in said
    come(readers, 2, now=15.0)
    readers.advance(2, 6)
    readers.leave(1, now=20.0)
    assert readers.describe_holders(6, now=21.0) == "local rank 1 at step 2, gone for 1.0 s"
    readers.advance(1, 6)
    assert readers.describe_holders(6, now=22.0) == ""


class Group(RuleBasedStateMachine):
    """Processes that come, read, die and come back, against what each of them has seen itself."""

    RING_PACKS = 4

    @initialize(expected=st.integers(1, 4), first=st.integers(0, 5))
    def begin(self, expected: int, first: int) -> None:
        self.readers = Readers(0, first, expected)
        self.made = self.freed = first
        self.stood = dict.fromkeys(
            range(expected), first
        )  # what each process, or the one before it, has released
        self.alive: set[int] = set()
        self.members: set[int] = set()
        self.now = 0.0

    @rule(number=st.integers(1, 3))
    def make(self, number: int) -> None:
        self.made = min(self.made + number, self.readers.lowest + self.RING_PACKS)

    @rule(data=st.data())
    def come_anew(self, data: st.DataObject) -> None:
        local_rank = data.draw(st.sampled_from(sorted(self.stood)))
        if local_rank in self.alive:
            with pytest.raises(BusyError):
                self.admit(local_rank, None)
            return
        if not self.alive:
            self.stood = dict.fromkeys(self.stood, min(self.stood.values()))
            self.members = set()
        assert self.admit(local_rank, None) == self.stood[local_rank]
        self.enter(local_rank)

    @rule(data=st.data(), back=st.integers(0, 6))
    def come_with_a_place(self, data: st.DataObject, back: int) -> None:
        local_rank = data.draw(st.sampled_from(sorted(self.stood)))
        if local_rank in self.alive:
            return
        step = max(0, self.made + 1 - back)
        try:
            place = self.admit(local_rank, step)
        except BusyError:
            assert self.alive
            assert not self.readers.lowest <= step <= self.made
            return
        if place is None:
            assert step < self.readers.lowest or step > self.made
            if self.alive and local_rank in self.members:
                raise AssertionError("others would have been sent away by one of a whole group")
            self.readers = Readers(0, step, self.readers.expected)
            self.made = self.freed = step
            self.stood = dict.fromkeys(self.stood, step)
            self.alive, self.members = set(), set()
            place = self.admit(local_rank, None)
        assert place == step
        self.stood[local_rank] = step
        self.enter(local_rank)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), number=st.integers(1, 4))
    def release(self, data: st.DataObject, number: int) -> None:
        local_rank = data.draw(st.sampled_from(sorted(self.alive)))
        self.stood[local_rank] = max(self.stood[local_rank], min(self.stood[local_rank] + number, self.made))
        self.readers.advance(local_rank, self.stood[local_rank])

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        local_rank = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.remove(local_rank)
        self.readers.leave(local_rank, self.now)

    def admit(self, local_rank: int, step: int | None) -> int | None:
        self.now += 1.0
        return self.readers.admit(
            local_rank, step, expected=self.readers.expected, known_until=self.made, now=self.now
        )

    def enter(self, local_rank: int) -> None:
        self.readers.enter(local_rank, "trainer", self.now, waits=False)
        self.alive.add(local_rank)
        self.members.add(local_rank)

    @invariant()
    def nothing_is_freed_that_somebody_needs(self) -> None:
        if not hasattr(self, "readers"):
            return
        assert self.readers.lowest == min(self.stood.values())
        assert self.readers.lowest >= self.freed, "what is free is free"
        self.freed = self.readers.lowest
        assert {n for n, cursor in self.readers.cursors.items() if cursor.attached} == self.alive


TestGroup = Group.TestCase
TestGroup.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
