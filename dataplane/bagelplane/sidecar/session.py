"""One client's connection: messages in, doorbells out. What a client does wrong ends its connection alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from bagelplane.errors import BagelplaneError, ProtocolError
from bagelplane.logs import log_about
from bagelplane.shm.protocol import (
    ERROR_CODES,
    Ack,
    Attach,
    Attached,
    Detach,
    Error,
    Hello,
    Message,
    Published,
    Resume,
    Seek,
    Snapshot,
    Snapshotted,
    Status,
    StatusRequest,
    Waiting,
    Welcome,
    encode,
    negotiate,
    read_message,
)
from bagelplane.sidecar.producer import error_code
from bagelplane.sidecar.rank import RankFailedError, RankServer, RankStoppedError
from bagelplane.sidecar.readers import BusyError

if TYPE_CHECKING:
    from bagelplane.sidecar.supervisor import Supervisor

HELLO_SECONDS = 10.0
WAITING_SECONDS = 1.0
"""How often a client that has nothing to take is told what it waits for."""
_SNAPSHOT_SECONDS = 5.0
"""How long a snapshot waits for the rank's other readers, before it is of what all of them have."""
MAX_UNSENT_BYTES = 8 * 1024 * 1024
"""More than this unread, and the client is not reading at all."""

log = logging.getLogger(__name__)


class Session:
    """Lives as long as its connection."""

    def __init__(
        self, supervisor: Supervisor, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._supervisor = supervisor
        self._reader = reader
        self._writer = writer
        self._server: RankServer | None = None
        self._place: Attach | None = None  # where it is attached, or asks to be
        self._dropped_by: RankServer | None = None
        self._attaching_since: float | None = None
        self._told_all = False  # nothing may be sent any more
        self._announced = 0
        self.client = "unknown client"
        self.closed = asyncio.Event()

    async def run(self) -> None:
        """Serves the client until it leaves, errs or is dropped."""
        ticker = asyncio.create_task(self._tell_waiting())
        try:
            await self._greet()
            while (message := await read_message(self._reader)) is not None:
                if isinstance(message, Detach):
                    break
                if self._dropped_by is None:  # else it crossed the news that the producer is gone
                    await self._handle(message)
        except (ConnectionError, TimeoutError) as error:
            log.info("%s: the connection broke (%s)", self.client, str(error) or type(error).__name__)
        except BagelplaneError as error:
            log.warning("%s: %s", self.client, error)
            self._send_error(error, fatal=not isinstance(error, (BusyError, RankStoppedError)))
        finally:
            ticker.cancel()
            self._leave()
            self.closed.set()
            with contextlib.suppress(ConnectionError, TimeoutError):
                self._writer.close()
                await asyncio.wait_for(self._writer.wait_closed(), 1.0)

    # -- for the rank's server

    def publish(self, message: Published) -> None:
        if self._server is not None:
            self._announced = message.step + 1
            self._send(message)

    def drop(self, reason: str, *, error: RankFailedError | None = None) -> None:
        """The rank's producer is gone. The client hears why and, if it may, attaches again.

        Its connection is closed by the client: until then its process is known to live, and the other readers of its
        rank are no new group.
        """
        if self._server is None:
            return
        self._dropped_by, self._server = self._server, None
        if error is not None:
            self._send_error(error, fatal=True)
        else:
            self._send(Error("internal", reason, fatal=False))
        self._told_all = True
        if not self._writer.is_closing():
            self._writer.write_eof()

    def end(self, reason: str) -> None:
        """The sidecar ends, and with it the connection."""
        self._send(Error("internal", reason, fatal=False))
        self._writer.close()

    # -- messages

    async def _greet(self) -> None:
        hello = await asyncio.wait_for(read_message(self._reader), HELLO_SECONDS)
        if not isinstance(hello, Hello):
            raise ProtocolError("a client began without 'hello'", got=hello.TYPE if hello else "the end")
        self.client = hello.client[:200]
        version = negotiate(hello.version)
        self._send(Welcome(version, self._supervisor.dataset.metadata.name, self._supervisor.spec_hash))

    async def _handle(self, message: Message) -> None:
        if isinstance(message, Ack):
            self._acknowledge(message)
        elif isinstance(message, Attach):
            if self._server is not None:
                raise ProtocolError("a client attached twice on one connection", fix="detach first")
            await self._attach(message)
        elif isinstance(message, Seek):
            self._require_server("seek")
            self._leave()
            assert self._place is not None
            await self._attach(replace(self._place, generation=0, resume=Resume("step", message.step)))
        elif isinstance(message, Snapshot):
            await self._snapshot()
        elif isinstance(message, StatusRequest):
            self._send(Status(self._supervisor.status()))
        else:
            raise ProtocolError(f"a {message.TYPE!r} message is out of place")

    async def _attach(self, attach: Attach) -> None:
        self._place, self._attaching_since = attach, time.monotonic()
        try:
            server, next_step = await self._supervisor.attach(attach)
        finally:
            self._attaching_since = None
        # From here on nothing may be awaited: packs that become ready meanwhile would be announced twice.
        self._server = server
        log_about(server.log_subject)
        records = server.attach(attach.local_rank, self, self.client)
        self._announced = next_step
        place = server.progress.position(next_step), self._supervisor.streams
        self._send(Attached(server.ring_path, server.epoch, server.ring_bytes, next_step, *place))
        for record in records:
            self.publish(record)
        log.info("%s: rank %d attached at step %d", self.client, server.rank, next_step)

    def _acknowledge(self, ack: Ack) -> None:
        server = self._require_server("ack")
        if ack.step >= self._announced:
            raise ProtocolError(
                "a client acknowledged a pack that it was never given",
                got=f"step {ack.step}",
                expected=f"below {self._announced}",
            )
        server.acknowledge(self._local_rank, ack.step, ack.stalled_seconds)

    async def _snapshot(self) -> None:
        server = self._require_server("snapshot")
        # The rank's other readers are given the same before long; what one alone has taken is no state of the rank.
        await server.wait_released(server.readers.cursors[self._local_rank].next_step, _SNAPSHOT_SECONDS)
        if self._server is not server:
            return  # the producer ended meanwhile, and the client knows
        # A failure ends the connection: so the trainer hears of it now, and attaches again for the next pack.
        step, uri = await self._supervisor.snapshot(server)
        self._send(Snapshotted(step, uri))

    def _require_server(self, what: str) -> RankServer:
        if self._server is None:
            raise ProtocolError(f"{what!r} needs an attached rank", fix="attach first")
        return self._server

    @property
    def _local_rank(self) -> int:
        assert self._place is not None
        return self._place.local_rank

    def _leave(self) -> None:
        for server, returns in ((self._server, False), (self._dropped_by, True)):
            if server is not None:
                server.detach(self._local_rank, self, returns=returns)
        self._server = self._dropped_by = None

    # -- out

    async def _tell_waiting(self) -> None:
        while True:
            await asyncio.sleep(WAITING_SECONDS)
            server, place = self._server, self._place
            if self._attaching_since is not None and place is not None:
                what = self._supervisor.describe(place.rank)
                self._send(Waiting(what, time.monotonic() - self._attaching_since))
            elif server is not None:
                seconds = server.awaited_seconds(self._local_rank)
                if seconds >= WAITING_SECONDS:
                    self._send(Waiting(server.describe(), seconds))

    def _send_error(self, error: BagelplaneError, *, fatal: bool) -> None:
        text = str(BagelplaneError(error.what, got=error.got, expected=error.expected))
        self._send(Error(_code(error), text, error.fix, fatal))

    def _send(self, message: Message) -> None:
        if self._told_all or self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.warning("%s: it does not read what it is sent; its connection is closed", self.client)
            self._writer.transport.abort()
            return
        self._writer.write(encode(message))


def _code(error: BagelplaneError) -> str:
    code = "busy" if isinstance(error, BusyError) else getattr(error, "code", "") or error_code(error)
    if isinstance(error, ProtocolError) and code == "internal":
        code = "protocol"
    return code if code in ERROR_CODES else "internal"
