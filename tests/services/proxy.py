"""An HTTP proxy in front of a real store: adds latency to every request, counts them, and lets them go wrong.

with serve_proxy(server.url, latency_seconds=0.02) as proxy:
    proxy.url, proxy.requests
    proxy.fault = lambda request: Broken(cut_after_bytes=1000) if request.number == 3 else None
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.services.scripted import Answer

_CHUNK_BYTES = 1 << 20


@dataclass(slots=True)
class Request:
    """One request. `body_bytes` is what went back to the client; `number` counts from 0."""

    number: int
    method: str
    target: str
    range: str
    body_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Broken:
    """How a request goes wrong: an answer instead of the store's, or the store's own body cut or halted after so many
    bytes. `drip_seconds`: from there on a byte comes each time that so long has passed."""

    answer: Answer | None = None
    cut_after_bytes: int | None = None
    stall_after_bytes: int | None = None
    drip_seconds: float | None = None


class Proxy:
    """Runs on an event loop in a thread of its own. `latency_seconds` and `fault` may be changed at any time."""

    def __init__(self, upstream: str, latency_seconds: float) -> None:
        parts = urlsplit(upstream)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self.latency_seconds = latency_seconds
        self.fault: Callable[[Request], Broken | None] = lambda request: None
        self.requests: list[Request] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=4 * _CHUNK_BYTES)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._over.wait()
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while head := await _read_head(reader):
                method, target, headers = _parse(head)
                if headers.get("expect"):
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                request = Request(len(self.requests), method, target, headers.get("range", ""))
                self.requests.append(request)
                fault = self.fault(request)
                await asyncio.sleep(self.latency_seconds)
                if fault is not None and fault.answer is not None:
                    _answer(writer, request, fault.answer)
                    continue
                if upstream is None:
                    upstream = await asyncio.open_connection(self._host, self._port, limit=4 * _CHUNK_BYTES)
                lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:")]
                upstream[1].write(b"\r\n".join(lines) + body)
                if not await _forward(upstream[0], writer, request, fault):
                    return
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            for open_writer in (writer, *(upstream or ())[1:]):
                with contextlib.suppress(OSError):
                    open_writer.transport.abort()


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def _parse(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    pairs = (line.partition(":") for line in lines if line)
    return parts[0], parts[1], {name.strip().lower(): value.strip() for name, _, value in pairs}


def _answer(writer: asyncio.StreamWriter, request: Request, answer: Answer) -> None:
    headers = {"Content-Length": str(len(answer.body)), **answer.headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"HTTP/1.1 {answer.status} as asked\r\n{lines}\r\n".encode())
    writer.write(b"" if request.method == "HEAD" else answer.body)


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request, fault: Broken | None
) -> bool:
    """The store's answer to the client; False when the connection is to be closed."""
    head = await _read_head(reader)
    _, status, headers = _parse(head)
    writer.write(head)
    if request.method == "HEAD" or status in ("204", "304"):
        return True
    assert "chunked" not in headers.get("transfer-encoding", ""), "the stores of the tests send lengths"
    left = int(headers.get("content-length", 0))
    limit = left
    if fault is not None:
        limits = (fault.cut_after_bytes, fault.stall_after_bytes, fault.drip_seconds and 0)
        limit = min([left, *(number for number in limits if number is not None)])
    while request.body_bytes < limit:
        data = await reader.read(min(_CHUNK_BYTES, limit - request.body_bytes))
        request.body_bytes += len(data)
        writer.write(data)
        await writer.drain()
    if fault is None or limit == left:
        return True
    if fault.stall_after_bytes is not None:
        await asyncio.sleep(3600)
    while fault.drip_seconds and request.body_bytes < left:
        writer.write(await reader.readexactly(1))
        await writer.drain()
        request.body_bytes += 1
        await asyncio.sleep(fault.drip_seconds)
    return False


@contextmanager
def serve_proxy(upstream: str, *, latency_seconds: float = 0.0) -> Iterator[Proxy]:
    proxy = Proxy(upstream, latency_seconds)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
