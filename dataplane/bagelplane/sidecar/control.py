"""The pipe between supervisor and producer: a socket pair with length-prefixed JSON maps, both ways.

    supervisor to producer: setup (first, once), ack{step}, stop
    producer to supervisor: ready, no_room{step}, store{away}, published, known_bad, failed

JSON, because the state of a pack is JSON and must come through as it is. Both ends are ours and of one
release; lengths are checked all the same, so that a mistake is an error and not an endless read.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

from bagelplane.errors import ProtocolError

MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct("<I")

Frame = dict[str, Any]


def encode_frame(frame: Frame) -> bytes:
    data = json.dumps(frame, separators=(",", ":")).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise ProtocolError("a control message is too large", got=f"{len(data)} bytes")
    return _LENGTH.pack(len(data)) + data


def send_frame(sock: socket.socket, frame: Frame) -> None:
    """Blocking; OSError when the other end is gone."""
    sock.sendall(encode_frame(frame))


def receive_frame(sock: socket.socket) -> Frame | None:
    """Blocking; None when the other end is gone."""
    prefix = _receive_exactly(sock, _LENGTH.size)
    if prefix is None:
        return None
    body = _receive_exactly(sock, _checked(prefix))
    return None if body is None else _parse(body)


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """The same for the supervisor's loop; None at the end, also within a frame (a producer was killed)."""
    try:
        prefix = await reader.readexactly(_LENGTH.size)
        return _parse(await reader.readexactly(_checked(prefix)))
    except (asyncio.IncompleteReadError, OSError):
        return None


def _receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            chunk = sock.recv(size - len(parts))
        except OSError:
            return None
        if not chunk:
            return None
        parts += chunk
    return bytes(parts)


def _checked(prefix: bytes) -> int:
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError("a control message announces too many bytes", got=str(length))
    assert isinstance(length, int)
    return length


def _parse(body: bytes) -> Frame:
    frame = json.loads(body)
    assert isinstance(frame, dict)
    return frame
