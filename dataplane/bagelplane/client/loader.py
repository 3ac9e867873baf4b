"""`PackedLoader`: the packs of one rank as torch tensors."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from bagelplane.client.agreement import Peers, digest_pack, lowest_of_all, meet_peers
from bagelplane.client.connection import RingMemory
from bagelplane.client.conversion import Conversion
from bagelplane.client.devices import open_device, parse_device
from bagelplane.client.place import MeshLike, Place
from bagelplane.client.reader import DEFAULT_TIMEOUT_SECONDS, NumpyReader
from bagelplane.client.tensors import CpuTensors, DeviceTensors, Tensors
from bagelplane.engine.pack import Pack
from bagelplane.errors import SpecError
from bagelplane.shm.protocol import Snapshotted
from bagelplane.shm.record import Image

logger = logging.getLogger(__name__)


class PackedLoader(IterableDataset[dict[str, Any]]):
    """Iterates over the packs of one rank, for ever, from where it stands; a trainer's data loader.

        loader = PackedLoader()
        for batch in loader:
            ...

    Yields the mapping that Automodel's packer yields: same keys in the same order, same bits; or what `dtype`,
    `normalise`, `pad`, `patchify` and `masks` say (docs/guides/client.md). A batch belongs to the caller; nothing in
    it changes later. `state_dict` and `load_state_dict` follow torch's Stateful protocol: saved after k packs, the
    loaded one continues with pack k (counted from 0), whatever was prefetched.

    `iter()` gives the loader itself: a second loop continues after the first one's last pack. It does not
    start again (there are no epochs: the stream has no end). The sidecar may restart; the loader attaches by
    itself and continues with the next pack. Not for use by two threads at once, nor in worker processes:
    there is nothing to do for them. Nor after a fork: connection and thread stay with the process that iterated, a
    child makes a loader of its own.

    It is an IterableDataset, for trainers that insist on a DataLoader: one with `num_workers=0` gives its packs.
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
        verify_every: int = 0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | str | None = None,
        normalise: bool = True,
        pad: bool = True,
        patchify: bool = True,
        masks: bool = True,
        prefetch: int = 1,
        resume: Literal["latest", "none"] = "latest",
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        """Connects when the first pack is asked for, not here.

        directory: the sidecar's run directory, or its socket in there; default `BAGELPLANE_DIR`.
        rank, world_size: default from torch.distributed when it is initialised, else RANK and WORLD_SIZE,
        else 0 of 1. local_rank: default LOCAL_RANK, else `rank`. generation: of the BagelDataset; default
        `BAGELPLANE_GENERATION`.
        dp_rank, dp_size, or mesh and dp_dim: where processes read the same packs (tensor, context or pipeline
            parallel); see `resolve_place` and docs/concepts/data-parallel.md. Default: each is a data-parallel rank.
        readers: how many processes of this pod have this data-parallel rank; default: counted from the mesh, else
            learned from the others through torch.distributed before the first pack, which all ranks then have to
            take.
        verify_every: processes with one data-parallel rank compare every n-th pack's digest, and one that differs is a
            DataError. 0: never.
        device: where all tensors shall be; default: in the CPU's memory. Pixels go there as uint8 and become floats
            there, the same bits.
        dtype, normalise, pad, patchify, masks: what is wanted of a pack, see `Conversion`.
        prefetch: packs converted ahead of the one handed over, by a thread of the loader's own, when they are ready in
            the ring; each takes the memory of a batch. 0: the thread that iterates converts.
        resume: where to begin without a loaded state. latest: after the last acknowledged pack, or the newest
            snapshot, or at the start, whichever the sidecar has first; none: at the start. With latest, and
            rank and world size from torch.distributed, all ranks begin at the lowest step that one of their
            sidecars has: take the first pack on every rank, and load a state on all or on none.
        timeout_seconds: longest wait for anything; its error names what it waited for and what it last saw.
        """
        self._process = _process_of_job() if rank is None and world_size is None else None
        self._must_agree = resume == "latest" and self._process is not None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank = torch.distributed.get_rank() if rank is None else rank
            world_size = torch.distributed.get_world_size() if world_size is None else world_size
        self._timeout_seconds = timeout_seconds
        name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
        conversion = Conversion(name, normalise, pad, patchify, masks)
        self._tensors, memory = _open_tensors(conversion, device)
        self._reader = NumpyReader(
            directory,
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            generation=generation,
            dp_rank=dp_rank,
            dp_size=dp_size,
            mesh=mesh,
            dp_dim=dp_dim,
            readers=readers,
            prefetch=prefetch,
            resume=resume,
            timeout_seconds=timeout_seconds,
            memory=memory,
        )
        self._verify_every = _check_verify_every(verify_every, self._process is not None)
        self._must_meet = self._process is not None and (verify_every > 0 or self.place.readers is None)
        self._peers: Peers | None = None

    @property
    def place(self) -> Place:
        """Whose packs this process reads: data-parallel rank, local rank, data-parallel ranks in all, generation."""
        return self._reader.place

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        if worker is not None:
            raise SpecError(
                "PackedLoader takes packs in the trainer's own process, not in a DataLoader's worker",
                got=f"worker {worker.id} of {worker.num_workers}",
                fix="num_workers=0: the sidecar does the work",
            )
        return self

    def __next__(self) -> dict[str, Any]:
        self._agree()
        step, digest, converted = self._reader.take(self._digest_and_convert)
        if digest and self._peers is not None:
            self._peers.compare(step, digest)
        return self._tensors.hand_over(converted)

    @property
    def step(self) -> int:
        """See `NumpyReader.step`."""
        self._agree()
        return self._reader.step

    @property
    def position(self) -> int:
        """See `NumpyReader.position`."""
        self._agree()
        return self._reader.position

    def state_dict(self) -> dict[str, Any]:
        """See `NumpyReader.state_dict`."""
        self._agree()
        return self._reader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `NumpyReader.load_state_dict`."""
        self._must_agree = False
        self._reader.load_state_dict(state_dict)

    def resume(self, *, step: int | None = None, position: int | None = None) -> None:
        """See `NumpyReader.resume`."""
        self._must_agree = False
        self._reader.resume(step=step, position=position)

    def snapshot(self) -> Snapshotted:
        """Has the sidecar store the place after the last batch handed over; waits until it is stored."""
        self._meet()
        return self._reader.snapshot()

    def status(self) -> dict[str, Any]:
        """What the sidecar tells about itself."""
        self._meet()
        return self._reader.status()

    def close(self) -> None:
        """Detaches. The next batch asked for attaches again, at the same place."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _meet(self) -> None:
        """Learns who else reads this process's packs, where that is not known or has to be."""
        if not self._must_meet:
            return
        assert self._process is not None
        rank, world_size = self._process
        self._peers = meet_peers(
            self.place,
            self._reader.directory,
            rank=rank,
            world_size=world_size,
            timeout_seconds=self._timeout_seconds,
        )
        if self.place.readers is None:
            self._reader.set_readers(self._peers.readers)
        self._must_meet = False

    def _agree(self) -> None:
        """Without a loaded state, all ranks begin at the lowest step that one of their sidecars stands at."""
        self._meet()
        if not self._must_agree:
            return
        assert self._process is not None
        rank, world_size = self._process
        place, ours = self.place, self._reader.position
        agreed = lowest_of_all(ours, rank=rank, world_size=world_size, timeout_seconds=self._timeout_seconds)
        if agreed != ours:
            logger.warning(
                "data-parallel rank %d: its sidecar stood at step %d, another rank's at %d: all go on there",
                place.rank,
                ours // place.world_size,
                agreed // place.world_size,
            )
            self._reader.resume(position=agreed)
        self._must_agree = False

    def _digest_and_convert(self, pack: Pack, images: Sequence[Image]) -> tuple[int, str, Any]:
        due = self._verify_every and pack.step % self._verify_every == 0
        return pack.step, digest_pack(pack, images) if due else "", self._tensors.convert(pack, images)


def _open_tensors(
    conversion: Conversion, device: torch.device | str | int | None
) -> tuple[Tensors, RingMemory | None]:
    """What makes the tensors, and whether it has to know of the ring's memory."""
    target = torch.device("cpu") if device is None else parse_device(device)
    if target.type == "cpu":
        return CpuTensors(conversion), None
    on_device = DeviceTensors(conversion, open_device(target))
    return on_device, on_device


def _process_of_job() -> tuple[int, int] | None:
    """(rank, world size) of this process under torch.distributed."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _check_verify_every(verify_every: int, is_job: bool) -> int:
    if type(verify_every) is not int or verify_every < 0:
        raise SpecError("verify_every must be a number of packs, 0 for never", got=repr(verify_every))
    if verify_every and not is_job:
        raise SpecError(
            "packs are compared through torch.distributed, which is not initialised",
            fix="call torch.distributed.init_process_group first and leave rank= and world_size= out, or pass "
            "verify_every=0",
        )
    return verify_every
