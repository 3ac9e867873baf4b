"""The ring: one preallocated file of variable-size records, written by one producer, mapped by its readers.

The format is `HEADER_FIELDS` and `RECORD_FIELDS` below; docs/reference/ring.md is made from them and lets a
reader in another language be written. In short: a header page, then `capacity_bytes` of data that are used in
a circle. Positions count bytes ever written (they never wrap; `position % capacity_bytes` is the place),
`head_position` ends the published part, `tail_position` begins the unreleased one. A record never crosses the
end of the data: a filler record does.

Who may do what: one process writes, kept alone by a lock on the file. In it, one thread reserves and
publishes, any thread may release or stop. Readers map the file read-only and never touch it; what they took,
they say over the socket. A record keeps its bytes from `publish` until its release; a new epoch (the producer
restarted, or was sent elsewhere) takes all of them back at once, so a reader that copied asks `is_intact`
before it believes its copy.

Sizing: capacity = packs held x (largest record + 64 bytes, rounded up to 64).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bagelplane.errors import RingError

RING_MAGIC = b"BGLPRING"
RECORD_MAGIC = 0x43455242
"""The bytes "BREC" in the file."""
RING_VERSION = 1
ALIGNMENT_BYTES = 64
HEADER_BYTES = 4096
RECORD_HEADER_BYTES = 64
KIND_PACK = 1
KIND_FILLER = 2

HEADER_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("magic", "8s", 'the bytes "BGLPRING"'),
    ("version", "I", "1; a reader refuses any other"),
    ("header_bytes", "I", "4096; where the data begin"),
    ("epoch", "Q", "changes when the producer starts again; all earlier records are void then"),
    ("capacity_bytes", "Q", "size of the data, a multiple of 4096"),
    ("alignment_bytes", "I", "64; every record begins at a multiple of it"),
    ("record_header_bytes", "I", "64; the payload begins this far into the record"),
    ("writer_pid", "Q", "process id of the producer, for people who look"),
    ("reserved", "12s", "zero"),
    ("checksum", "I", "CRC-32 (zlib) of the 60 bytes before it"),
    (
        "head_position",
        "Q",
        "end of the published records; one 8-byte store publishes. Not under the checksum",
    ),
    ("tail_position", "Q", "begin of the records not yet released. Not under the checksum"),
)
RECORD_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("magic", "I", 'the bytes "BREC"'),
    ("kind", "I", "1 a pack; 2 filler up to the end of the data, without content"),
    ("epoch", "Q", "epoch of the ring when it was written"),
    ("position", "Q", "position of this record's first byte"),
    ("step", "Q", "number of the pack in its rank's stream, from 0; 0 for filler"),
    ("length_bytes", "Q", "length of the payload, not rounded"),
    ("reserved", "20s", "zero"),
    ("checksum", "I", "CRC-32 (zlib) of the 60 bytes before it"),
)
_HEADER = struct.Struct("<" + "".join(code for _, code, _ in HEADER_FIELDS))
_RECORD = struct.Struct("<" + "".join(code for _, code, _ in RECORD_FIELDS))
_CHECKED_BYTES = 60
# The header seen as 8-byte words: these three are read and written as one store each.
_EPOCH_WORD, _HEAD_WORD, _TAIL_WORD = 2, 8, 9
_LOCK_PAUSE_SECONDS = 0.02
_LARGEST_CAPACITY_BYTES = 2**48


class RingStoppedError(RingError):
    """`stop` was called while a reservation waited."""

    reaction = "None: the producer is shutting down."


class StaleEpochError(RingError):
    """The ring has begun a new epoch: what was read or announced before is void."""

    reaction = "Attach again; the client does so by itself."


class RingCutError(RingError):
    """The file became shorter while it was in use: somebody cut it. Its bytes beyond the new end are gone."""

    reaction = "The sidecar makes the ring anew and the client attaches again, both by themselves."


@dataclass(frozen=True, slots=True)
class Record:
    """A published record, as the doorbell names it."""

    step: int
    offset_bytes: int
    """Where the payload begins, from the start of the file."""
    length_bytes: int
    epoch: int


def footprint_bytes(length_bytes: int) -> int:
    """Bytes that a record with this payload takes in the ring."""
    return _align(RECORD_HEADER_BYTES + length_bytes)


def _align(size: int, to: int = ALIGNMENT_BYTES) -> int:
    return (size + to - 1) // to * to


class RingWriter:
    """The producer's side. Make one with `create`."""

    def __init__(self, path: Path, fd: int, mapping: mmap.mmap, capacity_bytes: int, epoch: int) -> None:
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._fd = fd
        self._mapping = mapping
        self._view = memoryview(mapping)
        self._words = self._view[:HEADER_BYTES].cast("Q")
        self._changed = threading.Condition()
        self._barrier = threading.Lock()
        self._stopped = False
        self._unreleased: deque[tuple[Record, int]] = deque()  # with the position after it
        self._reserved: tuple[int, int] | None = None  # position, payload length
        self._head = self._tail = 0
        self._waiting_since = 0.0
        self.epoch = epoch
        self._begin_epoch(epoch)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        capacity_bytes: int,
        epoch: int | None = None,
        mode: int = 0o600,
        lock_timeout_seconds: float = 10.0,
    ) -> RingWriter:
        """Makes the file, or takes over one of the same size, under a new epoch. All its memory is allocated
        here.

        `capacity_bytes` is rounded up to 4096. `epoch` is by default larger than any before (nanoseconds of
        the clock). RingError: the volume is too small (the half-made file is removed), another producer holds
        the ring after `lock_timeout_seconds`, or the place cannot be written.
        """
        if sys.byteorder != "little":
            raise RingError("the ring needs a little-endian machine", got=sys.byteorder)
        if capacity_bytes <= 0:
            raise RingError("a ring needs room", got=f"{capacity_bytes} bytes", fix="raise dataplane.ring")
        where = Path(path)
        capacity = _align(capacity_bytes, HEADER_BYTES)
        size = HEADER_BYTES + capacity
        fd = _open_locked(where, size, mode, lock_timeout_seconds)
        try:
            _allocate(fd, where, size)
            previous = _previous_epoch(fd)
            mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException as error:
            with contextlib.suppress(OSError):
                where.unlink()
            os.close(fd)
            if isinstance(error, (OSError, ValueError)):
                raise RingError(f"the ring {where} cannot be mapped: {error}") from None
            raise
        if epoch is None:
            epoch = max(previous + 1, time.time_ns())
        return cls(where, fd, mapping, capacity, epoch)

    # -- writing (one thread)

    @property
    def largest_payload_bytes(self) -> int:
        return self.capacity_bytes - RECORD_HEADER_BYTES

    def check_fits(self, length_bytes: int) -> None:
        """RingError when a payload of this length can never be placed, however much is released."""
        if footprint_bytes(length_bytes) > self.capacity_bytes:
            raise RingError(
                "a pack does not fit into the ring",
                got=f"a record of {length_bytes} bytes",
                expected=f"at most {self.largest_payload_bytes} bytes (ring {self.path.name})",
                fix="raise dataplane.ring, or lower budgets.maxTokens",
            )

    def reserve(self, length_bytes: int, *, timeout_seconds: float | None = None) -> memoryview:
        """A writable place for a payload of `length_bytes`; waits until enough records are released.

        An earlier reservation that was not published is void. RingError: larger than the ring, or no room
        after `timeout_seconds` (None: no limit). RingStoppedError: `stop` was called.
        """
        self.check_fits(length_bytes)
        needed = footprint_bytes(length_bytes)
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._changed:
            self._reserved = None
            self._waiting_since = time.monotonic()
            while True:
                if self._stopped:
                    raise RingStoppedError("the ring was stopped while a pack waited for room")
                self._check_size()
                position = self._place(needed)
                if position is not None:
                    break
                rest = None if deadline is None else deadline - time.monotonic()
                if rest is not None and rest <= 0:
                    raise self._no_room(needed, timeout_seconds)
                self._changed.wait(rest)
            self._reserved = (position, length_bytes)
        start = self._offset(position) + RECORD_HEADER_BYTES
        return self._view[start : start + length_bytes]

    def has_room(self, length_bytes: int) -> bool:
        """Whether `reserve` would give a place for that many bytes without waiting."""
        self.check_fits(length_bytes)
        with self._changed:
            return self._place(footprint_bytes(length_bytes)) is not None

    def cancel(self) -> None:
        """Gives the reservation up. Nobody may write into it afterwards."""
        self._reserved = None

    def publish(self, step: int) -> Record:
        """Makes the reserved record visible: header first, then the one store that counts."""
        if self._reserved is None:
            raise RuntimeError("publish without a reservation")
        position, length = self._reserved
        self._reserved = None
        offset = self._offset(position)
        record = Record(step, offset + RECORD_HEADER_BYTES, length, self.epoch)
        end = position + footprint_bytes(length)
        with self._changed:
            self._check_size()
            self._unreleased.append((record, end))
            self._write_record_header(KIND_PACK, position, step, length)
            self._store_head(end)
        return record

    def reset(self, epoch: int | None = None) -> int:
        """Takes back all records under a new epoch, which it returns. Called by the writing thread."""
        with self._changed:
            self._reserved = None
            self._unreleased.clear()
            self._begin_epoch(max(self.epoch + 1, time.time_ns()) if epoch is None else epoch)
            self._changed.notify_all()
        return self.epoch

    # -- releasing and stopping (any thread)

    def release(self, step: int) -> int:
        """Frees the records up to and including `step`; how many those were. Unknown steps free nothing."""
        with self._changed:
            count = 0
            while self._unreleased and self._unreleased[0][0].step <= step:
                self._tail = self._unreleased.popleft()[1]
                count += 1
            if count:
                with contextlib.suppress(RingCutError):  # the writing thread is to say so
                    self._check_size()
                    self._words[_TAIL_WORD] = self._tail
                self._changed.notify_all()
        return count

    def unreleased(self) -> list[Record]:
        """Published records that no reader has released, oldest first: what a new reader is told again."""
        with self._changed:
            return [record for record, _ in self._unreleased]

    @property
    def used_bytes(self) -> int:
        """Bytes of the ring that hold unreleased records and filler."""
        return self._head - self._tail

    def stop(self) -> None:
        """Wakes a waiting `reserve`, and makes all later ones raise RingStoppedError."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self, *, unlink: bool = False) -> None:
        """Gives lock and descriptor back; the memory stays mapped until the last view of it is gone."""
        self.stop()
        if self._fd < 0:
            return
        if unlink:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        os.close(self._fd)
        self._fd = -1
        self._words.release()
        self._view.release()
        with contextlib.suppress(BufferError):  # a caller still holds a view; the last one unmaps
            self._mapping.close()

    # -- inside

    def _check_size(self) -> None:
        _check_size(self._fd, self.path, HEADER_BYTES + self.capacity_bytes)

    def _offset(self, position: int) -> int:
        return HEADER_BYTES + position % self.capacity_bytes

    def _place(self, needed: int) -> int | None:
        """Position for a record of `needed` bytes, after filler if it would cross the end; None while it is
        full.
        """
        room_to_end = self.capacity_bytes - self._head % self.capacity_bytes
        filler = room_to_end if needed > room_to_end else 0
        free = self.capacity_bytes - (self._head - self._tail)
        if filler and not self._unreleased:
            # Nothing to wait for: the filler is released at once, or a record above half the ring might never
            # fit.
            free += filler
        if filler + needed > free:
            return None
        if filler:
            self._write_record_header(KIND_FILLER, self._head, 0, filler - RECORD_HEADER_BYTES)
            self._store_head(self._head + filler)
            if not self._unreleased:
                self._tail = self._head
                self._words[_TAIL_WORD] = self._tail
        return self._head

    def _write_record_header(self, kind: int, position: int, step: int, length: int) -> None:
        offset = self._offset(position)
        fields = (RECORD_MAGIC, kind, self.epoch, position, step, length, b"")
        checked = _RECORD.pack(*fields, 0)[:_CHECKED_BYTES]
        self._view[offset : offset + RECORD_HEADER_BYTES] = checked + struct.pack("<I", zlib.crc32(checked))

    def _store_head(self, head: int) -> None:
        self._fence()
        self._words[_HEAD_WORD] = self._head = head

    def _fence(self) -> None:
        # Python has no memory fence. Taking and giving a lock twice is one on the machines we know: x86 keeps
        # the order of stores anyway; on ARM nothing moves before the second acquire past the first release,
        # nor after it. (`memoryview.cast("Q")` stores 8 bytes at once; struct.pack_into would go byte by
        # byte.)
        for _ in range(2):
            with self._barrier:
                pass

    def _begin_epoch(self, epoch: int) -> None:
        """The epoch word changes before anything that it protects does."""
        self.epoch = epoch
        self._words[_EPOCH_WORD] = epoch
        self._fence()
        self._head = self._tail = 0
        fields = (
            RING_MAGIC,
            RING_VERSION,
            HEADER_BYTES,
            epoch,
            self.capacity_bytes,
            ALIGNMENT_BYTES,
            RECORD_HEADER_BYTES,
            os.getpid(),
            b"",
        )
        checked = _HEADER.pack(*fields, 0, 0, 0)[:_CHECKED_BYTES]
        self._view[: _HEADER.size] = checked + struct.pack("<IQQ", zlib.crc32(checked), 0, 0)
        self._fence()

    def _no_room(self, needed: int, timeout_seconds: float | None) -> RingError:
        oldest = f"step {self._unreleased[0][0].step}" if self._unreleased else "nothing"
        return RingError(
            f"no room in {self.path.name} for {timeout_seconds} s: the trainer did not release {oldest}",
            got=f"{self.capacity_bytes - self.used_bytes} of {self.capacity_bytes} bytes free, "
            f"{len(self._unreleased)} packs unreleased",
            expected=f"{needed} bytes",
            fix="see whether the trainer of this rank still runs",
        )


def _open_locked(path: Path, size: int, mode: int, timeout_seconds: float) -> int:
    """Descriptor of a regular file of ours at `path`, with the writer's lock held. Its size is `size` or 0.

    A file of another size is unlinked, never truncated: a reader may still have it mapped, and would get
    SIGBUS.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            fd = os.open(path, flags, mode)
        except OSError as error:
            raise RingError(
                f"the ring {path} cannot be opened: {error.strerror}",
                fix="give BAGELPLANE_DIR a directory on a memory volume that this user may write",
            ) from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise RingError(f"the ring {path} is no regular file", fix="remove it")
            _lock(fd, path, deadline, timeout_seconds)
            status = os.fstat(fd)
            if _is_at(path, status) and status.st_size in (0, size):
                os.fchmod(fd, mode)
                return fd
            if _is_at(path, status):
                path.unlink()
        except OSError as error:
            os.close(fd)
            raise RingError(
                f"the ring {path} cannot be taken over: {error.strerror}", fix="remove it"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it was replaced while we waited for its lock, or had another size: once more


def _lock(fd: int, path: Path, deadline: float, timeout_seconds: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise RingError(
                    f"the ring {path} is in use by another producer after {timeout_seconds} s",
                    fix="end the other sidecar, or give this one a BAGELPLANE_DIR of its own",
                ) from None
        time.sleep(_LOCK_PAUSE_SECONDS)


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        now = path.lstat()
    except FileNotFoundError:
        return False
    return (now.st_dev, now.st_ino) == (status.st_dev, status.st_ino)


def _allocate(fd: int, path: Path, size: int) -> None:
    """Every page of the file, now: a volume too small says so here, and not by SIGBUS at step 40,000."""
    before = os.fstatvfs(fd)
    had = os.fstat(fd).st_blocks * 512
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM):
            raise
        free = before.f_bavail * before.f_frsize + had
        limit = f"{free} bytes free on {path.parent}" + (f", but {error.strerror}" if free >= size else "")
        raise RingError(
            "the volume is too small for the ring",
            got=limit,
            expected=f"{size} bytes",
            fix="raise the volume's sizeLimit and the container's memory limit, or lower dataplane.ring",
        ) from None


def _check_size(fd: int, path: Path, size_bytes: int) -> None:
    # A page behind a file's end is SIGBUS, which no program survives: look before each access. Who cuts the file in
    # the middle of one still ends a process; the supervisor starts producers again and says what happened.
    found = os.fstat(fd).st_size
    if found < size_bytes:
        raise RingCutError(
            f"the ring {path} was cut short while it was in use",
            got=f"{found} bytes",
            expected=f"{size_bytes} bytes",
            fix="let nothing but the sidecar write in its directory",
        )


def ring_problem(path: Path, capacity_bytes: int) -> str:
    """What befell a ring's file since it was made, in words; empty if nothing did."""
    try:
        found = path.lstat().st_size
    except FileNotFoundError:
        return "was deleted"
    expected = HEADER_BYTES + capacity_bytes
    return "" if found >= expected else f"was cut to {found} of {expected} bytes"


def _previous_epoch(fd: int) -> int:
    try:
        return _parse_header(os.pread(fd, _HEADER.size, 0)).epoch
    except RingError:
        return 0


@dataclass(frozen=True, slots=True)
class _Header:
    epoch: int
    capacity_bytes: int


def _parse_header(data: bytes | memoryview, where: str = "the ring") -> _Header:
    """RingError for anything that is not a header of this version, whole and consistent."""
    if len(data) < _HEADER.size:
        raise RingError(f"{where} is too short to be a ring", got=f"{len(data)} bytes")
    values = _HEADER.unpack_from(data)
    magic, version, header_bytes, epoch, capacity, alignment, record_header, _, _, checksum = values[:10]
    if magic != RING_MAGIC:
        raise RingError(f"{where} is not a bagelplane ring", got=repr(magic), fix="remove the file")
    if checksum != zlib.crc32(bytes(data[:_CHECKED_BYTES])):
        raise RingError(f"{where} has a damaged header", fix="restart the sidecar: it makes the ring anew")
    geometry = (version, header_bytes, alignment, record_header)
    expected = (RING_VERSION, HEADER_BYTES, ALIGNMENT_BYTES, RECORD_HEADER_BYTES)
    if geometry != expected:
        raise RingError(
            f"{where} has another format",
            got=f"version {version} {geometry[1:]}",
            expected=f"version {RING_VERSION} {expected[1:]}",
            fix="install the same bagelplane release on both sides",
        )
    if capacity == 0 or capacity % HEADER_BYTES or capacity > _LARGEST_CAPACITY_BYTES:
        raise RingError(f"{where} has an impossible capacity", got=f"{capacity} bytes")
    return _Header(epoch, capacity)


class RingReader:
    """A read-only view of a ring. Trusts nothing in the file before it has checked it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """RingError when the file is missing, foreign, torn, of another version or shorter than it says."""
        self.path = Path(path)
        self._fd = -1
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise RingError(f"the ring {self.path} is no regular file")
            header = _parse_header(os.pread(self._fd, _HEADER.size, 0), f"the ring {self.path}")
            self.epoch = header.epoch
            self.capacity_bytes = header.capacity_bytes
            self.size_bytes = HEADER_BYTES + header.capacity_bytes
            self._check_size()
            self._mapping = mmap.mmap(self._fd, self.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            self._close_fd()
            reason = getattr(error, "strerror", None) or str(error)
            raise RingError(f"the ring {self.path} cannot be opened: {reason}") from None
        except RingError:
            self._close_fd()
            raise
        self._view = memoryview(self._mapping)
        self._words = self._view[:HEADER_BYTES].cast("Q")

    @property
    def address(self) -> int:
        """Where the file's `size_bytes` bytes begin in this process's memory."""
        return int(np.frombuffer(self._view, np.uint8).ctypes.data)

    def read(self, record: Record) -> memoryview:
        """The payload of a published record, read-only and not copied.

        StaleEpochError when the producer began a new epoch; RingError when it is not what it should be.
        """
        if record.epoch != self.epoch:
            raise StaleEpochError(
                f"step {record.step} belongs to another epoch of the ring",
                got=str(record.epoch),
                expected=str(self.epoch),
            )
        try:
            self._check_record(record)
        except RingCutError:
            raise  # not even the epoch may be looked at
        except RingError:
            self._check_epoch()  # the better reason, if it is one
            raise
        self._check_epoch()
        return self._view[record.offset_bytes : record.offset_bytes + record.length_bytes]

    def _check_record(self, record: Record) -> None:
        self._check_size()
        offset = record.offset_bytes - RECORD_HEADER_BYTES - HEADER_BYTES
        if offset < 0 or offset % ALIGNMENT_BYTES or offset + RECORD_HEADER_BYTES > self.capacity_bytes:
            raise RingError(f"step {record.step} lies outside the ring", got=f"offset {record.offset_bytes}")
        kind, position, step, length = self._record_header(offset)
        found = (kind, position % self.capacity_bytes, step, length)
        if found != (KIND_PACK, offset, record.step, record.length_bytes):
            raise RingError(
                f"another record lies where step {record.step} was announced",
                got=f"kind {kind}, step {step}, {length} bytes",
                expected=f"kind {KIND_PACK}, step {record.step}, {record.length_bytes} bytes",
            )

    def is_intact(self, record: Record) -> bool:
        """Whether the bytes that `read` gave are still those: no new epoch, the same record in its place."""
        try:
            self.read(record)
        except RingError:
            return False
        return True

    def unreleased(self) -> Iterator[Record]:
        """The published, unreleased packs from the file alone, oldest first: for tools, and for other
        languages.
        """
        position, head = self._positions()
        while position < head:
            offset = position % self.capacity_bytes
            kind, found, step, length = self._record_header(offset)
            if found != position:
                raise RingError(
                    f"the ring {self.path} holds a stale record", got=str(found), expected=str(position)
                )
            if kind == KIND_PACK:
                yield Record(step, HEADER_BYTES + offset + RECORD_HEADER_BYTES, length, self.epoch)
            position += footprint_bytes(length)

    def close(self) -> None:
        """Unmaps, or leaves that to the last view that someone still holds."""
        self._close_fd()
        self._words.release()
        self._view.release()
        with contextlib.suppress(BufferError):
            self._mapping.close()

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _positions(self) -> tuple[int, int]:
        """(tail, head) of one moment: tail did not move while head was read."""
        self._check_size()
        tail = head = 0
        for _ in range(1000):
            tail, head = self._words[_TAIL_WORD], self._words[_HEAD_WORD]
            if tail == self._words[_TAIL_WORD] and tail <= head <= tail + self.capacity_bytes:
                self._check_epoch()
                return tail, head
        self._check_epoch()
        raise RingError(f"the ring {self.path} has impossible positions", got=f"{tail} to {head}")

    def _check_epoch(self) -> None:
        epoch = self._words[_EPOCH_WORD]
        if epoch != self.epoch:
            raise StaleEpochError(
                f"the ring {self.path} has begun a new epoch", got=str(epoch), expected=str(self.epoch)
            )

    def _check_size(self) -> None:
        _check_size(self._fd, self.path, self.size_bytes)

    def _record_header(self, offset: int) -> tuple[int, int, int, int]:
        """(kind, position, step, payload length) of the record `offset` bytes into the data, checked."""
        start = HEADER_BYTES + offset
        data = bytes(self._view[start : start + RECORD_HEADER_BYTES])
        magic, kind, epoch, position, step, length, _, checksum = _RECORD.unpack(data)
        if magic != RECORD_MAGIC or checksum != zlib.crc32(data[:_CHECKED_BYTES]):
            raise RingError(f"the ring {self.path} holds no record at {start}")
        if epoch != self.epoch:
            raise RingError(
                f"the record at {start} is of another epoch", got=str(epoch), expected=str(self.epoch)
            )
        if (
            kind not in (KIND_PACK, KIND_FILLER)
            or offset + RECORD_HEADER_BYTES + length > self.capacity_bytes
        ):
            raise RingError(f"the record at {start} is impossible", got=f"kind {kind}, {length} bytes")
        return kind, position, step, length
