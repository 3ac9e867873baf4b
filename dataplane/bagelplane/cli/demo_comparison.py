"""What the demo's trainers took, held against the undisturbed run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bagelplane.cli.demo_processes import Child
from bagelplane.cli.demo_trainer import Taken, read_taken


@dataclass(slots=True)
class Ranks:
    """The trainers of one attempt, and where they write what they took."""

    children: list[Child]
    outputs: list[Path]

    def taken(self) -> list[list[Taken]]:
        return [read_taken(path) for path in self.outputs]


@dataclass(slots=True)
class Comparison:
    """What came out of comparing packs with those of the undisturbed run."""

    packs: int = 0
    twice: int = 0
    """Packs that were taken before the kill and, since no snapshot covered them, once more after it."""
    arrays: int = 0
    bits: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, who: str, taken: Taken, expected: Taken) -> None:
        self.packs += 1
        self.arrays += len(expected.digests)
        self.bits += expected.bits
        if list(taken.digests) != list(expected.digests):
            self.differences.append(f"{who}, pack {taken.step}: keys {list(taken.digests)}")
            return
        different = [key for key, digest in expected.digests.items() if taken.digests[key] != digest]
        self.differences += [f"{who}, pack {taken.step}: {key}" for key in different]
