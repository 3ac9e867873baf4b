"""What is fetched before it is asked for: in planned order, within its bounds, and never another thing than without."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagelplane.errors import StorageError, TransientStorageError
from bagelplane.storage import ObjectMissingError
from bagelplane.storage.ahead import Part, ReadAhead

SIZE = 1000


def content(uri: str) -> bytes:
    return (uri.encode() * SIZE)[:SIZE]


class Store:
    """Objects of 1,000 bytes; `gate` holds back what is asked for."""

    def __init__(self, fail: Callable[[Part], Exception | None] = lambda part: None) -> None:
        self.fail, self.asked, self.lock = fail, list[Part](), threading.Lock()
        self.free: Part | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.at_once = self.most_at_once = 0

    def fetch(self, part: Part) -> bytes:
        with self.lock:
            self.asked.append(part)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        assert part == self.free or self.gate.wait(30)
        time.sleep(0.001)
        with self.lock:
            self.at_once -= 1
        error = self.fail(part)
        if error is not None:
            raise error
        return content(part.uri)[part.start : part.end]


@contextmanager
def reading_ahead(store: Store, limit_bytes: int = 10 * SIZE, requests: int = 4) -> Iterator[ReadAhead]:
    ahead = ReadAhead(store.fetch, limit_bytes, requests)
    try:
        yield ahead
    finally:
        store.gate.set()
        ahead.close()


def halves(number: int, block: int) -> list[Part]:
    return [Part(f"u{number}", 0, SIZE // 2), Part(f"u{number}", SIZE // 2, SIZE)]


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}; last: {condition()}"
        time.sleep(0.002)


def test_units_to_come_are_fetched_in_order_and_within_the_bounds() -> None:
    store = Store()
    with reading_ahead(store, limit_bytes=4 * SIZE, requests=3) as ahead:
        lane = ahead.lane(halves, 100, 50)
        assert lane is not None
        most = 0
        for number in range(100):
            lane.stand_at(number, 0)
            most = max(most, ahead.held_bytes)
            wait_for(lambda n=number: Part(f"u{n}", SIZE // 2, SIZE) in store.asked, "the unit")  # type: ignore[misc]
            for start in (0, SIZE // 2):
                assert (
                    ahead.take(f"u{number}", start, start + SIZE // 2)
                    == content(f"u{number}")[start : start + SIZE // 2]
                )
        assert most <= 4 * SIZE
        assert store.most_at_once <= 3
        order = [part for part in store.asked if part.start == 0]
        # Several threads take them: neighbours may change places.
        places = [int(part.uri[1:]) for part in order]
        assert all(abs(place - at % 100) <= 3 for at, place in enumerate(places))
        assert max(Counter(store.asked).values()) <= 2  # the list begins again at its end


def test_nothing_is_fetched_where_no_bytes_or_requests_are_allowed() -> None:
    for limits in ((0, 4), (100, 0)):
        assert ReadAhead(Store().fetch, *limits).lane(halves, 10, 10) is None


def test_a_failure_is_raised_where_it_is_read_and_nowhere_else() -> None:
    lasting = ObjectMissingError("there is no u2")
    store = Store(lambda part: lasting if part.uri == "u2" else None)
    with reading_ahead(store) as ahead:
        lane = ahead.lane(lambda number, block: [Part(f"u{number}")], 5, 4)
        assert lane is not None
        lane.stand_at(0, 0)
        wait_for(lambda: Part("u3") in store.asked, "u3")
        assert ahead.take("u0", 0, None) == content("u0")
        assert ahead.take("u1", 0, None) == content("u1")
        with pytest.raises(StorageError) as caught:
            ahead.take("u2", 0, None)
        assert caught.value is lasting
        assert ahead.take("u3", 0, None) == content("u3")
        assert store.asked.count(Part("u2")) == 1


@pytest.mark.parametrize("error", [TransientStorageError("it was away"), RuntimeError("unforeseen")])
def test_what_may_have_passed_is_left_to_whoever_reads(error: Exception) -> None:
    store = Store(lambda part: error)
    with reading_ahead(store) as ahead:
        lane = ahead.lane(lambda number, block: [Part(f"u{number}")], 1, 1)
        assert lane is not None
        lane.stand_at(0, 0)
        wait_for(lambda: store.asked, "the request")
        assert ahead.take("u0", 0, None) is None


def test_what_raises_while_parts_are_looked_up_is_left_to_whoever_reads() -> None:
    def parts_of(number: int, block: int) -> list[Part]:
        if number == 0:
            raise ZeroDivisionError
        return halves(number, block)

    store = Store()
    with reading_ahead(store) as ahead:
        lane = ahead.lane(parts_of, 3, 2)
        assert lane is not None
        lane.stand_at(0, 0)
        wait_for(lambda: len(store.asked) == 2, "the parts of the unit behind it")
        assert ahead.take("u0", 0, 10) is None


def test_nobody_waits_behind_what_has_not_begun() -> None:
    store = Store()
    store.gate.clear()
    with reading_ahead(store, requests=1) as ahead:
        lane = ahead.lane(halves, 3, 1)
        assert lane is not None
        lane.stand_at(0, 0)
        wait_for(lambda: store.asked, "the first request")
        store.free = Part("u0", SIZE // 2, SIZE)
        assert ahead.take("u0", SIZE // 2 + 1, SIZE - 1) == content("u0")[SIZE // 2 + 1 : SIZE - 1]
        assert ahead.take("u0", SIZE // 2, SIZE) == content("u0")[SIZE // 2 :], "of the part that is here"
        store.gate.set()
        assert ahead.take("u0", 0, SIZE // 2) == content("u0")[: SIZE // 2]
        assert sorted(store.asked, key=lambda part: part.start) == halves(0, 0)


def test_what_two_want_is_fetched_once() -> None:
    store = Store()
    with reading_ahead(store) as ahead:
        lanes = [ahead.lane(lambda number, block: [Part("same")], 1, 1) for _ in range(2)]
        for lane in lanes:
            assert lane is not None
            lane.stand_at(0, 0)
        wait_for(lambda: store.asked, "the request")
        time.sleep(0.02)
        assert [ahead.take("same", 0, None) for _ in range(3)] == [content("same"), content("same"), None]
        assert store.asked == [Part("same")]


def test_another_version_is_not_taken() -> None:
    store = Store()
    with reading_ahead(store) as ahead:
        lane = ahead.lane(lambda number, block: [Part("u", 0, SIZE, "old")], 1, 1)
        assert lane is not None
        lane.stand_at(0, 0)
        wait_for(lambda: store.asked, "the request")
        assert ahead.take("u", 0, SIZE, "new") is None
        assert ahead.take("u", 0, SIZE, "old") == content("u")


def test_a_walker_that_is_gone_leaves_nothing() -> None:
    store = Store()
    with reading_ahead(store) as ahead:
        lane = ahead.lane(halves, 50, 20)
        assert lane is not None
        lane.stand_at(0, 0)
        wait_for(lambda: store.asked, "a request")
        lane.close()
        assert ahead.held_bytes == 0
        assert not ahead.lanes
        lane.stand_at(3, 0)
        assert ahead.held_bytes == 0


def test_a_forked_child_reads_without_what_its_parent_fetched() -> None:
    store = Store()
    with reading_ahead(store) as ahead:
        lane = ahead.lane(halves, 5, 2)
        assert lane is not None
        lane.stand_at(0, 0)
        wait_for(lambda: len(store.asked) >= 4, "the parts")
        pid = os.fork()
        if pid == 0:
            os._exit(0 if ahead.take("u0", 0, 10) is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@settings(max_examples=40, deadline=None)
@given(
    walk=st.lists(st.tuples(st.integers(0, 11), st.integers(0, SIZE - 1), st.integers(1, SIZE)), max_size=30),
    limit=st.integers(1, 20 * SIZE),
    requests=st.integers(1, 6),
)
def test_whatever_is_read_in_whatever_order_is_the_same(
    walk: list[tuple[int, int, int]], limit: int, requests: int
) -> None:
    store = Store()
    with reading_ahead(store, limit, requests) as ahead:
        lane = ahead.lane(halves, 12, 5)
        assert lane is not None
        for number, start, length in walk:
            end = min(start + length, SIZE)
            lane.stand_at(number, 0)
            taken = ahead.take(f"u{number}", start, end)
            assert taken is None or taken == content(f"u{number}")[start:end]
            # What is being read goes past the bound: else nothing would move.
            assert ahead.held_bytes <= limit + SIZE
