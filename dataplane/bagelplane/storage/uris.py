"""Addresses of objects: taken apart, put together, shown.

A URI is taken literally: no percent-decoding and no globbing, because keys are data and may hold any sign.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from bagelplane.errors import DataError, StorageError

# "memory" is fsspec's store inside the process: for tests.
OBJECT_SCHEMES = ("s3", "gs", "az", "memory")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a URI points. `bucket` is empty and `key` a path when `scheme` is "file"."""

    uri: str
    scheme: str
    bucket: str
    key: str

    @property
    def is_local(self) -> bool:
        return self.scheme == "file"

    @property
    def folder_prefix(self) -> str:
        """The key as a folder: with one slash at its end, or empty for a whole bucket."""
        return self.key if not self.key or self.key.endswith("/") else self.key + "/"

    def child_uri(self, key: str) -> str:
        """The URI of another key of the same bucket (a path, when local), written in the way of this one."""
        if self.is_local:
            return f"file://{key}" if self.uri.startswith("file://") else key
        return f"{self.scheme}://{self.bucket}/{key}"


def parse_uri(uri: str) -> Location:
    """Takes `s3://bucket/key`, `file:///path` or a path apart. Raises StorageError for anything else."""
    scheme, separator, rest = uri.partition("://")
    # A path may hold these three signs too, behind its first slash.
    if not uri or not separator or "/" in scheme:
        if not uri:
            raise StorageError("the address of a file is empty", fix="write s3://bucket/key, or a path")
        return Location(uri, "file", "", uri)
    if scheme == "file":
        if not rest.startswith("/"):
            fix = "write three slashes, as in file:///data"
            raise StorageError(f"{show(uri)} does not name an absolute path", fix=fix)
        return Location(uri, "file", "", rest)
    if scheme not in OBJECT_SCHEMES:
        raise StorageError(
            f"cannot open {show(uri)}",
            got=f"the scheme {show(scheme)}://",
            expected="s3://, gs://, az://, file:// or a path",
            fix="correct the address",
        )
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise StorageError(f"{show(uri)} names no bucket", fix=f"write {scheme}://bucket/key")
    return Location(uri, scheme, bucket, key)


def same_object(one: str, other: str) -> bool:
    """Whether two URIs are spellings of one: `file://` or not, a slash at the end, `..` in a path."""
    return _spelled(parse_uri(one)) == _spelled(parse_uri(other))


def _spelled(location: Location) -> tuple[str, str, str]:
    key = os.path.abspath(location.key) if location.is_local else location.key.rstrip("/")  # noqa: PTH100
    return location.scheme, location.bucket, key


def join_uri(base: str, name: str, *, inside: bool = False) -> str:
    """The URI of `name` below the folder `base`, where `name` is data (from a JSON line, from a listing).

    With `inside` false (profile Automodel) the name is followed wherever it leads, as `os.path.join` does:
    `../` climbs, and a name that begins with a slash starts at the root (of the file system, or of the
    bucket). No name leads out of its bucket, though, nor from a bucket to the local disk. With `inside` true
    (profile Strict) a name that leads out of `base` is refused. Symbolic links are not looked at. Raises
    DataError.
    """
    folder = parse_uri(base)
    if "\x00" in name or not name:
        raise DataError(f"a name below {show(base)} is empty or holds a zero byte", fix="correct the name")
    if folder.is_local and not inside:
        # As it is: the system resolves `..`, to which a linked folder makes a difference.
        return folder.child_uri(os.path.join(folder.key, name))  # noqa: PTH118
    if folder.is_local:
        below = name.removeprefix(folder.folder_prefix) if folder.key else name
        path = None if below.startswith("/") else _walk([], below)
        key = None if path is None else folder.folder_prefix + path
    else:
        start = folder.folder_prefix.split("/")[:-1]
        key = _walk([] if name.startswith("/") else start, name.lstrip("/"))
        if inside and key is not None and (name.startswith("/") or _walk([], name) is None):
            key = None
    if key is None:
        raise DataError(
            f"the name {show(name)} leads out of {show(base)}",
            expected="a name below that folder" if inside else "a name in that bucket",
            fix="correct the name, or give the folder that holds all files",
        )
    return folder.child_uri(key)


def _walk(start: list[str], name: str) -> str | None:
    """Where the parts of `name` lead from `start`; None if above its root. A slash at the end stays."""
    parts = list(start)
    for part in name.split("/"):
        if part == ".." and not parts:
            return None
        if part == "..":
            parts.pop()
        elif part not in {"", "."}:
            parts.append(part)
    return "/".join(parts) + ("/" if parts and name.endswith("/") else "")


def show(text: str) -> str:
    """The text on one line: control characters and undecodable bytes are escaped, so that a key cannot fake
    a log line.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )
