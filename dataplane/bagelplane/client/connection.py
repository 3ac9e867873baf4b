"""One rank's connection to the sidecar: attach, wait for packs, acknowledge, attach again when that breaks.

A sidecar that restarts is nothing that the trainer has to know: whatever breaks is dropped and built up
again, from the place that the caller names, until the deadline. The error at the deadline says what was
waited for and what was last seen. What the sidecar declares fatal is raised at once.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from bagelplane import __version__
from bagelplane.client.place import Place
from bagelplane.errors import (
    BagelplaneError,
    DataError,
    ProtocolError,
    RingError,
    SnapshotError,
    SpecError,
    StorageError,
)
from bagelplane.shm.protocol import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    SIDECAR_MESSAGES,
    SOCKET_NAME,
    Ack,
    Attach,
    Attached,
    Detach,
    Error,
    Hello,
    Message,
    MessageSocket,
    Published,
    Resume,
    Snapshotted,
    Waiting,
    Welcome,
)
from bagelplane.shm.ring import Record, RingCutError, RingReader, StaleEpochError, ring_problem

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "BAGELPLANE_DIR"
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 1.0
_GOODBYE_SECONDS = 1.0
_ABSENT_SECONDS = 5.0
"""A sidecar that starts may not be there for so long; then somebody should know what is waited for."""
_ABSENT_AGAIN_SECONDS = 60.0
_SILENT_SECONDS = 5.0
"""A sidecar that lives tells every second what is waited for; one that does not for so long is to be named."""

_ERROR_CLASSES: Mapping[str, type[BagelplaneError]] = {
    "spec": SpecError,
    "data": DataError,
    "storage": StorageError,
    "ring": RingError,
    "snapshot": SnapshotError,
}

M = TypeVar("M", bound=Message)
T = TypeVar("T")


class _BrokenError(ConnectionError):
    """The connection is of no more use, for a reason that may pass."""


class _AbsentError(_BrokenError):
    """Nobody listens at the socket."""


class RingMemory(Protocol):
    """Who has to know which memory records are read from."""

    def ring_opened(self, address: int, size_bytes: int) -> None:
        """Records lie in there from now on."""

    def ring_closed(self) -> None:
        """No more; the memory may be gone when this returns."""


class Connection:
    """A connection that is made when first needed. For one thread."""

    def __init__(
        self, directory: Path, place: Place, *, timeout_seconds: float, memory: RingMemory | None = None
    ) -> None:
        self.directory = directory
        self.place = place
        self.timeout_seconds = timeout_seconds
        self._memory = memory
        self.next_step = 0
        """Number of the pack that comes next; valid while attached."""
        self.offset, self.streams = 0, 0
        """Packs of the run behind the first step of this world; streams of elastic sharding. Known once attached."""
        self.spec_hash = ""
        """Of the data set that this trainer runs on; empty before that is known. Of another one the sidecar decides."""
        self._socket: MessageSocket | None = None
        self._ring: RingReader | None = None
        self._owner_pid = os.getpid()
        self._epoch = 0
        self._doorbells: deque[Published] = deque()
        self._read: deque[Record] = deque()  # given to the caller and not released, oldest first
        self._trouble: Exception | None = None  # what `ready_record` ran into
        self._last_seen = "nothing yet"
        self._peer, self._heard = "the sidecar", 0.0  # who is at the other end; when it last spoke
        self._is_absent = False  # nobody was there the last time
        self._refusal = ""  # why the sidecar did not attach us the last time

    @property
    def attached(self) -> bool:
        return self._ring is not None

    def attach(self, resume: Resume) -> int:
        """Attaches at `resume` unless attached already. The number of the pack that comes next."""
        self._until_deadline("the sidecar to attach", resume, lambda deadline: None)
        return self.next_step

    def next_record(self, resume: Resume) -> tuple[Record, memoryview]:
        """The next pack's record and its bytes in the ring, read-only; they stay until `release`.

        The next one is that after those that were read and not released; should it be necessary to attach (again),
        at `resume`, there are none of those.
        """
        return self._until_deadline("the next pack", resume, self._await_record)

    def ready_record(self) -> tuple[Record, memoryview] | None:
        """The same where it takes no waiting, else None.

        Raises nothing: what it runs into is told by the next call that has to wait, when all that was read before
        is handed over.
        """
        if self._ring is None or self._trouble is not None:
            return None
        try:
            while not self._doorbells:
                if self._receive(Published, time.monotonic()) is None:
                    return None
            return self._read_announced()
        except (OSError, BagelplaneError) as error:
            self._trouble = error
            return None
        except BaseException:
            self._drop("interrupted")
            raise

    def check_owner(self) -> None:
        """ProtocolError in a forked child: it shares the socket, and what it took would be missing in its parent."""
        if self._ring is not None and self._owner_pid != os.getpid():
            raise ProtocolError(
                "a loader was used in a forked child of the process that it is attached in",
                got=f"process {os.getpid()}",
                expected=f"process {self._owner_pid}",
                fix="make a loader in the process that iterates (a DataLoader with num_workers=0 does)",
            )

    def confirm(self, record: Record) -> bool:
        """Whether all that was read from the record is what the producer put there. If not, read anew."""
        if self._ring is None or record not in self._read:
            return False  # the connection broke since
        if self._ring.is_intact(record):
            return True
        self._drop(f"the producer began anew while step {record.step} was read")
        return False

    def release(self, record: Record, *, stalled_seconds: float = 0.0) -> None:
        """Acknowledges the record: the trainer has it. Nothing of the ring may be referred to any more.

        `stalled_seconds` is how long the trainer stood still for it; the sidecar counts that.
        """
        if self._ring is None:
            return  # it broke since; the next attach says where we are
        assert self._read[0] == record
        self._read.popleft()
        self.next_step = record.step + 1
        ack = Ack(record.step, stalled_seconds)
        try:
            self._require_socket().send(ack, timeout_seconds=self.timeout_seconds)
        except OSError as error:
            # Not lost: the next attach says where we are.
            self._drop(f"the connection broke while step {record.step} was acknowledged ({error})")
        except BaseException:
            self._drop("interrupted")  # part of a message may be on its way
            raise

    def request(self, message: Message, answer: type[M], resume: Resume) -> M:
        """Sends `message` while attached and waits for its answer."""

        def ask(deadline: float) -> M:
            self._require_socket().send(message, timeout_seconds=deadline - time.monotonic())
            return self._await(answer, deadline)

        return self._until_deadline(f"the answer to {message.TYPE!r}", resume, ask)

    def close(self) -> None:
        """Detaches. Returns when the sidecar has read every acknowledgement, after a second at the latest."""
        if self._socket is not None and self._owner_pid == os.getpid():
            try:
                self._socket.leave(Detach(), timeout_seconds=_GOODBYE_SECONDS)
            except OSError:
                logger.debug("the sidecar was gone before we detached")
        self._drop("detached")

    def __del__(self) -> None:
        self._drop("given up")

    # -- inside

    def _until_deadline(self, what: str, resume: Resume, act: Callable[[float], T]) -> T:
        """`act`, attached; again after everything that may pass, until the deadline."""
        self.check_owner()
        begun = time.monotonic()
        deadline, warn_at = begun + self.timeout_seconds, begun + _ABSENT_SECONDS
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                if self._ring is None:
                    self._connect(resume, deadline)
                return act(deadline)
            except (OSError, StaleEpochError, RingCutError) as error:
                self._drop(str(error))
                self._is_absent = isinstance(error, _AbsentError)
                if isinstance(error, RingCutError):
                    logger.warning("rank %d: %s", self.place.rank, error)
                if isinstance(error, _AbsentError) and time.monotonic() >= warn_at:
                    warn_at = time.monotonic() + _ABSENT_AGAIN_SECONDS
                    self._warn_absent(str(error), time.monotonic() - begun)
            except BaseException:
                self._drop("given up")
                raise
            if time.monotonic() + pause >= deadline:
                raise self._overdue(what, resume)
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def _warn_absent(self, what: str, seconds: float) -> None:
        logger.warning(
            "rank %d: %s for %.0f s, waiting up to %g s. Fix: %s",
            self.place.rank, what, seconds, self.timeout_seconds, self._describe_start(),
        )  # fmt: skip

    def _describe_start(self) -> str:
        variable = os.environ.get(DIRECTORY_VARIABLE) or "not set"
        return (
            f"start the sidecar (bagelplane run --dir {self.directory}), or correct {DIRECTORY_VARIABLE}, which is "
            f"{variable} here"
        )

    def _overdue(self, what: str, resume: Resume) -> ProtocolError:
        step = resume.step if resume.step is not None else self.next_step
        return ProtocolError(
            f"waited {self.timeout_seconds:g} s for {what} of rank {self.place.rank}"
            f" (step {step}); last seen: {self._last_seen}"
            + (f"; {self._refusal}" if self._refusal not in self._last_seen else ""),
            fix=self._describe_start()
            if self._is_absent
            else f"look at the log of the sidecar that serves {self.directory}, or raise timeout_seconds",
        )

    def _describe_silence(self) -> str:
        seconds = time.monotonic() - self._heard
        if seconds < _SILENT_SECONDS:
            return ""
        return (
            f"; {self._peer} has said nothing for {seconds:.0f} s, though it tells every second what is waited for: "
            "it is stopped, or its machine has no time for it"
        )

    def _require_socket(self) -> MessageSocket:
        if self._socket is None:
            raise _BrokenError("not connected")
        return self._socket

    def _drop(self, reason: str) -> None:
        self._last_seen = reason
        self._epoch = 0
        self._doorbells.clear()
        self._read.clear()
        self._trouble = None
        if self._ring is not None:
            if self._memory is not None:
                self._memory.ring_closed()
            self._ring.close()
            self._ring = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self, resume: Resume, deadline: float) -> None:
        path = self.directory / SOCKET_NAME
        self._drop(self._last_seen)
        self._owner_pid = os.getpid()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket = MessageSocket(sock, SIDECAR_MESSAGES)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            sock.connect(os.fspath(path))
        except OSError as error:
            raise _AbsentError(f"no sidecar at {path} ({error.strerror or error})") from None
        self._last_seen = f"connected to {path}"
        self._peer, self._heard = _name_peer(sock), time.monotonic()
        name = f"bagelplane {__version__}, pid {os.getpid()}"
        self._socket.send(Hello(PROTOCOL_VERSION, name), timeout_seconds=deadline - time.monotonic())
        welcome = self._await(Welcome, deadline)
        if not OLDEST_VERSION <= welcome.version <= PROTOCOL_VERSION:
            raise ProtocolError(
                "the sidecar speaks another protocol",
                got=f"version {welcome.version}",
                expected=f"{OLDEST_VERSION} to {PROTOCOL_VERSION}",
                fix="install the same bagelplane release in the trainer's image as in the sidecar's",
            )
        place = self.place
        attach = Attach(
            place.rank,
            place.local_rank,
            place.world_size,
            place.generation,
            resume,
            place.readers or 1,
            # The sidecar knows what was changed, and whether the resource allows it.
            "" if self.spec_hash == welcome.spec_hash else self.spec_hash,
        )
        self._socket.send(attach, timeout_seconds=deadline - time.monotonic())
        self._last_seen = f"welcomed by data set {welcome.dataset!r}, attaching"
        attached = self._await(Attached, deadline)
        if resume.step is not None and attached.next_step != resume.step:
            raise ProtocolError(
                "the sidecar attached us elsewhere",
                got=f"step {attached.next_step}",
                expected=f"step {resume.step}",
            )
        if resume.position is not None and attached.position != resume.position:
            raise ProtocolError(
                "the sidecar attached us elsewhere",
                got=f"position {attached.position}",
                expected=f"position {resume.position}",
            )
        self._open_ring(attached)
        self.spec_hash = welcome.spec_hash
        self.next_step, self.streams = attached.next_step, attached.streams
        self.offset = attached.position - attached.next_step * place.world_size
        self._refusal = ""
        self._last_seen = f"attached at step {attached.next_step}"

    def _open_ring(self, attached: Attached) -> None:
        # Both containers mount one volume, maybe at different paths: the name counts, in the directory that
        # we know.
        path = self.directory / Path(attached.ring_path).name
        problem = ring_problem(path, attached.ring_bytes)
        if problem:
            raise _BrokenError(f"the ring {path} {problem}")  # the sidecar sees it, too, and makes it anew
        ring = RingReader(path)
        if ring.epoch != attached.epoch:
            ring.close()
            raise StaleEpochError(
                f"the ring {ring.path} is of another epoch", got=str(ring.epoch), expected=str(attached.epoch)
            )
        self._ring, self._epoch = ring, attached.epoch
        if self._memory is not None:
            self._memory.ring_opened(ring.address, ring.size_bytes)

    def _await(self, kind: type[M], deadline: float) -> M:
        """The next message of this kind. Doorbells are kept, `waiting` is remembered, `error` is raised."""
        message = self._receive(kind, deadline)
        if message is None:
            raise _BrokenError(self._last_seen + self._describe_silence())
        return message

    def _receive(self, kind: type[M], deadline: float) -> M | None:
        """The same, None when there is none at the deadline."""
        if self._trouble is not None:
            raise self._trouble
        while True:
            message = self._require_socket().receive(timeout_seconds=deadline - time.monotonic())
            if message is None:
                return None
            self._heard = time.monotonic()
            if isinstance(message, Published):
                if message.epoch == self._epoch and message.step >= self.next_step:
                    self._doorbells.append(message)
            elif isinstance(message, Waiting):
                self._last_seen = f"sidecar said: {message.what} (for {message.since_seconds:.1f} s)"
            elif isinstance(message, Error):
                self._handle_error(message, kind)
            elif not isinstance(message, kind):
                raise ProtocolError(f"the sidecar sent {message.TYPE!r} instead of {kind.TYPE!r}")
            if isinstance(message, kind):
                return message

    def _handle_error(self, error: Error, awaited: type[Message]) -> None:
        # A refused snapshot is the answer to its request; the stream itself goes on.
        if error.fatal or (awaited is Snapshotted and error.code == "snapshot"):
            cls = _ERROR_CLASSES.get(error.code, ProtocolError)
            raise cls(error.message, fix=error.fix)
        self._last_seen = f"sidecar said: {error.message}" + (f" Fix: {error.fix}" if error.fix else "")
        logger.warning("rank %d: %s", self.place.rank, self._last_seen)
        if self._ring is None:
            self._refusal = self._last_seen
            raise _BrokenError(self._last_seen)  # attaching was refused for now

    def _await_record(self, deadline: float) -> tuple[Record, memoryview]:
        while not self._doorbells:
            self._await(Published, deadline)
        return self._read_announced()

    def _read_announced(self) -> tuple[Record, memoryview]:
        """What the first doorbell rang for."""
        bell, expected = self._doorbells[0], self.next_step + len(self._read)
        if bell.step != expected:
            raise ProtocolError(
                "the sidecar left a step out", got=f"step {bell.step}", expected=f"step {expected}"
            )
        record = Record(bell.step, bell.offset_bytes, bell.length_bytes, bell.epoch)
        assert self._ring is not None
        payload = self._ring.read(record)
        self._doorbells.popleft()
        self._read.append(record)
        return record, payload


def _name_peer(sock: socket.socket) -> str:
    credentials = struct.Struct("3i")  # process, user, group
    pid, _, _ = credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return f"the sidecar (process {pid})" if pid else "the sidecar"  # 0: a process of another pod container
