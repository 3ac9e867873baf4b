"""What a kind of store must be able to do. Backends raise whatever their libraries raise; store.py
translates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bagelplane.storage.uris import Location


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One object or file. `version` changes with the content: an ETag, or size and time of change."""

    uri: str
    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class Children:
    """What lies directly in a folder, in no order. Markers are left out. `folders` are URIs that end with a
    slash.
    """

    files: list[FileInfo]
    folders: list[str]


class Backend(Protocol):
    """One kind of store. Used by many threads at once."""

    def endpoint(self) -> str:
        """Where requests go, for messages; empty for what is local."""

    def region(self) -> str:
        """The region that requests are signed for, if any."""

    def generation(self) -> int:
        """Counts the connections made: which one a request uses."""

    def reconnect(self, generation: int) -> bool:
        """Drops the connection of that generation; False if a new one would have the same credentials."""

    def children(self, location: Location) -> Children: ...

    def info(self, location: Location) -> FileInfo: ...

    def read(
        self,
        location: Location,
        start: int,
        end: int | None,
        version: str | None,
        limit_bytes: int | None = None,
    ) -> bytes:
        """The bytes from `start` to before `end` (None: to the last). Fails if `version` is given and not
        current, and with ObjectTooLargeError, before more is in memory, if there are more than `limit_bytes`.
        """

    def write(self, location: Location, data: bytes | memoryview) -> None: ...

    def create(self, location: Location, data: bytes | memoryview) -> None:
        """Writes on condition that nothing is there. A store may ignore that: see `is_conditional`."""

    def is_conditional(self, location: Location) -> bool:
        """Whether `create` keeps its condition."""

    def delete(self, location: Location) -> None:
        """No error if it is not there."""
