"""`NumpyReader`: the packs of one rank as NumPy arrays."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from bagelplane.client.ahead import Convert, ReadAhead
from bagelplane.client.connection import DIRECTORY_VARIABLE, Connection, RingMemory
from bagelplane.client.conversion import Conversion, to_arrays
from bagelplane.client.place import MeshLike, resolve_place
from bagelplane.engine.pack import Pack
from bagelplane.errors import SnapshotError, SpecError
from bagelplane.shm.protocol import PLACE_LIMIT, Resume, Snapshot, Snapshotted, Status, StatusRequest
from bagelplane.shm.record import Image

STATE_VERSION = 1
DEFAULT_TIMEOUT_SECONDS = 300.0
_LONGEST_TIMEOUT_SECONDS = 1e7
"""Some months: as good as for ever, and what a socket takes."""

T = TypeVar("T")


def default_directory() -> Path:
    """`BAGELPLANE_DIR`, else the directory that `bagelplane run` uses for this user."""
    return Path(os.environ.get(DIRECTORY_VARIABLE) or f"/dev/shm/bagelplane-{os.getuid()}")


class NumpyReader:
    """Iterates over the packs of one rank, for ever, from where it stands.

    Yields the mapping that Automodel's packer yields: same keys in the same order, same bits, NumPy arrays
    where that has tensors; or what `conversion` says. A mapping belongs to the caller; nothing in it changes later.
    A pack is acknowledged when it is handed over, so at most the pack being copied is taken twice, and a snapshot
    then covers it. What is prefetched is not acknowledged: state, step and snapshots speak of what was handed over.

    `iter()` gives the reader itself: a second loop continues after the first one's last pack. It does not
    start again. If the sidecar restarts, the reader attaches by itself and continues with the pack after the
    last one it gave.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        rank: int | None = None,
        local_rank: int | None = None,
        world_size: int | None = None,
        generation: int | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        mesh: MeshLike | None = None,
        dp_dim: str | Sequence[str] | None = None,
        readers: int | None = None,
        conversion: Conversion | None = None,
        prefetch: int = 0,
        resume: Literal["latest", "none"] = "latest",
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        memory: RingMemory | None = None,
    ) -> None:
        """Connects when the first pack is asked for, not here.

        directory: the sidecar's run directory, or its socket in there; default `BAGELPLANE_DIR`.
        rank, local_rank, world_size, generation, dp_rank, dp_size, mesh, dp_dim: see `resolve_place`.
        readers: how many processes of this pod read the same data-parallel rank; default: counted from `mesh`, else 1.
        conversion: what is wanted of a pack; default: the mapping of Automodel's packer.
        prefetch: packs converted ahead of the one handed over, by a thread of the reader's own, when they are ready in
            the ring; each takes the memory of a mapping. 0: the caller's thread converts.
        resume: where to begin without a loaded state. latest: after the last acknowledged pack, or the newest
            snapshot, or at the start, whichever the sidecar has first; none: at the start.
        timeout_seconds: longest wait for anything; its error names what it waited for and what it last saw.
        memory: told of the memory of each ring that packs are read from.
        """
        conversion = Conversion() if conversion is None else conversion
        if conversion.dtype == "bfloat16":
            raise SpecError("NumPy has no bfloat16", fix="take dtype float32 or float16, or use PackedLoader")
        self._to_arrays = partial(to_arrays, conversion=conversion)
        where = default_directory() if directory is None else Path(directory)
        if where.is_socket():
            where = where.parent
        if (
            not isinstance(timeout_seconds, (int, float))
            or not 0 < timeout_seconds <= _LONGEST_TIMEOUT_SECONDS
        ):
            raise SpecError(
                "timeout_seconds is no length of time that can be waited",
                got=repr(timeout_seconds),
                expected=f"a number above 0, at most {_LONGEST_TIMEOUT_SECONDS:g}",
            )
        if resume not in ("latest", "none"):
            raise SpecError(
                "resume must be 'latest' or 'none'", got=repr(resume), fix="use resume() for a step"
            )
        if type(prefetch) is not int or prefetch < 0:
            raise SpecError("prefetch must be a number of packs, 0 or more", got=repr(prefetch))
        self.place = resolve_place(
            rank, local_rank, world_size, generation,
            dp_rank=dp_rank, dp_size=dp_size, mesh=mesh, dp_dim=dp_dim, readers=readers,
        )  # fmt: skip
        self._connection = Connection(where, self.place, timeout_seconds=timeout_seconds, memory=memory)
        self._ahead = ReadAhead(prefetch, timeout_seconds=timeout_seconds)
        self._resume = Resume(resume)

    @property
    def directory(self) -> Path:
        """The sidecar's run directory."""
        return self._connection.directory

    def set_readers(self, readers: int) -> None:
        """How many processes of this pod read the same packs, where that is learned later; before the first pack."""
        self.place = self._connection.place = replace(self.place, readers=readers)

    # -- packs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        return self.take(self._to_arrays)

    def next_pack(self) -> tuple[Pack, list[Image]]:
        """The next pack as it travelled, copied: scalars, index arrays, images as uint8 [h, w, 3].

        (Or float32 [3, h, w], normalised, where the resource says `pixelFormat: float32`.)
        """
        return self.take(_copy)

    def packs(self) -> Iterator[tuple[Pack, list[Image]]]:
        """`next_pack` for ever."""
        while True:
            yield self.next_pack()

    def take(self, convert: Convert[T]) -> T:
        """The next pack, as `convert` makes it from the views of the ring; its result must not refer to them.

        `convert` is called again should the sidecar have restarted meanwhile: what it read may be torn then. Where
        packs are prefetched it is called by another thread, also for packs that are never handed over. What it
        raises is raised here when it is that pack's turn; the next call tries the same pack again.
        The time that all this takes is what the caller stands still: it goes to the sidecar, which counts it.
        """
        begun = time.perf_counter()
        ahead, connection = self._ahead, self._connection
        connection.check_owner()
        while True:
            if not ahead:
                ahead.append(*connection.next_record(self._resume), convert)
            record = ahead.first
            try:
                state, result = ahead.converted(convert)
            except Exception:
                # Bytes that change while they are read may look like anything. A record that is whole is at
                # fault.
                if connection.confirm(record):
                    raise
            else:
                if connection.confirm(record):
                    break
            ahead.clear()
        ahead.pop()
        stalled_seconds = time.perf_counter() - begun
        # Before the pack counts as handed over: an interrupt in here must not lose it.
        while ahead.has_room and (ready := connection.ready_record()) is not None:
            ahead.append(*ready, convert)
        connection.release(record, stalled_seconds=stalled_seconds)
        self._resume = Resume("state", record.step + 1, state)
        return result

    # -- place in the stream

    @property
    def step(self) -> int:
        """Number of the pack that comes next: packs of this rank behind, at this world size.

        Before the first pack this attaches, to learn it. With elastic sharding it is `position // world_size`, so
        it changes when the world size does (docs/concepts/steps.md).
        """
        if self._resume.step is None:
            step, connection = self._connection.attach(self._resume), self._connection
            if connection.streams:
                position = connection.offset + step * self.place.world_size
                self._resume = Resume("position", step, position=position)
            else:
                self._resume = Resume("step", step)
        assert self._resume.step is not None
        return self._resume.step

    @property
    def position(self) -> int:
        """Packs of all ranks together behind the next step: what stays the same when the world size changes."""
        step, resume = self.step, self._resume
        if resume.position is not None:
            return resume.position
        if resume.state is not None and "position" in resume.state:
            return int(resume.state["position"])
        return step * self.place.world_size

    def state_dict(self) -> dict[str, Any]:
        """The place after the last pack handed over: a few KB of JSON types, always the same keys.

        `step` is the number of packs behind it; with elastic sharding `position` says it for the whole run, and any
        rank of any world size may load it. `state` is a text, empty before the first pack: so a
        checkpoint library that takes nested mappings apart finds the same structure in a fresh object as in a
        saved one. Save it per rank, under a key of its own. Before the first pack this attaches, to learn
        where the stream stands.
        """
        step, resume = self.step, self._resume
        streams = self._connection.streams or (resume.state or {}).get("streams", 0)
        return {
            "version": STATE_VERSION,
            "step": step,
            "rank": self.place.rank,
            "world_size": self.place.world_size,
            "spec_hash": self._connection.spec_hash,
            "state": "" if resume.state is None else json.dumps(resume.state, separators=(",", ":")),
            **({"position": self.position, "streams": streams} if streams else {}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues at a place that `state_dict` gave, from the next pack on. SnapshotError if none of ours.

        Whether state, data set and topology belong together is decided when attaching: SnapshotError then,
        too.
        """
        step, state = _parse_state(state_dict)
        rank, world_size, position = (state_dict.get(name) for name in ("rank", "world_size", "position"))
        if position is None and world_size == self.place.world_size and rank != self.place.rank:
            raise SnapshotError(
                "the loaded state belongs to another rank",
                got=f"rank {rank} of {world_size}",
                expected=f"rank {self.place.rank} of {self.place.world_size}",
                fix="save each rank's state_dict under a key of its own",
            )
        self.close()
        self._connection.spec_hash = str(state_dict.get("spec_hash") or "")
        if position is not None:
            step = _parse_position(position) // self.place.world_size
        if state is not None:
            self._resume = Resume("state", step, state)
        else:
            self._resume = (
                Resume("step", step) if position is None else Resume("position", step, None, position)
            )

    def resume(self, *, step: int | None = None, position: int | None = None) -> None:
        """Continues with pack number `step` (from 0) of this rank: any step, saved or not.

        Or at a `position` of the whole run, in packs of all ranks together. With elastic sharding that is the same
        place at any world size, while step n is position n * world size.
        """
        place = step if position is None else position
        if type(place) is not int or not 0 <= place < PLACE_LIMIT or None not in (step, position):
            raise SpecError(
                "a place is a step or a position",
                got=f"step {step!r}, position {position!r}",
                expected=f"one of them, from 0 to below {PLACE_LIMIT}",
            )
        self.close()
        if position is None:
            self._resume = Resume("step", step)
        else:
            self._resume = Resume("position", position // self.place.world_size, position=position)

    # -- the sidecar

    def snapshot(self) -> Snapshotted:
        """Has the sidecar store the place after the last pack handed over; waits until it is stored."""
        return self._connection.request(Snapshot(), Snapshotted, self._resume)

    def status(self) -> dict[str, Any]:
        """What the sidecar tells about itself."""
        return self._connection.request(StatusRequest(), Status, self._resume).status

    def close(self) -> None:
        """Detaches, and ends the thread that prefetched. The next pack asked for attaches again, at the same place."""
        self._ahead.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _parse_state(state_dict: Mapping[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """(step, state or None) of a client's state. SnapshotError for anything else."""
    if not isinstance(state_dict, Mapping):
        raise SnapshotError(
            "the loaded state is no mapping",
            got=type(state_dict).__name__,
            fix="load what PackedLoader.state_dict() gave",
        )
    version, step, state = (state_dict.get(name) for name in ("version", "step", "state"))
    if version != STATE_VERSION:
        raise SnapshotError(
            "the loaded state is not one of PackedLoader",
            got=f"version {version!r}",
            expected=f"version {STATE_VERSION}",
            fix="load what PackedLoader.state_dict() gave",
        )
    if isinstance(state, str) and state:
        try:
            state = json.loads(state)
        except (ValueError, RecursionError):
            raise SnapshotError("the loaded state is damaged", got="text that is no JSON") from None
    if type(step) is not int or step < 0 or not (state in (None, "") or isinstance(state, dict)):
        raise SnapshotError(
            "the loaded state is damaged", got=f"step {step!r}, a {type(state).__name__} as state"
        )
    return step, state or None


def _parse_position(position: Any) -> int:
    if type(position) is not int or position < 0:
        raise SnapshotError("the loaded state is damaged", got=f"position {position!r}")
    return position


def _copy(pack: Pack, images: list[Image]) -> tuple[Pack, list[Image]]:
    arrays = {name: array.copy() for name, array in pack.arrays.items()}
    return replace(pack, arrays=arrays), [image.copy() for image in images]
