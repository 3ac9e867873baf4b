"""Local folders. Written files appear whole or not at all, and survive a crash once written."""

from __future__ import annotations

import errno
import io
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from bagelplane.costs import Costs, CountedFile
from bagelplane.storage.backends import Children, FileInfo
from bagelplane.storage.faults import Attempted, ObjectTooLargeError, UnusableNameError, changed
from bagelplane.storage.uris import Location, show

_TEMPORARY_PREFIX = ".bagelplane-writing-"
# What file systems say that make no file without a name, and those without hard links.
_NO_NAMELESS = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS}
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
                    with suppress(FileNotFoundError):  # deleted since: the folder and all else are there
                        files.append(_describe(location.child_uri(path), entry.stat()))
        return Children(files, folders)

    def info(self, location: Location) -> FileInfo:
        status = os.stat(location.key)  # noqa: PTH116 (as above)
        _refuse_other_kinds(location, status)
        return _describe(location.uri, status)

    def read(
        self,
        location: Location,
        start: int,
        end: int | None,
        version: str | None,
        limit_bytes: int | None = None,
    ) -> bytes:
        with self.open(location, version=version) as file:
            file.seek(start)
            if limit_bytes is not None and (size_bytes := os.fstat(file.fileno()).st_size) > limit_bytes:
                raise ObjectTooLargeError.of(location, f"{size_bytes} bytes", limit_bytes)
            return file.read() if end is None else file.read(max(end - start, 0))

    def open(self, location: Location, costs: Costs | None = None, version: str | None = None) -> BinaryIO:
        # Before it is opened: that alone waits for ever at a pipe, and does things to some devices.
        status = os.stat(location.key)  # noqa: PTH116 (as above)
        _refuse_other_kinds(location, status)
        if version is not None and _describe(location.uri, status).version != version:
            raise changed(Attempted("read", location), version)
        if costs is not None:
            return cast(BinaryIO, io.BufferedReader(CountedFile(location.key, costs)))
        return open(location.key, "rb")  # noqa: PTH123 (as above: a slash at the end names no file)

    def write(self, location: Location, data: bytes | memoryview) -> None:
        target = Path(location.key)
        with _written_beside(target, data) as written:
            written.rename(target)

    def create(self, location: Location, data: bytes | memoryview) -> None:
        target = Path(location.key)
        with _written_beside(target, data) as written:
            try:
                # A link is made or refused in one step, however many try at once; a rename would overwrite.
                written.link(target)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # Second best: an empty file claims the name, so that one writer wins; a reader may see it
                # empty.
                os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                written.rename(target)

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


class _Written:
    """A durable file that is not yet where it belongs.

    Without a name, where the file system can do that: nothing is left then of a process that is killed while it
    writes, while temporary files of killed writers gather and keep their folder from being removed.
    """

    def __init__(self, folder: Path, data: bytes | memoryview) -> None:
        self._temporary = folder / f"{_TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        self._data = data
        self._named = False
        try:
            self._fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
            self._make_named()
        else:
            self._fill()

    def _make_named(self) -> None:
        self._fd = os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        self._named = True
        self._fill()

    def _fill(self) -> None:
        try:
            with open(self._fd, "wb", closefd=False) as file:
                file.write(self._data)
            os.fsync(self._fd)
        except BaseException:
            self.close()
            raise

    def link(self, target: Path) -> None:
        if self._named:
            os.link(self._temporary, target)
        else:
            # With a src_dir_fd, which an absolute path ignores, os.link follows the symbolic link; without, not.
            os.link(f"/proc/self/fd/{self._fd}", target, src_dir_fd=self._fd, follow_symlinks=True)

    def rename(self, target: Path) -> None:
        if not self._named:
            try:
                self.link(self._temporary)
                self._named = True
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                os.close(self._fd)
                self._make_named()
        self._temporary.replace(target)

    def close(self) -> None:
        os.close(self._fd)
        if self._named:
            with suppress(OSError):
                self._temporary.unlink(missing_ok=True)


@contextmanager
def _written_beside(target: Path, data: bytes | memoryview) -> Iterator[_Written]:
    """A durable file with this content in the target's folder, to be linked or renamed to its name."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        # It is the folder's name that is taken, not the file's.
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target)) from None
    written = _Written(target.parent, data)
    try:
        yield written
        _sync_folder(target.parent)
    finally:
        written.close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems refuse it; the file itself is on disk already.
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
