"""Snapshots: the states of all ranks at one step, so that nothing torn, foreign or damaged is ever resumed.

    <uri>/step-<12 digits>/rank-<5 digits>.json.zst     one a rank, written by whoever serves it; with elastic
                                                        sharding position-<...>/rank-<...>-of-<...>.json.zst
    <uri>/step-<12 digits>/manifest.json                last, by conditional put; without it nothing counts
                                                        by a run (`runs`), -<its id> at the end of the folder
    <uri>/known-bad/rank-<5 digits>-<step>.json.zst     images that do not decode, durable before a pack
                                                        planned with them is published

`snapshot_format` says how each looks. A state at step n is the state before pack number n: n packs
are behind it. It is a function of spec, data, rank and topology, so two writers of the same step write the same
meaning, and the first one wins.

With elastic sharding the number is a position, of the whole run, and a rank's object holds the states of its
streams. All ranks' together hold all streams, so that any world size may read them; `step` below is the position.

Knows storage by the few calls of `SnapshotStorage`. All calls block; the supervisor makes them in a thread.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from bagelplane.costs import Costs
from bagelplane.errors import ObjectExistsError, SnapshotError
from bagelplane.sidecar.changes import data_changes, describe, spec_changes
from bagelplane.sidecar.fingerprint import Fingerprint, read_fingerprint, write_fingerprint
from bagelplane.sidecar.lease import RunLease
from bagelplane.sidecar.retention import Retention
from bagelplane.sidecar.runs import Lineage, RunFolder, SnapshotStorage, lineage_of, read_object
from bagelplane.sidecar.snapshot_format import (
    FORMAT_VERSION,
    KNOWN_BAD_FORMAT,
    MANIFEST_NAME,
    RANK_FORMAT,
    Manifest,
    RankFile,
    SnapshotEntry,
    StreamTopology,
    base_name,
    check_images,
    check_rank_content,
    compress,
    decompress,
    digest,
    fix_damaged,
    fix_topology,
    is_object_name,
    library_versions,
    parse_folders,
    parse_manifest,
    rank_name,
    seal,
    take,
)
from bagelplane.spec_parts import CHANGEABLE
from bagelplane.storage import ObjectMissingError

log = logging.getLogger(__name__)


class SnapshotStore:
    """Snapshots of one run below one URI. Thread-safe as far as the storage is: it holds no state itself.

    An empty `spec_hash` reads snapshots of any spec: for people who look. Such a store does not write.
    """

    def __init__(
        self, storage: SnapshotStorage, uri: str, spec_hash: str, *, dataset: str = "", streams: int = 0
    ) -> None:
        self.storage = storage
        self.uri = uri.rstrip("/")
        self.spec_hash = spec_hash
        self.dataset = dataset
        self.streams = streams
        self.spec: Mapping[str, Any] = {}
        """What `spec_hash` is of, to tell what changed."""
        self.allowed: Collection[str] = ()
        """What may differ from a snapshot that is resumed from (`spec.resume.allowSpecChange`)."""
        self.data: Fingerprint | None = None
        """Of the data as they are; None if that is not known."""
        self.runs = RunFolder(storage, self.uri)
        self._read_data: dict[str, Fingerprint] = {}
        self.lease: RunLease | None = None
        """This sidecar's place in the run that it writes for. Without one, the newest run's history is read."""

    # -- writing

    @property
    def costs(self) -> Costs:
        """What was asked of the storage."""
        return self.storage.costs

    def write_rank(self, step: int, rank: int, topology: StreamTopology, state: Mapping[str, Any]) -> bool:
        """Writes one rank's state, and the manifest when that completes the set. Whether it is complete now.

        What a manifest names is never written again. SnapshotError when another run or sidecar has taken over.
        """
        if not self.spec_hash:
            raise ValueError("a store without a spec hash is for reading")
        if self.lease is not None:
            self.lease.verify(rank, step=step)
        manifest = self._manifest_at(step, self.step_uri(step))
        if manifest is not None:
            self._check_owner(manifest, topology)
            return True
        content = {
            "format": RANK_FORMAT,
            "version": FORMAT_VERSION,
            "step": step,
            "rank": rank,
            "spec_hash": self.spec_hash,
            "world_size": topology.world_size,
            "num_workers": topology.num_workers,
            "state": state,
        }
        uri = f"{self.step_uri(step)}/{rank_name(rank, topology)}"
        data = compress(content)
        try:
            self.storage.write_bytes(uri, data, only_if_absent=True)
        except ObjectExistsError:
            # Of a writer that died before the manifest. A usable one stays: another pod may be naming it.
            if self._rank_digest(step, rank, topology) is None:
                self.storage.write_bytes(uri, data)
        return self._complete(step, topology)

    def _complete(self, step: int, topology: StreamTopology) -> bool:
        """Writes the manifest if the states of all ranks are there."""
        names = {
            base_name(item.uri) for item in self.storage.list_files(self.step_uri(step), missing_ok=True)
        }
        wanted = [rank_name(rank, topology) for rank in range(topology.world_size)]
        if not names.issuperset(wanted):
            return False
        files = [self._rank_digest(step, rank, topology) for rank in range(topology.world_size)]
        ranks = tuple(item for item in files if item is not None)
        if len(ranks) != len(files):
            return False
        if self.lease is not None:
            self.lease.verify()  # reading all ranks' states takes its time
        run = self.lease.run.id if self.lease is not None else ""
        data = self.data.digest if self.data is not None else ""
        manifest = Manifest(
            self.step_uri(step), step, self.spec_hash, self.dataset, topology, ranks, library_versions(), run,
            self.spec, data,
        )  # fmt: skip
        try:
            self.storage.write_bytes(
                f"{manifest.uri}/{MANIFEST_NAME}", seal(manifest.as_json()), only_if_absent=True
            )
        except ObjectExistsError:
            log.debug("snapshot %d was completed by another pod", step)
        return True

    def _rank_digest(self, step: int, rank: int, topology: StreamTopology) -> RankFile | None:
        """What the manifest says of a rank's state; None when it is not one of this run."""
        name = rank_name(rank, topology)
        uri = f"{self.step_uri(step)}/{name}"
        try:
            data = read_object(self.storage, uri)
            content = decompress(data, uri, RANK_FORMAT)
            check_rank_content(content, uri, step, rank, self.spec_hash, topology)
        except SnapshotError as error:
            log.info("a left-over state is not used: %s", error)
            return None
        return RankFile(name, digest(data), len(data))

    # -- reading

    def step_uri(self, step: int) -> str:
        """The folder that this run writes a snapshot to."""
        run = f"-{self.lease.run.id}" if self.lease is not None else ""
        return f"{self.uri}/{'position' if self.streams else 'step'}-{step:012d}{run}"

    def lineage(self) -> Lineage:
        """The history that counts: of the run that is written for, else of the newest run here.

        SnapshotError when the record of what may be the newest run is damaged.
        """
        if self.lease is not None:
            return self.lease.lineage
        register = self.runs.look()
        register.check_newest()
        return lineage_of(register.newest, register.runs)

    def _known_lineage(self) -> Lineage:
        """As far as records are sound: for those who look."""
        if self.lease is not None:
            return self.lease.lineage
        register = self.runs.look()
        return lineage_of(register.newest, register.runs)

    def entries(self) -> list[SnapshotEntry]:
        """All snapshots by step, with what is wrong with the unusable ones. Rank states are not read."""
        lineage = self._known_lineage()
        return [self._entry(step, run, uri, lineage) for step, run, uri in self._folders(lineage)]

    def _entry(self, step: int, run: str, uri: str, lineage: Lineage) -> SnapshotEntry:
        try:
            manifest = self._manifest_at(step, uri)
            if manifest is None:
                return SnapshotEntry(step, uri, "incomplete", problem="no manifest", run=run)
            if not lineage.holds(run, step):
                problem = "not of the present run's history"
                return SnapshotEntry(step, uri, "superseded", manifest, problem, run)
            self._check_spec(manifest)
        except SnapshotError as error:
            return SnapshotEntry(step, uri, "unusable", problem=str(error), run=run)
        return SnapshotEntry(step, uri, "complete", manifest, run=run)

    def load(self, which: int | Literal["latest"], topology: StreamTopology | None = None) -> Manifest | None:
        """The manifest of a step or of the newest complete snapshot, None when there is none at all (latest).

        SnapshotError: it is damaged, of a newer format, another spec or another topology; a step without one.
        """
        if which == "latest":
            return self.nearest(None, topology)
        manifest = self._newest(self.lineage(), which, which)
        if manifest is None:
            raise SnapshotError(
                f"there is no complete snapshot of step {which} below {self.uri}",
                got=self._describe_steps(),
                fix="name one of those, or latest (a run may resume at any step: it plans forward from the one below)",
            )
        self._check_owner(manifest, topology)
        self.check_changes(manifest)
        return manifest

    def nearest(
        self, step: int | None, topology: StreamTopology | None = None, lineage: Lineage | None = None
    ) -> Manifest | None:
        """The newest complete snapshot at or below `step` (None: of all) in a history; None when there is none.

        A torn one is passed over. A damaged or foreign one is refused, not passed over in silence.
        """
        lineage = lineage or self.lineage()
        if step is not None and step < lineage.floor:
            raise self._unreachable(step, lineage.floor, "spec or data were changed there")
        manifest = self._newest(lineage, 0, step)
        if manifest is not None:
            self._check_owner(manifest, topology)
            changed = self.check_changes(manifest)
            if changed and step not in (None, manifest.step) and manifest.step != lineage.floor:
                raise self._unreachable(step, manifest.step, "the resource names changes to it")
        if lineage.floor and (manifest is None or manifest.step < lineage.floor):
            raise self._unreachable(
                step, lineage.floor, "spec or data were changed there, and its snapshot is gone"
            )
        return manifest

    def _unreachable(self, step: int | None, snapshot: int, why: str) -> SnapshotError:
        """The packs between would have to be planned with what is not known any more."""
        return SnapshotError(
            f"step {'latest' if step is None else step} of {self.uri} cannot be reached by planning",
            got=f"the snapshot of {snapshot}: {why}",
            expected="a step at that snapshot or after it, once there are newer ones",
            fix=f"resume at {snapshot}, or with the resource and the data as they were then",
        )

    def _newest(self, lineage: Lineage, first: int, last: int | None) -> Manifest | None:
        for step, run, uri in reversed(self._folders(lineage)):
            if step < first or (last is not None and step > last) or not lineage.holds(run, step):
                continue
            manifest = self._manifest_at(step, uri)
            if manifest is not None:
                return manifest
        return None

    def load_state(self, manifest: Manifest, rank: int) -> dict[str, Any]:
        """One rank's state out of a complete snapshot, checked against what its manifest says."""
        if not 0 <= rank < len(manifest.ranks):
            raise SnapshotError(
                f"the snapshot {manifest.uri} has no rank {rank}",
                got=str(manifest.topology),
                fix=fix_topology(manifest.topology),
            )
        expected = manifest.ranks[rank]
        uri = f"{manifest.uri}/{expected.name}"
        if not self.storage.exists(uri):
            raise SnapshotError(
                f"the state of rank {rank} is missing from the snapshot of step {manifest.step}",
                got=f"no object {uri}",
                expected=f"{expected.size_bytes} bytes that its manifest names",
                fix=fix_damaged(manifest.step),
            )
        data = read_object(self.storage, uri)
        if (len(data), digest(data)) != (expected.size_bytes, expected.sha256):
            raise SnapshotError(
                f"the state {uri} is damaged",
                got=f"{len(data)} bytes, sha256 {digest(data)[:16]}",
                expected=f"{expected.size_bytes} bytes, sha256 {expected.sha256[:16]}",
                fix=fix_damaged(manifest.step),
            )
        content = decompress(data, uri, RANK_FORMAT)
        check_rank_content(content, uri, manifest.step, rank, manifest.spec_hash, manifest.topology)
        state: dict[str, Any] = content["state"]
        return state

    def check_place_of(self, spec_hash: str, step: int, topology: StreamTopology) -> None:
        """SnapshotError unless a run may go on at `step` of another spec: at a snapshot of it, across what is allowed
        to differ.
        """
        manifest = self.nearest(step, topology)
        if manifest is None or (manifest.step, manifest.spec_hash) != (step, spec_hash):
            found = f"that of {manifest.step}, spec hash {manifest.spec_hash[:16]}" if manifest else "none"
            raise SnapshotError(
                f"the trainer's state belongs to another spec, and no snapshot says what changed since step {step}",
                got=found,
                expected=f"a snapshot of {step}, spec hash {spec_hash[:16]}",
                fix="resume at a snapshot (loader.snapshot() writes one where a checkpoint is saved), or with the "
                "resource as it was then",
            )

    def check_owner(self) -> None:
        """SnapshotError when the newest complete snapshot here belongs to another spec or is damaged."""
        self.nearest(None)

    def check_writable(self) -> None:
        """StorageError when nothing can be written or deleted here, before the first snapshot finds that out."""
        uri = f"{self.uri}/write-check-{uuid.uuid4().hex}"
        self.storage.write_bytes(uri, b"bagelplane looks whether snapshots can be written here\n")
        self.storage.delete(uri)

    def for_any_spec(self) -> SnapshotStore:
        """The same place for people who look."""
        return SnapshotStore(self.storage, self.uri, "")

    # -- retention

    def prune(self, retention: Retention) -> list[int]:
        """Deletes what `retention` gives up. Returns the steps deleted."""
        doomed = deletable(retention.doomed(self.entries()))
        if self.lease is not None:
            # After the look at what is there: a run that takes over now has seen the snapshots that stay.
            self.lease.verify()
        for entry in doomed:
            self.delete(entry)
        return [entry.step for entry in doomed]

    def delete(self, entry: SnapshotEntry) -> None:
        """Removes one snapshot, of whatever condition: the objects that we write, and the folder if that empties it.

        SnapshotError for one whose folder is a symbolic link: what it leads to need not be ours.
        """
        if _is_link(entry.uri):
            raise SnapshotError(
                f"the snapshot {entry.uri} is not deleted",
                got="a symbolic link",
                expected="a folder",
                fix="remove the link, and what it leads to if nobody needs it",
            )
        # The manifest first: what remains of an interrupted deletion is a torn snapshot, which is never used.
        manifest_uri = f"{entry.uri}/{MANIFEST_NAME}"
        if entry.manifest is not None:
            self.storage.delete(manifest_uri)
        for item in self.storage.list_files(entry.uri, missing_ok=True):
            if item.uri != manifest_uri and is_object_name(base_name(item.uri)):
                self.storage.delete(item.uri)
        _remove_local_folder(entry.uri)

    # -- images that do not decode

    def write_known_bad(self, rank: int, step: int, images: Mapping[str, str]) -> None:
        """Makes newly found bad images (reference to reason) durable. Returns when they are."""
        uri = f"{self.uri}/known-bad/rank-{rank:05d}-{step:012d}.json.zst"
        content = {
            "format": KNOWN_BAD_FORMAT,
            "version": FORMAT_VERSION,
            "spec_hash": self.spec_hash,
            "images": dict(images),
        }
        try:
            self.storage.write_bytes(uri, compress(content), only_if_absent=True)
        except ObjectExistsError:
            content["images"] = {**self._read_known_bad(uri), **images}
            self.storage.write_bytes(uri, compress(content))

    def load_known_bad(self) -> dict[str, str]:
        """All bad images that any rank of this run has found so far."""
        known: dict[str, str] = {}
        for item in self.storage.list_files(f"{self.uri}/known-bad", ".json.zst", missing_ok=True):
            known.update(self._read_known_bad(item.uri))
        return known

    def _read_known_bad(self, uri: str) -> dict[str, str]:
        """A list's images; none if it is another run's. SnapshotError."""
        content = decompress(read_object(self.storage, uri), uri, KNOWN_BAD_FORMAT)
        try:
            images = check_images(take(content, "images", dict))
            return images if take(content, "spec_hash", str) == self.spec_hash else {}
        except (KeyError, ValueError) as error:
            raise SnapshotError(
                f"the list of bad images {uri} has a wrong field or lacks one: {error}",
                fix="restore that object, or delete it: its images are found again",
            ) from None

    # -- inside

    def _folders(self, lineage: Lineage) -> list[tuple[int, str, str]]:
        """(number, run, URI) of each snapshot, complete or not, of either sharding, in order."""
        found = parse_folders(self.storage.list_folders(self.uri, missing_ok=True), self.uri)
        return sorted(found, key=lambda item: (item[0], -lineage.age(item[1]), item[2]))

    def _describe_steps(self) -> str:
        steps = [entry.step for entry in self.entries() if entry.condition == "complete"]
        return f"steps {', '.join(map(str, steps[-8:]))}" if steps else "no complete snapshot"

    def _manifest_at(self, step: int, folder: str) -> Manifest | None:
        """The manifest in a snapshot's folder, parsed and checked in itself; None when there is none."""
        uri = f"{folder}/{MANIFEST_NAME}"
        try:
            data = read_object(self.storage, uri)
        except ObjectMissingError:
            return None
        return parse_manifest(data, folder, step)

    def _check_owner(self, manifest: Manifest, topology: StreamTopology | None) -> None:
        self._check_spec(manifest)
        if topology is not None and not topology.can_continue(manifest.topology):
            raise SnapshotError(
                f"the snapshot {manifest.uri} was written by another topology",
                got=str(manifest.topology),
                expected=str(topology),
                fix=fix_topology(manifest.topology),
            )

    def _check_spec(self, manifest: Manifest) -> None:
        if self.spec_hash and manifest.topology.streams != self.streams:
            raise SnapshotError(
                f"the snapshot {manifest.uri} was written under another sharding",
                got=str(manifest.topology) if manifest.topology.streams else f"Bagel, {manifest.topology}",
                expected=f"{self.streams} streams (Elastic)" if self.streams else "Bagel",
                fix="resume with the resource it was written for, or give this one another snapshots.uri",
            )
        if self.spec_hash and manifest.spec_hash != self.spec_hash:
            found = (
                spec_changes(manifest.spec, self.spec, self.allowed) if manifest.spec and self.spec else []
            )
            refused = [change for change in found if change.verdict == "refused"]
            if found and not refused:
                return
            parts = sorted({change.part for change in refused if change.part in CHANGEABLE})
            name_them = f"name {', '.join(parts)} in spec.resume.allowSpecChange, " if parts else ""
            raise SnapshotError(
                f"the snapshot {manifest.uri} belongs to another dataset spec",
                got=f"spec hash {manifest.spec_hash[:16]} (dataset {manifest.dataset or 'unknown'})",
                expected=f"spec hash {self.spec_hash[:16]} (dataset {self.dataset or 'unknown'})"
                + ("; " if refused else "")
                + describe(refused),
                fix=f"resume with the resource it was written for, {name_them}or give this one another snapshots.uri",
            )

    def check_changes(self, manifest: Manifest) -> bool:
        """Whether spec or data differ from the snapshot's, as the resource allows. SnapshotError: it does not."""
        self._check_spec(manifest)
        changed = bool(self.spec_hash) and manifest.spec_hash != self.spec_hash
        if self.data is None or not manifest.data or manifest.data == self.data.digest:
            return changed
        found = data_changes(self.read_data(manifest), self.data, self.allowed)
        refused = [change for change in found if change.verdict == "refused"]
        if refused:
            raise SnapshotError(
                f"the data were changed since the snapshot {manifest.uri}",
                got=describe(refused),
                expected="the objects that the run has read so far",
                fix="put them back and give new data new names; or name data in spec.resume.allowSpecChange, and take "
                "it that rows come twice or never",
            )
        return True

    # -- the data's fingerprint

    def keep_data(self) -> str:
        """Writes the fingerprint of the data, if it is known. Its digest."""
        if self.data is None:
            return ""
        write_fingerprint(self.storage, self.uri, self.data)
        return self.data.digest

    def read_data(self, manifest: Manifest) -> Fingerprint:
        """What the data were when a snapshot was taken. SnapshotError, StorageError."""
        if manifest.data not in self._read_data:
            self._read_data[manifest.data] = read_fingerprint(self.storage, self.uri, manifest.data)
        return self._read_data[manifest.data]


def deletable(entries: Iterable[SnapshotEntry]) -> list[SnapshotEntry]:
    """Without those whose folder is a symbolic link, which `delete` refuses."""
    return [entry for entry in entries if not _is_link(entry.uri)]


def _local_path(uri: str) -> Path | None:
    path = uri.removeprefix("file://")
    return None if "://" in path else Path(path)


def _is_link(uri: str) -> bool:
    path = _local_path(uri)
    return path is not None and path.is_symlink()


def _remove_local_folder(uri: str) -> None:
    """Object stores have no folders to be left over; a local disk has."""
    path = _local_path(uri)
    if path is not None:
        with contextlib.suppress(OSError):
            path.rmdir()


__all__ = ["Manifest", "SnapshotEntry", "SnapshotStorage", "SnapshotStore", "StreamTopology", "deletable"]
