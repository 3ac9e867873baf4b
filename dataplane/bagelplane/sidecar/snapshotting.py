"""Writing snapshots in the background: a slow or failing store never holds training up, it shows.

One task of the supervisor's loop owns the queue; the calls to the store run in threads of their own, which an
ending process does not wait for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from bagelplane.costs import Costs
from bagelplane.errors import BagelplaneError, SnapshotError, TransientStorageError
from bagelplane.logs import log_about
from bagelplane.sidecar.lease import RunLease
from bagelplane.sidecar.retention import Retention
from bagelplane.sidecar.snapshots import SnapshotStore, StreamTopology

MAX_WAITING_STEPS = 2
"""Steps that may wait for the store. One more, and the oldest that was not begun is given up."""
_RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)

log = logging.getLogger(__name__)

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """`function` in a daemon thread: unlike an executor's it holds no process up that wants to end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # it is a T when there is no error

    def work() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = function(), None
        except BaseException as error:  # noqa: BLE001 - it is handed to whoever waits
            outcome = None, error
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:
            log.debug("a call to the store ended after the sidecar")

    threading.Thread(target=work, name="store", daemon=True).start()
    return await future


@dataclass(slots=True)
class _Job:
    step: int
    """With elastic sharding: position (`SnapshotStore.write_rank`)."""
    rank: int
    topology: StreamTopology
    state: dict[str, Any]
    done: asyncio.Future[str]

    @property
    def name(self) -> str:
        return f"{self.topology.unit} {self.step}"

    def log_subject(self) -> Mapping[str, int]:
        return {"rank": self.rank, self.topology.unit: self.step}


@dataclass(slots=True)
class SnapshotHealth:
    """What status and metrics say of snapshots."""

    last_step: int | None = None
    """Newest complete snapshot that this sidecar wrote; with elastic sharding its position."""
    last_time: float | None = None
    """When, in seconds since the epoch."""
    last_write_seconds: float | None = None
    """How long its last state took to write."""
    completed: int = 0
    failed: int = 0
    given_up: int = 0
    problem: str = ""
    """What the last attempt failed with; empty while all is well."""


class SnapshotWriter:
    """The queue of states to be written. Runs until `close`."""

    def __init__(
        self,
        store: SnapshotStore | None,
        retention: Retention,
        before_state: Callable[[int], Awaitable[object]] | None = None,
    ) -> None:
        """`before_state` is awaited before a state of that rank is written."""
        self._store = store
        self._retention = retention
        self._before_state = before_state
        self._jobs: list[_Job] = []
        self._current: _Job | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.health = SnapshotHealth()
        self._task = asyncio.create_task(self._work(), name="snapshots")

    @property
    def uri(self) -> str | None:
        """Where snapshots are; None when they have no place."""
        return None if self._store is None else self._store.uri

    @property
    def costs(self) -> dict[str, Any]:
        """What was asked of the store (`Costs.as_json`)."""
        return (Costs() if self._store is None else self._store.costs).as_json()

    @property
    def lease(self) -> RunLease | None:
        """This sidecar's place in a run; None where nothing is written."""
        return self._store.lease if self._store is not None else None

    @property
    def waiting(self) -> int:
        """States that are not written yet."""
        return len(self._jobs) + (self._current is not None)

    def submit(
        self, step: int, rank: int, topology: StreamTopology, state: dict[str, Any]
    ) -> asyncio.Future[str]:
        """Queues one rank's state. The future gives the snapshot's URI once it is written, or its error."""
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_retrieve)
        if self._store is None:
            done.set_exception(
                SnapshotError(
                    "no snapshot can be written: the resource names no place for them",
                    fix="set spec.snapshots.uri, or keep loader.state_dict() in the trainer's checkpoint",
                )
            )
            return done
        for job in [*self._jobs, *filter(None, [self._current])]:
            if (job.step, job.rank, job.topology) == (step, rank, topology):
                return job.done
        self._jobs.append(_Job(step, rank, topology, state, done))
        self._idle.clear()
        self._give_up_oldest()
        self._wake.set()
        return done

    async def drain(self, timeout_seconds: float) -> bool:
        """Waits until all that was queued is written or failed; whether it was in time."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # -- inside

    def _give_up_oldest(self) -> None:
        steps = sorted({job.step for job in self._jobs})
        for step in steps[:-MAX_WAITING_STEPS]:
            [unit] = {job.topology.unit for job in self._jobs if job.step == step}
            error = SnapshotError(
                f"the snapshot of {unit} {step} was given up: the store is behind",
                fix="look at the store, or raise snapshots.everySteps",
            )
            for job in [job for job in self._jobs if job.step == step]:
                self._jobs.remove(job)
                job.done.set_exception(error)
            self.health.given_up += 1
            self.health.problem = str(error)
            log.warning("%s", error)

    async def _work(self) -> None:
        while True:
            while self._jobs:
                self._current = job = self._jobs.pop(0)
                log_about(job.log_subject)
                try:
                    uri = await self._write(job)
                except BagelplaneError as error:
                    self._note_failure(job, error)
                except Exception as error:
                    log.exception("snapshot of %s, rank %d: failed", job.name, job.rank)
                    self._note_failure(job, SnapshotError(f"the snapshot failed: {error}"))
                else:
                    job.done.set_result(uri)
                finally:
                    self._current = None
            self._idle.set()
            self._wake.clear()
            await self._wake.wait()

    async def _write(self, job: _Job) -> str:
        store = self._store
        assert store is not None
        if self._before_state is not None:
            await self._before_state(job.rank)
        begun = time.monotonic()
        for pause in (*_RETRY_SECONDS, None):
            try:
                complete = await in_thread(
                    lambda: store.write_rank(job.step, job.rank, job.topology, job.state)
                )
                break
            except TransientStorageError as error:
                # A newer state is worth more than another attempt at this one.
                if pause is None or any(later.rank == job.rank for later in self._jobs):
                    raise
                self.health.problem = str(error)
                log.warning("snapshot of %s, rank %d: %s; again in %.1f s", job.name, job.rank, error, pause)
                await asyncio.sleep(pause)
        self.health.problem = ""
        if complete:
            self._note_complete(job)
            self.health.last_write_seconds = time.monotonic() - begun
            await in_thread(lambda: store.prune(self._retention))
        return store.step_uri(job.step)

    def _note_complete(self, job: _Job) -> None:
        if self.health.last_step != job.step:
            self.health.completed += 1
            log.info("snapshot of %s is complete", job.name)
        self.health.last_step, self.health.last_time = job.step, time.time()

    def _note_failure(self, job: _Job, error: BagelplaneError) -> None:
        self.health.failed += 1
        self.health.problem = str(error)
        log.error("snapshot of %s, rank %d: %s", job.name, job.rank, error)
        if not job.done.done():
            job.done.set_exception(error)


def _retrieve(future: asyncio.Future[str]) -> None:
    """Looks at the outcome, so that one nobody waits for is no warning: the log has it already."""
    if not future.cancelled():
        future.exception()
