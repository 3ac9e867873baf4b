"""What packs cost: decoding, reading, requests. Counted where it happens, told with each pack.

Only ever more: whoever wants the cost of one pack takes the difference. A count costs a tenth of a microsecond.
"""

from __future__ import annotations

import io
import threading
from collections import Counter
from time import perf_counter
from typing import Any


class Costs:
    """Counts of one stream, or of one store. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decode_seconds = 0.0
        self._storage_seconds = 0.0
        self._read_bytes = 0
        self._written_bytes = 0
        self._requests: Counter[str] = Counter()
        self._retries: Counter[str] = Counter()

    def decoded(self, seconds: float) -> None:
        """An image was decoded and resized, or found to be bad, by one thread."""
        with self._lock:
            self._decode_seconds += seconds

    def requested(self, operation: str, seconds: float) -> None:
        """Storage was asked for something, and answered or failed."""
        with self._lock:
            self._requests[operation] += 1
            self._storage_seconds += seconds

    def retried(self, cause: str) -> None:
        with self._lock:
            self._retries[cause] += 1

    def read(self, size_bytes: int, seconds: float = 0.0) -> None:
        """Bytes that came; `seconds` where no request was counted for them."""
        with self._lock:
            self._read_bytes += size_bytes
            self._storage_seconds += seconds

    def wrote(self, size_bytes: int) -> None:
        with self._lock:
            self._written_bytes += size_bytes

    def as_json(self) -> dict[str, Any]:
        """All counts so far."""
        with self._lock:
            return {
                "decode_seconds": self._decode_seconds,
                "storage_seconds": self._storage_seconds,
                "read_bytes": self._read_bytes,
                "written_bytes": self._written_bytes,
                "requests": dict(self._requests),
                "retries": dict(self._retries),
            }


class CountedFile(io.FileIO):
    """A local file that counts what is read of it; to be wrapped in a `BufferedReader`."""

    def __init__(self, path: str, costs: Costs) -> None:
        super().__init__(path, "rb")
        self._costs = costs

    def readinto(self, buffer: Any, /) -> int | None:
        begun = perf_counter()
        size_bytes = super().readinto(buffer)
        self._costs.read(size_bytes or 0, perf_counter() - begun)
        return size_bytes

    def readall(self) -> bytes:
        begun = perf_counter()
        data = super().readall()
        self._costs.read(len(data), perf_counter() - begun)
        return data
