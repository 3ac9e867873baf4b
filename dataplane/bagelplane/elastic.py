"""One rank's packs under elastic sharding: its streams in turn, each opened when its first pack is due.

Opening is put off because a rank of a small world has many streams, and behind each is a buffer of rows that have to
be read again. For the same reason a stream that has to catch up plans forward only when its turn comes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from bagelplane.costs import Costs
from bagelplane.engine.drops import Drop, DropLog
from bagelplane.engine.elastic import (
    SHARDING,
    STATE_VERSION,
    ElasticPlace,
    check_state,
    newest_states,
    packs_known,
)
from bagelplane.engine.pack import Pack
from bagelplane.engine.planner import Mark, PackPlan
from bagelplane.engine.samples import known_bad_part
from bagelplane.errors import BagelplaneError, SnapshotError

if TYPE_CHECKING:
    from bagelplane.sources.index import DatasetIndex
    from bagelplane.storage import Storage
    from bagelplane.stream import WorkerStream

PROGRESS_SECONDS = 5.0
"""How often a stream that catches up says how far it is."""

Allocate = Callable[[Pack], Sequence[np.ndarray]]
OpenStream = Callable[[int, DropLog], "WorkerStream"]

log = logging.getLogger(__name__)


class ElasticStream:
    """A rank's packs. Owned by one thread.

    `step` counts this rank's packs at its world size (`ElasticPlace`); `position` those of the whole run.
    """

    index: DatasetIndex | None = None
    """What planning knows the data from, beside themselves."""

    def __init__(
        self, place: ElasticPlace, open_stream: OpenStream, drops: DropLog,
        known_bad: dict[str, str] | None, pool: ThreadPoolExecutor | None = None,
        costs: Costs | None = None, storage: Storage | None = None,
    ) -> None:  # fmt: skip
        self.costs, self._storage = costs or Costs(), storage
        self._place, self._open_stream = place, open_stream
        self._drop_log, self._known_bad, self._pool = drops, known_bad, pool
        self._open: dict[int, WorkerStream] = {}
        self._drops: dict[int, DropLog] = {}
        self._states: dict[str, Any] = {}
        """The newest known state of each stream; it may lie behind what is due, never ahead."""
        self._verify = True
        self.step = 0

    @property
    def position(self) -> int:
        """Packs of the whole run that lie behind this step."""
        return self._place.position(self.step)

    def next_pack(self, allocate: Allocate) -> Pack:
        """The rank's next pack, pixels in place; its state is that of its stream (see `WorkerStream.next_pack`)."""
        step, (stream, behind) = self.step, self._due(self.step)
        worker = self._ready(stream, behind)
        self._read_ahead(is_wanted=True)
        entry: dict[str, Any] = {}

        def allocate_numbered(pack: Pack) -> Sequence[np.ndarray]:
            nonlocal entry
            pack.step = step
            planned, drops = worker.planned()
            entry = self._entry(stream, behind + 1, planned, drops)
            pack.state = self._state(step + 1, {str(stream): entry}, drops)
            return allocate(pack)

        pack, _ = worker.next_pack(allocate_numbered, plan_ahead=self._plan_ahead)
        self._states[str(stream)] = entry
        self.step += 1
        return pack

    def plan_pack(self, *, verify: bool = False) -> PackPlan:
        """Plan the rank's next pack and go past it, as `RankStream.plan_pack`."""
        stream, behind = self._due(self.step)
        worker = self._ready(stream, behind)
        self._read_ahead(is_wanted=verify)
        plan = worker.plan_pack(verify=verify)
        self._states[str(stream)] = self._entry(stream, behind + 1, worker.state())
        self.step += 1
        return plan

    def skip_to(
        self, step: int, *, verify: bool = True, on_progress: Callable[[int], None] | None = None
    ) -> None:
        """Stand at `step`. Each stream plans what lies between when its turn comes, as `RankStream.skip_to` does."""
        if step < self.step:
            raise SnapshotError(
                "a stream cannot go back", got=f"step {step}", expected=f"at least {self.step}",
                fix="use an older state",
            )  # fmt: skip
        self.step, self._verify = step, verify
        if on_progress is not None:
            on_progress(step)

    def marks(self) -> list[Mark]:
        """What determines the packs after `step`: of the stream that is due."""
        return [self._ready(*self._due(self.step)).mark]

    def state(self) -> dict[str, Any]:
        """JSON-able state after `step` packs of this rank: all that is known of its streams."""
        return self._state(self.step, self._states)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the position that `state` names, at whatever world size it was taken. Raises SnapshotError.

        Streams whose state is missing, or lies further behind, plan forward.
        """
        place = self._place
        position = check_state(state, place.streams)
        if state.get("version") != STATE_VERSION:
            raise SnapshotError(
                "a state of another format", got=f"version {state.get('version')}",
                expected=f"version {STATE_VERSION}", fix="use the release that wrote it",
            )  # fmt: skip
        place = ElasticPlace(place.rank, place.world_size, place.streams, position % place.world_size)
        try:
            if self._known_bad is not None:
                self._known_bad.update(state.get("known_bad", {}))
        except (TypeError, ValueError) as error:
            raise _damaged(error) from error
        self._states = newest_states([state["states"]], position, place.streams, place.served())
        self._place, self.step = place, position // place.world_size
        self._open.clear()
        self._drops.clear()

    def close(self) -> None:
        """End the decode threads, and reading ahead."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._storage is not None:
            self._storage.close()

    # -- inside

    def _due(self, step: int) -> tuple[int, int]:
        """(stream, its packs behind) of the pack that this rank takes in `step`."""
        number = self._place.pack(step)
        return number % self._place.streams, number // self._place.streams

    def _ready(self, stream: int, behind: int) -> WorkerStream:
        """The stream, open and with exactly `behind` packs behind it."""
        worker = self._open.get(stream) or self._opened(stream)
        found = packs_known(self._states, stream)
        if found == behind:
            return worker
        log.info("stream %d: planning forward from its pack %d to %d", stream, found, behind)
        started = told = time.monotonic()
        packs = found
        self._read_ahead(is_wanted=self._verify)
        try:
            while packs < behind:
                worker.skip_pack(verify=self._verify)
                packs, now = packs + 1, time.monotonic()
                if now - told >= PROGRESS_SECONDS:
                    told, rate = now, (packs - found) / (now - started)
                    log.info(
                        "stream %d: planned %d of %d packs, %.1f a second, %.0f s left",
                        stream, packs - found, behind - found, rate, (behind - packs) / rate,
                    )  # fmt: skip
        finally:
            # Also when a plan fails: what is planned already is not planned again.
            self._states[str(stream)] = self._entry(stream, packs, worker.state())
        return worker

    def _read_ahead(self, *, is_wanted: bool) -> None:
        """As of RankStream."""
        if self._storage is not None:
            self._storage.ahead.is_paused = self.index is not None and not is_wanted

    def _opened(self, stream: int) -> WorkerStream:
        drops = self._drop_log.sibling()
        worker = self._open_stream(stream, drops)
        known = self._states.get(str(stream))
        if known is not None:
            try:
                worker.load_state(known["state"])
                drops.load_json(known["drops"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise _damaged(error) from error
        self._drops[stream], self._open[stream] = drops, worker
        return worker

    def _plan_ahead(self) -> None:
        """While a pack's images decode: plan the next stream's, unless that has to catch up first."""
        (present, _), (stream, behind) = self._due(self.step), self._due(self.step + 1)
        if stream != present and packs_known(self._states, stream) != behind:
            return
        try:
            worker = self._open.get(stream) or self._opened(stream)
        except BagelplaneError:
            return  # said again when it is due
        worker.plan_ahead()

    def _entry(self, stream: int, packs: int, state: Any, pending: Iterable[Drop] = ()) -> dict[str, Any]:
        return {"packs": packs, "state": state, "drops": self._drops[stream].as_json(pending)}

    def _state(self, step: int, states: Mapping[str, Any], pending: Iterable[Drop] = ()) -> dict[str, Any]:
        place = self._place
        return {
            "version": STATE_VERSION,
            "sharding": SHARDING,
            "streams": place.streams,
            "position": place.position(step),
            "rank": place.rank,
            "world_size": place.world_size,
            "step": step,
            "states": dict(states),
            **known_bad_part(self._known_bad),
            "drops": self._total_drops(pending),
        }

    def _total_drops(self, pending: Iterable[Drop]) -> dict[str, dict[str, int]]:
        """Of all streams of the rank, since each began."""
        total = DropLog(log)
        for name, known in self._states.items():
            if int(name) not in self._drops:
                total.add_json(known["drops"])
        for drops in self._drops.values():
            total.counts += drops.counts
        return total.as_json(pending)


def _damaged(error: Exception) -> SnapshotError:
    return SnapshotError(
        "a state is damaged",
        got=f"{type(error).__name__}: {error}",
        expected="what a stream of this data set gave as its state",
        fix="resume from another snapshot or checkpoint",
    )
