"""Where a rank begins under Bagel sharding: at a step of its own stream, which is bound to the topology.

The counterpart of elastic.py, with the same methods. Belongs to the supervisor's loop; snapshots are looked up in
threads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

from bagelplane.errors import SnapshotError
from bagelplane.shm.protocol import Resume
from bagelplane.sidecar.rank import Progress, StartingPoint
from bagelplane.sidecar.snapshot_format import check_state_tables
from bagelplane.sidecar.snapshots import SnapshotStore, StreamTopology
from bagelplane.sidecar.snapshotting import in_thread

log = logging.getLogger(__name__)


class BagelRun:
    """What this sidecar knows of a run, beyond the world that trains at present."""

    def __init__(
        self, workers: int, store: SnapshotStore | None, resume: Literal["latest", "none"] | int
    ) -> None:
        self.streams = 0
        self._workers, self._store, self._resume = workers, store, resume

    def topology(self, world_size: int) -> StreamTopology:
        return StreamTopology(world_size, self._workers)

    def way_back(self, world_size: int) -> str:
        """What people do who came with another number of ranks than attached before."""
        return (
            f"attach {world_size} ranks again, or restart the sidecar with --resume none and another "
            "snapshots.uri (Bagel sharding is bound to its topology)"
        )

    def check_change(
        self, progress: Mapping[int, Progress], world_size: int, wanted: int, resume: Resume
    ) -> None:
        """SnapshotError: another number of ranks may only begin where nothing was taken yet."""
        taken = max((rank.next_step for rank in progress.values()), default=0)
        if taken and resume.mode != "none":
            raise SnapshotError(
                f"the run stands at step {taken} and cannot change its topology",
                got=str(self.topology(wanted)),
                expected=str(self.topology(world_size)),
                fix=self.way_back(world_size),
            )

    def end_world(self, progress: Mapping[int, Progress], world_size: int) -> None:
        """Nothing of another topology is of use."""

    def number(self, progress: Progress, step: int) -> int:
        """What snapshots count by: steps."""
        return step

    def pack_number(self, progress: Progress, rank: int, step: int) -> int:
        """Which pack a rank takes at a step: of its own stream."""
        return step

    def step_in(self, progress: Progress, resume: Resume) -> int:
        """The step of a rank that is being served at the place that `resume` says. SnapshotError for none."""
        if resume.mode == "latest":
            return progress.next_step
        return 0 if resume.mode == "none" else _named_step(resume, progress.world_size)

    def place_of(self, resume: Resume, world_size: int) -> tuple[int, Resume]:
        """What snapshots call the place that a state, a position or a step names, and the same without its state."""
        step = _named_step(resume, world_size)
        return step, Resume("step", step)

    async def starting_point(
        self, rank: int, world_size: int, resume: Resume, progress: Mapping[int, Progress]
    ) -> StartingPoint:
        """Looks into memory first, then into the snapshots. Raises SnapshotError, and StorageError."""
        if resume.mode == "none":
            return StartingPoint()
        if resume.mode == "state":
            assert resume.step is not None
            assert resume.state is not None
            check_state_tables(resume.state, "of the trainer", "load the state of another checkpoint")
            return StartingPoint(resume.step, resume.state, resume.step)
        mine = progress.get(rank)
        step: int | None
        if resume.mode != "latest":
            step = _named_step(resume, world_size)
        elif mine is not None:
            return mine.starting_point()
        elif self._resume == "none":
            return StartingPoint()
        else:
            step = self._resume if isinstance(self._resume, int) else None
        in_memory = None if mine is None or step is None else mine.starting_point(step)
        stored = await in_thread(lambda: self._stored_point(rank, step, world_size))
        found = [point for point in (in_memory, stored) if point is not None]
        return max(found, key=lambda point: point.start_step, default=StartingPoint(target_step=step or 0))

    # -- inside

    def _stored_point(self, rank: int, step: int | None, world_size: int) -> StartingPoint | None:
        """The newest snapshot at or below `step` (None: of all). Runs in a thread."""
        if self._store is None:
            return None
        manifest = self._store.nearest(step, self.topology(world_size))
        if manifest is None:
            return None
        log.info("rank %d: resuming from the snapshot of step %d", rank, manifest.step)
        state = self._store.load_state(manifest, rank)
        return StartingPoint(manifest.step, state, manifest.step if step is None else step)


def _named_step(resume: Resume, world_size: int) -> int:
    """The step that a state, a position or a step names. SnapshotError for a position where there is none."""
    if resume.mode != "position":
        return resume.step or 0
    step, rest = divmod(resume.position or 0, world_size)
    if rest:
        raise SnapshotError(
            f"there is no step of {world_size} ranks at position {resume.position}",
            got=f"{rest} packs past step {step}",
            expected=f"a multiple of {world_size}",
            fix="ranks of Bagel sharding step together: name a step",
        )
    return step
