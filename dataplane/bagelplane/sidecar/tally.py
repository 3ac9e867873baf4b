"""What is counted of one rank, from when it was first served to the end of the sidecar.

A tally outlives producers and topologies, so its counts only ever grow. Producers count from their own start:
what is added is the difference to what the same producer told before. A pack that is made again after a crash
counts again.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bagelplane.sidecar.control import Frame

PACK_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds for the making of a pack: small ones take a hundredth of a second, large ones on one core seconds."""
STALL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
"""Bounds for the stall at one hand-over: under a millisecond is what a ready pack takes."""

Drops = Mapping[str, Mapping[str, int]]
"""Counts by group and reason."""


class Histogram:
    """How many values were at most each bound, as Prometheus counts them; and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Values in each bucket, not cumulative; the last one is for those above all bounds."""
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(slots=True)
class Tally:
    """Counts of one rank. Times in seconds."""

    published: int = 0
    acknowledged: int = 0
    tokens: int = 0
    images: int = 0
    pixel_bytes: int = 0
    ring_wait_seconds: float = 0.0
    trainer_wait_seconds: float = 0.0
    restarts: int = 0
    work: Histogram = field(default_factory=lambda: Histogram(PACK_SECONDS))
    stalls: Histogram = field(default_factory=lambda: Histogram(STALL_SECONDS))
    decode_seconds: float = 0.0
    storage_seconds: float = 0.0
    read_bytes: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    run_drops: Drops = field(default_factory=dict)
    """Of the whole run, as the newest pack's state has them."""
    drops: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Since the rank was first served."""
    _told: dict[str, Any] = field(default_factory=dict)
    _told_drops: Counter[tuple[str, str]] = field(default_factory=Counter)

    def begin(self, drops: Drops) -> None:
        """A producer begins, where the run has dropped this much."""
        self._told = {}
        self.run_drops, self._told_drops = drops, _flat(drops)

    def publish(self, frame: Frame) -> None:
        """A pack is finished; `frame` is the producer's `published`."""
        self.published += 1
        self.tokens += frame["tokens"]
        self.images += frame["images"]
        self.pixel_bytes += frame["pixel_bytes"]
        self.ring_wait_seconds += frame["ring_wait_seconds"]
        self.work.add(frame["work_seconds"])
        self._add_costs(frame["costs"])
        drops = _flat(frame["drops"])
        self.drops += drops - self._told_drops  # a Counter's difference holds what is above zero
        self.run_drops, self._told_drops = frame["drops"], drops

    def _add_costs(self, costs: dict[str, Any]) -> None:
        before, self._told = self._told, costs
        self.decode_seconds += costs["decode_seconds"] - before.get("decode_seconds", 0.0)
        self.storage_seconds += costs["storage_seconds"] - before.get("storage_seconds", 0.0)
        self.read_bytes += costs["read_bytes"] - before.get("read_bytes", 0)
        self.requests += Counter(costs["requests"]) - Counter(before.get("requests", {}))
        self.retries += Counter(costs["retries"]) - Counter(before.get("retries", {}))


def _flat(drops: Drops) -> Counter[tuple[str, str]]:
    return Counter(
        {(group, reason): int(count) for group, row in drops.items() for reason, count in row.items()}
    )
