"""How snapshots look in the store: manifests and states as JSON, each under a checksum, and what is refused of them.

All is JSON; states are compressed with zstd (with its checksum), the manifest names each one's SHA-256 and
carries one of its own. Pure: bytes in, values out; nothing is read or written here.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal, TypeVar

import zstandard

from bagelplane.errors import SnapshotError

FORMAT_VERSION = 1
RANK_FORMAT = "bagelplane-rank-state"
MANIFEST_FORMAT = "bagelplane-snapshot"
KNOWN_BAD_FORMAT = "bagelplane-known-bad"
MANIFEST_NAME = "manifest.json"
MAX_OBJECT_BYTES = 64 * 1024 * 1024
"""No object of ours is larger, also after decompression; what claims to be is refused, and not read."""
MAX_RECORD_BYTES = 1024 * 1024
"""Nor any record of a run, a lease or a claim than this."""
NUMBER = "([0-9]{12}|[1-9][0-9]{12,18})"
"""A step or position as `:012d` writes it: one pattern for names, so that what is written is found."""
_FOLDER_NAME = re.compile(rf"(?:step|position)-{NUMBER}(?:-([0-9a-f]{{8}}))?")
_RANK_NAME = re.compile(r"rank-[0-9]{5}(?:-of-[0-9]{5})?\.json\.zst")


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
    run: str = ""
    """Id of the run that wrote it; empty in snapshots from before there were runs."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """What `spec_hash` is of, as in YAML; empty in snapshots of an earlier release."""
    data: str = ""
    """Digest of the data's fingerprint (`fingerprint`); empty if it is not known."""

    @property
    def steps(self) -> int:
        """Steps of its world that are behind it; `step` is a position with elastic sharding."""
        return self.step // self.topology.world_size if self.topology.streams else self.step

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
            **({"run": self.run} if self.run else {}),
            **({"spec": dict(self.spec)} if self.spec else {}),
            **({"data": self.data} if self.data else {}),
        }


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """One line of a listing: a complete snapshot, or one that is not used, and why."""

    step: int
    uri: str
    condition: Literal["complete", "incomplete", "unusable", "superseded"]
    """superseded: whole perhaps, and not of the present run's history."""
    manifest: Manifest | None = None
    problem: str = ""
    run: str = ""


def rank_name(rank: int, topology: StreamTopology) -> str:
    """With elastic sharding worlds of other sizes may write at the same position."""
    world = f"-of-{topology.world_size:05d}" if topology.streams else ""
    return f"rank-{rank:05d}{world}.json.zst"


def is_object_name(name: str) -> bool:
    """Whether we write objects of that name into the folder of a snapshot."""
    return name == MANIFEST_NAME or _RANK_NAME.fullmatch(name) is not None


def parse_folders(uris: Sequence[str], root: str) -> Iterator[tuple[int, str, str]]:
    """(number, run's id, URI) of the folders of snapshots among these; the id is empty before there were runs.

    Only names exactly as we write them: others, however alike, belong to somebody else.
    """
    for uri in uris:
        name = base_name(uri)
        match = _FOLDER_NAME.fullmatch(name)
        if match is not None:
            yield int(match[1]), match[2] or "", f"{root}/{name}"


def base_name(uri: str) -> str:
    return uri.rstrip("/").rpartition("/")[2]


def library_versions() -> dict[str, str]:
    """Of all that can move a bit of the stream."""
    versions = {"python": platform.python_version()}
    for name in ("bagelplane", "numpy", "pillow", "pyarrow", "tokenizers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions


def canonical(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def compress(content: Mapping[str, Any]) -> bytes:
    """The JSON as stored; `decompress` reads it. SnapshotError for more than that would read."""
    text = canonical(content)
    if len(text) > MAX_OBJECT_BYTES:
        raise SnapshotError(
            f"an object of format {content.get('format')} is too large to be stored",
            got=f"{len(text)} bytes of JSON",
            expected=f"at most {MAX_OBJECT_BYTES}",
            fix="lower what has to be remembered: the resource's budgets.maxBufferSize",
        )
    packed: bytes = zstandard.ZstdCompressor(level=6, write_checksum=True).compress(text)
    return packed


def decompress(data: bytes, uri: str, wanted_format: str) -> dict[str, Any]:
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


def check_rank_content(
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
            fix=fix_damaged(step),
        )
    if not isinstance(content.get("state"), dict):
        raise SnapshotError(f"the state {uri} has no content", fix=fix_damaged(step))
    check_state_tables(content["state"], uri, fix_damaged(step))


def check_state_tables(state: Mapping[str, Any], where: str, fix: str) -> None:
    """What others than the state's stream read of it: bad images and counts of drops. SnapshotError."""
    try:
        check_images(take(state, "known_bad", dict, {}))
        for group, row in take(state, "drops", dict, {}).items():
            if not isinstance(row, dict) or not all(type(count) is int for count in row.values()):
                raise ValueError(f"drops of {group[:60]} are {repr(row)[:60]}")
    except ValueError as error:
        raise SnapshotError(f"the state {where} has a wrong field: {error}", fix=fix) from None


def check_images(images: Mapping[str, Any]) -> dict[str, str]:
    """A list of bad images: reference to reason. ValueError for anything else."""
    for name, reason in images.items():
        if type(name) is not str or type(reason) is not str:
            raise ValueError(f"the reason of image {name[:60]} is {repr(reason)[:60]}")
    return dict(images)


def seal(content: Mapping[str, Any]) -> bytes:
    """JSON for people too, with a checksum in it; `unseal` reads it."""
    return json.dumps({**content, "sha256": digest(canonical(content))}, indent=1).encode()


def unseal(data: bytes, uri: str, wanted_format: str, fix: str) -> dict[str, Any]:
    """The content that `seal` was given. SnapshotError, with this `fix`, for anything else."""
    name = {MANIFEST_FORMAT: "manifest"}.get(wanted_format, "object")
    try:
        if len(data) > MAX_OBJECT_BYTES:
            raise ValueError(f"{len(data)} bytes")
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(
            f"the {name} {uri} is damaged: {error}", got=f"{len(data)} bytes that are not JSON", fix=fix
        ) from None
    content = _check_format(content, uri, wanted_format)
    claimed = content.pop("sha256", "")
    actual = digest(canonical(content))
    if claimed != actual:
        raise SnapshotError(
            f"the {name} {uri} is damaged",
            got=f"sha256 {actual[:16]}",
            expected=f"sha256 {str(claimed)[:16]}",
            fix=fix,
        )
    return content


_Value = TypeVar("_Value")


def take(content: Mapping[str, Any], name: str, kind: type[_Value], default: _Value | None = None) -> _Value:
    """A field of just that type, and no number below 0. KeyError without it and a default; ValueError else."""
    value = content[name] if default is None else content.get(name, default)
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise ValueError(f"{name} is {repr(value)[:60]}")
    return value


def parse_manifest(data: bytes, folder: str, step: int) -> Manifest:
    """SnapshotError for what is no manifest of that step."""
    uri = f"{folder}/{MANIFEST_NAME}"
    content = unseal(data, uri, MANIFEST_FORMAT, fix_damaged(step))
    try:
        ranks = tuple(_parse_rank_file(item) for item in take(content, "ranks", list))
        manifest = Manifest(
            folder,
            take(content, "step", int),
            take(content, "spec_hash", str),
            take(content, "dataset", str),
            StreamTopology(
                take(content, "world_size", int),
                take(content, "num_workers", int),
                take(content, "streams", int, 0),
            ),
            ranks,
            take(content, "versions", dict),
            take(content, "run", str, ""),
            take(content, "spec", dict, {}),
            take(content, "data", str, ""),
        )
        if not ranks:
            raise ValueError("it names no states")
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(
            f"the manifest {uri} has a wrong field or lacks one: {error}", fix=fix_damaged(step)
        ) from None
    if manifest.step != step or len(ranks) != manifest.topology.world_size:
        raise SnapshotError(
            f"the manifest {uri} is not that of its folder",
            got=f"step {manifest.step}, {len(ranks)} states for {manifest.topology}",
            expected=f"step {step}",
            fix=fix_damaged(step),
        )
    return manifest


def _parse_rank_file(item: Any) -> RankFile:
    if not isinstance(item, dict):
        raise TypeError(f"a state is {repr(item)[:60]}")
    file = RankFile(take(item, "name", str), take(item, "sha256", str), take(item, "size_bytes", int))
    if _RANK_NAME.fullmatch(file.name) is None:  # names are put behind the folder's
        raise ValueError(f"a state has the name {file.name[:60]!r}")
    return file


def fix_damaged(step: int) -> str:
    return f"restore the objects of step {step}, or delete that folder: the snapshot before it is used then"


def fix_topology(topology: StreamTopology) -> str:
    return (
        f"run with {topology}, or start anew with --resume none and another snapshots.uri "
        "(Bagel sharding is bound to its topology)"
    )
