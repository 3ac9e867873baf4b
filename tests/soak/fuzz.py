"""Damaged and made-up bytes for all that reads what others wrote: an error of ours or a valid value, never more.

    python -m tests.soak.fuzz [--inputs 1000000] [--seed N] [--only NUMBER]

Inputs are valid messages, records and rings, changed in a few places: bits, bytes, numbers, pieces lost, doubled or
exchanged, and checksums put right again, so that what lies behind them is reached. Input number n of a seed is
always the same one: what goes wrong names both, and `--only` runs it alone. An input that takes longer than
`HANG_SECONDS` ends the process with the place where it hangs.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import random
import resource
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from bagelplane.errors import BagelplaneError
from bagelplane.shm.protocol import (
    CLIENT_MESSAGES,
    SIDECAR_MESSAGES,
    Message,
    MessageSocket,
    Status,
    decode,
    encode,
)
from bagelplane.shm.record import read_record, record_size, write_record
from bagelplane.shm.ring import HEADER_BYTES, RECORD_HEADER_BYTES, Record, RingReader, RingWriter
from tests.integration.fake_sidecar import make_pack
from tests.protocol_messages import FROM_CLIENT, FROM_SIDECAR

HANG_SECONDS = 30.0
_MEMORY_BYTES = 2 * 2**30
"""More than this for small inputs is a finding: MemoryError is no error of ours."""
_BATCH = 500
_MESSAGES = (*FROM_CLIENT, *FROM_SIDECAR)
_NUMBERS = (0, 1, 2, 63, 64, 127, 128, 255, 4095, 4096, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1,
            2**47, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 2**63, 2**64 - 1, 0.5, float("nan"), float("inf"), "", "x" * 300, b"bytes", [],
    [[]], {}, {"a": {"b": [1]}}, {1: 2}, "latest", "step", "state", [0] * 50, msgpack.Timestamp(1), "\ud800"
)  # fmt: skip


@dataclass(slots=True)
class Outcome:
    seed: int
    inputs: int = 0
    seconds: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    """Inputs that ended with an error of ours, by target."""
    accepted: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        targets = ", ".join(
            f"{name} {self.refused[name]} refused and {self.accepted[name]} valid" for name in sorted(TARGETS)
        )
        rate = self.inputs / self.seconds
        return f"{self.inputs} inputs in {self.seconds:.0f} s ({rate:,.0f} a second), seed {self.seed}: {targets}"


class FoundError(AssertionError):
    """An input whose outcome was neither; says how to run it again."""


class Fuzzer:
    """Valid inputs, and a folder on a memory file system for ring files."""

    def __init__(self, folder: Path) -> None:
        self._ring_path = folder / "ring-0.bin"
        self._records = [_record_bytes(step) for step in range(6)]
        self._rings, self._published = _ring_bytes(folder / "valid.bin")

    def run(self, inputs: int, seed: int, *, first: int = 0) -> Outcome:
        """FoundError at the first input that is answered in another way. (A hang ends the process.)"""
        outcome, begun = Outcome(seed), time.monotonic()
        names = itertools.cycle(_TURNS)
        for _ in range(first % len(_TURNS)):
            next(names)
        try:
            for number in range(first, first + inputs):
                if number % _BATCH == 0 or number == first:
                    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
                name = next(names)
                try:
                    TARGETS[name](self, random.Random((seed << 40) + number))
                    outcome.accepted[name] += 1
                except BagelplaneError:
                    outcome.refused[name] += 1
                except Exception as error:
                    again = f"python -m tests.soak.fuzz --seed {seed} --only {number}"
                    raise FoundError(f"{name}: {type(error).__name__}: {error}; again by: {again}") from error
                outcome.inputs += 1
        finally:
            faulthandler.cancel_dump_traceback_later()
        outcome.seconds = time.monotonic() - begun
        return outcome

    # -- targets: return for a value that is valid in every part, else raise

    def fuzz_message(self, draws: random.Random) -> None:
        """One message's body, by either side's list."""
        message = draws.choice(_MESSAGES)
        change = draws.choice((_with_other_fields, mutate))
        body = bytes(change(bytearray(encode(message)[4:]), draws))
        fits = message.TYPE in CLIENT_MESSAGES and type(message) is not Status
        ours = fits if draws.random() < 0.9 else not fits
        _check_message(decode(body, CLIENT_MESSAGES if ours else SIDECAR_MESSAGES))

    def fuzz_stream(self, draws: random.Random) -> None:
        """Some messages one after the other, in pieces, with damage anywhere: in the lengths too."""
        data = bytearray(b"".join(encode(draws.choice(FROM_CLIENT)) for _ in range(draws.randrange(1, 5))))
        if draws.random() < 0.8:
            data = mutate(data, draws)
        messages = MessageSocket(_Pieces(bytes(data), draws), CLIENT_MESSAGES)  # type: ignore[arg-type]
        while True:
            try:
                message = messages.receive(timeout_seconds=0)
            except ConnectionResetError:
                return  # the stream's end
            assert message is not None
            _check_message(message)

    def fuzz_record(self, draws: random.Random) -> None:
        """The bytes of a pack."""
        data = mutate(bytearray(draws.choice(self._records)), draws, tail=draws.random() < 0.7)
        pack, images = read_record(memoryview(bytes(data)))
        assert pack.step >= 0
        for array in (*pack.arrays.values(), *images):
            assert not array.flags.writeable
            array.tobytes()  # every byte of it can be read

    def fuzz_ring(self, draws: random.Random) -> None:
        """A whole file: its header, its records' headers, its length; then what its packs say."""
        data = bytearray(draws.choice(self._rings))
        for _ in range(draws.randrange(1, 4)):
            offset, size = draws.choice(((0, 80), *((record, 64) for record in self._record_offsets())))
            data[offset : offset + size] = mutate(data[offset : offset + size], draws)[:size].ljust(
                size, b"\0"
            )
            if draws.random() < 0.7:
                data[offset + 60 : offset + 64] = struct.pack("<I", zlib.crc32(data[offset : offset + 60]))
        if draws.random() < 0.1:
            del data[draws.randrange(len(data)) :]
        self._ring_path.write_bytes(data)
        reader = RingReader(self._ring_path)
        try:
            _read_packs(reader, list(itertools.islice(reader.unreleased(), 1000)))
        finally:
            reader.close()

    def fuzz_announcement(self, draws: random.Random) -> None:
        """A sound ring, and a doorbell that says something else than is true."""
        self._ring_path.write_bytes(self._rings[0])
        record = draws.choice(self._published)
        name = draws.choice(("step", "offset_bytes", "length_bytes", "epoch"))
        value = draws.choice((*_NUMBERS, getattr(record, name) + draws.randrange(-70, 70)))
        reader = RingReader(self._ring_path)
        try:
            _read_packs(reader, [replace(record, **{name: max(value, 0)})])
        finally:
            reader.close()

    def _record_offsets(self) -> list[int]:
        return [record.offset_bytes - RECORD_HEADER_BYTES for record in self._published]


TARGETS: dict[str, Callable[[Fuzzer, random.Random], None]] = {
    "message": Fuzzer.fuzz_message,
    "stream": Fuzzer.fuzz_stream,
    "record": Fuzzer.fuzz_record,
    "ring": Fuzzer.fuzz_ring,
    "announcement": Fuzzer.fuzz_announcement,
}
_TURNS = (*("message",) * 4, *("stream",) * 2, *("record",) * 4, *("ring",) * 2, "announcement")


# ---- changing


def mutate(data: bytearray, draws: random.Random, *, tail: bool = False) -> bytearray:
    """`data` with one to four changes; with `tail` in its last 2000 bytes only, where a record's contents lie."""
    for _ in range(draws.choice((1, 1, 1, 2, 3, 4))):
        begin = max(0, len(data) - 2000) if tail else 0
        place = draws.randrange(begin, len(data)) if len(data) > begin else begin
        draws.choice(_MUTATIONS)(data, place, draws)
    return data


def _flip(data: bytearray, place: int, draws: random.Random) -> None:
    if data:
        data[place] ^= 1 << draws.randrange(8)


def _set(data: bytearray, place: int, draws: random.Random) -> None:
    if data:
        data[place] = draws.choice((0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xD9, 0xDF, 0xFF, draws.randrange(256)))


def _number(data: bytearray, place: int, draws: random.Random) -> None:
    code, size = draws.choice((("<Q", 8), ("<I", 4), (">Q", 8), (">I", 4)))
    place -= place % draws.choice((1, size))
    value = draws.choice(_NUMBERS) & (2 ** (8 * size) - 1)
    data[place : place + size] = struct.pack(code, value)[: len(data) - place]


def _lose(data: bytearray, place: int, draws: random.Random) -> None:
    del data[place : place + draws.choice((1, 2, 8, 64, len(data)))]


def _double(data: bytearray, place: int, draws: random.Random) -> None:
    data[place:place] = data[place : place + draws.choice((1, 4, 64))]


def _exchange(data: bytearray, place: int, draws: random.Random) -> None:
    size = draws.choice((1, 8, 64))
    other = draws.randrange(len(data)) if data else 0
    data[place : place + size] = data[other : other + size]


def _scatter(data: bytearray, place: int, draws: random.Random) -> None:
    data[place : place + 8] = draws.randbytes(min(8, len(data) - place))


_MUTATIONS = (_flip, _set, _number, _number, _lose, _double, _exchange, _scatter)


def _with_other_fields(body: bytes | bytearray, draws: random.Random) -> bytes:
    """Good msgpack with something wrong in the map."""
    fields = msgpack.unpackb(body)
    inner = fields.get("resume") if draws.random() < 0.5 else None
    changed = inner if isinstance(inner, dict) else fields
    for _ in range(draws.randrange(1, 3)):
        name = draws.choice([*changed, "more"])
        if draws.random() < 0.2:
            changed.pop(name, None)
        else:
            changed[name] = draws.choice((*_VALUES, *_NUMBERS, draws.choice(list(changed.values()) or [0])))
    packed: bytes = msgpack.packb(fields, use_bin_type=True, unicode_errors="surrogatepass")
    return packed


# ---- valid inputs, and what is valid


def _record_bytes(step: int) -> bytes:
    pack, images = make_pack(step)
    buffer = bytearray(record_size(pack))
    for place, image in zip(write_record(pack, memoryview(buffer)), images, strict=True):
        place[...] = image
    return bytes(buffer)


def _ring_bytes(path: Path) -> tuple[list[bytes], list[Record]]:
    """Rings of four pages: with three packs; with packs after filler, at the data's end and begin; empty."""
    writer = RingWriter.create(path, capacity_bytes=16 * 1024, epoch=7)
    rings, published = [], []
    payload = _record_bytes(0)[:2000]
    try:
        for step in range(3):
            writer.reserve(len(payload), timeout_seconds=0)[:] = payload
            published.append(writer.publish(step))
        rings.append(path.read_bytes())
        for step in range(3, 20):
            writer.release(step - 3)
            writer.reserve(len(payload), timeout_seconds=0)[:] = payload
            writer.publish(step)
        rings.append(path.read_bytes())
        writer.reset(8)
        rings.append(path.read_bytes())
    finally:
        writer.close(unlink=True)
    assert all(len(ring) == HEADER_BYTES + 16 * 1024 for ring in rings)
    return rings, published


class _Pieces:
    """A socket that gives its bytes in pieces and then ends."""

    def __init__(self, data: bytes, draws: random.Random) -> None:
        self._data, self._draws = data, draws

    def settimeout(self, seconds: float) -> None:
        pass

    def recv(self, size: int) -> bytes:
        taken = min(size, self._draws.choice((1, 3, 100, 10_000)))
        piece, self._data = self._data[:taken], self._data[taken:]
        return piece


def _check_message(message: Message) -> None:
    accepted = CLIENT_MESSAGES if message.TYPE in CLIENT_MESSAGES else SIDECAR_MESSAGES
    if type(message) is Status:
        accepted = SIDECAR_MESSAGES
    sent = encode(message)
    assert encode(decode(sent[4:], accepted)) == sent, "another message comes out than went in"


def _read_packs(reader: RingReader, records: list[Record]) -> None:
    for record in records:
        payload = reader.read(record)
        assert len(payload) == record.length_bytes
        np.frombuffer(payload, np.uint8).sum()  # every byte of it can be read
        payload.release()


def fuzz(inputs: int, seed: int | None = None, *, first: int = 0) -> Outcome:
    """Runs that many inputs; rings lie in shared memory."""
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="bagelplane-fuzz-", dir=memory if memory.is_dir() else None
    ) as name:
        return Fuzzer(Path(name)).run(inputs, seed, first=first)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, help="default: a new one")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this input alone")
    options = parser.parse_args()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, resource.RLIM_INFINITY))
    if options.only is not None:
        print(fuzz(1, options.seed, first=options.only))
    else:
        print(fuzz(options.inputs, options.seed))


if __name__ == "__main__":
    sys.exit(main())
