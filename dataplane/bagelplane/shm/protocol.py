"""The messages between trainer and sidecar: a length (u32, little-endian), then a msgpack map with a "type".

    client to sidecar: hello, attach, ack, snapshot, seek, status, detach
    sidecar to client: welcome, attached, published, snapshotted, status, waiting, error

Order: the client says `hello` and gets `welcome` (or `error`), says `attach` and gets `attached`, then one
`published` for each pack from `next_step` on, as packs become ready and without being asked; it answers each
with `ack` once it no longer refers to the ring. `snapshot` is answered by `snapshotted`, `seek` by a new
`attached`, `status` (allowed without `attach`) by `status`. `waiting` may come at any time. `error` with
`fatal` ends the connection; without it the client may try the same again.

Everything that arrives is checked field by field; what does not fit is a `ProtocolError`, and the connection
that sent it is to be closed. Nothing else suffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import struct
import time
import types
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import msgpack

from bagelplane.errors import ProtocolError

PROTOCOL_VERSION = 1
OLDEST_VERSION = 1
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""States are 64 KB at most; the rest is for known-bad lists and status. Larger announcements are refused
unread.
"""

SOCKET_NAME = "sidecar.sock"

_LENGTH = struct.Struct("<I")
_MAX_DEPTH = 64
_UNPACK_ERRORS = (ValueError, TypeError, OverflowError, RecursionError, MemoryError, msgpack.UnpackException)
"""What msgpack raises for bytes that are not msgpack; its own classes are ValueErrors, most of them."""
_MAX_UINT64 = 2**64 - 1
PLACE_LIMIT = 10**12
"""Steps and positions to resume at are below: no run gets there, and planning forward to a mistyped one has no end."""


def ring_name(number: int) -> str:
    """File name of one of the pod's rings, a data-parallel rank's, in the run directory."""
    return f"ring-{number}.bin"


ResumeMode = Literal["latest", "step", "position", "state", "none"]
ERROR_CODES = (
    "protocol",
    "version",
    "attach",
    "generation",
    "busy",
    "spec",
    "data",
    "storage",
    "ring",
    "snapshot",
    "internal",
)
"""What `Error.code` says in this release. A client shows the message of an unknown one all the same."""


@dataclass(frozen=True, slots=True)
class Message:
    """Root of all messages."""

    TYPE: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class Resume:
    """Where an attached rank begins.

    latest: the next unacknowledged step, else the newest snapshot, else the start. none: the start.
    step: `step` packs are behind, so pack number `step` comes first. position: `position` packs of all ranks
    together are behind. state: `state`, as a pack carried it; `step` is then the number of packs behind it.
    """

    mode: ResumeMode = "latest"
    step: int | None = None
    state: dict[str, Any] | None = None
    position: int | None = None

    def __post_init__(self) -> None:
        if self.mode in ("step", "state") and self.step is None:
            raise ProtocolError(f"resume mode {self.mode!r} came without a step")
        if self.mode == "position" and self.position is None:
            raise ProtocolError("resume mode 'position' came without a position")
        if self.mode == "state" and self.state is None:
            raise ProtocolError("resume mode 'state' came without a state")
        if max(self.step or 0, self.position or 0) >= PLACE_LIMIT:
            raise ProtocolError(
                "no run gets to the place to resume at", got=f"step {self.step}, position {self.position}",
                expected=f"numbers below {PLACE_LIMIT}", fix="correct the number",
            )  # fmt: skip


# ---- client to sidecar


@dataclass(frozen=True, slots=True)
class Hello(Message):
    TYPE: ClassVar[str] = "hello"
    version: int
    """Newest protocol version that the client speaks."""
    client: str
    """For logs: name, release, process id."""


@dataclass(frozen=True, slots=True)
class Attach(Message):
    TYPE: ClassVar[str] = "attach"
    rank: int
    """Data-parallel rank: whose packs are wanted."""
    local_rank: int
    """Which of the pod's processes this is."""
    world_size: int
    """Data-parallel ranks in all."""
    generation: int = 0
    """Generation of the BagelDataset that the trainer's pod was made for; 0 is unknown."""
    resume: Resume = field(default_factory=Resume)
    readers: int = field(default=1, metadata={"added": True})
    """How many processes of the pod read this data-parallel rank, each as a local rank of its own."""
    spec_hash: str = field(default="", metadata={"added": True})
    """What the place to resume at belongs to, where that is another data set than the sidecar's `welcome` named."""

    def __post_init__(self) -> None:
        if not self.rank < self.world_size:
            raise ProtocolError(
                "attach names a rank outside its world",
                got=f"rank {self.rank} of world size {self.world_size}",
                fix="check RANK and WORLD_SIZE of the trainer",
            )
        if self.readers < 1:
            raise ProtocolError("attach names a rank without readers", got=f"readers {self.readers}")


@dataclass(frozen=True, slots=True)
class Ack(Message):
    TYPE: ClassVar[str] = "ack"
    step: int
    """This pack was taken, and all before it; their slots are free."""
    stalled_seconds: float = 0.0
    """How long the trainer stood still for packs since the acknowledgement before, as it measured itself."""

    def __post_init__(self) -> None:
        if self.stalled_seconds < 0:
            raise ProtocolError("an acknowledgement tells of negative time", got=f"{self.stalled_seconds} s")


@dataclass(frozen=True, slots=True)
class Snapshot(Message):
    TYPE: ClassVar[str] = "snapshot"


@dataclass(frozen=True, slots=True)
class Seek(Message):
    TYPE: ClassVar[str] = "seek"
    step: int
    """Number of the pack that is to come next."""


@dataclass(frozen=True, slots=True)
class StatusRequest(Message):
    TYPE: ClassVar[str] = "status"


@dataclass(frozen=True, slots=True)
class Detach(Message):
    TYPE: ClassVar[str] = "detach"


# ---- sidecar to client


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    TYPE: ClassVar[str] = "welcome"
    version: int
    """The version that both will speak."""
    dataset: str
    spec_hash: str


@dataclass(frozen=True, slots=True)
class Attached(Message):
    TYPE: ClassVar[str] = "attached"
    ring_path: str
    epoch: int
    ring_bytes: int
    """Capacity of the ring's data region."""
    next_step: int
    position: int = 0
    """Packs of all ranks together behind `next_step` of this rank."""
    streams: int = 0
    """Elastic sharding: the number of streams; 0 with Bagel sharding."""


@dataclass(frozen=True, slots=True)
class Published(Message):
    """The doorbell: a pack is ready."""

    TYPE: ClassVar[str] = "published"
    step: int
    offset_bytes: int
    """Where the record's payload begins, from the start of the ring file."""
    length_bytes: int
    """Length of the payload."""
    epoch: int


@dataclass(frozen=True, slots=True)
class Snapshotted(Message):
    TYPE: ClassVar[str] = "snapshotted"
    step: int
    """Number of packs behind the snapshot."""
    uri: str


@dataclass(frozen=True, slots=True)
class Status(Message):
    TYPE: ClassVar[str] = "status"
    status: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Waiting(Message):
    TYPE: ClassVar[str] = "waiting"
    what: str
    since_seconds: float


@dataclass(frozen=True, slots=True)
class Error(Message):
    TYPE: ClassVar[str] = "error"
    code: str
    message: str
    fix: str = ""
    fatal: bool = True


CLIENT_MESSAGES: Mapping[str, type[Message]] = {
    cls.TYPE: cls for cls in (Hello, Attach, Ack, Snapshot, Seek, StatusRequest, Detach)
}
"""What a sidecar accepts."""
SIDECAR_MESSAGES: Mapping[str, type[Message]] = {
    cls.TYPE: cls for cls in (Welcome, Attached, Published, Snapshotted, Status, Waiting, Error)
}
"""What a client accepts."""


def negotiate(client_version: int) -> int:
    """The version to speak with a client whose newest is `client_version`; ProtocolError if there is none."""
    if client_version < OLDEST_VERSION:
        raise ProtocolError(
            "the client's protocol is too old",
            got=f"version {client_version}",
            expected=f"{OLDEST_VERSION} to {PROTOCOL_VERSION}",
            fix="install the same bagelplane release in the trainer's image as in the sidecar's",
        )
    return min(client_version, PROTOCOL_VERSION)


# ---- encode and decode


def encode(message: Message) -> bytes:
    """The message as one frame, length included. ProtocolError when it is too large or holds what msgpack
    cannot.
    """
    body = {"type": message.TYPE, **_to_plain(message)}
    try:
        data: bytes = msgpack.packb(body, use_bin_type=True)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a {message.TYPE!r} message cannot be encoded: {error}") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a {message.TYPE!r} message is too large",
            got=f"{len(data)} bytes",
            expected=f"at most {MAX_MESSAGE_BYTES}",
        )
    return _LENGTH.pack(len(data)) + data


def decode(body: bytes | bytearray | memoryview, accepted: Mapping[str, type[Message]]) -> Message:
    """The message in `body` (a frame without its length). Anything that does not fit is a ProtocolError."""
    try:
        value = msgpack.unpackb(
            body, raw=False, strict_map_key=True, max_ext_len=0, ext_hook=_refuse_extension
        )
    except _UNPACK_ERRORS as error:
        raise ProtocolError(f"a message is not msgpack: {type(error).__name__}: {error}"[:300]) from None
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise ProtocolError('a message is no map with a "type"', got=_short(value))
    kind = value.pop("type")
    cls = accepted.get(kind)
    if cls is None:
        raise ProtocolError("a message has an unknown type", got=_short(kind), expected=", ".join(accepted))
    message = _build(cls, value, kind)
    assert isinstance(message, Message)
    return message


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _to_plain(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for item in fields(value):
        content = getattr(value, item.name)
        if item.metadata.get("added") and content == item.default:
            continue  # an older sidecar does not know it
        plain[item.name] = _to_plain(content) if isinstance(content, Resume) else content
    return plain


_CHECKS: dict[type, dict[str, Callable[[Any], bool]]] = {}


def _build(cls: type, value: dict[str, Any], where: str) -> Any:
    """An instance of the dataclass from a decoded map: no unknown names, none missing, every type right."""
    checks = _CHECKS.get(cls)
    if checks is None:
        hints = get_type_hints(cls)
        checks = _CHECKS[cls] = {item.name: _checker(hints[item.name]) for item in fields(cls)}
    for name, content in value.items():
        if name not in checks:
            raise ProtocolError(f"a {where!r} message has an unknown field", got=_short(name))
        if not checks[name](content):
            raise ProtocolError(f"a {where!r} message has a wrong {name!r}", got=_short(content))
    arguments = dict(value)
    if cls is Attach and "resume" in arguments:
        arguments["resume"] = _build(Resume, arguments["resume"], "attach.resume")
    try:
        return cls(**arguments)
    except TypeError:
        missing = [item.name for item in fields(cls) if item.name not in arguments]
        raise ProtocolError(f"a {where!r} message lacks fields", got=", ".join(missing)) from None


def _checker(hint: Any) -> Callable[[Any], bool]:
    """Whether a decoded value fits a field's type. Integers are 0 to 2**64 - 1: all of ours count things."""
    origin = get_origin(hint)
    if origin is Literal:
        allowed = get_args(hint)
        return lambda value: isinstance(value, str) and value in allowed
    if origin in (Union, types.UnionType):
        parts = [_checker(part) for part in get_args(hint)]
        return lambda value: any(part(value) for part in parts)
    if hint is Resume or origin is dict:
        return lambda value: isinstance(value, dict) and _is_json(value)
    return _PLAIN_CHECKS[hint]


_PLAIN_CHECKS: Mapping[type, Callable[[Any], bool]] = {
    int: lambda value: type(value) is int and 0 <= value <= _MAX_UINT64,
    float: lambda value: type(value) in (int, float) and math.isfinite(value),
    str: lambda value: type(value) is str,
    bool: lambda value: type(value) is bool,
    type(None): lambda value: value is None,
}


def _is_json(value: Any, depth: int = 0) -> bool:
    # Deep nesting is legal msgpack and would exhaust the stack of whoever walks it later.
    if depth > _MAX_DEPTH:
        return False
    if isinstance(value, dict):
        return all(_is_json(item, depth + 1) for item in value.values())
    if isinstance(value, list):
        return all(_is_json(item, depth + 1) for item in value)
    return value is None or isinstance(value, (str, int, float))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---- blocking sockets, for the client


class MessageSocket:
    """A connected Unix stream socket that sends and receives whole messages, each with a deadline.

    Not for use by two threads at once. Receiving never loses part of a message: a frame that is incomplete at
    the deadline is continued by the next call.
    """

    def __init__(self, sock: socket.socket, accepted: Mapping[str, type[Message]]) -> None:
        self._sock = sock
        self._accepted = accepted
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def send(self, message: Message, *, timeout_seconds: float) -> None:
        """TimeoutError when the other side does not take it in time; OSError when it is gone."""
        self._sock.settimeout(max(timeout_seconds, 0.001))
        self._sock.sendall(encode(message))

    def leave(self, message: Message, *, timeout_seconds: float) -> None:
        """Sends a last message and waits until the other side has closed: it has then read all that was sent.

        Closing at once would be a reset where something is unread here, and what was sent last could be lost.
        """
        deadline = time.monotonic() + timeout_seconds
        self.send(message, timeout_seconds=timeout_seconds)
        self._sock.shutdown(socket.SHUT_WR)
        while (left_seconds := deadline - time.monotonic()) > 0:
            self._sock.settimeout(left_seconds)
            if not self._sock.recv(65536):
                return

    def receive(self, *, timeout_seconds: float) -> Message | None:
        """The next message, or None if none was complete in time. ConnectionError at the stream's end."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            body = self._take_frame()
            if body is not None:
                return decode(body, self._accepted)
            # One look without waiting even when the deadline is past: what has arrived is given.
            self._sock.settimeout(max(deadline - time.monotonic(), 0.0))
            try:
                chunk = self._sock.recv(65536)
            except (TimeoutError, BlockingIOError):
                return None
            if not chunk:
                raise ConnectionResetError("the other side closed the connection")
            self._buffer += chunk

    def _take_frame(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        length = checked_length(self._buffer)
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return body


def checked_length(prefix: bytes | bytearray) -> int:
    """Length in bytes that the frame's first four bytes announce; ProtocolError above the limit."""
    (length,) = _LENGTH.unpack_from(prefix)
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            "a message announces too many bytes",
            got=str(length),
            expected=f"at most {MAX_MESSAGE_BYTES}",
            fix="look at what else writes to the socket",
        )
    assert isinstance(length, int)
    return length


# ---- asyncio, for the sidecar


class _WholeStream(asyncio.StreamReaderProtocol):
    """A connection whose reader gets all that arrived before it broke, and then an end like any other.

    asyncio drops what is unread when a write fails or a reset comes: the last acknowledgements of a trainer that
    exits with doorbells unread.
    """

    def __init__(
        self, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    ) -> None:
        self._whole_reader = asyncio.StreamReader()
        super().__init__(self._whole_reader, serve)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection = transport.get_extra_info("socket")
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, ConnectionError):
            self._read_rest()
            exc = None
        super().connection_lost(exc)

    def _read_rest(self) -> None:
        # Called before the transport closes the socket; its own descriptor is not for reading past it.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as rest:
            rest.setblocking(False)
            while chunk := rest.recv(65536):
                self._whole_reader.feed_data(chunk)


async def serve_unix(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], sock: socket.socket
) -> asyncio.Server:
    """Calls `serve` for each connection to the bound Unix socket; a connection that breaks ends like any other."""
    return await asyncio.get_running_loop().create_unix_server(lambda: _WholeStream(serve), sock=sock)


async def read_message(
    reader: asyncio.StreamReader, accepted: Mapping[str, type[Message]] = CLIENT_MESSAGES
) -> Message | None:
    """The next message; None at the orderly end of the stream. ProtocolError: garbage, half a message."""
    try:
        prefix = await reader.readexactly(_LENGTH.size)
        body = await reader.readexactly(checked_length(prefix))
    except asyncio.IncompleteReadError as error:
        if error.partial or error.expected != _LENGTH.size:
            raise ProtocolError("the connection ended within a message") from None
        return None
    return decode(body, accepted)


async def write_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """Sends one message and waits until the transport has room again. The caller sets the deadline."""
    writer.write(encode(message))
    await writer.drain()
