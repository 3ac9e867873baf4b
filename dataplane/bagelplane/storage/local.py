"""Local folders. Written files appear whole or not at all, and survive a crash once written."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from bagelplane.storage.backends import Children, FileInfo
from bagelplane.storage.faults import UnusableNameError
from bagelplane.storage.uris import Location, show

_TEMPORARY_PREFIX = ".bagelplane-writing-"
# What file systems without hard links say.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class LocalFiles:
    """Files by path. Follows symbolic links: data sets are often made of them."""

    def endpoint(self) -> str:
        return ""

    def region(self) -> str:
        return ""

    def generation(self) -> int:
        return 0

    def reconnect(self, generation: int) -> bool:
        return False

    def is_conditional(self, location: Location) -> bool:
        return True

    def children(self, location: Location) -> Children:
        files, folders = [], []
        with os.scandir(location.key) as entries:
            for entry in entries:
                path = os.path.join(location.key, entry.name)  # noqa: PTH118 (a Path would rewrite the user's spelling)
                if entry.name.startswith(_TEMPORARY_PREFIX):
                    continue
                if entry.is_dir():
                    folders.append(location.child_uri(path) + "/")
                elif entry.is_file():
                    files.append(_describe(location.child_uri(path), entry.stat()))
        return Children(files, folders)

    def info(self, location: Location) -> FileInfo:
        status = os.stat(location.key)  # noqa: PTH116 (as above)
        _refuse_other_kinds(location, status)
        return _describe(location.uri, status)

    def read(self, location: Location, start: int, end: int | None, version: str | None) -> bytes:
        with self.open(location) as file:
            file.seek(start)
            return file.read() if end is None else file.read(max(end - start, 0))

    def open(self, location: Location) -> BinaryIO:
        # Before it is opened: that alone waits for ever at a pipe, and does things to some devices.
        _refuse_other_kinds(location, os.stat(location.key))  # noqa: PTH116 (as above)
        return open(location.key, "rb")  # noqa: PTH123 (as above: a slash at the end names no file)

    def write(self, location: Location, data: bytes | memoryview) -> None:
        with _written_beside(Path(location.key), data) as temporary:
            temporary.replace(location.key)

    def create(self, location: Location, data: bytes | memoryview) -> None:
        target = Path(location.key)
        with _written_beside(target, data) as temporary:
            try:
                # A link is made or refused in one step, however many try at once; a rename would overwrite.
                os.link(temporary, target)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # Second best: an empty file claims the name, so that one writer wins; a reader may see it
                # empty.
                os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                temporary.replace(target)

    def delete(self, location: Location) -> None:
        Path(location.key).unlink(missing_ok=True)


_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def _refuse_other_kinds(location: Location, status: os.stat_result) -> None:
    """Folders, pipes, devices and sockets are no files to read. Rows may name any of them."""
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), location.key)
    if kind != stat.S_IFREG:
        raise UnusableNameError(
            f"cannot read {show(location.uri)}: it is no file",
            got=_KINDS.get(kind, "something else"),
            fix="name a file",
        )


def _describe(uri: str, status: os.stat_result) -> FileInfo:
    return FileInfo(uri, status.st_size, f"{status.st_size}-{status.st_mtime_ns}")


@contextmanager
def _written_beside(target: Path, data: bytes | memoryview) -> Iterator[Path]:
    """A durable file with this content in the target's folder, to be moved or linked; removed if it still
    exists.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        # It is the folder's name that is taken, not the file's.
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target)) from None
    temporary = target.parent / f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
        _sync_folder(target.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems refuse it; the file itself is on disk already.
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
