"""The control group that all pods of the test node are in, in every hierarchy of the machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.cluster.addresses import CGROUP
from tests.cluster.processes import ClusterError

_ROOT = Path("/sys/fs/cgroup")
_GONE_SECONDS = 10.0


def create_cgroup() -> None:
    """Makes it anew, empty; one that a crashed run left behind is removed first. Raises ClusterError."""
    remove_cgroup()
    hierarchies = _hierarchies()
    if not hierarchies:
        raise ClusterError(
            f"no control groups are mounted on {_ROOT}. Fix: run on a machine, or in a container with "
            "`--privileged --cgroupns host`"
        )
    for hierarchy in hierarchies:
        folder = hierarchy / CGROUP
        try:
            if hierarchy == _ROOT:
                (hierarchy / "cgroup.subtree_control").write_text("+cpu +cpuset +memory +pids")
            folder.mkdir()
            if hierarchy.name == "cpuset":
                # A new group's sets are empty in version 1, and nothing may run in it.
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (folder / name).write_text((hierarchy / name).read_text())
        except OSError as error:
            raise ClusterError(
                f"the control group {folder} cannot be made: {error}. Fix: run as root; in a container, one with "
                "`--privileged --cgroupns host`"
            ) from None


def remove_cgroup() -> None:
    """Removes it with all below it. No error if it is not there. Raises ClusterError while processes are in it."""
    deadline = time.monotonic() + _GONE_SECONDS
    for hierarchy in _hierarchies():
        while left := _remove(hierarchy / CGROUP):
            # Processes that were killed a moment ago are still being taken down.
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the control group {hierarchy / CGROUP} stays: {left}. Fix: end its processes"
                )
            time.sleep(0.02)


def _remove(group: Path) -> str:
    for folder, _, _ in os.walk(group, topdown=False):
        try:
            Path(folder).rmdir()  # its files are the kernel's and go with it
        except OSError as error:
            return str(error)
    return ""


def _hierarchies() -> list[Path]:
    """Version 2 has one, version 1 one for each controller (some under two names)."""
    if (_ROOT / "cgroup.procs").exists():
        return [_ROOT]
    return [
        folder
        for folder in sorted(_ROOT.glob("*"))
        if (folder / "cgroup.procs").exists() and not folder.is_symlink()
    ]
