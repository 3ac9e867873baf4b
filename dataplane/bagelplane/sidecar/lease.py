"""A sidecar's place in a run: nobody else writes its history while it lives, and it does not when it was replaced.

Each sidecar of a run keeps a lease: a small object whose counter it raises every few seconds. Whoever wants the
place watches that counter over a clock of its own, and takes over when it has not changed for long enough; at once
when the lease was ended in order, or when the process is known to be dead. No two clocks are ever compared.

A writer that was replaced while it was paused finds a newer run, or another claim on its rank, when it looks; it
looks before each write. What it wrote between that look and the write is in a folder of its own run and past the
step at which the other began: it is never read (`runs.Lineage`).

Pods of one job are one run. They know each other by what `--run-id` says (in Kubernetes the job's UID). Without it,
sidecars are of one job as long as they serve different ranks: two that serve one rank at once are two runs.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bagelplane.errors import BagelplaneError, SnapshotError
from bagelplane.sidecar.runs import (
    LEASE_FORMAT,
    Claim,
    Lineage,
    Origin,
    Register,
    Run,
    RunFolder,
    lineage_of,
    read_object,
)
from bagelplane.sidecar.snapshot_format import FORMAT_VERSION, MAX_RECORD_BYTES, seal, unseal
from bagelplane.sidecar.whereabouts import Whereabouts
from bagelplane.storage import ObjectMissingError

LEASE_SECONDS = 20.0

log = logging.getLogger(__name__)


class RunTakenError(SnapshotError):
    """Another run writes here, or serves this rank. Passes when that one ends."""

    reaction = "End the other run, or give this one a snapshots.uri of its own."


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """All in seconds."""

    lease: float = LEASE_SECONDS
    """A counter that did not change for so long is that of a dead sidecar."""

    @property
    def renew(self) -> float:
        return self.lease / 4

    @property
    def poll(self) -> float:
        """Between two looks at others' counters, or at which ranks are in use here."""
        return self.lease / 40


@dataclass(frozen=True, slots=True)
class Identity:
    """What a sidecar says of itself."""

    dataset: str
    spec_hash: str
    where: Whereabouts
    job: str = ""
    data: str = ""


@dataclass(frozen=True, slots=True)
class _Member:
    """Another sidecar, as its lease says."""

    name: str
    data: bytes
    """As read: a lease that changes is one that is renewed."""
    content: dict[str, Any]

    @property
    def where(self) -> Whereabouts:
        found = self.content.get("where")
        return Whereabouts.from_json(found if isinstance(found, dict) else {})

    def is_over(self, here: Whereabouts) -> bool:
        return bool(self.content.get("ended")) or here.is_alive(self.where) is False

    def serves(self, rank: int) -> bool:
        ranks = self.content.get("ranks")
        return isinstance(ranks, list) and rank in ranks


class _Watch:
    """Which of several leases change, over a clock that only this process uses."""

    def __init__(
        self, times: LeaseTimes, clock: Callable[[], float], wait: Callable[[float], object]
    ) -> None:
        self._times, self._clock, self._wait = times, clock, wait
        self._seen: dict[str, bytes] = {}
        self._last = clock()
        self.left_seconds = times.lease

    def sees_change(self, members: Iterable[_Member]) -> _Member | None:
        """One that was renewed since it was first seen."""
        for member in members:
            if self._seen.setdefault(member.name, member.data) != member.data:
                return member
        return None

    def pause(self) -> None:
        """Waits a little. A jump of the clock, or a pause of this machine, counts for no more than that."""
        self._wait(self._times.poll)
        now = self._clock()
        self.left_seconds -= min(max(now - self._last, 0.0), 2 * self._times.poll)
        self._last = now


class RunLease:
    """Held from `acquire` to `end`; `keep` has it renewed meanwhile. Thread-safe."""

    def __init__(
        self,
        folder: RunFolder,
        identity: Identity,
        *,
        ranks_in_use: Callable[[], Iterable[int]] = tuple,
        times: LeaseTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._folder, self._storage, self._identity = folder, folder.storage, identity
        self._ranks_in_use, self._times = ranks_in_use, times or LeaseTimes()
        self._clock, self._wait = clock, wait
        self.member = uuid.uuid4().hex[:8]
        self.run: Run
        self.lineage: Lineage
        self.problem: SnapshotError | None = None
        """Why this sidecar writes no more."""
        self._claims: set[int] = set()
        self._looked: tuple[int | None, Register] | None = None
        """The last look before a write, and of which step."""
        self._counter = 0
        self._told: list[int] = []
        self._version = ""
        self._writing = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    # -- to get it

    def acquire(self, find_origin: Callable[[Lineage], int | None], *, may_join: bool = True) -> None:
        """Joins the run of this job if it lives, else begins one, after whatever wrote here before has ended.

        `find_origin` gives the step at which a run begins that goes on with that history; None: with nothing of it.
        It may raise. Without `may_join` a run that is over is not joined, whoever's it was. Waits at most about a
        lease. RunTakenError: another run is alive.
        """
        while not self._try(find_origin, may_join):
            log.debug("another sidecar began a run meanwhile: looking again")
        self._collect()

    def _try(self, find_origin: Callable[[Lineage], int | None], may_join: bool) -> bool:
        register = self._folder.look()
        register.check_newest()
        for damaged in register.damaged:
            log.warning("what run %d continued is not known: %s", damaged.number, damaged.problem)
        previous = register.newest
        if previous is not None and self._is_to_be_joined(previous, may_join):
            self._enter(previous, register.runs)
            self._write()
            log.info("joined %s, which %s began", previous, previous.began_by)
            return True
        number = previous.number if previous is not None else 0
        step = self._find(find_origin, previous, register)
        while True:
            number += 1
            run = self._new_run(number, previous, step)
            self._enter(run, [*register.runs, run])
            self._write()  # first: whoever sees the run sees that somebody is in it
            if not (self._folder.begin(run) and self._stands(run)):
                self._storage.delete(self._folder.lease_uri(run, self.member))
                return False
            # Until the run stood there, the one before may have written one more snapshot.
            again = self._find(find_origin, previous, register)
            if again == step:
                self._tell(run, previous)
                return True
            self._storage.delete(self._folder.lease_uri(run, self.member))
            step = again

    def _stands(self, run: Run) -> bool:
        """Once more, for stores that know no conditions: of two that wrote at once the last one stands."""
        newest = self._folder.look().newest
        return newest is not None and newest.id == run.id

    def _find(
        self, find_origin: Callable[[Lineage], int | None], previous: Run | None, register: Register
    ) -> int | None:
        return find_origin(lineage_of(previous, register.runs))

    def _new_run(self, number: int, previous: Run | None, step: int | None) -> Run:
        identity = self._identity
        origin = Origin(previous.id if previous is not None else "", step) if step is not None else None
        began = datetime.now(UTC).isoformat(timespec="seconds")
        return Run(
            number,
            uuid.uuid4().hex[:8],
            identity.dataset,
            identity.spec_hash,
            identity.data,
            identity.job,
            str(identity.where),
            began,
            origin,
        )

    def _tell(self, run: Run, previous: Run | None) -> None:
        if previous is None and run.origin is None:
            log.info("%s begins", run)
        elif run.origin is None:
            log.info("%s begins at the start: nothing of %s is continued", run, previous)
        else:
            before = previous if previous is not None else "snapshots of an earlier release"
            log.info("%s continues %s from %d", run, before, run.origin.step)

    def _enter(self, run: Run, runs: list[Run]) -> None:
        self.run, self.lineage, self._version = run, lineage_of(run, runs), ""

    # -- who else is here

    def _is_to_be_joined(self, run: Run, may_join: bool) -> bool:
        """True: it is this job's; False: it is over. RunTakenError: it is another's and lives."""
        same_job = run.job == self._identity.job
        data = {self._identity.data, run.data} - {""}
        same_stream = run.spec_hash == self._identity.spec_hash and len(data) <= 1
        watch, others = self._watch(), self._others(run)
        if same_job and run.job and same_stream and (may_join or others):
            return True
        while others:
            living = watch.sees_change(others)
            # Where it is known to live, nothing has to be awaited: that it serves other ranks is seen later.
            if living is None and same_job:
                living = next((other for other in others if self._lives(other)), None)
            if living is not None:
                if same_job and same_stream:
                    return True
                raise self._taken(f"another run writes its snapshots to {self._folder.base}", run, living)
            if watch.left_seconds <= 0:
                break
            watch.pause()
            others = self._others(run)
        return False

    def _lives(self, member: _Member) -> bool:
        return self._identity.where.is_alive(member.where) is True

    def _others(self, run: Run) -> list[_Member]:
        """Members of a run that are not known to be gone."""
        register = self._folder.look()
        found = [
            self._read_member(name, uri)
            for (number, name), uri in register.members.items()
            if number == run.number and name != self.member
        ]
        return [member for member in found if member and not member.is_over(self._identity.where)]

    def _read_member(self, name: str, uri: str) -> _Member | None:
        try:
            data = read_object(self._storage, uri, MAX_RECORD_BYTES)
        except ObjectMissingError:
            return None
        except SnapshotError as error:
            # A lease has not that size: somebody put it there, and keeps it up perhaps.
            data = str(error).encode()
        try:
            content = unseal(data, uri, LEASE_FORMAT, "")
        except SnapshotError:
            content = {}  # whether it changes can be seen all the same
        return _Member(name, data, content)

    def _watch(self) -> _Watch:
        return _Watch(self._times, self._clock, self._wait)

    def _taken(self, what: str, run: Run, member: _Member) -> RunTakenError:
        mine = f"job {self._identity.job}" if self._identity.job else "no known job (no --run-id)"
        return RunTakenError(
            what,
            got=f"{run} of dataset {run.dataset}, begun {run.began} by {run.began_by}; {member.where} in it renews its "
            f"lease (last seen: number {member.content.get('counter')})",
            expected=f"one run at a time, and this sidecar is of {mine}",
            fix="end the other run first, or give this one a snapshots.uri of its own; pods of a job need one --run-id",
        )

    # -- ranks

    def claim(self, rank: int) -> None:
        """From now on this sidecar serves the rank. Waits up to a lease for one that served it before.

        RunTakenError: another sidecar serves it and lives. SnapshotError: this one was replaced. Where the job has a
        name, its sidecars need no claims: pods that share a data-parallel rank serve the same packs, each to its own.
        """
        if self._identity.job:
            self._claims.add(rank)
            return
        watch, watched, renewed = self._watch(), "", False
        while True:
            register = self._look()
            held = register.claims.get((self.run.number, rank))
            if held is not None and self._folder.claimant(held) == self.member:
                self._claims.add(rank)
                return
            holder = self._holder(register, held) if held is not None else None
            if holder is not None:
                if holder.name != watched:
                    watch, watched, renewed = self._watch(), holder.name, False
                renewed |= watch.sees_change([holder]) is not None
                if watch.left_seconds > 0:
                    watch.pause()
                    continue
                if renewed:
                    raise self._taken(
                        f"rank {rank} of this run is served by another sidecar", self.run, holder
                    )
            number = held.number + 1 if held is not None else 1
            self._folder.claim(self.run, self.member, rank, number)  # who was first, the next look says

    def _holder(self, register: Register, claim: Claim) -> _Member | None:
        """The other sidecar that serves a rank, unless it has ended or lets the rank go."""
        name = self._folder.claimant(claim)
        uri = register.members.get((self.run.number, name))
        member = self._read_member(name, uri) if uri is not None and name != self.member else None
        if member is None or member.is_over(self._identity.where) or not member.serves(claim.rank):
            return None
        return member

    # -- to keep it

    def holds(self, rank: int) -> bool:
        """Whether the rank was claimed, and not lost as far as is known."""
        return rank in self._claims

    def verify(self, rank: int | None = None, *, step: int | None = None) -> None:
        """SnapshotError when another run, or another sidecar of this rank, has taken over: nothing may be written.

        All ranks' states of one `step` are written after one look.
        """
        known = self._looked
        if step is None or known is None or known[0] != step or self.problem is not None:
            self._looked = known = step, self._look()
        register = known[1]
        held = register.claims.get((self.run.number, rank)) if rank is not None else None
        if held is not None and (owner := self._folder.claimant(held)) != self.member:
            raise SnapshotError(
                f"rank {rank} is served by another sidecar now: this one writes no more of it",
                got=f"member {owner}",
                expected=f"member {self.member}",
                fix="end this trainer process, or resume it where the other one stands",
            )

    def _look(self) -> Register:
        """What is in `runs/` now. SnapshotError when this run is not the present one any more."""
        if self.problem is not None:
            raise self.problem
        register = self._folder.look()
        newest = register.newest
        # (No record at all: somebody cleared the folder, which is no reason to stop.)
        if newest is not None and newest.number >= self.run.number and newest.id != self.run.id:
            self.problem = SnapshotError(
                f"another run has taken over: {self.run} writes no more",
                got=f"{newest}, begun {newest.began} by {newest.began_by}",
                expected=str(self.run),
                fix="end this job; the other one goes on with the history",
            )
            log.error("%s", self.problem)
            raise self.problem
        # No problem that lasts: somebody may restore the record, and it is said at each look until then.
        register.check_newest(after=self.run.number)
        return register

    def keep(self) -> None:
        """Starts the thread that renews."""
        self._thread.start()

    def renew(self) -> None:
        """Says once more that this sidecar lives. SnapshotError when it was replaced."""
        self._drop_lost(self._look())
        self._write()

    def _keep(self) -> None:
        """The thread: renews in time, and at once when other ranks are in use."""
        due = self._clock() + self._times.renew
        while not self._ending.wait(self._times.poll):
            if self._clock() < due and self._in_use() == self._told:
                continue
            due = self._clock() + self._times.renew
            try:
                self.renew()
            except BagelplaneError as error:
                if self.problem is not None:
                    return
                log.warning("the lease of %s could not be renewed: %s", self.run, error)

    def _drop_lost(self, register: Register) -> None:
        """Ranks that another sidecar serves now: it may, once no trainer here has them."""
        for rank in list(self._claims):
            held = register.claims.get((self.run.number, rank))
            if held is not None and self._folder.claimant(held) != self.member:
                self._claims.discard(rank)
                log.info("rank %d is served by another sidecar now", rank)

    def _in_use(self) -> list[int]:
        return sorted(self._ranks_in_use())

    def _write(self, *, ended: bool = False) -> None:
        with self._writing:
            self._counter += 1
            self._told = self._in_use()
            content = {
                "format": LEASE_FORMAT,
                "version": FORMAT_VERSION,
                "run": self.run.id,
                "counter": self._counter,
                "ranks": self._told,
                "ended": ended,
                "where": self._identity.where.as_json(),
            }
            self._storage.write_bytes(self._folder.lease_uri(self.run, self.member), seal(content))

    def end(self) -> None:
        """An orderly end: whoever comes next need not wait. Blocks for a renewal that is under way."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.problem is None:
            self._write(ended=True)

    def _collect(self) -> None:
        """Deletes leases and claims that say nothing any more."""
        try:
            for uri in self._folder.look().old:
                self._storage.delete(uri)
        except BagelplaneError as error:
            log.debug("what earlier runs left could not be deleted: %s", error)
