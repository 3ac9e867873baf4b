"""Elastic sharding, in numbers: one global order of packs over S streams, whatever the world size (DESIGN, 8).

Pack g of the run is the (g // S)-th pack of stream g % S. A *position* is a number of packs that lie behind, of
the whole run: the only thing that a checkpoint has to name. At position p a step of W ranks takes the packs
p .. p + W - 1, rank r the r-th of them; W divides S, so that a rank keeps to the streams congruent to p + r.

A rank counts its steps as position // W: whole numbers that rise by one with each pack. What is left over of that
division, the offset, stays what it is as long as the world does; it is 0 unless a larger world began in mid-round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bagelplane.errors import SnapshotError, SpecError

SHARDING = "Elastic"
"""What a state under elastic sharding says of itself."""

STATE_VERSION = 1
"""Of a rank's state: written by its stream, and put together anew by the sidecar at another world size."""

StreamStates = Mapping[str, Mapping[str, Any]]
"""By the stream's number as text (it travels as JSON); each has `packs`, how many of the stream it lies behind."""


def fitting_world_sizes(streams: int) -> list[int]:
    """The world sizes that divide the number of streams, rising."""
    small = [size for size in range(1, int(streams**0.5) + 1) if streams % size == 0]
    return sorted({*small, *(streams // size for size in small)})


def check_world_size(streams: int, world_size: int) -> None:
    """SpecError, naming those that work, for a world size that does not divide the number of streams."""
    if world_size < 1 or streams % world_size:
        raise SpecError(
            f"{world_size} ranks cannot share {streams} streams evenly",
            got=f"world size {world_size}, sharding.streams {streams}",
            expected=f"one of the world sizes {', '.join(map(str, fitting_world_sizes(streams)))}",
            fix="run with one of those: another number of streams would be another run",
        )


def packs_behind(position: int, stream: int, streams: int) -> int:
    """How many packs of one stream lie behind a position: one for each g below it with g % streams == stream."""
    return max(0, (position - stream + streams - 1) // streams)


def packs_known(states: StreamStates, stream: int) -> int:
    """How many packs of a stream its known state lies behind; 0 where none is known."""
    name = str(stream)
    return int(states[name]["packs"]) if name in states else 0


@dataclass(frozen=True, slots=True)
class ElasticPlace:
    """A rank in a world of a run, and how its steps lie in the global order."""

    rank: int
    world_size: int
    streams: int
    offset: int = 0
    """Position modulo world size."""

    def position(self, step: int) -> int:
        """Packs of the run behind `step` steps of all ranks."""
        return self.offset + step * self.world_size

    def pack(self, step: int) -> int:
        """Global number of the pack that this rank takes in step number `step`."""
        return self.position(step) + self.rank

    def served(self) -> range:
        """The streams of this rank."""
        return range((self.offset + self.rank) % self.world_size, self.streams, self.world_size)


def newest_states(
    found: Iterable[StreamStates], position: int, streams: int, served: Iterable[int]
) -> dict[str, Any]:
    """Of each stream served the state that is nearest to `position` and not past it; nothing where there is none."""
    kept: dict[str, Any] = {}
    sources = list(found)
    for stream in served:
        name, most = str(stream), packs_behind(position, stream, streams)
        usable = [source[name] for source in sources if name in source and source[name]["packs"] <= most]
        if usable:
            kept[name] = max(usable, key=lambda state: int(state["packs"]))
    return kept


def check_state(state: Mapping[str, Any], streams: int) -> int:
    """The position that a state names. SnapshotError for one of another sharding or number of streams."""
    if state.get("sharding") != SHARDING:
        raise SnapshotError(
            "a state of another sharding",
            got=f"Bagel sharding, {state.get('topology') or 'of unknown topology'}",
            expected=f"Elastic sharding, {streams} streams",
            fix="resume with the resource that the state was taken with",
        )
    if state.get("streams") != streams:
        raise SnapshotError(
            "a state of another number of streams",
            got=f"{state.get('streams')} streams",
            expected=f"{streams} streams",
            fix="set sharding.streams to what the run began with: it decides which packs come",
        )
    position = state.get("position")
    if type(position) is not int or position < 0:
        raise SnapshotError("a state names no position", got=repr(position), expected="a number from 0")
    states = state.get("states")
    entries = states.values() if isinstance(states, Mapping) else [None]
    if not all(isinstance(entry, Mapping) and type(entry.get("packs")) is int for entry in entries):
        raise SnapshotError(
            "a state is damaged", got="no states by stream", fix="resume from another snapshot or checkpoint"
        )
    return position


def merge_states(before: Mapping[str, Any] | None, state: dict[str, Any]) -> dict[str, Any]:
    """A rank's state with what only `before` knows: a pack carries the state of its own stream alone.

    States of Bagel sharding are whole as they are.
    """
    if before is None or "states" not in state or "states" not in before:
        return state
    states = {**before["states"]}
    for name, found in state["states"].items():
        if name not in states or found["packs"] >= states[name]["packs"]:
            states[name] = found
    return {**state, "states": states}
