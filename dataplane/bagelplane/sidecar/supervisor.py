"""The supervisor: owns the socket, the ranks, the snapshots and the end of all of them.

One process, one asyncio loop. `run_sidecar` is the way in; it returns after SIGTERM or SIGINT with 0, or
raises what makes it impossible to serve, before a trainer attaches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

from bagelplane.errors import (
    BagelplaneError,
    RingError,
    SnapshotError,
    SpecError,
    StorageError,
    TransientStorageError,
)
from bagelplane.logs import LogFormat
from bagelplane.shm.protocol import Attach, Resume, serve_unix
from bagelplane.sidecar.bagel import BagelRun
from bagelplane.sidecar.elastic import ElasticRun
from bagelplane.sidecar.examination import Examination, examine
from bagelplane.sidecar.lease import LEASE_SECONDS, LeaseTimes
from bagelplane.sidecar.lineage_writing import LineageWriter
from bagelplane.sidecar.producer import DEFAULT_STREAM_FACTORY, ProducerSetup
from bagelplane.sidecar.rank import Progress, RankFailedError, RankServer, RankStoppedError, StartingPoint
from bagelplane.sidecar.readers import BusyError
from bagelplane.sidecar.report import build_status
from bagelplane.sidecar.rundir import RunDirectory
from bagelplane.sidecar.session import Session
from bagelplane.sidecar.sizing import decode_threads
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.sidecar.snapshotting import SnapshotWriter, in_thread
from bagelplane.sidecar.status import StatusServer
from bagelplane.sidecar.store import begin_run, retention_of
from bagelplane.sidecar.tally import Tally
from bagelplane.spec import BagelDataset, spec_hash
from bagelplane.spec_memory import ring_bytes
from bagelplane.spec_parts import Sharding

_GOODBYE_SECONDS = 0.5
_WATCH_SECONDS = 2.0
_LEASE_END_SECONDS = 1.0
_TAKE_OVER_SECONDS = 1.0
"""How long a reader waits for the end of the one before it, and for others that are in its way, until it hears of it.
Clients come again by themselves."""
_ROOM_SECONDS = 5.0
_MAX_RANKS = 64
"""Producers at once, unless more were expected: each takes a process and a ring."""
_KNOWN_RANKS = 256
"""Ranks that something is kept of."""
_ADMISSION_SECONDS = 0.05

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """How a sidecar runs; nothing here changes the stream."""

    directory: Path
    resume: Literal["latest", "none"] | int = "latest"
    """Where ranks begin that are attached with `latest` and that nothing is known of yet."""
    local_ranks: int = 1
    """Data-parallel ranks expected on this machine, for memory and threads. More may come."""
    world_size: int = 1
    """Ranks expected in all, for a look at whether the data have a part for each. The trainer decides."""
    status_host: str = "127.0.0.1"
    status_port: int = 0
    """0: no status server."""
    grace_seconds: float = 25.0
    """From SIGTERM to the end; the last snapshot takes most of it."""
    run_id: str = ""
    """What the sidecars of one job have in common; empty: ranks tell them apart (`lease`)."""
    lease_seconds: float = LEASE_SECONDS
    """A sidecar that did not renew its lease for so long has lost its place in the run."""
    generation: int = 0
    """Generation of the resource; 0 is unknown."""
    any_user: bool = False
    """Trainers of other users may attach: the directory is reached by this pod alone."""
    stream_factory: str = DEFAULT_STREAM_FACTORY
    log_level: int = logging.INFO
    log_format: LogFormat = "text"


def run_sidecar(dataset: BagelDataset, settings: SidecarSettings) -> int:
    """Serves until a signal ends it; 0. Raises BagelplaneError for what makes serving impossible."""
    with RunDirectory(settings.directory, any_user=settings.any_user) as directory:
        directory.check_room(settings.local_ranks, ring_bytes(dataset))
        return asyncio.run(Supervisor(dataset, settings, directory).run())


class Supervisor:
    """All state of a running sidecar."""

    def __init__(self, dataset: BagelDataset, settings: SidecarSettings, directory: RunDirectory) -> None:
        self.dataset = dataset
        self.settings = settings
        self.spec_hash = spec_hash(dataset)
        self.servers: dict[int, RankServer] = {}
        """By data-parallel rank."""
        self.started = time.time()
        self._directory = directory
        self._progress: dict[int, Progress] = {}  # by rank; outlives servers
        self._tallies: dict[int, Tally] = {}  # by rank; outlive all
        self._world_size = 0
        self._store: SnapshotStore | None = None
        self._known_bad: dict[str, str] = {}
        self._wanted_steps: set[int] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._attaching: dict[int, int] = {}  # ranks that are on their way, by local rank
        self._topology_lock = asyncio.Lock()
        self._sessions: dict[Session, asyncio.Task[None]] = {}
        self._stop = asyncio.Event()
        self._listening: asyncio.Server | None = None
        self._problem = ""  # what trainers cannot attach for
        self.snapshots: SnapshotWriter
        self.lineage: LineageWriter | None = None
        self._run: BagelRun | ElasticRun

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        preparing = asyncio.create_task(in_thread(self._prepare))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({preparing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not preparing.done():
            preparing.cancel()
            return 0
        found = preparing.result()
        self._store, self._known_bad = found.store, found.known_bad
        self._run = _open_run(self.dataset.spec.sharding, self._store, self.settings.resume)
        if self._store is not None and self.dataset.spec.snapshots.lineage:
            self.lineage = LineageWriter(self._store)
        # The log first: who resumes from a snapshot finds all rows before it told.
        before_state = self.lineage.write if self.lineage is not None else None
        self.snapshots = SnapshotWriter(self._store, retention_of(self.dataset), before_state)
        self._listening = await serve_unix(self._serve, self._directory.bind())
        watching = asyncio.create_task(self._watch_directory(), name="run directory")
        status = StatusServer(self, self.settings.status_host, self.settings.status_port)
        try:
            await status.start()
            log.info(
                "serving %s (spec %s) at %s, waiting for trainers",
                self.dataset.metadata.name,
                self.spec_hash[:12],
                self._directory.socket_path,
            )
            await stopping
            log.info("asked to stop")
        finally:
            watching.cancel()
            self._listening.close()
            await self._shut_down(status)
        return 0

    async def _watch_directory(self) -> None:
        """Puts back what somebody deleted: trainers could not attach, and nothing would say why."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            problem = ""
            try:
                sock = self._directory.bind_again()
                if sock is not None:
                    log.warning("%s was deleted and is made again", self._directory.socket_path)
                    before, self._listening = self._listening, await serve_unix(self._serve, sock)
                    if before is not None:
                        before.close()  # who is connected stays so
            except RingError as error:
                problem = str(error)
                if problem != self._problem:
                    log.error("%s", problem)
            self._problem = problem
            for server in self.servers.values() if not problem else ():
                server.watch()

    # -- before a trainer attaches

    def _prepare(self) -> Examination:
        """Looks at everything that the resource names, and raises the first thing wrong. Runs in a thread."""
        settings = self.settings
        found = examine(
            self.dataset,
            world_size=max(1, settings.world_size),
            resume=settings.resume,
            stream_factory=settings.stream_factory,
        )
        for error in found.problems[1:]:
            log.error("%s", error)
        if found.problems:
            raise found.problems[0]
        if found.store is not None:
            begin_run(
                found.store,
                job=settings.run_id,
                lock=self._directory.lock_identity,
                resume=settings.resume,
                world_size=max(1, settings.world_size),
                ranks_in_use=self._ranks_in_use,
                times=LeaseTimes(settings.lease_seconds),
            )
        return found

    def _ranks_in_use(self) -> set[int]:
        """Ranks that no other sidecar may serve now. Called by the lease's thread."""
        servers = list(self.servers.values())
        return {*list(self._attaching.values()), *(s.rank for s in servers if s.listeners)}

    # -- attaching

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = Session(self, reader, writer)
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        self._sessions[session] = task
        try:
            await session.run()
        except Exception:
            log.exception("%s: its session failed", session.client)
        finally:
            del self._sessions[session]

    def describe(self, rank: int) -> str:
        """What somebody who attaches waits for."""
        server = self.servers.get(rank)
        return "the place to resume from is being looked up" if server is None else server.describe()

    async def attach(self, attach: Attach) -> tuple[RankServer, int]:
        """The rank's server, ready, and the reader's next step. Raises BagelplaneError; BusyError passes."""
        self._check_generation(attach)
        attach = await self._check_spec(attach)
        async with self._lock_of(f"local rank {attach.local_rank}"), self._serving(attach):
            moved = await self._leave_other_ranks(attach)
            await self._stop_abandoned(room_for=0)
            async with self._lock_of(f"rank {attach.rank}"):
                async with self._topology_lock:  # or the second rank to come would end what the first began
                    await self._adopt_topology(attach)
                server, step = await self._admit(attach)
                if server is None:
                    if moved:
                        await self._await_room()
                    server = await self._start_server(attach)
                    step = server.progress.next_step
                try:
                    await server.wait_ready()
                except RankFailedError as error:
                    raise self._explained(error, len(self.servers)) from None
                return server, step

    def _lock_of(self, what: str) -> asyncio.Lock:
        lock = self._locks.get(what)
        if lock is None:
            lock = self._locks[what] = asyncio.Lock()
        return lock

    @contextlib.asynccontextmanager
    async def _serving(self, attach: Attach) -> AsyncIterator[None]:
        """Keeps other sidecars off the rank while it is on its way; afterwards its listeners do."""
        lease = self._store.lease if self._store is not None else None
        self._attaching[attach.local_rank] = attach.rank
        try:
            if lease is not None and not lease.holds(attach.rank):
                await in_thread(lambda: lease.claim(attach.rank))
            yield
        finally:
            # Only after the session, which goes on at once, has begun to listen.
            asyncio.get_running_loop().call_soon(self._attaching.pop, attach.local_rank, None)

    def _explained(self, error: RankFailedError, rings: int) -> RankFailedError:
        """The volume was made for the ranks that were expected: one more is seldom a reason to enlarge it."""
        expected = self.settings.local_ranks
        if error.code != "ring" or rings <= expected:
            return error
        fix = (
            f"say how many data-parallel ranks this machine has (it was {expected}): nprocPerNode of the job, "
            f"PET_NPROC_PER_NODE or --ranks. Or {error.fix}"
        )
        return RankFailedError(error.what, fix=fix, code=error.code)

    async def _leave_other_ranks(self, attach: Attach) -> bool:
        """Waits for the end of the local rank's trainer before this one: one that was restarted may be here before
        that is noticed. Whether it read for another rank.
        """
        moved = False
        for server in list(self.servers.values()):
            listener = server.listeners.get(attach.local_rank)
            if isinstance(listener, Session):
                try:
                    await asyncio.wait_for(listener.closed.wait(), _TAKE_OVER_SECONDS)
                except TimeoutError:
                    raise server.readers.taken(attach.local_rank) from None
            if server.rank != attach.rank:
                moved = server.readers.forget(attach.local_rank) or moved
        return moved

    async def _admit(self, attach: Attach) -> tuple[RankServer | None, int]:
        """The running server and the reader's step there; no server if only a new one leads to the place asked for.

        Waits for other readers that are in the way, and then raises BusyError.
        """
        deadline = time.monotonic() + _TAKE_OVER_SECONDS
        while True:
            server = self.servers.get(attach.rank)
            if server is None or server.phase not in ("starting", "ready"):
                return None, 0
            try:
                step = self._admitted(server, attach)
            except BusyError:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_ADMISSION_SECONDS)
            else:
                return (None, 0) if step is None else (server, step)

    def _admitted(self, server: RankServer, attach: Attach) -> int | None:
        wanted = None if attach.resume.mode == "latest" else self._run.step_in(server.progress, attach.resume)
        if wanted is None and attach.resume.mode != "latest":
            wanted = -1  # the rank has no step there: as far away as one that it left behind
        return server.readers.admit(
            attach.local_rank,
            wanted,
            expected=attach.readers,
            known_until=server.known_until,
            now=time.monotonic(),
        )

    async def _await_room(self) -> None:
        """Waits a moment while ranks come in another order: rings whose readers all left are as good as new ones."""
        deadline = time.monotonic() + _ROOM_SECONDS
        while len(self.servers) >= self.settings.local_ranks and time.monotonic() < deadline:
            if any(not server.readers.cursors for server in self.servers.values()):
                return
            await asyncio.sleep(_ADMISSION_SECONDS)

    async def _stop_abandoned(self, room_for: int) -> None:
        """Ranks that all readers left give way, as long as there are more of them than the room was made for."""
        for rank, server in list(self.servers.items()):
            if len(self.servers) + room_for > self.settings.local_ranks and not server.readers.cursors:
                del self.servers[rank]
                await server.stop()
                if server.ring_number not in {other.ring_number for other in self.servers.values()}:
                    self._directory.ring_path(server.ring_number).unlink(missing_ok=True)

    async def _start_server(self, attach: Attach) -> RankServer:
        """A new producer for the rank, at the place asked for."""
        topology = self._run.topology(attach.world_size)
        if (old := self.servers.pop(attach.rank, None)) is not None:
            await old.stop()
        await self._stop_abandoned(room_for=1)
        self._check_number()
        origin = await self._run.starting_point(attach.rank, attach.world_size, attach.resume, self._progress)
        if self._stop.is_set():
            # Nobody would end what begins now: those that attach may have waited until after the others' end.
            raise RankStoppedError("the sidecar ends", fix="attach again")
        if attach.world_size != self._world_size:
            raise RankStoppedError(
                "another topology was adopted meanwhile", got=str(topology), fix="attach again"
            )
        progress = Progress(origin, attach.world_size)
        tally = self._tallies.pop(attach.rank, None) or Tally()
        self._remember(attach.rank, progress, tally)
        local_ranks = max(self.settings.local_ranks, len(self.servers) + 1)
        ring_number = self._free_ring_number()

        def build_setup(point: StartingPoint) -> ProducerSetup:
            return ProducerSetup(
                dataset=self.dataset.to_mapping(),
                rank=attach.rank,
                ring_number=ring_number,
                world_size=attach.world_size,
                ring_path=str(self._directory.ring_path(ring_number)),
                ring_bytes=ring_bytes(self.dataset),
                ring_mode=self._directory.file_mode,
                decode_threads=decode_threads(self.dataset, local_ranks),
                producers=local_ranks,
                start_step=point.start_step,
                target_step=point.target_step,
                state=point.state,
                known_bad=self._known_bad,
                stream_factory=self.settings.stream_factory,
                log_level=self.settings.log_level,
                log_format=self.settings.log_format,
            )

        server = RankServer(
            build_setup,
            progress,
            tally,
            readers=attach.readers,
            on_acknowledged=self._after_acknowledge,
            on_known_bad=self._known_bad.update,
        )
        self.servers[attach.rank] = server
        self._admitted(server, replace(attach, resume=Resume("latest")))
        log.info("rank %d: starting at step %d of %s", attach.rank, origin.target_step, topology)
        return server

    def _check_number(self) -> None:
        """BusyError for one rank more than a machine has: clients name whatever ranks they like."""
        most = max(_MAX_RANKS, self.settings.local_ranks)
        if len(self.servers) >= most:
            raise BusyError(
                "this sidecar serves as many data-parallel ranks as it may",
                got=f"{len(self.servers)} ranks",
                expected=f"at most {most}",
                fix="end trainer processes that are not needed, or say how many ranks this machine has: --ranks",
            )

    def _remember(self, rank: int, progress: Progress, tally: Tally) -> None:
        """The last ones that were begun, and all that are served."""
        self._progress.pop(rank, None)
        self._progress[rank], self._tallies[rank] = progress, tally
        known: tuple[dict[int, Any], ...] = (self._progress, self._tallies)
        for table in known:
            for old in list(table)[:-_KNOWN_RANKS]:
                if old not in self.servers:
                    del table[old]

    def _free_ring_number(self) -> int:
        taken = {server.ring_number for server in self.servers.values()}
        return min(set(range(len(taken) + 1)) - taken)

    def _check_generation(self, attach: Attach) -> None:
        ours = self.settings.generation
        if ours and attach.generation and attach.generation != ours:
            error = SpecError(
                "the trainer was made for another generation of the dataset",
                got=f"generation {attach.generation}",
                expected=f"generation {ours}",
                fix="recreate the pod, so that trainer and sidecar come from one resource",
            )
            raise error

    async def _check_spec(self, attach: Attach) -> Attach:
        """Of a place of another spec, as a trainer's state names it: the snapshot there, if a run may go on from it."""
        theirs, resume = attach.spec_hash, attach.resume
        if theirs in ("", self.spec_hash):
            return replace(attach, spec_hash="")
        store = self._store
        if store is None or not store.allowed or resume.mode in ("latest", "none"):
            raise SnapshotError(
                f"the trainer's state belongs to another data set than {self.dataset.metadata.name!r}, which is served",
                got=f"spec hash {theirs[:16]}",
                expected=f"spec hash {self.spec_hash[:16]}",
                fix="use the resource that the run began with, or begin without a state; a change that is meant is to "
                "be named in spec.resume.allowSpecChange",
            )
        place, resume = self._run.place_of(resume, attach.world_size)
        topology = self._run.topology(attach.world_size)
        await in_thread(lambda: store.check_place_of(theirs, place, topology))
        return replace(attach, spec_hash="", resume=resume)

    async def _adopt_topology(self, attach: Attach) -> None:
        """Another number of ranks takes the run over, where its sharding lets it."""
        if self._world_size == attach.world_size:
            return
        run = self._run
        wanted, present = run.topology(attach.world_size), run.topology(self._world_size)
        run.check_change(self._progress, self._world_size, attach.world_size, attach.resume)
        if any(server.listeners for server in self.servers.values()):
            raise BusyError(
                "ranks of another topology are attached",
                got=str(wanted),
                expected=str(present),
                fix=run.way_back(self._world_size),
            )
        if self._store is not None:
            store = self._store
            try:
                await in_thread(lambda: store.nearest(None, wanted))
            except (TransientStorageError, StorageError) as error:
                log.warning("the snapshots could not be looked at: %s", error)
        run.end_world(self._progress, self._world_size)
        servers, self.servers, self._progress = self.servers, {}, {}
        self._world_size, self._wanted_steps = attach.world_size, set()
        for server in servers.values():
            await server.stop()

    @property
    def streams(self) -> int:
        """Of elastic sharding; 0 with Bagel sharding."""
        return self._run.streams

    # -- snapshots

    def _after_acknowledge(self, server: RankServer) -> None:
        step = server.progress.next_step
        if self._store is None:
            return
        rows = server.take_rows(step - 1)
        if self.lineage is not None and rows is not None:
            number = self._run.pack_number(server.progress, server.rank, step - 1)
            self.lineage.add(server.rank, server.world_size, number, rows)
        if step % self.dataset.spec.snapshots.every_steps == 0 or step in self._wanted_steps:
            self._submit(server, step)

    def _submit(self, server: RankServer, step: int) -> asyncio.Future[str] | None:
        state = server.progress.acknowledged().get(step)
        if state is None:
            log.warning("rank %d: the state of step %d is not at hand, no snapshot of it", server.rank, step)
            return None
        number = self._run.number(server.progress, step)
        return self.snapshots.submit(number, server.rank, self._run.topology(server.world_size), state)

    async def snapshot(self, server: RankServer) -> tuple[int, str]:
        """Writes the rank's last acknowledged state, and that of the pod's other ranks at the same step.

        Others that are behind write theirs when they get there. Returns the step and its URI once this rank's
        state is written; the snapshot counts when all ranks' are.
        """
        step = server.progress.next_step
        self._wanted_steps = {wanted for wanted in self._wanted_steps if wanted >= step - 1000} | {step}
        if not server.progress.acknowledged().get(step):
            raise SnapshotError(
                f"rank {server.rank} has taken no pack yet: there is nothing to snapshot",
                fix="take a pack first",
            )
        future = self._submit(server, step)
        assert future is not None
        for other in self.servers.values():
            if other is not server and step in other.progress.acknowledged():
                self._submit(other, step)
        return step, await future

    def _submit_last(self) -> list[asyncio.Future[str]]:
        """States for the last snapshot: of the newest step that all ranks here have, if the world is here.

        Between pods nobody can be asked, but ranks are at most one step apart: the last two of each then.
        """
        ranks = [server for server in self.servers.values() if server.progress.acknowledged()]
        if self._store is None or not ranks:
            return []
        steps = [set(server.progress.acknowledged()) for server in ranks]
        common = sorted(set.intersection(*steps))
        futures = []
        for server, known in zip(ranks, steps, strict=True):
            whole = len(ranks) == server.world_size
            chosen = common[-1:] if whole else sorted(known)[-2:]
            futures += [self._submit(server, step) for step in chosen]
        return [future for future in futures if future is not None]

    # -- the end

    async def _shut_down(self, status: StatusServer) -> None:
        """Snapshot, sessions, producers, in that order; the directory is cleared by its owner."""
        self._stop.set()  # for the attaching, when it is an error that ends us
        deadline = time.monotonic() + self.settings.grace_seconds
        self._submit_last()
        # Three seconds are left for the rest: a snapshot that a slow store lost is less than a killed pod.
        await self._drain(max(0.1, self.settings.grace_seconds - 3.0))
        await self.snapshots.close()
        await self._end_lease()
        for session in list(self._sessions):
            session.end("the sidecar ends")
        await asyncio.gather(*(server.stop() for server in self.servers.values()))
        await status.stop()
        if self._sessions:
            # What they were told last is on its way; the loop's end would cut it off.
            await asyncio.wait(self._sessions.values(), timeout=_GOODBYE_SECONDS)
        log.info("ended %.1f s before the deadline", deadline - time.monotonic())

    async def _drain(self, seconds: float) -> None:
        """Waits until the last snapshot and the log of rows are written, or time is up."""
        writers = {"the last snapshot": self.snapshots, "the log of rows": self.lineage}
        for name, writer in writers.items():
            begun = time.monotonic()
            if writer is not None and not await writer.drain(max(0.1, seconds)):
                log.error("%s was not written in time: %s", name, writer.health.problem or "slow store")
            seconds -= time.monotonic() - begun

    async def _end_lease(self) -> None:
        if self._store is None or self._store.lease is None:
            return
        try:
            await asyncio.wait_for(in_thread(self._store.lease.end), _LEASE_END_SECONDS)
        except TimeoutError:
            log.warning("the store is slow: the lease is not ended, and who comes next waits for it")
        except BagelplaneError as error:
            log.warning("the lease is not ended, and who comes next waits for it: %s", error)

    # -- status

    def status(self) -> dict[str, Any]:
        """What /v1/status and the `status` message say; JSON-able (`report.SidecarStatus`)."""
        status = build_status(
            self, world_size=self._world_size, problem=self._problem, known_bad_images=len(self._known_bad)
        )
        return status.model_dump(mode="json")


def _open_run(
    sharding: Sharding, store: SnapshotStore | None, resume: Literal["latest", "none"] | int
) -> BagelRun | ElasticRun:
    if sharding.mode == "Elastic":
        return ElasticRun(sharding.streams, store, resume)
    return BagelRun(sharding.workers_per_rank, store, resume)
