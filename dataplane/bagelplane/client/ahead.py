"""Packs that were read from the ring and are not handed over yet, and the thread that converts them meanwhile.

Nothing is acknowledged here, and nothing waits for the sidecar: the thread turns the bytes of a record into what the
trainer gets, and that is all. So it ends whenever it is told to, and with the interpreter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from bagelplane.engine.pack import Pack
from bagelplane.errors import ProtocolError
from bagelplane.shm.record import Image, read_record
from bagelplane.shm.ring import Record

T = TypeVar("T")
Convert = Callable[[Pack, list[Image]], T]
"""Makes something of a pack and the views of its images; nothing in the result may refer to them."""


@dataclass(slots=True)
class _Read:
    record: Record
    payload: memoryview
    convert: Convert[Any]
    future: Future[tuple[dict[str, Any], Any]] | None


class ReadAhead:
    """Records in the order of the stream, each converted once. All but the conversion is for one thread."""

    def __init__(self, depth: int, *, timeout_seconds: float) -> None:
        """depth: packs converted ahead of the one that is handed over; 0: no thread, the caller converts."""
        self._depth = depth
        self._timeout_seconds = timeout_seconds
        self._reads: deque[_Read] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._reads)

    @property
    def has_room(self) -> bool:
        return len(self._reads) < self._depth

    @property
    def first(self) -> Record:
        """The record that is handed over next."""
        return self._reads[0].record

    def append(self, record: Record, payload: memoryview, convert: Convert[T]) -> None:
        """Has the record converted. `payload` stays what it is until the record is released."""
        self._reads.append(_Read(record, payload, convert, self._start(payload, convert)))

    def converted(self, convert: Convert[T]) -> tuple[dict[str, Any], T]:
        """(state after it, what `convert` makes of it) of the first record. It stays the first until `pop`.

        Waits for the thread; converts here where the thread failed before or was told of another `convert`.
        """
        read = self._reads[0]
        future = read.future
        if future is None or read.convert != convert:
            return _convert(read.payload, convert)
        try:
            return future.result(self._timeout_seconds)
        except Exception as error:
            if not future.done():
                raise ProtocolError(
                    f"waited {self._timeout_seconds:g} s for the conversion of step {read.record.step}",
                    fix="make the loader in the process that iterates (threads do not survive a fork), or pass "
                    "prefetch=0",
                ) from error
            read.future = None
            raise

    def pop(self) -> None:
        """The first record was handed over."""
        self._reads.popleft()

    def clear(self) -> None:
        """Throws away what was read: the ring may hold something else by now."""
        for read in self._reads:
            if read.future is not None:
                read.future.cancel()
        self._reads.clear()

    def close(self) -> None:
        """Throws away what was read and ends the thread. A conversion that runs is waited for."""
        self.clear()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _start(self, payload: memoryview, convert: Convert[T]) -> Future[tuple[dict[str, Any], T]] | None:
        if not self._depth:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="bagelplane-convert")
        try:
            return self._thread.submit(_convert, payload, convert)
        except RuntimeError:  # the interpreter is ending: what is still asked for is converted by who asks
            return None


def _convert(payload: memoryview, convert: Convert[T]) -> tuple[dict[str, Any], T]:
    pack, images = read_record(payload)
    return pack.state, convert(pack, images)
