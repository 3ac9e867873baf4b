"""What holds of the messages between trainer and sidecar."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bagelplane.errors import ProtocolError
from bagelplane.shm.protocol import (
    CLIENT_MESSAGES,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    SIDECAR_MESSAGES,
    Ack,
    Message,
    MessageSocket,
    Status,
    decode,
    encode,
    negotiate,
    read_message,
    write_message,
)
from tests.protocol_messages import FROM_CLIENT, FROM_SIDECAR

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=4)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["version", "client", "rank", "local_rank", "world_size", "generation", "resume", "step", "state", "mode"]
)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@pytest.mark.parametrize("message", FROM_CLIENT, ids=repr)
def test_client_messages_survive_the_journey(message: Message) -> None:
    assert decode(encode(message)[4:], CLIENT_MESSAGES) == message


@pytest.mark.parametrize("message", FROM_SIDECAR, ids=repr)
def test_sidecar_messages_survive_the_journey(message: Message) -> None:
    assert decode(encode(message)[4:], SIDECAR_MESSAGES) == message


@given(st.binary(max_size=200))
@example(b"\xd6\xff\x00\x00\x00\x00")  # a timestamp extension
@example(b"\x91" * 5000)  # nesting without end
@example(b"\xdf\xff\xff\xff\xff")  # a map that announces 4 G entries
@example(b"\xc1")
def test_garbage_is_a_protocol_error(body: bytes) -> None:
    for accepted in (CLIENT_MESSAGES, SIDECAR_MESSAGES):
        with pytest.raises(ProtocolError):
            decode(body, accepted)


@given(
    st.sampled_from(sorted(CLIENT_MESSAGES)) | st.text(max_size=5),
    st.dictionaries(NAMES | st.text(max_size=5), JSON, max_size=6),
)
def test_a_message_is_understood_whole_or_refused(kind: str, fields: dict[str, Any]) -> None:
    body = msgpack.packb({**fields, "type": kind}, use_bin_type=True)
    try:
        message = decode(body, CLIENT_MESSAGES)
    except ProtocolError:
        return
    assert decode(encode(message)[4:], CLIENT_MESSAGES) == message


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"type": "ack"}, "step"),
        ({"type": "ack", "step": -1}, "step"),
        ({"type": "ack", "step": True}, "step"),
        ({"type": "ack", "step": 1.0}, "step"),
        ({"type": "ack", "step": 1, "more": 2}, "more"),
        ({"type": "hello", "version": 1, "client": b"x"}, "client"),
        ({"type": "published"}, "published"),
        ({"type": 3}, "type"),
        ({"type": "attach", "rank": 2, "local_rank": 0, "world_size": 2}, "rank 2 of world size 2"),
        (
            {"type": "attach", "rank": 0, "local_rank": 0, "world_size": 1, "resume": {"mode": "step"}},
            "without a step",
        ),
        ({"type": "attach", "rank": 0, "local_rank": 0, "world_size": 1, "resume": {"mode": "now"}}, "mode"),
        *(
            (
                {"type": "attach", "rank": 0, "local_rank": 0, "world_size": 1, "resume": resume},
                "no run gets",
            )
            for resume in ({"mode": "step", "step": 10**12}, {"mode": "position", "position": 10**15})
        ),
        (
            {
                "type": "attach",
                "rank": 0,
                "local_rank": 0,
                "world_size": 1,
                "resume": {"mode": "state", "step": 1, "state": {"a": b"bytes"}},
            },
            "resume",
        ),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], word: str) -> None:
    with pytest.raises(ProtocolError, match=word):
        decode(msgpack.packb(body), CLIENT_MESSAGES)


def test_an_older_client_is_spoken_to_in_its_version_and_a_too_old_one_is_told() -> None:
    assert negotiate(PROTOCOL_VERSION + 5) == PROTOCOL_VERSION
    with pytest.raises(ProtocolError, match="same bagelplane release"):
        negotiate(0)


def test_a_message_above_the_limit_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ProtocolError, match="too large"):
        encode(Status({"x": "y" * MAX_MESSAGE_BYTES}))


def test_what_msgpack_cannot_hold_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="status"):
        encode(Status({"x": 2**70}))


def test_an_announcement_above_the_limit_is_refused_unread(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    left, right = sockets
    left.sendall(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
    with pytest.raises(ProtocolError, match="too many bytes"):
        MessageSocket(right, CLIENT_MESSAGES).receive(timeout_seconds=5)


def test_half_a_message_at_the_deadline_is_completed_later(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    left, right = sockets
    receiver = MessageSocket(right, CLIENT_MESSAGES)
    frame = encode(Ack(5)) + encode(Ack(6))
    left.sendall(frame[:7])
    assert receiver.receive(timeout_seconds=0) is None
    left.sendall(frame[7:])
    assert receiver.receive(timeout_seconds=5) == Ack(5)
    assert receiver.receive(timeout_seconds=0) == Ack(6)


def test_the_end_of_the_stream_is_a_connection_error(sockets: tuple[socket.socket, socket.socket]) -> None:
    left, right = sockets
    left.close()
    with pytest.raises(ConnectionError):
        MessageSocket(right, CLIENT_MESSAGES).receive(timeout_seconds=5)


def test_a_peer_that_does_not_read_is_a_timeout(sockets: tuple[socket.socket, socket.socket]) -> None:
    sender = MessageSocket(sockets[0], CLIENT_MESSAGES)
    big = Status({"x": "y" * 1_000_000})
    with pytest.raises(TimeoutError):
        sender.send(big, timeout_seconds=0.05)


def test_the_sidecar_reads_and_writes_the_same_frames() -> None:
    async def talk() -> list[Message | None]:
        left, right = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=right)
        _, other = await asyncio.open_connection(sock=left)
        for message in FROM_CLIENT:
            await write_message(other, message)
        other.write_eof()
        got = [await read_message(reader) for _ in range(len(FROM_CLIENT) + 1)]
        for end in (writer, other):
            end.close()
            await end.wait_closed()
        return got

    assert asyncio.run(asyncio.wait_for(talk(), 10)) == [*FROM_CLIENT, None]


@pytest.mark.parametrize("data", [b"\x01", encode(Ack(1))[:-1]])
def test_a_connection_that_ends_within_a_message_is_a_protocol_error(data: bytes) -> None:
    async def talk() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        await read_message(reader)

    with pytest.raises(ProtocolError, match="within a message"):
        asyncio.run(asyncio.wait_for(talk(), 10))
