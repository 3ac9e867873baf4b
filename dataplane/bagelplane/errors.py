"""What Bagelplane raises: one root, and a subclass for each way of reacting to it.

A message has up to four parts: what went wrong, what was got, what was expected, what to do about it.
`exit_code` is the status that the command line ends with (listed in docs/reference/exit-codes.md).
"""

from __future__ import annotations

from typing import ClassVar


class BagelplaneError(Exception):
    """Root of all errors that a user can act on. Never raised itself."""

    exit_code: ClassVar[int] = 1
    reaction: ClassVar[str] = "Read the message."

    def __init__(self, what: str, *, got: str = "", expected: str = "", fix: str = "") -> None:
        self.what, self.got, self.expected, self.fix = what, got, expected, fix
        super().__init__(what, got, expected, fix)

    def __str__(self) -> str:
        parts = [self.what]
        if self.got:
            parts.append(f"got {self.got}")
        if self.expected:
            parts.append(f"expected {self.expected}")
        message = "; ".join(parts)
        return f"{message}. Fix: {self.fix}" if self.fix else message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders; keyword-only fields need spelling out for that.
        return _rebuild, (type(self), self.what, self.got, self.expected, self.fix)


def _rebuild(cls: type[BagelplaneError], what: str, got: str, expected: str, fix: str) -> BagelplaneError:
    return cls(what, got=got, expected=expected, fix=fix)


class SpecError(BagelplaneError):
    """The resource, a setting or an argument is wrong."""

    exit_code = 2
    reaction = "Correct the resource file or the argument that the message names."


class StorageError(BagelplaneError):
    """Storage refused for good: missing, denied, wrong endpoint."""

    exit_code = 3
    reaction = (
        "Correct the bucket, key, endpoint or credentials that the message names; retrying will not help."
    )


class ObjectExistsError(StorageError):
    """A conditional write found the object there already."""

    reaction = "Another writer was first. Use another prefix, or stop the other run."


class TransientStorageError(StorageError):
    """Storage failed in a way that passes: 5xx, time-outs, resets."""

    exit_code = 4
    reaction = "Try again; look at the store if it goes on."


class DataError(BagelplaneError):
    """The data cannot be trained on as the resource asks."""

    exit_code = 5
    reaction = "Correct the data, or the part of the resource that selects it."


class RingError(BagelplaneError):
    """The shared-memory ring cannot be made, or is not to be trusted."""

    exit_code = 6
    reaction = "Give the memory volume or the ring the size that the message names."


class ProtocolError(BagelplaneError):
    """Sidecar and client do not understand each other, or the other side is gone."""

    exit_code = 7
    reaction = "Look at the other side's log; use the same release on both sides."


class SnapshotError(BagelplaneError):
    """A stored state is missing, damaged or belongs to another run."""

    exit_code = 8
    reaction = "Resume from another snapshot, or from the start."
