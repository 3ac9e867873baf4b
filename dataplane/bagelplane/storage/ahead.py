"""Parts of objects fetched before somebody asks for them, in the order in which they will be.

A walker (a group of a stream) has a `Lane`: it says where it stands in its list of units, and what a unit's parts are
is looked up in the background. Parts are fetched by a few threads, bounded in bytes and in requests over all lanes
together. `Storage` looks here first: whoever reads need not know that something was fetched ahead, and gets the same
bytes, and the same errors at the same place, as without.

Nobody waits behind others: a part that is asked for before its fetch has begun is fetched by whoever asks.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from bagelplane.errors import BagelplaneError, TransientStorageError

_LARGEST_PART_BYTES = 8 * 2**20
_SMALLEST_PART_BYTES = 256 * 1024
_MOST_PARTS_A_LANE = 256
_UNKNOWN_BYTES = 512 * 1024
"""What an object of unknown size is reckoned with before the first one came."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `start` to before `end` of an object; without an end, all of it, whatever its version."""

    uri: str
    start: int = 0
    end: int | None = None
    version: str | None = None


@dataclass(slots=True, eq=False)
class _Held:
    """A part that somebody expects, on its way or here."""

    part: Part
    reckoned_bytes: int
    wanted_by: list[_Unit] = field(default_factory=list)
    is_begun: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    data: bytes = b""
    error: BagelplaneError | None = None
    served_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Unit:
    """A unit ahead: its parts once they are known, and those of them that are held."""

    lane: Lane
    parts: deque[Part] | None = None
    held: list[_Held] = field(default_factory=list)


class Lane:
    """What one walker expects. Made by `ReadAhead.lane`; used by the walker's thread."""

    def __init__(self, ahead: ReadAhead, parts_of: PartsOf, count: int, most_units: int) -> None:
        self._ahead, self._count, self._most_units = ahead, count, most_units
        self.parts_of = parts_of
        self.units: deque[_Unit] = deque()
        self._number = self._block = -1  # of the first of `units`

    def stand_at(self, number: int, block: int) -> None:
        """The walker reads this unit from this block on, and goes on from there over the end of the list."""
        if self._ahead.is_paused or (number == self._number and self.units):
            return
        with self._ahead.lock:
            distance = (number - self._number) % self._count
            if not self.units or distance >= len(self.units):
                behind = self._count - distance
                if self.units and behind <= self._most_units:
                    return  # planned again from a little before: what is ahead of that is still wanted
                distance = len(self.units)
            for _ in range(distance):
                self._drop_first()
            self._number, self._block = number, block
            first = None if self.units else self.next_unit()
            self._ahead.pump(self)
        if first is not None:
            # By this thread, which would have to find out the same: nothing of it is read past the parts.
            self._ahead.look_up(*first)

    def expect(self, parts: Sequence[Part]) -> None:
        """Of a walker that reads one thing, whose parts are known."""
        with self._ahead.lock:
            self._number = 0
            self.units.append(_Unit(self, deque(parts)))
            self._ahead.pump(self)

    def next_unit(self) -> tuple[int, int, _Unit] | None:
        """A unit whose parts are to be found out; None while enough are known. Under the lock."""
        if len(self.units) >= self._most_units or self._number < 0:
            return None
        number = (self._number + len(self.units)) % self._count
        unit = _Unit(self)
        self.units.append(unit)
        return number, self._block if len(self.units) == 1 else 0, unit

    def _drop_first(self) -> None:
        unit = self.units.popleft()
        while unit.held:
            self._ahead.forget(unit.held[0], unit)

    def close(self) -> None:
        """The walker is gone. Takes no lock: it may be a finalizer, in the middle of anything. So it is said here, and
        done when the next lane moves.
        """
        self._ahead.closed.append(self)

    def drop_all(self) -> None:
        """Under the lock."""
        while self.units:
            self._drop_first()
        self._most_units = 0


PartsOf = Callable[[int, int], Sequence[Part]]
"""(unit, first block) -> its parts, in the order of need. Called by other threads; what it raises the reader meets."""


class ReadAhead:
    """The parts that are held for all lanes. `limit_bytes` 0 or `requests` 0: nothing is read ahead."""

    def __init__(self, fetch: Callable[[Part], bytes], limit_bytes: int, requests: int) -> None:
        self._fetch, self._limit_bytes, self._requests = fetch, limit_bytes, requests
        self.is_paused = False
        """Walkers look at what an index knows, and nothing of the data will be read."""
        self._begin()

    def _begin(self) -> None:
        self.lock = threading.RLock()
        self.lanes: set[Lane] = set()
        self.closed: deque[Lane] = deque()
        self._process = os.getpid()
        self._held: dict[str, list[_Held]] = {}
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._seen_bytes, self._seen_objects = 0, 0

    @property
    def part_bytes(self) -> int:
        """How large the parts of a large object should be, so that each lane has two of them at least."""
        return max(_SMALLEST_PART_BYTES, min(_LARGEST_PART_BYTES, self._share // 2))

    @property
    def _share(self) -> int:
        return self._limit_bytes // max(1, len(self.lanes))

    @property
    def held_bytes(self) -> int:
        """Of all parts that are here or on their way."""
        with self.lock:
            self._drop_closed()
            return sum(held.reckoned_bytes for entries in self._held.values() for held in entries)

    def lane(self, parts_of: PartsOf, count: int, most_units: int) -> Lane | None:
        """For a walker over `count` units, of which at most `most_units` are looked at ahead."""
        if not self._limit_bytes or not self._requests or not count:
            return None
        self._check_process()
        lane = Lane(self, parts_of, count, most_units)
        with self.lock:
            self._drop_closed()
            self.lanes.add(lane)
        return lane

    def take(self, uri: str, start: int, end: int | None, version: str | None = None) -> bytes | None:
        """These bytes if they were fetched ahead or are on their way; None: ask the store.

        Raises what fetching them raised, if that lasts; what may have passed is asked for again.
        """
        if not self._held or self._process != os.getpid():
            return None
        found = self._find(uri, start, end, version)
        pieces = []
        for held in found:
            is_mine = self._get(held)
            if not held.is_begun:
                return None  # nobody wanted it any more
            held.done.wait()
            if held.error is not None:
                self._served(held, None)
                if isinstance(held.error, TransientStorageError) and not is_mine:
                    return None
                raise held.error.with_traceback(None)
            first, last = max(start - held.part.start, 0), None if end is None else end - held.part.start
            pieces.append(held.data[first:last])
            self._served(held, None if end is None else len(pieces[-1]))
        return None if not found else pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """No more is fetched; threads end with what they are at."""
        with self.lock:
            self.closed.extend(self.lanes)
            self._drop_closed()
            for _ in self._threads:
                self._work.put(None)
            self._threads = []

    # -- under the lock

    def _drop_closed(self) -> None:
        while self.closed:
            lane = self.closed.popleft()
            lane.drop_all()
            self.lanes.discard(lane)

    def pump(self, lane: Lane) -> None:
        """Has parts looked up and fetched, as far as the bounds let it."""
        self._drop_closed()
        while (following := lane.next_unit()) is not None:
            self._submit(partial(self.look_up, *following))
        mine = [held for unit in lane.units for held in unit.held]
        held_bytes, count = sum(held.reckoned_bytes for held in mine), len(mine)
        for unit in lane.units:
            if unit.parts is None:
                return  # in order: what comes first is fetched first
            while unit.parts:
                size = self._reckon(unit.parts[0])
                if count >= _MOST_PARTS_A_LANE or (count and held_bytes + size > self._share):
                    return
                self._expect(unit.parts.popleft(), size, unit)
                held_bytes, count = held_bytes + size, count + 1

    def _expect(self, part: Part, size: int, unit: _Unit) -> None:
        held = next((held for held in self._held.get(part.uri, ()) if held.part == part), None)
        if held is None:
            held = _Held(part, size)
            self._held.setdefault(part.uri, []).append(held)
            self._submit(partial(self._get, held))
        held.wanted_by.append(unit)
        unit.held.append(held)

    def forget(self, held: _Held, unit: _Unit) -> None:
        """A unit has its part, or does without."""
        held.wanted_by.remove(unit)
        unit.held.remove(held)
        if not held.wanted_by:
            entries = self._held[held.part.uri]
            entries.remove(held)
            if not entries:
                del self._held[held.part.uri]

    def _reckon(self, part: Part) -> int:
        if part.end is not None:
            return part.end - part.start
        return self._seen_bytes // self._seen_objects if self._seen_objects else _UNKNOWN_BYTES

    def _submit(self, work: Callable[[], object]) -> None:
        self._work.put(work)
        if self._idle < self._work.qsize() and len(self._threads) < self._requests:
            # Daemons: at the end of the interpreter nobody waits for what a store does not answer.
            thread = threading.Thread(target=self._serve, args=(self._work,), name="read-ahead", daemon=True)
            self._threads.append(thread)
            thread.start()

    # -- in the threads

    def _serve(self, work: queue.SimpleQueue[Callable[[], object] | None]) -> None:
        while True:
            with self.lock:
                self._idle += 1
            job = work.get()
            with self.lock:
                self._idle -= 1
            if job is None:
                return
            job()

    def look_up(self, number: int, block: int, unit: _Unit) -> None:
        try:
            parts = deque(unit.lane.parts_of(number, block))
        except Exception:  # noqa: BLE001 (whatever it is, the reader meets it at its place)
            parts = deque()
        with self.lock:
            unit.parts = parts
            self.pump(unit.lane)

    def _get(self, held: _Held) -> bool:
        """Fetches a part, unless somebody has begun to, or nobody wants it any more."""
        with self.lock:
            if held.is_begun or not held.wanted_by:
                return False
            held.is_begun = True
        try:
            held.data = self._fetch(held.part)
        except BagelplaneError as error:
            held.error = error
        except Exception as error:  # noqa: BLE001 (as above; asked for again by the reader)
            held.error = TransientStorageError(f"{type(error).__name__}: {error}")
        with self.lock:
            if held.part.end is None and held.error is None:
                held.reckoned_bytes = len(held.data)
                self._seen_bytes += len(held.data)
                self._seen_objects += 1
                for unit in held.wanted_by[:1]:
                    self.pump(unit.lane)  # it may take less than it was reckoned with
        held.done.set()
        return True

    # -- of take

    def _find(self, uri: str, start: int, end: int | None, version: str | None) -> list[_Held]:
        """The parts that together have these bytes, in order; empty if some are missing."""
        with self.lock:
            entries = [held for held in self._held.get(uri, ()) if held.part.version == version]
            if end is None:
                return [held for held in entries if held.part.end is None][:1]
            return _covering(entries, start, end) or self._wanted_now(uri, start, end, version)

    def _wanted_now(self, uri: str, start: int, end: int, version: str | None) -> list[_Held]:
        """The same of parts that wait for room: what is read now goes before what will be."""
        for unit in [unit for lane in self.lanes for unit in islice(lane.units, 2)]:
            meant = [
                part
                for part in unit.parts or ()
                if part.uri == uri and part.version == version and _overlaps(part, start, end)
            ]
            for part in meant:
                assert unit.parts is not None
                unit.parts.remove(part)
                self._expect(part, self._reckon(part), unit)
            if meant:
                return _covering(self._held[uri], start, end)
        return []

    def _served(self, held: _Held, size_bytes: int | None) -> None:
        """A reader had so much of it (None: all); once it had all, a part leaves the unit that came first."""
        with self.lock:
            held.served_bytes += len(held.data) if size_bytes is None else size_bytes
            if held.served_bytes < len(held.data) or not held.wanted_by:
                return
            held.served_bytes = 0
            unit = held.wanted_by[0]
            self.forget(held, unit)
            self.pump(unit.lane)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            self._begin()  # after a fork: threads and locks are the parent's


def _overlaps(part: Part, start: int, end: int) -> bool:
    return part.end is not None and part.start < end and start < part.end


def _covering(entries: Sequence[_Held], start: int, end: int) -> list[_Held]:
    found, at = [], start
    for held in sorted(entries, key=lambda held: held.part.start):
        if held.part.end is not None and held.part.start <= at < held.part.end:
            found.append(held)
            at = held.part.end
            if at >= end:
                return found
    return []
