"""Where a process lives, so that another one may know without waiting that it is dead, or that it lives.

Nothing here trusts a clock. What cannot be known is said so: then somebody has to wait and watch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

# Of /proc/<pid>/stat after the name, counted from 0. When the process began: in ticks since the boot.
_STATE_FIELD, _START_TICKS_FIELD = 0, 19


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """A process, by what no other one has at the same time."""

    host: str
    """For people; in a pod its name."""
    boot_id: str = ""
    """Of the kernel, new with each boot; empty where it cannot be read."""
    pid_namespace: str = ""
    pid: int = 0
    start_ticks: int = 0
    lock: str = ""
    """The file that is locked while it lives (device and inode); empty where there is none."""

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"

    @classmethod
    def of_this_process(cls, lock: str = "") -> Self:
        return cls(
            host=socket.gethostname(),
            boot_id=_read("/proc/sys/kernel/random/boot_id").strip(),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            start_ticks=_start_ticks(os.getpid()),
            lock=lock,
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """What is missing, or of another type, is unknown."""
        known = {
            name: value
            for name, value in content.items()
            if (name in _TEXTS and isinstance(value, str)) or (name in _NUMBERS and type(value) is int)
        }
        fields_of: dict[str, Any] = {"host": "unknown", **known}
        return cls(**fields_of)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def is_alive(self, other: Whereabouts) -> bool | None:
        """Whether `other` lives, seen from this process; None where it cannot be known from here."""
        if not self.boot_id or other.boot_id != self.boot_id:
            return None
        if self.lock and other.lock == self.lock and other != self:
            return False  # it would hold the lock that this process holds
        if not other.pid or other.pid_namespace != self.pid_namespace:
            return None
        return _start_ticks(other.pid) == other.start_ticks


_NUMBERS = ("pid", "start_ticks")
_TEXTS = [field.name for field in fields(Whereabouts) if field.name not in _NUMBERS]


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def process_state(pid: int) -> str:
    """The letter that the kernel gives it, such as T for one that a signal stopped; empty: there is no such process."""
    fields = _stat_fields(pid)
    return fields[_STATE_FIELD] if fields else ""


def _start_ticks(pid: int) -> int:
    """0: there is no such process."""
    fields = _stat_fields(pid)
    if len(fields) <= _START_TICKS_FIELD or fields[_STATE_FIELD] in ("Z", "X"):
        return 0
    return int(fields[_START_TICKS_FIELD])


def _stat_fields(pid: int) -> list[str]:
    # The name in parentheses may hold spaces and parentheses itself.
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
