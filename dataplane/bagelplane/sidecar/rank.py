"""One data-parallel rank in the supervisor: its progress, which outlives everything, its producer, which may die,
and its readers, one or more.

All of this runs in the supervisor's loop and belongs to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from bagelplane.engine.elastic import merge_states
from bagelplane.errors import BagelplaneError
from bagelplane.logs import log_about
from bagelplane.shm.protocol import Published
from bagelplane.shm.ring import ring_problem
from bagelplane.sidecar.control import Frame, encode_frame, read_frame
from bagelplane.sidecar.producer import ProducerSetup
from bagelplane.sidecar.readers import Readers
from bagelplane.sidecar.tally import Tally
from bagelplane.sidecar.whereabouts import process_state

KEPT_STATES = 8
"""Acknowledged states that are kept: ranks are a few steps apart when a snapshot is asked for."""
MAX_FAILURES = 8
"""Deaths of a producer in a row, without a pack in between, until its rank is given up."""
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_STOP_SECONDS = 2.0
_LAG_SECONDS = 5.0
"""A reader that waits so long for another one is a matter for the log."""
_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: ", out of memory?",
    signal.SIGBUS: ": the ring's volume shrank or its file was cut",
}

log = logging.getLogger(__name__)

State = dict[str, Any]


class RankFailedError(BagelplaneError):
    """A producer failed in a way that starting it again does not mend. `code` is the protocol's."""

    def __init__(self, what: str, *, fix: str = "", code: str = "internal") -> None:
        super().__init__(what, fix=fix)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_failure, (self.what, self.fix, self.code)


class RankStoppedError(BagelplaneError):
    """A producer was stopped while somebody waited for it: for another topology, or at the end."""

    reaction = "Attach again."


def _rebuild_failure(what: str, fix: str, code: str) -> RankFailedError:
    return RankFailedError(what, fix=fix, code=code)


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Where a stream is opened and how far it is planned forward before its first pack."""

    start_step: int = 0
    state: State | None = None
    target_step: int = 0
    offset: int = 0
    """Elastic sharding: the run's position is `offset` more than the world's steps account for."""


class Progress:
    """Steps and states of a rank. `next_step` is the first pack that was not acknowledged."""

    def __init__(self, origin: StartingPoint, world_size: int = 1) -> None:
        self.origin = origin
        self.world_size = world_size
        self.next_step = origin.target_step
        self._states: dict[int, State] = {}
        if origin.state is not None and origin.start_step == origin.target_step:
            self._states[origin.start_step] = origin.state

    def keep(self, step: int, state: State) -> None:
        """The state before pack `step`, acknowledged or not yet. With elastic sharding it may be the last pack's
        stream's alone: what is known of the others is put to it."""
        self._states[step] = merge_states(self._states.get(step - 1), state)

    def position(self, step: int | None = None) -> int:
        """Packs of the whole run behind a step of all ranks (default: the next one)."""
        return self.origin.offset + (self.next_step if step is None else step) * self.world_size

    def states(self) -> list[State]:
        """All that are kept, acknowledged or not."""
        return list(self._states.values())

    @property
    def known_until(self) -> int:
        """The last place whose state is known, or that needs none."""
        return max([self.next_step, *self._states])

    def advance(self, next_step: int) -> None:
        """Everything before `next_step` was taken by the trainer."""
        self.next_step = next_step
        for step in [step for step in self._states if step <= next_step - KEPT_STATES]:
            del self._states[step]

    def acknowledged(self) -> dict[int, State]:
        """The states that a snapshot may hold, by step: never one that lies past what the trainer took."""
        return {step: state for step, state in sorted(self._states.items()) if 0 < step <= self.next_step}

    def starting_point(self, step: int | None = None) -> StartingPoint:
        """The nearest known place at or below `step` (default: the next one)."""
        target = self.next_step if step is None else step
        known = [at for at in self._states if at <= target]
        if known:
            return StartingPoint(max(known), self._states[max(known)], target)
        if self.origin.start_step <= target:
            return StartingPoint(self.origin.start_step, self.origin.state, target)
        return StartingPoint(target_step=target)


class Listener(Protocol):
    """Who takes a rank's packs: a client's session. Told to go, it stays known until its client has gone."""

    def publish(self, message: Published) -> None: ...
    def drop(self, reason: str, *, error: RankFailedError | None = None) -> None: ...


class RankServer:
    """A rank's producer process, kept alive until `stop`."""

    def __init__(
        self,
        build_setup: Callable[[StartingPoint], ProducerSetup],
        progress: Progress,
        tally: Tally,
        *,
        readers: int,
        on_acknowledged: Callable[[RankServer], None],
        on_known_bad: Callable[[dict[str, str]], None],
    ) -> None:
        self._build_setup = build_setup
        self.progress = progress
        self._on_acknowledged = on_acknowledged
        self._on_known_bad = on_known_bad
        setup = build_setup(progress.starting_point())
        self.rank, self.ring_number, self.world_size = setup.rank, setup.ring_number, setup.world_size
        self.readers = Readers(self.rank, progress.next_step, readers)
        self.phase: Literal["starting", "ready", "failed", "stopped"] = "starting"
        self.phase_since = time.monotonic()
        self.failure: RankFailedError | None = None
        self.ring_path, self.ring_bytes, self.epoch = setup.ring_path, setup.ring_bytes, 0
        self.tally = tally
        self.has_pack = False
        """Whether a first pack was ever ready."""
        self.listeners: dict[int, Listener] = {}
        """By local rank."""
        self.pid = 0
        self._records: deque[Published] = deque()
        self._rows: dict[int, dict[str, Any]] = {}
        """Of packs that were not acknowledged, as the producer told them (`PackRows`), by step."""
        self._published_until = progress.next_step
        self._process: asyncio.subprocess.Process | None = None
        self._control: asyncio.StreamWriter | None = None
        self._changed = asyncio.Event()
        self._stopping = False
        self._failures = 0
        self._last_failure = ""
        self._has_no_room = False  # the producer waits for the readers
        self._store_away = ""  # what the producer waits for; empty while the store answers
        self._told_obstacle = ""
        self._task = asyncio.create_task(self._keep_alive(), name=f"rank {self.rank}")

    # -- for the supervisor and sessions

    async def wait_ready(self) -> None:
        """Returns when packs can be announced. RankFailedError when that will not happen."""
        while self.phase == "starting":
            self._changed.clear()
            await self._changed.wait()
        if self.failure is not None:
            raise self.failure
        if self.phase == "stopped":
            raise RankStoppedError(f"the producer of rank {self.rank} was stopped", fix="attach again")

    def log_subject(self) -> Mapping[str, int]:
        """What lines about this rank are about."""
        return {"rank": self.rank, "step": self.progress.next_step}

    @property
    def ready_packs(self) -> int:
        """Packs in the ring that the trainer has not taken."""
        return len(self._records)

    @property
    def used_bytes(self) -> int:
        """Their bytes."""
        return sum(record.length_bytes for record in self._records)

    @property
    def known_until(self) -> int:
        """The first pack that was not made yet, in this life of the producer or an earlier one."""
        return max(self._published_until, self.progress.known_until)

    def awaited_seconds(self, local_rank: int) -> float:
        """How long this reader has had nothing to take; 0 while it has."""
        cursor = self.readers.cursors.get(local_rank)
        if cursor is None or cursor.waiting_since is None:
            return 0.0
        return time.monotonic() - cursor.waiting_since

    @property
    def longest_awaited_seconds(self) -> float:
        """The same of the reader that has waited longest."""
        return max(map(self.awaited_seconds, self.readers.cursors), default=0.0)

    def describe(self) -> str:
        """What is being waited for, in words."""
        if stopped := self._describe_stopped():
            return stopped
        if self._store_away:
            return f"the producer of rank {self.rank} waits until the store is back: {self._store_away}"
        if self.phase == "starting":
            again = f" again ({self._last_failure})" if self._last_failure else ""
            return f"the producer of rank {self.rank} is starting{again}"
        if self.phase != "ready":
            return f"the producer of rank {self.rank} is {self.phase}"
        step = self._published_until
        holders = self.readers.describe_holders(step, time.monotonic()) if self._has_no_room else ""
        if holders:
            return (
                f"the ring of rank {self.rank} has no room for step {step}, its packs are held by {holders}"
            )
        return f"the producer of rank {self.rank} is making step {step}"

    @property
    def obstacle(self) -> str:
        """What keeps readers waiting that somebody should know of, in words; empty while there is nothing."""
        waits = self.longest_awaited_seconds >= _LAG_SECONDS
        is_stuck = self._store_away or (waits and self._has_no_room)
        return self._describe_stopped() or (self.describe() if is_stuck else "")

    def take_rows(self, step: int) -> dict[str, Any] | None:
        """The rows of a pack, once; None where they were not told."""
        return self._rows.pop(step, None)

    def attach(self, local_rank: int, listener: Listener, client: str) -> list[Published]:
        """From now on an admitted reader's packs go to `listener`. The ones that are ready for it."""
        self.listeners[local_rank] = listener
        next_step = self.readers.cursors[local_rank].next_step
        ready = [record for record in self._records if record.step >= next_step]
        self.readers.enter(local_rank, client, time.monotonic(), waits=not ready)
        self._release(self.readers.lowest)
        return ready

    def detach(self, local_rank: int, listener: Listener, *, returns: bool = False) -> None:
        """The listener's client has gone. `returns`: only because the producer went."""
        if self.listeners.get(local_rank) is listener:
            del self.listeners[local_rank]
            self.readers.leave(local_rank, time.monotonic(), returns=returns)

    def acknowledge(self, local_rank: int, step: int, stalled_seconds: float | None = None) -> None:
        """The reader has this pack and all before it; a step that was never announced must not come here.

        `stalled_seconds` is how long it stood still for it, None where nobody was asked. Of several readers the first
        to have a pack is counted.
        """
        cursor = self.readers.cursors[local_rank]
        if stalled_seconds is not None and step >= self.readers.furthest:
            self.tally.stalls.add(stalled_seconds)
        self._release(self.readers.advance(local_rank, step + 1))
        if cursor.next_step >= self._published_until and cursor.waiting_since is None:
            cursor.waiting_since = time.monotonic()

    async def wait_released(self, step: int, seconds: float) -> None:
        """Until all readers have everything before `step`, the producer has ended or time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.progress.next_step < step and self.phase == "ready":
                    self._changed.clear()
                    await self._changed.wait()

    def watch(self) -> None:
        """Looked after every few seconds: says what holds readers up, once. Has the producer begin anew if its ring
        was deleted or cut: who attaches now would find none.
        """
        obstacle = self.obstacle
        if obstacle and not self._told_obstacle:
            log.warning("rank %d: %s", self.rank, obstacle)
        self._told_obstacle = obstacle
        if self.phase != "ready" or self._process is None:
            return
        problem = ring_problem(Path(self.ring_path), self.ring_bytes)
        if problem:
            self._last_failure = f"its ring {self.ring_path} {problem}"
            _kill(self._process)

    async def stop(self) -> None:
        """Ends the producer, by force if it does not end within two seconds."""
        self._stopping = True
        self._send({"type": "stop"})
        process = self._process
        if process is not None:
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except TimeoutError:
                _kill(process)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._set_phase("stopped")
        self._drop_listeners("the producer was stopped")

    # -- the producer's life

    async def _keep_alive(self) -> None:
        log_about(self.log_subject)
        try:
            while not self._is_over():
                await self._run_once()
                if self._is_over():
                    break
                self.tally.restarts += 1
                pause = min(_FIRST_PAUSE_SECONDS * 2 ** max(0, self._failures - 1), _LONGEST_PAUSE_SECONDS)
                log.warning(
                    "rank %d: the producer ended (%s), starting it again at step %d in %.1f s",
                    self.rank,
                    self._last_failure,
                    self.progress.next_step,
                    pause,
                )
                self._set_phase("starting")
                self._drop_listeners()
                await asyncio.sleep(pause)
        except Exception:
            log.exception("rank %d: the supervisor lost its producer", self.rank)
            self.failure = RankFailedError(
                f"the supervisor of rank {self.rank} failed", fix="the sidecar's log has more"
            )
        finally:
            await self._end_process()
        if self.failure is not None:
            log.error("rank %d: %s", self.rank, self.failure)
            self._set_phase("failed")
            self._drop_listeners()

    def _is_over(self) -> bool:
        return self._stopping or self.failure is not None

    async def _run_once(self) -> None:
        """One life of a producer, from its start to its end."""
        self._records.clear()
        self._last_failure, self._has_no_room, self._store_away = "", False, ""
        reader = await self._spawn(self._build_setup(self.progress.starting_point()))
        while (frame := await read_frame(reader)) is not None:
            self._take(frame)
        status = await self._end_process()
        if self._is_over():
            return
        self._failures += 1
        self._last_failure = self._last_failure or _describe_exit(status)
        if self._failures >= MAX_FAILURES:
            self.failure = RankFailedError(
                f"the producer of rank {self.rank} died {self._failures} times in a row without a pack; "
                f"the last time: {self._last_failure}",
                fix="the sidecar's log has more; if it was killed, give its container more memory",
            )

    async def _spawn(self, setup: ProducerSetup) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        try:
            arguments = ("--control-fd", str(theirs.fileno()), "--parent-pid", str(os.getpid()))
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *_warning_options(),
                "-m",
                "bagelplane.sidecar.producer",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
            self.pid = self._process.pid
            reader, self._control = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._control.write(encode_frame(setup.as_frame()))
        return reader

    async def _end_process(self) -> int | None:
        """Makes sure that the process is gone and its channel closed. Its exit status."""
        process, self._process, self.pid = self._process, None, 0
        if self._control is not None:
            self._control.close()
            self._control = None
        if process is None:
            return None
        if process.returncode is None:
            # Its channel is closed, so it is dying or stuck; nothing in it is worth waiting for.
            _kill(process)
        return await process.wait()

    def _take(self, frame: Frame) -> None:
        kind = frame["type"]
        if kind == "published":
            self._take_published(frame)
        elif kind == "ready":
            self.epoch, self.ring_path = frame["epoch"], frame["ring_path"]
            self.ring_bytes = frame["ring_bytes"]
            self._published_until = frame["next_step"]
            self.tally.begin((frame["state"] or {}).get("drops", {}))
            if frame["state"] is not None:
                self.progress.keep(frame["next_step"], frame["state"])
            self._set_phase("ready")
        elif kind == "no_room":
            self._has_no_room = True
        elif kind == "store":
            self._store_away = frame["away"]
        elif kind == "known_bad":
            self._on_known_bad(frame["images"])
        elif kind == "failed":
            self._last_failure = frame["message"]
            if frame["fatal"]:
                self.failure = RankFailedError(frame["message"], fix=frame["fix"], code=frame["code"])

    def _take_published(self, frame: Frame) -> None:
        step = frame["step"]
        self._failures, self._has_no_room = 0, False
        self._published_until = step + 1
        self.progress.keep(step + 1, frame["state"])
        self.has_pack = True
        self.tally.publish(frame)
        if step < self.progress.next_step:
            # Made again after a crash that lost only the acknowledgement.
            self._send({"type": "ack", "step": step})
            return
        if frame["rows"] is not None:
            self._rows[step] = frame["rows"]
        message = Published(step, frame["offset_bytes"], frame["length_bytes"], frame["epoch"])
        self._records.append(message)
        now, waited_seconds = time.monotonic(), 0.0
        for local_rank, listener in self.listeners.items():
            cursor = self.readers.cursors[local_rank]
            if cursor.next_step > step:
                continue  # it began ahead of the others
            if cursor.waiting_since is not None:
                waited_seconds = max(waited_seconds, now - cursor.waiting_since)
                cursor.waiting_since = None
            listener.publish(message)
        self.tally.trainer_wait_seconds += waited_seconds

    def _release(self, next_step: int) -> None:
        """Everything before `next_step` was taken by all readers."""
        if next_step <= self.progress.next_step:
            return
        self.tally.acknowledged += next_step - self.progress.next_step
        # One step at a time: a snapshot may be due at any of them.
        for step in range(self.progress.next_step + 1, next_step + 1):
            self.progress.advance(step)
            self._on_acknowledged(self)
        while self._records and self._records[0].step < next_step:
            self._records.popleft()
        self._send({"type": "ack", "step": next_step - 1})
        self._changed.set()

    def _describe_stopped(self) -> str:
        """That the producer's process was stopped, in words; empty if it runs."""
        if not self.pid or process_state(self.pid) not in ("T", "t"):
            return ""
        return (
            f"the producer of rank {self.rank}, process {self.pid}, was stopped by a signal (SIGSTOP) at step "
            f"{self._published_until}: kill -CONT {self.pid} lets it go on, its end has it started again"
        )

    def _drop_listeners(self, reason: str = "") -> None:
        """They are told; each is detached once its client has gone."""
        for listener in list(self.listeners.values()):
            listener.drop(reason or self._last_failure or "the producer ended", error=self.failure)

    def _set_phase(self, phase: Literal["starting", "ready", "failed", "stopped"]) -> None:
        self.phase = phase
        self.phase_since = time.monotonic()
        self._changed.set()

    def _send(self, frame: Frame) -> None:
        if self._control is not None and not self._control.is_closing():
            self._control.write(encode_frame(frame))


def _kill(process: asyncio.subprocess.Process) -> None:
    # Not process.kill(): that polls, and so takes the exit status away from the loop's own watcher.
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def _describe_exit(status: int | None) -> str:
    if status is not None and status < 0:
        hint = _SIGNAL_HINTS.get(-status, "")
        return f"killed by {signal.Signals(-status).name}{hint}"
    return f"exit status {status}"


def _warning_options() -> list[str]:
    """The interpreter's own warning settings: what is an error here is one there."""
    return [f"-W{option}" for option in sys.warnoptions]
