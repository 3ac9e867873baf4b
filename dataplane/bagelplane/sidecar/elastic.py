"""Where a rank begins under elastic sharding: at a position of the whole run, with what is known of its streams.

A position is all that has to be known; every state of a stream at or below it saves planning forward. They come from
the trainer's own state, from ranks that this sidecar serves or served at another world size, and from snapshots,
whichever of them is nearest. Belongs to the supervisor's loop; snapshots are looked up in threads.

bagel.py is its counterpart, with the same methods.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Literal

from bagelplane.engine.elastic import (
    SHARDING,
    STATE_VERSION,
    ElasticPlace,
    StreamStates,
    check_state,
    check_world_size,
    newest_states,
    packs_behind,
    packs_known,
)
from bagelplane.errors import SnapshotError
from bagelplane.shm.protocol import Resume
from bagelplane.sidecar.rank import Progress, StartingPoint
from bagelplane.sidecar.snapshot_format import check_state_tables
from bagelplane.sidecar.snapshots import Manifest, SnapshotStore, StreamTopology
from bagelplane.sidecar.snapshotting import in_thread

log = logging.getLogger(__name__)


class ElasticRun:
    """What this sidecar knows of a run, beyond the world that trains at present."""

    def __init__(
        self, streams: int, store: SnapshotStore | None, resume: Literal["latest", "none"] | int
    ) -> None:
        self.streams = streams
        self._store, self._resume = store, resume
        self._lock = asyncio.Lock()
        self._began: int | None = None
        """Where the present world began: ranks that come later begin there too."""
        self._left: int | None = None
        """Where the world before it was left."""
        self._left_in_part = False
        """That world had ranks elsewhere, so where it was left cannot be known here."""
        self._remembered: list[StreamStates] = []

    def topology(self, world_size: int) -> StreamTopology:
        return StreamTopology(world_size, 0, self.streams)

    def way_back(self, world_size: int) -> str:
        """What people do who came with another number of ranks than the one that is attached."""
        return "end their trainer processes first"

    def check_change(
        self, progress: Mapping[int, Progress], world_size: int, wanted: int, resume: Resume
    ) -> None:
        """SpecError for a number of ranks that does not divide the number of streams."""
        check_world_size(self.streams, wanted)

    def end_world(self, progress: Mapping[int, Progress], world_size: int) -> None:
        """Another number of ranks goes on: keeps what is known of this one's streams."""
        if not progress:
            return
        self._left_in_part = len(progress) < world_size
        # Ranks end a step apart. A step that not all of them took is taken again.
        self._left = None if self._left_in_part else min(rank.position() for rank in progress.values())
        self._remembered = [state["states"] for rank in progress.values() for state in rank.states()]
        self._began = None

    def number(self, progress: Progress, step: int) -> int:
        """What snapshots count by: positions."""
        return progress.position(step)

    def pack_number(self, progress: Progress, rank: int, step: int) -> int:
        """Which pack a rank takes at a step: of the whole run."""
        return progress.position(step) + rank

    def step_in(self, progress: Progress, resume: Resume) -> int | None:
        """The step at which a rank that is being served stands where `resume` says; None when it has none such."""
        if resume.mode == "latest":
            return progress.next_step
        position = 0 if resume.mode == "none" else self._named(resume, progress.world_size)
        steps, rest = divmod(position - progress.origin.offset, progress.world_size)
        return None if rest else steps

    def place_of(self, resume: Resume, world_size: int) -> tuple[int, Resume]:
        """What snapshots call the place that a state, a position or a step names, and the same without its state."""
        position = self._named(resume, world_size)
        return position, Resume("position", position // world_size, position=position)

    async def starting_point(
        self, rank: int, world_size: int, resume: Resume, progress: Mapping[int, Progress]
    ) -> StartingPoint:
        """Raises SnapshotError, and StorageError where snapshots cannot be looked up."""
        async with self._lock:
            mine = progress.get(rank)
            if resume.mode == "latest" and mine is not None:
                return mine.starting_point()
            position, is_step = self._position(resume, world_size)
            if is_step and position:
                stands = min((rank.position() for rank in progress.values()), default=self._left)
                await in_thread(lambda: self._check_whole_steps(stands, world_size))
            given = resume.state if resume.mode == "state" else None
            known = [state["states"] for other in progress.values() for state in other.states()]
            known += self._remembered
            point = await in_thread(lambda: self._look_up(position, rank, world_size, given, known))
            self._began = point.offset + point.target_step * world_size
            return point

    # -- inside

    def _named(self, resume: Resume, world_size: int) -> int:
        """The position that a state, a position or a step names. SnapshotError for a state of another sharding."""
        if resume.state is not None:
            check_state_tables(resume.state, "of the trainer", "load the state of another checkpoint")
            return check_state(resume.state, self.streams)
        if resume.position is not None:
            return resume.position
        return (resume.step or 0) * world_size

    def _position(self, resume: Resume, world_size: int) -> tuple[int | None, bool]:
        """The position asked for (None: that of the newest snapshot), and whether a step named it."""
        if resume.mode == "none":
            return 0, False
        if resume.mode == "latest":
            for position in (self._began, self._left):
                if position is not None:
                    return position, False
            if self._resume == "none" and not self._left_in_part:
                return 0, False
            if not isinstance(self._resume, int) or self._left_in_part:
                return None, False
            resume = Resume("step", self._resume)
        return self._named(resume, world_size), resume.mode == "step"

    def _check_whole_steps(self, stands: int | None, world_size: int) -> None:
        """SnapshotError where steps of this world have no numbers, since it goes on in mid-round.

        Where the run stands is looked up in the snapshots if it isn't known. Runs in a thread.
        """
        if stands is None and (newest := self._nearest(None, world_size)) is not None:
            stands = newest.step
        if stands is not None and stands % world_size:
            raise SnapshotError(
                f"steps of {world_size} ranks have no numbers here: the run stands between two of them",
                got=f"position {stands}, {stands / world_size:.4g} steps",
                expected="a position: a number of packs of all ranks together",
                fix=f"resume(position={stands}), or load a state; or resume at another world size",
            )

    def _look_up(
        self, position: int | None, rank: int, world_size: int, given: Mapping[str, Any] | None,
        known: list[StreamStates],
    ) -> StartingPoint:  # fmt: skip
        """Runs in a thread."""
        newest = None
        if position is None:
            newest = self._nearest(None, world_size)
            if newest is None and self._left_in_part:
                raise SnapshotError(
                    f"where the run goes on with {world_size} ranks is not known here",
                    got="no snapshot, and ranks of the world before were served by other sidecars",
                    expected="a state, a position or a snapshot",
                    fix="load the loader's state, or set snapshots.uri",
                )
            position = newest.step if newest is not None else 0
        if position == 0:
            return StartingPoint()
        place = ElasticPlace(rank, world_size, self.streams, position % world_size)
        sources = [given["states"], *known] if given is not None else known
        states = newest_states(sources, position, self.streams, place.served())
        known_bad = dict(given.get("known_bad", {})) if given is not None else {}
        if any(
            packs_known(states, stream) < packs_behind(position, stream, self.streams)
            for stream in place.served()
        ):
            manifest = newest or self._nearest(position, world_size)
            if manifest is not None:
                log.info("rank %d: resuming from the snapshot of position %d", rank, manifest.step)
                assert self._store is not None
                stored, bad = stored_states(self._store, manifest, place)
                states = newest_states([states, *stored], position, self.streams, place.served())
                known_bad |= bad
        step = position // world_size
        state = {
            "version": STATE_VERSION,
            "sharding": SHARDING,
            "streams": self.streams,
            "position": position,
            "step": step,
            "states": states,
            "known_bad": known_bad,
        }
        return StartingPoint(step, state, step, place.offset)

    def _nearest(self, position: int | None, world_size: int) -> Manifest | None:
        if self._store is None:
            return None
        return self._store.nearest(position, self.topology(world_size))


def stored_states(
    store: SnapshotStore, manifest: Manifest, place: ElasticPlace
) -> tuple[list[StreamStates], dict[str, str]]:
    """States of a rank's streams, and bad images, out of those of a snapshot's files that have some of them.

    Their writers' world may differ.
    """
    found: list[StreamStates] = []
    known_bad: dict[str, str] = {}
    size = manifest.topology.world_size
    for rank in range(size):
        writer = ElasticPlace(rank, size, place.streams, manifest.step % size)
        if set(writer.served()).isdisjoint(place.served()):
            continue
        state = store.load_state(manifest, rank)
        if check_state(state, place.streams) != manifest.step:
            raise SnapshotError(
                f"the state of rank {rank} in {manifest.uri} is of another position",
                got=str(state["position"]), expected=str(manifest.step), fix="resume from another snapshot",
            )  # fmt: skip
        found.append(state["states"])
        known_bad |= state.get("known_bad", {})
    return found, known_bad
