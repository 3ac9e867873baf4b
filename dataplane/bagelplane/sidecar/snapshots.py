"""Snapshots: the states of all ranks at one step, so that nothing torn, foreign or damaged is ever resumed.

    <uri>/step-<12 digits>/rank-<5 digits>.json.zst     one a rank, written by whoever serves it; with elastic
                                                        sharding position-<...>/rank-<...>-of-<...>.json.zst
    <uri>/step-<12 digits>/manifest.json                last, by conditional put; without it nothing counts
    <uri>/known-bad/rank-<5 digits>-<step>.json.zst     images that do not decode, durable before a pack
                                                        planned with them is published

All is JSON; states are compressed with zstd (with its checksum), the manifest names each one's SHA-256 and
carries one of its own. A state at step n is the state before pack number n: n packs are behind it. It is a
function of spec, data, rank and topology, so two writers of the same step write the same meaning, and the
first one wins.

With elastic sharding the number is a position, of the whole run, and a rank's object holds the states of its
streams. All ranks' together hold all streams, so that any world size may read them; `step` below is the position.

Knows storage by the few calls of `SnapshotStorage`. All calls block; the supervisor makes them in a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import platform
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Protocol

import zstandard

from bagelplane.errors import ObjectExistsError, SnapshotError, StorageError

FORMAT_VERSION = 1
RANK_FORMAT = "bagelplane-rank-state"
MANIFEST_FORMAT = "bagelplane-snapshot"
KNOWN_BAD_FORMAT = "bagelplane-known-bad"
MANIFEST_NAME = "manifest.json"
MAX_OBJECT_BYTES = 64 * 1024 * 1024
"""No object of ours is larger, also after decompression; what claims to be is refused."""

log = logging.getLogger(__name__)


class Listed(Protocol):
    """What a listing tells of a file."""

    @property
    def uri(self) -> str: ...


class SnapshotStorage(Protocol):
    """The calls of `bagelplane.storage.Storage` that snapshots need."""

    def list_files(self, uri: str, suffix: str = "", *, missing_ok: bool = False) -> Sequence[Listed]: ...
    def list_folders(self, uri: str, *, missing_ok: bool = False) -> Sequence[str]: ...
    def exists(self, uri: str) -> bool: ...
    def read_bytes(self, uri: str) -> bytes: ...
    def write_bytes(self, uri: str, data: bytes, *, only_if_absent: bool = False) -> None: ...
    def delete(self, uri: str) -> None: ...


@dataclass(frozen=True, slots=True)
class StreamTopology:
    """What a stream under Bagel sharding is bound to; under elastic sharding it is the streams alone."""

    world_size: int
    num_workers: int
    streams: int = 0
    """Elastic sharding; 0 is Bagel."""

    def __str__(self) -> str:
        if self.streams:
            return f"{self.streams} streams (Elastic), world size {self.world_size}"
        return f"world size {self.world_size} with {self.num_workers} workers a rank"

    @property
    def unit(self) -> str:
        """What the number of a snapshot counts."""
        return "position" if self.streams else "step"

    def can_continue(self, other: StreamTopology) -> bool:
        return self.streams == other.streams if self.streams else self == other


@dataclass(frozen=True, slots=True)
class RankFile:
    name: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete snapshot."""

    uri: str
    """Its folder."""
    step: int
    """Number of packs behind it, for every rank; with elastic sharding of all ranks together."""
    spec_hash: str
    dataset: str
    topology: StreamTopology
    ranks: tuple[RankFile, ...]
    """By rank."""
    versions: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Its content as written, without the checksum."""
        return {
            "format": MANIFEST_FORMAT,
            "version": FORMAT_VERSION,
            "step": self.step,
            "spec_hash": self.spec_hash,
            "dataset": self.dataset,
            "world_size": self.topology.world_size,
            "num_workers": self.topology.num_workers,
            **({"streams": self.topology.streams} if self.topology.streams else {}),
            "ranks": [
                {"name": item.name, "sha256": item.sha256, "size_bytes": item.size_bytes}
                for item in self.ranks
            ],
            "versions": dict(self.versions),
        }


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """One line of a listing: a complete snapshot, one that cannot be used, or one that was never finished."""

    step: int
    uri: str
    condition: Literal["complete", "incomplete", "unusable"]
    manifest: Manifest | None = None
    problem: str = ""


class SnapshotStore:
    """Snapshots of one run below one URI. Thread-safe as far as the storage is: it holds no state itself.

    An empty `spec_hash` reads snapshots of any spec: for people who look. Such a store does not write.
    """

    def __init__(
        self, storage: SnapshotStorage, uri: str, spec_hash: str, *, dataset: str = "", streams: int = 0
    ) -> None:
        self._storage = storage
        self.uri = uri.rstrip("/")
        self.spec_hash = spec_hash
        self.dataset = dataset
        self.streams = streams

    # -- writing

    def write_rank(self, step: int, rank: int, topology: StreamTopology, state: Mapping[str, Any]) -> bool:
        """Writes one rank's state, and the manifest when that completes the set. Whether it is complete now.

        What a manifest names is never written again. SnapshotError when the place belongs to another run.
        """
        if not self.spec_hash:
            raise ValueError("a store without a spec hash is for reading")
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
        data = _compress(content)
        try:
            self._storage.write_bytes(uri, data, only_if_absent=True)
        except ObjectExistsError:
            # Of a writer that died before the manifest. A usable one stays: another pod may be naming it.
            if self._rank_digest(step, rank, topology) is None:
                self._storage.write_bytes(uri, data)
        return self._complete(step, topology)

    def _complete(self, step: int, topology: StreamTopology) -> bool:
        """Writes the manifest if the states of all ranks are there."""
        names = {_name(item.uri) for item in self._storage.list_files(self.step_uri(step), missing_ok=True)}
        wanted = [rank_name(rank, topology) for rank in range(topology.world_size)]
        if not names.issuperset(wanted):
            return False
        files = [self._rank_digest(step, rank, topology) for rank in range(topology.world_size)]
        ranks = tuple(item for item in files if item is not None)
        if len(ranks) != len(files):
            return False
        manifest = Manifest(
            self.step_uri(step), step, self.spec_hash, self.dataset, topology, ranks, library_versions()
        )
        body = manifest.as_json()
        body["sha256"] = _digest(_canonical(body))
        try:
            text = json.dumps(body, indent=1).encode()
            self._storage.write_bytes(f"{manifest.uri}/{MANIFEST_NAME}", text, only_if_absent=True)
        except ObjectExistsError:
            log.debug("snapshot %d was completed by another pod", step)
        return True

    def _rank_digest(self, step: int, rank: int, topology: StreamTopology) -> RankFile | None:
        """What the manifest says of a rank's state; None when it is not one of this run."""
        name = rank_name(rank, topology)
        uri = f"{self.step_uri(step)}/{name}"
        try:
            data = self._storage.read_bytes(uri)
            content = _decompress(data, uri, RANK_FORMAT)
            _check_rank_content(content, uri, step, rank, self.spec_hash, topology)
        except SnapshotError as error:
            log.info("a left-over state is not used: %s", error)
            return None
        return RankFile(name, _digest(data), len(data))

    # -- reading

    def step_uri(self, step: int) -> str:
        return f"{self.uri}/{'position' if self.streams else 'step'}-{step:012d}"

    def entries(self) -> list[SnapshotEntry]:
        """All snapshots by step, with what is wrong with the unusable ones. Rank states are not read."""
        found: list[SnapshotEntry] = []
        for step, uri in self._folders():
            try:
                manifest = self._manifest_at(step, uri)
                if manifest is None:
                    found.append(SnapshotEntry(step, uri, "incomplete", problem="no manifest"))
                    continue
                self._check_spec(manifest)
                found.append(SnapshotEntry(step, uri, "complete", manifest))
            except SnapshotError as error:
                found.append(SnapshotEntry(step, uri, "unusable", problem=str(error)))
        return found

    def load(self, which: int | Literal["latest"], topology: StreamTopology | None = None) -> Manifest | None:
        """The manifest of a step or of the newest complete snapshot, None when there is none at all (latest).

        SnapshotError: it is damaged, of a newer format, another spec or another topology; a step without one.
        """
        if which == "latest":
            return self.nearest(None, topology)
        uris = [uri for step, uri in self._folders() if step == which]
        manifest = next(filter(None, (self._manifest_at(which, uri) for uri in uris)), None)
        if manifest is None:
            raise SnapshotError(
                f"there is no complete snapshot of step {which} below {self.uri}",
                got=self._describe_steps(),
                fix="resume from one of those, or from any step: the nearest one below it is planned forward",
            )
        self._check_owner(manifest, topology)
        return manifest

    def nearest(self, step: int | None, topology: StreamTopology | None = None) -> Manifest | None:
        """The newest complete snapshot at or below `step` (None: of all); None when there is none.

        A torn one is passed over. A damaged or foreign one is refused, not passed over in silence.
        """
        for candidate, uri in reversed(self._folders()):
            if step is not None and candidate > step:
                continue
            manifest = self._manifest_at(candidate, uri)
            if manifest is not None:
                self._check_owner(manifest, topology)
                return manifest
        return None

    def load_state(self, manifest: Manifest, rank: int) -> dict[str, Any]:
        """One rank's state out of a complete snapshot, checked against what its manifest says."""
        if not 0 <= rank < len(manifest.ranks):
            raise SnapshotError(
                f"the snapshot {manifest.uri} has no rank {rank}",
                got=str(manifest.topology),
                fix=_fix_topology(manifest.topology),
            )
        expected = manifest.ranks[rank]
        uri = f"{manifest.uri}/{expected.name}"
        if not self._storage.exists(uri):
            raise SnapshotError(
                f"the state of rank {rank} is missing from the snapshot of step {manifest.step}",
                got=f"no object {uri}",
                expected=f"{expected.size_bytes} bytes that its manifest names",
                fix=_fix_damaged(manifest.step),
            )
        data = self._storage.read_bytes(uri)
        if (len(data), _digest(data)) != (expected.size_bytes, expected.sha256):
            raise SnapshotError(
                f"the state {uri} is damaged",
                got=f"{len(data)} bytes, sha256 {_digest(data)[:16]}",
                expected=f"{expected.size_bytes} bytes, sha256 {expected.sha256[:16]}",
                fix=_fix_damaged(manifest.step),
            )
        content = _decompress(data, uri, RANK_FORMAT)
        _check_rank_content(content, uri, manifest.step, rank, manifest.spec_hash, manifest.topology)
        state: dict[str, Any] = content["state"]
        return state

    def check_owner(self) -> None:
        """SnapshotError when the newest complete snapshot here belongs to another spec or is damaged."""
        self.nearest(None)

    def check_writable(self) -> None:
        """StorageError when nothing can be written or deleted here, before the first snapshot finds that out."""
        uri = f"{self.uri}/write-check-{uuid.uuid4().hex}"
        self._storage.write_bytes(uri, b"bagelplane looks whether snapshots can be written here\n")
        self._storage.delete(uri)

    # -- retention

    def prune(self, keep_last: int) -> list[int]:
        """Deletes this run's complete snapshots but the newest `keep_last`, and what was torn before those.

        Never the newest complete one, nothing of another spec. Returns the steps deleted.
        """
        entries = self.entries()
        complete = [entry.step for entry in entries if entry.condition == "complete"]
        if not complete:
            return []
        oldest_kept = complete[-max(1, keep_last) :][0]
        doomed = [entry for entry in entries if entry.step < oldest_kept and entry.condition != "unusable"]
        for entry in doomed:
            self._delete(entry)
        return [entry.step for entry in doomed]

    def _delete(self, entry: SnapshotEntry) -> None:
        # The manifest first: what remains of an interrupted deletion is a torn snapshot, which is never used.
        manifest_uri = f"{entry.uri}/{MANIFEST_NAME}"
        if entry.manifest is not None:
            self._storage.delete(manifest_uri)
        for item in self._storage.list_files(entry.uri, missing_ok=True):
            if item.uri != manifest_uri:
                self._storage.delete(item.uri)
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
            self._storage.write_bytes(uri, _compress(content), only_if_absent=True)
        except ObjectExistsError:
            before = _decompress(self._storage.read_bytes(uri), uri, KNOWN_BAD_FORMAT)
            if before["spec_hash"] == self.spec_hash:
                content["images"] = {**before["images"], **images}
            self._storage.write_bytes(uri, _compress(content))

    def load_known_bad(self) -> dict[str, str]:
        """All bad images that any rank of this run has found so far."""
        known: dict[str, str] = {}
        for item in self._storage.list_files(f"{self.uri}/known-bad", ".json.zst", missing_ok=True):
            content = _decompress(self._storage.read_bytes(item.uri), item.uri, KNOWN_BAD_FORMAT)
            if content["spec_hash"] == self.spec_hash:
                known.update(content["images"])
        return known

    # -- inside

    def _folders(self) -> list[tuple[int, str]]:
        """(number, URI) of each snapshot, complete or not, of either sharding, in order."""
        return sorted(_parse_folders(self._storage.list_folders(self.uri, missing_ok=True), self.uri))

    def _describe_steps(self) -> str:
        steps = [entry.step for entry in self.entries() if entry.condition == "complete"]
        return f"steps {', '.join(map(str, steps[-8:]))}" if steps else "no complete snapshot"

    def _manifest_at(self, step: int, folder: str) -> Manifest | None:
        """The manifest in a snapshot's folder, parsed and checked in itself; None when there is none."""
        uri = f"{folder}/{MANIFEST_NAME}"
        if not self._storage.exists(uri):
            return None
        return _parse_manifest(self._storage.read_bytes(uri), folder, step)

    def _check_owner(self, manifest: Manifest, topology: StreamTopology | None) -> None:
        self._check_spec(manifest)
        if topology is not None and not topology.can_continue(manifest.topology):
            raise SnapshotError(
                f"the snapshot {manifest.uri} was written by another topology",
                got=str(manifest.topology),
                expected=str(topology),
                fix=_fix_topology(manifest.topology),
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
            raise SnapshotError(
                f"the snapshot {manifest.uri} belongs to another dataset spec",
                got=f"spec hash {manifest.spec_hash[:16]} (dataset {manifest.dataset or 'unknown'})",
                expected=f"spec hash {self.spec_hash[:16]} (dataset {self.dataset or 'unknown'})",
                fix="resume with the resource it was written for, or give this one another snapshots.uri",
            )


def rank_name(rank: int, topology: StreamTopology) -> str:
    """With elastic sharding worlds of other sizes may write at the same position."""
    world = f"-of-{topology.world_size:05d}" if topology.streams else ""
    return f"rank-{rank:05d}{world}.json.zst"


def library_versions() -> dict[str, str]:
    """Of all that can move a bit of the stream."""
    versions = {"python": platform.python_version()}
    for name in ("bagelplane", "numpy", "pillow", "pyarrow", "tokenizers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions


def _parse_folders(uris: Sequence[str], root: str) -> Iterator[tuple[int, str]]:
    for uri in uris:
        name = _name(uri)
        kind, _, digits = name.partition("-")
        if kind in ("step", "position") and len(digits) == 12 and digits.isdecimal():
            yield int(digits), f"{root}/{name}"


def _name(uri: str) -> str:
    return uri.rstrip("/").rpartition("/")[2]


def _remove_local_folder(uri: str) -> None:
    """Object stores have no folders to be left over; a local disk has."""
    path = uri.removeprefix("file://")
    if "://" not in path:
        with contextlib.suppress(OSError):
            Path(path).rmdir()


def _canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _compress(content: Mapping[str, Any]) -> bytes:
    packed: bytes = zstandard.ZstdCompressor(level=6, write_checksum=True).compress(_canonical(content))
    return packed


def _decompress(data: bytes, uri: str, wanted_format: str) -> dict[str, Any]:
    """The JSON in a compressed object of ours. SnapshotError for anything else."""
    try:
        parameters = zstandard.get_frame_parameters(data)
        if parameters.content_size > MAX_OBJECT_BYTES:
            raise ValueError(f"{parameters.content_size} bytes after decompression")
        text = zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_OBJECT_BYTES)
        content = json.loads(text)
    except (zstandard.ZstdError, ValueError, MemoryError, RecursionError) as error:
        raise SnapshotError(
            f"the object {uri} is damaged: {error}",
            got=f"{len(data)} bytes that do not decompress to JSON",
            fix="resume from another snapshot, or restore the object",
        ) from None
    return _check_format(content, uri, wanted_format)


def _check_format(content: Any, uri: str, wanted_format: str) -> dict[str, Any]:
    if not isinstance(content, dict) or content.get("format") != wanted_format:
        raise SnapshotError(
            f"the object {uri} is none of ours",
            got=repr(content.get("format") if isinstance(content, dict) else type(content).__name__),
            expected=repr(wanted_format),
            fix="give the run a snapshots.uri of its own",
        )
    version = content.get("version")
    if version != FORMAT_VERSION:
        raise SnapshotError(
            f"the object {uri} has another format version",
            got=f"version {version}",
            expected=f"version {FORMAT_VERSION}",
            fix="install the bagelplane release that wrote it, or a newer one",
        )
    return content


def _check_rank_content(
    content: Mapping[str, Any], uri: str, step: int, rank: int, spec_hash: str, topology: StreamTopology
) -> None:
    names = ("step", "rank", "spec_hash", "world_size", "num_workers")
    found = {name: content.get(name) for name in names}
    wanted = dict(zip(names, (step, rank, spec_hash, topology.world_size, topology.num_workers), strict=True))
    different = [name for name in names if found[name] != wanted[name]]
    if different:
        raise SnapshotError(
            f"the state {uri} belongs elsewhere",
            got=", ".join(f"{name} {found[name]}" for name in different),
            expected=", ".join(f"{name} {wanted[name]}" for name in different),
            fix=_fix_damaged(step),
        )
    if not isinstance(content.get("state"), dict):
        raise SnapshotError(f"the state {uri} has no content", fix=_fix_damaged(step))


def _parse_manifest(data: bytes, folder: str, step: int) -> Manifest:
    uri = f"{folder}/{MANIFEST_NAME}"
    try:
        if len(data) > MAX_OBJECT_BYTES:
            raise ValueError(f"{len(data)} bytes")
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(
            f"the manifest {uri} is damaged: {error}",
            got=f"{len(data)} bytes that are not JSON",
            fix=_fix_damaged(step),
        ) from None
    content = _check_format(content, uri, MANIFEST_FORMAT)
    claimed = content.pop("sha256", "")
    actual = _digest(_canonical(content))
    if claimed != actual:
        raise SnapshotError(
            f"the manifest {uri} is damaged",
            got=f"sha256 {actual[:16]}",
            expected=f"sha256 {str(claimed)[:16]}",
            fix=_fix_damaged(step),
        )
    try:
        ranks = tuple(RankFile(item["name"], item["sha256"], item["size_bytes"]) for item in content["ranks"])
        manifest = Manifest(
            folder,
            content["step"],
            content["spec_hash"],
            content["dataset"],
            StreamTopology(content["world_size"], content["num_workers"], content.get("streams", 0)),
            ranks,
            content["versions"],
        )
    except (KeyError, TypeError) as error:
        raise SnapshotError(f"the manifest {uri} lacks a field: {error}", fix=_fix_damaged(step)) from None
    if manifest.step != step or len(ranks) != manifest.topology.world_size:
        raise SnapshotError(
            f"the manifest {uri} is not that of its folder",
            got=f"step {manifest.step}, {len(ranks)} states for {manifest.topology}",
            expected=f"step {step}",
            fix=_fix_damaged(step),
        )
    return manifest


def _fix_damaged(step: int) -> str:
    return f"restore the objects of step {step}, or delete that folder: the snapshot before it is used then"


def _fix_topology(topology: StreamTopology) -> str:
    return (
        f"run with {topology}, or start anew with --resume none and another snapshots.uri "
        "(Bagel sharding is bound to its topology)"
    )


__all__ = [
    "FORMAT_VERSION",
    "Manifest",
    "RankFile",
    "SnapshotEntry",
    "SnapshotError",
    "SnapshotStorage",
    "SnapshotStore",
    "StorageError",
    "StreamTopology",
    "library_versions",
    "rank_name",
]
