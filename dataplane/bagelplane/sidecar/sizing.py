"""How much memory and how many threads a rank gets, from the resource and from what the container may use."""

from __future__ import annotations

import os
from pathlib import Path

from bagelplane.spec import BagelDataset

ARRAY_BYTES_A_TOKEN = 96
"""All index arrays of a token together: at most eleven of 8 or 4 bytes."""
META_BYTES = 1024 * 1024
"""State (64 KB at most), lengths, lineage and alignment of a record."""
_CHANNELS = 3
_CGROUP = Path("/sys/fs/cgroup")


def largest_pack_bytes(dataset: BagelDataset) -> int:
    """Upper bound of a record: tokens that a pack can hold, each an image's.

    A token of an image stands for stride**2 pixels. Mandatory samples may lie past maxTokens, one for each
    mandatory group.
    """
    spec = dataset.spec
    mandatory = sum(group.mandatory for group in spec.groups)
    tokens = spec.budgets.max_tokens + mandatory * spec.budgets.max_tokens_per_sample
    strides = [1]
    for group in spec.groups:
        transforms = (group.image_transform, group.vit_image_transform)
        strides += [transform.stride for transform in transforms if transform is not None]
    pixels = tokens * max(strides) ** 2 * _CHANNELS
    return pixels + tokens * ARRAY_BYTES_A_TOKEN + META_BYTES


def ring_bytes(dataset: BagelDataset) -> int:
    """Capacity of one rank's ring: `dataplane.ring.size`, else `ring.packs` packs of the largest size."""
    ring = dataset.spec.dataplane.ring
    return ring.size or ring.packs * largest_pack_bytes(dataset)


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
