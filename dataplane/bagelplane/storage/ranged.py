"""A remote object as a seekable file: each read beyond the last window is one ranged request."""

from __future__ import annotations

import io
from collections.abc import Callable

WINDOW_BYTES = 64 * 1024


class RangedFile(io.BufferedIOBase):
    """Reads an object of known size through `fetch(start, end) -> bytes`. Not thread-safe, as files are.

    Small reads are served from a window of 64 KiB, so that lines and footers cost few requests; a read
    larger than the window fetches just what was asked for. pyarrow reads it
    (`pyarrow.parquet.ParquetFile(file)`). `take(start, end)` gives what was fetched ahead, or None.
    """

    def __init__(
        self,
        name: str,
        size_bytes: int,
        fetch: Callable[[int, int], bytes],
        take: Callable[[int, int], bytes | None] = lambda start, end: None,
        *,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.name, self.size_bytes = name, size_bytes
        self._fetch, self._take, self._window_bytes = fetch, take, window_bytes
        self._position = 0
        self._window, self._window_start = b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._check_open()
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        if origin + offset < 0:
            raise ValueError(f"seek to {origin + offset}, before the start of {self.name}")
        self._position = origin + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        self._check_open()
        end = self.size_bytes if size is None or size < 0 else min(self._position + size, self.size_bytes)
        if end <= self._position:
            return b""
        data = self._bytes_between(self._position, end)
        self._position += len(data)
        return data

    read1 = read

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def peek(self, size: int = 0, /) -> bytes:
        """Bytes from here on without moving, at least one before the end: `readline` looks for its newline
        in them.
        """
        self._check_open()
        end = min(self._position + max(size, 1), self.size_bytes)
        if end <= self._position:
            return b""
        self._bytes_between(self._position, end)
        return self._window[self._position - self._window_start :] or self._bytes_between(self._position, end)

    def _bytes_between(self, start: int, end: int) -> bytes:
        window_end = self._window_start + len(self._window)
        if self._window_start <= start and end <= window_end:
            return self._window[start - self._window_start : end - self._window_start]
        ahead = self._take(start, end)
        if ahead is not None:
            return ahead
        if end - start >= self._window_bytes:
            return self._fetch(start, end)
        # At the end of the file the window reaches backwards: a footer's length is read before the footer.
        self._window_start = max(min(start, self.size_bytes - self._window_bytes), 0)
        self._window = self._fetch(
            self._window_start, min(self._window_start + self._window_bytes, self.size_bytes)
        )
        return self._window[start - self._window_start : end - self._window_start]

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.name} is closed")
