"""Where a stream stands among the ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """A rank of `world_size`. `num_workers` counts as Automodel's DataLoader does; 0: read in the process."""

    rank: int
    world_size: int
    num_workers: int
