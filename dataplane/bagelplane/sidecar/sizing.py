"""How many threads a rank gets, from the resource and from what the container may use."""

from __future__ import annotations

import os
from pathlib import Path

from bagelplane.spec import BagelDataset

_CGROUP = Path("/sys/fs/cgroup")


def available_cpus() -> float:
    """CPUs that this process may use: its affinity, or less when the cgroup has a quota."""
    cpus = float(len(os.sched_getaffinity(0)))
    quota = _cgroup_quota()
    return min(cpus, quota) if quota else cpus


def decode_threads(dataset: BagelDataset, local_ranks: int) -> int:
    """Decode threads of one rank: what the resource says if it says it, else the CPUs shared out."""
    threads = dataset.spec.dataplane.decode_threads
    return threads if threads is not None else max(1, int(available_cpus() / max(1, local_ranks)))


def _cgroup_quota() -> float:
    """CPUs of the cgroup's quota (version 2, else 1); 0 when there is none."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (_CGROUP / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (_CGROUP / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return 0.0
    try:
        return max(0.0, float(quota) / float(period))
    except (ValueError, ZeroDivisionError):
        return 0.0  # "max": no quota
