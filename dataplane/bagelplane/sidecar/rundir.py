"""The run directory: one live sidecar in it at a time, and nothing left in it afterwards.

sidecar.lock       held (flock) by the supervisor that lives; a dead one's is free at once
sidecar.sock       what trainers connect to
ring-<n>.bin       one a data-parallel rank; made by producers, reclaimed by the next, removed at an orderly end

All is for this user alone, the directory 0700 and the files 0600. With `any_user` socket and rings are 0666 and
the directory stays as it is: a volume that only the containers of one pod reach, whose users differ.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Self

from bagelplane.errors import RingError
from bagelplane.shm.protocol import SOCKET_NAME, ring_name
from bagelplane.shm.ring import RingWriter

LOCK_NAME = "sidecar.lock"
DIRECTORY_VARIABLE = "BAGELPLANE_DIR"
_LONGEST_SOCKET_PATH_BYTES = 107
_FIX_DIRECTORY = f"give {DIRECTORY_VARIABLE} or --dir a directory of this user's own on a memory volume"


def default_directory() -> Path:
    """What BAGELPLANE_DIR says, else a directory of this user's in shared memory."""
    return Path(os.environ.get(DIRECTORY_VARIABLE) or f"/dev/shm/bagelplane-{os.getuid()}")


class RunDirectory:
    """An open run directory with its lock held. Use as a context: the end removes what was ours."""

    def __init__(self, path: Path, *, any_user: bool = False) -> None:
        """RingError: it cannot be made, belongs to somebody else, or another sidecar lives in it."""
        self.path = path.absolute()
        self.socket_path = self.path / SOCKET_NAME
        self.file_mode = 0o666 if any_user else 0o600
        """Mode of the socket and of the rings, whatever the umask."""
        self._socket_id: tuple[int, int] | None = None
        directory_mode = 0o755 if any_user else 0o700
        try:
            self._made = not self.path.exists()
            self.path.mkdir(mode=directory_mode, parents=True, exist_ok=True)
            status = self.path.stat()
        except OSError as error:
            raise RingError(
                f"the run directory {self.path} cannot be made: {error.strerror}", fix=_FIX_DIRECTORY
            ) from None
        if not stat.S_ISDIR(status.st_mode) or not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
            raise RingError(f"the run directory {self.path} is not this user's to write", fix=_FIX_DIRECTORY)
        if status.st_uid == os.getuid() and (self._made or not any_user):
            with contextlib.suppress(OSError):
                self.path.chmod(directory_mode)
        try:
            self._lock_fd = self._take_lock()
        except RingError:
            if self._made:
                with contextlib.suppress(OSError):
                    self.path.rmdir()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lock_identity(self) -> str:
        """Of the file that is locked: one who held it before is dead."""
        status = os.fstat(self._lock_fd)
        return f"{status.st_dev}:{status.st_ino}"

    def ring_path(self, number: int) -> Path:
        return self.path / ring_name(number)

    def check_room(self, local_ranks: int, capacity_bytes: int) -> None:
        """Allocates the rings of that many ranks, so that a small volume is an error before a trainer comes.

        The files stay: producers take them over.
        """
        for local_rank in range(local_ranks):
            try:
                path = self.ring_path(local_rank)
                RingWriter.create(path, capacity_bytes=capacity_bytes, mode=self.file_mode).close()
            except RingError as error:
                self.remove_rings()
                if local_ranks == 1:
                    raise
                raise RingError(
                    f"{error.what} (ring {local_rank + 1} of {local_ranks})",
                    got=error.got,
                    expected=f"{error.expected} for each of {local_ranks} ranks",
                    fix=error.fix,
                ) from None

    def bind(self) -> socket.socket:
        """The listening socket, after that of a dead sidecar was removed (this one holds the lock)."""
        if len(os.fsencode(self.socket_path)) > _LONGEST_SOCKET_PATH_BYTES:
            raise RingError(
                "the path of the run directory is too long for a Unix socket",
                got=f"{len(os.fsencode(self.socket_path))} bytes: {self.socket_path}",
                expected=f"at most {_LONGEST_SOCKET_PATH_BYTES}",
                fix=f"give {DIRECTORY_VARIABLE} or --dir a shorter path",
            )
        self.socket_path.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(os.fspath(self.socket_path))
            # Until here the umask decides: a trainer that came too early tries again, and others are kept out
            # by the directory.
            self.socket_path.chmod(self.file_mode)
            self._socket_id = _identity(self.socket_path)
        except OSError as error:
            sock.close()
            raise RingError(
                f"the socket {self.socket_path} cannot be made: {error.strerror}", fix=_FIX_DIRECTORY
            ) from None
        return sock

    def bind_again(self) -> socket.socket | None:
        """A new listening socket if the file of the one before was deleted; None while it is there.

        RingError: that cannot be, or another sidecar has begun here since (the lock was deleted with it).
        """
        try:
            if not _is_same(self._lock_fd, self.path / LOCK_NAME):
                fd = self._take_lock()
                os.close(self._lock_fd)
                self._lock_fd = fd
            return None if _identity(self.socket_path) == self._socket_id else self.bind()
        except OSError as error:
            raise RingError(
                f"the run directory {self.path} cannot be used any more: {error.strerror}",
                fix="restart the sidecar, and let nobody delete what is in its directory",
            ) from None

    def remove_rings(self) -> None:
        for path in self.path.glob(ring_name(0).replace("0", "*")):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Removes socket, rings and lock, and the directory if it was made here and is empty."""
        if self._lock_fd < 0:
            return
        if _is_same(self._lock_fd, self.path / LOCK_NAME):  # else all of it is another's
            self.socket_path.unlink(missing_ok=True)
            self.remove_rings()
            # Still locked: whoever opened this file meanwhile sees, once it has the lock, that it is gone.
            (self.path / LOCK_NAME).unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1
        if self._made:
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def _take_lock(self) -> int:
        path = self.path / LOCK_NAME
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise RingError(
                    f"the lock {path} cannot be opened: {error.strerror}", fix=_FIX_DIRECTORY
                ) from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
                os.close(fd)
                raise RingError(
                    f"another sidecar runs in {self.path}",
                    got=f"process {owner or 'unknown'}",
                    fix=f"end it, or give this one another directory ({DIRECTORY_VARIABLE} or --dir)",
                ) from None
            if _is_same(fd, path):
                try:
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                except OSError as error:
                    path.unlink(missing_ok=True)
                    os.close(fd)
                    raise RingError(
                        f"the lock {path} cannot be written: {error.strerror}",
                        fix=f"free room on its volume, or {_FIX_DIRECTORY}",
                    ) from None
                return fd
            os.close(fd)  # the one who held it removed it while leaving: once more


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _is_same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False
