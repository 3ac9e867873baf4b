"""Runs: who writes snapshots below one URI, one run after the other, and which snapshots are a run's history.

    <uri>/runs/run-<6 digits>.json                       a run began; the highest number is the present one
    <uri>/runs/run-<6 digits>.member-<id>.json           a sidecar in it: its lease (see `lease`)
    <uri>/runs/run-<6 digits>.rank-<5 digits>.<4>.json   which sidecar serves a rank; the highest number holds

Records are only ever added, on condition that the name is free: so one of two that begin at once wins, on any
store that knows this one condition, and whoever sees a higher number knows that another took over. Snapshots
carry the id of their run in their folder's name. What a run that was taken over writes later lies beside the
history, not in it: a run that begins where another ended says at which step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bagelplane.costs import Costs
from bagelplane.errors import ObjectExistsError, SnapshotError
from bagelplane.sidecar.snapshot_format import (
    FORMAT_VERSION,
    MAX_OBJECT_BYTES,
    MAX_RECORD_BYTES,
    base_name,
    seal,
    take,
    unseal,
)
from bagelplane.storage import ObjectMissingError, ObjectTooLargeError

RUN_FORMAT = "bagelplane-run"
CLAIM_FORMAT = "bagelplane-rank-claim"
LEASE_FORMAT = "bagelplane-lease"
_NAME = re.compile(r"run-(\d{6})(?:\.member-([0-9a-f]+)|\.rank-(\d{5})\.(\d{4}))?\.json")
_FIX = "restore the object, or give the run a snapshots.uri of its own"


class Listed(Protocol):
    """What a listing tells of a file."""

    @property
    def uri(self) -> str: ...
    @property
    def version(self) -> str: ...


class SnapshotStorage(Protocol):
    """The calls of `bagelplane.storage.Storage` that runs and snapshots need."""

    def list_files(self, uri: str, suffix: str = "", *, missing_ok: bool = False) -> Sequence[Listed]: ...
    def list_folders(self, uri: str, *, missing_ok: bool = False) -> Sequence[str]: ...
    def exists(self, uri: str) -> bool: ...
    def read_bytes(self, uri: str, *, limit_bytes: int | None = None) -> bytes: ...
    def write_bytes(self, uri: str, data: bytes, *, only_if_absent: bool = False) -> None: ...
    def delete(self, uri: str) -> None: ...
    @property
    def costs(self) -> Costs: ...


def read_object(storage: SnapshotStorage, uri: str, limit_bytes: int = MAX_OBJECT_BYTES) -> bytes:
    """An object of ours. SnapshotError, before it is in memory, for what is larger than any of ours; StorageError."""
    try:
        return storage.read_bytes(uri, limit_bytes=limit_bytes)
    except ObjectTooLargeError as error:
        raise SnapshotError(
            f"the object {uri} is none of ours: it is too large",
            got=error.got,
            expected=error.expected,
            fix=error.fix,
        ) from None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run begins that continues another."""

    run: str
    """Its id; empty for snapshots from before there were runs."""
    step: int
    """Packs behind (with elastic sharding the position): of that run's history nothing past it counts."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run. Several sidecars, those of one job, may serve its ranks."""

    number: int
    id: str
    dataset: str
    spec_hash: str
    data: str = ""
    """Fingerprint of the objects that it reads; empty if it is not known."""
    job: str = ""
    """What the pods of one job have in common (`--run-id`); empty if nobody said."""
    began_by: str = ""
    """Host and process that began it, for people."""
    began: str = ""
    """When, by the clock of that host: for people, nothing rests on it."""
    origin: Origin | None = None

    def __str__(self) -> str:
        of = f" of job {self.job}" if self.job else ""
        return f"run {self.number} ({self.id}){of}"

    def as_json(self) -> dict[str, Any]:
        return {
            "format": RUN_FORMAT,
            "version": FORMAT_VERSION,
            "number": self.number,
            "id": self.id,
            "dataset": self.dataset,
            "spec_hash": self.spec_hash,
            "data": self.data,
            "job": self.job,
            "began_by": self.began_by,
            "began": self.began,
            "origin": {"run": self.origin.run, "step": self.origin.step} if self.origin else None,
        }


@dataclass(frozen=True, slots=True)
class Lineage:
    """A run's history: its own snapshots, and those of the runs before it up to where each was left."""

    reach: Mapping[str, int | None] = field(default_factory=lambda: {"": None})
    """By run, the newest first: the last step that counts; None is all."""
    floor: int = 0
    """Where spec or data last changed: below it the run would have to be planned otherwise."""

    def holds(self, run: str, step: int) -> bool:
        last = self.reach.get(run, -1)
        return last is None or step <= last

    def age(self, run: str) -> int:
        """0 for the present run; of two snapshots of one step the younger run's is taken."""
        return list(self.reach).index(run) if run in self.reach else len(self.reach)


def lineage_of(run: Run | None, runs: Sequence[Run]) -> Lineage:
    """The history of `run`; `None` is that of snapshots from before there were runs."""
    if run is None:
        return Lineage()
    by_id = {other.id: other for other in runs}
    reach: dict[str, int | None] = {run.id: None}
    last, floor = None, 0
    while run is not None and run.origin is not None and run.origin.run not in reach:
        origin, before = run.origin, by_id.get(run.origin.run)
        last = origin.step if last is None else min(last, origin.step)
        reach[origin.run] = last
        if before is not None and _reads_otherwise(before, run):
            floor = max(floor, last)
        run = before
    return Lineage(reach, floor)


def _reads_otherwise(before: Run, run: Run) -> bool:
    known = bool(before.data and run.data)
    return before.spec_hash != run.spec_hash or (known and before.data != run.data)


@dataclass(frozen=True, slots=True)
class Claim:
    """A sidecar serves a rank."""

    rank: int
    number: int
    uri: str
    version: str


@dataclass(frozen=True, slots=True)
class DamagedRun:
    """A run whose record says nothing: it is left where it is, and what it continued is not known."""

    number: int
    uri: str
    problem: str


@dataclass(slots=True)
class Register:
    """What lies in `runs/` at one moment."""

    runs: list[Run] = field(default_factory=list)
    """By number."""
    damaged: list[DamagedRun] = field(default_factory=list)
    """By number."""
    versions: dict[int, str] = field(default_factory=dict)
    """Of each run's record, by its number."""
    members: dict[tuple[int, str], str] = field(default_factory=dict)
    """URI of each lease, by run number and member."""
    claims: dict[tuple[int, int], Claim] = field(default_factory=dict)
    """The claim that holds, by run number and rank."""
    old: list[str] = field(default_factory=list)
    """URIs of leases and claims that say nothing any more: their run was taken over, or their rank."""

    @property
    def newest(self) -> Run | None:
        return self.runs[-1] if self.runs else None

    def check_newest(self, after: int = 0) -> None:
        """SnapshotError when a damaged record may be that of the present run: it is newer than all others, and than
        run number `after`.
        """
        after = max(after, self.newest.number if self.newest is not None else 0)
        for damaged in self.damaged:
            if damaged.number > after:
                raise SnapshotError(
                    f"the record of the newest run, {damaged.uri}, is damaged: whether that run is alive is not known",
                    got=damaged.problem,
                    fix=f"restore that object; or make sure that no job writes snapshots here, and move {damaged.uri} "
                    "to another place: the history before that run counts then, and its own snapshots do not",
                )


class RunFolder:
    """Reads and adds to `runs/`. Thread-safe as far as the storage is."""

    def __init__(self, storage: SnapshotStorage, uri: str) -> None:
        self.storage = storage
        self.base = uri.rstrip("/")
        self.uri = f"{self.base}/runs"
        self._read: dict[tuple[str, str], dict[str, Any]] = {}  # by URI and version: records never change

    def look(self) -> Register:
        """All of it, by one listing; records that are new are read."""
        register = Register()
        claims: dict[tuple[int, int], list[Claim]] = {}
        for item in self.storage.list_files(self.uri, ".json", missing_ok=True):
            match = _NAME.fullmatch(base_name(item.uri))
            if match is None:
                continue
            number, member, rank, count = int(match[1]), match[2], match[3], match[4]
            if member is not None:
                register.members[number, member] = item.uri
            elif rank is not None:
                claim = Claim(int(rank), int(count), item.uri, item.version)
                claims.setdefault((number, int(rank)), []).append(claim)
            else:
                try:
                    content = self._record(item.uri, item.version, RUN_FORMAT)
                    run = parse_run(content, item.uri, number) if content is not None else None
                except SnapshotError as error:
                    register.damaged.append(DamagedRun(number, item.uri, str(error)))
                    continue
                if run is not None:
                    register.runs.append(run)
                    register.versions[number] = item.version
        register.runs.sort(key=lambda run: run.number)
        register.damaged.sort(key=lambda damaged: damaged.number)
        for place, found in claims.items():
            *lost, register.claims[place] = sorted(found, key=lambda claim: claim.number)
            register.old += [claim.uri for claim in lost]
        newest = register.newest.number if register.newest else 0
        register.old += [uri for (number, _), uri in register.members.items() if number < newest]
        register.old += [claim.uri for (number, _), claim in register.claims.items() if number < newest]
        return register

    def begin(self, run: Run) -> bool:
        """Adds a run; False when another one was first."""
        return self._add(f"{self.uri}/run-{run.number:06d}.json", run.as_json())

    def claim(self, run: Run, member: str, rank: int, number: int) -> bool:
        """Adds a claim; False when another one was first."""
        content = {"format": CLAIM_FORMAT, "version": FORMAT_VERSION, "rank": rank, "member": member}
        return self._add(f"{self.uri}/run-{run.number:06d}.rank-{rank:05d}.{number:04d}.json", content)

    def claimant(self, claim: Claim) -> str:
        """The member that made a claim; empty when it was taken back meanwhile."""
        content = self._record(claim.uri, claim.version, CLAIM_FORMAT)
        return str(content.get("member", "")) if content is not None else ""

    def lease_uri(self, run: Run, member: str) -> str:
        return f"{self.uri}/run-{run.number:06d}.member-{member}.json"

    def _add(self, uri: str, content: Mapping[str, Any]) -> bool:
        try:
            self.storage.write_bytes(uri, seal(content), only_if_absent=True)
        except ObjectExistsError:
            return False
        return True

    def _record(self, uri: str, version: str, wanted_format: str) -> dict[str, Any] | None:
        key = (uri, version)
        if key not in self._read:
            try:
                data = read_object(self.storage, uri, MAX_RECORD_BYTES)
                self._read[key] = unseal(data, uri, wanted_format, _FIX)
            except ObjectMissingError:
                return None  # deleted since it was listed
        return self._read[key]


def parse_run(content: Mapping[str, Any], uri: str, number: int) -> Run:
    """The run that a record is of. SnapshotError for a wrong or missing field, and for another run's record."""
    try:
        texts = {name: take(content, name, str) for name in ("id", "dataset", "spec_hash")}
        texts |= {name: take(content, name, str) for name in ("data", "job", "began_by", "began")}
        found = take(content, "number", int)
        if found != number:
            raise ValueError(f"number is {found}, not {number}")
        origin = None
        if content["origin"] is not None:
            told = take(content, "origin", dict)
            origin = Origin(take(told, "run", str), take(told, "step", int))
        return Run(number, origin=origin, **texts)
    except (KeyError, ValueError) as error:
        raise SnapshotError(f"the record {uri} has a wrong field or lacks one: {error}", fix=_FIX) from None
