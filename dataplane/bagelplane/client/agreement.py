"""What the processes of a job tell each other through torch's store: where they stand, what they read, what they saw.

A sidecar that lives goes on from its memory; one that was lost with its pod or machine comes back at the newest
snapshot. Ranks that each believed their own would train on packs of different steps, and nobody would notice.
Processes with one data-parallel rank have to know each other: a sidecar frees a pack when the last of its pod has read
it, and between pods both sidecars must have made the same bits.

Through the store of torch.distributed's default group, not by a collective: whatever else the trainer has its ranks
do before their first pack, the two do not get in each other's way, and no device is needed.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import distributed_c10d

from bagelplane.client.place import Place
from bagelplane.engine.pack import Pack
from bagelplane.errors import DataError, ProtocolError, SpecError
from bagelplane.shm.record import Image

_SHOWN_RANKS = 8
_LOOK_SECONDS = 0.1
_FIRST_LOOK_SECONDS = 0.005


def lowest_of_all(place: int, *, rank: int, world_size: int, timeout_seconds: float) -> int:
    """The lowest of all ranks' places. Returns when every rank has told its own, at its n-th call the n-th one.

    Raises ProtocolError, naming the ranks that are missing at the deadline.
    """
    _, told = _exchange("place", str(place), rank, world_size, timeout_seconds)
    return min(map(int, told))


def meet_peers(place: Place, directory: Path, *, rank: int, world_size: int, timeout_seconds: float) -> Peers:
    """Who else reads this process's packs. `rank` and `world_size` are the process's own.

    SpecError if the places of all do not go together; ProtocolError at the deadline.
    """
    pod = _identify(directory, timeout_seconds)
    mine = json.dumps([place.rank, place.world_size, place.local_rank, pod])
    call, told = _exchange("reads", mine, rank, world_size, timeout_seconds)
    all_places = [json.loads(text) for text in told]
    for other, (_, size, _, _) in enumerate(all_places):
        if size != place.world_size:
            raise SpecError(
                "ranks disagree about how many data-parallel ranks there are",
                got=f"dp_size {place.world_size} at rank {rank}, {size} at rank {other}",
                fix="pass the same dp_size= or mesh= on every rank",
            )
    peers = [other for other, (dp_rank, *_) in enumerate(all_places) if dp_rank == place.rank]
    here = [other for other in peers if all_places[other][3] == pod]
    for other in here:
        if other != rank and all_places[other][2] == place.local_rank:
            raise SpecError(
                f"two readers of data-parallel rank {place.rank} have one local rank",
                got=f"local rank {place.local_rank} at rank {rank} and at rank {other}",
                fix="set LOCAL_RANK, as torchrun does, or pass local_rank=",
            )
    return Peers(rank, place.rank, tuple(peers), len(here), call)


@dataclass(frozen=True, slots=True)
class Peers:
    """All processes with one data-parallel rank, this one among them."""

    rank: int
    """This process's own."""
    dp_rank: int
    ranks: tuple[int, ...]
    readers: int
    """How many of them are in this pod."""
    call: str
    """Key of the exchange that they met in: other loaders of theirs met in others."""

    def compare(self, step: int, digest: str) -> None:
        """Tells what was seen at a step, and looks at what the first of the others saw. Waits for nobody.

        DataError if the two differ. The last to come takes what was told out of the store again.
        """
        store = distributed_c10d._get_default_store()
        key = f"{self.call}/digest/{self.dp_rank}/{step}"
        mine = f"{self.rank} {digest}"
        first = store.compare_set(key, "", mine).decode()
        if store.add(f"{key}/seen", 1) == len(self.ranks):
            store.delete_key(key)
            store.delete_key(f"{key}/seen")
        other, _, theirs = first.partition(" ")
        if theirs != digest:
            raise DataError(
                f"two processes with data-parallel rank {self.dp_rank} were given different packs of step {step}",
                got=f"digest {digest} at rank {self.rank}",
                expected=f"{theirs}, which rank {other} was given first",
                fix="compare the spec_hash, the images' versions and the data of the two pods' sidecars",
            )


def digest_pack(pack: Pack, images: Sequence[Image]) -> str:
    """Of all bits that a batch is made of."""
    hashed = hashlib.blake2b(digest_size=16)
    layout = [pack.step, pack.scalars, pack.vae_images, pack.vit_images, pack.patch_size]
    hashed.update(json.dumps(layout, sort_keys=True).encode())
    for name, array in sorted(pack.arrays.items()):
        hashed.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    for image in images:
        hashed.update(f"{image.dtype} {image.shape}".encode() + image.tobytes())
    return hashed.hexdigest()


@dataclass(slots=True)
class _Gathering:
    """This process's, of the default group: the store it met the others in, and how often all told each other."""

    store: distributed_c10d.Store | None = None
    name: str = ""
    calls: int = 0


_gathering = _Gathering()


def _exchange(
    what: str, mine: str, rank: int, world_size: int, timeout_seconds: float
) -> tuple[str, list[str]]:
    """(key of this exchange, what every rank told, by rank)."""
    # torch has no public name for it; it is what all its own bookkeeping of groups goes through.
    store = distributed_c10d._get_default_store()
    if _gathering.store is not store:
        _gathering.name = gather(store, rank, world_size, timeout_seconds)
        _gathering.store, _gathering.calls = store, 0
    _gathering.calls += 1
    call = f"bagelplane/{_gathering.name}/{_gathering.calls}"
    keys = [f"{call}/{what}/{other}" for other in range(world_size)]
    store.set(keys[rank], mine)
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise ProtocolError("the ranks' agreement on a place was cut off", got=str(error)) from None
        raise _late(missing, world_size, timeout_seconds) from None
    return call, [told.decode() for told in store.multi_get(keys)]


def gather(store: distributed_c10d.Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """A name that the living processes of all ranks agree on, and none that died ever had.

    torchrun keeps its store when it starts the ranks again (torch 2.15; pytorch issue 135712), with all that the dead
    told each other. Every process signs in under a name of its own; rank 0 reads the names out, again when one has
    changed; who hears its own name confirms that list; when all have confirmed one, it is what they are called by.
    Raises ProtocolError, naming the ranks that are missing at the deadline.
    """
    deadline, look_seconds = time.monotonic() + timeout_seconds, _FIRST_LOOK_SECONDS
    mine, heard = secrets.token_hex(8), ""
    signed_in, confirmed = (
        [f"bagelplane/{what}/{other}" for other in range(world_size)] for what in ("here", "confirmed")
    )
    store.set(signed_in[rank], mine)
    while True:
        if rank == 0 and store.check(signed_in):
            store.set("bagelplane/list", b" ".join(store.multi_get(signed_in)).decode())
        names = _get(store, "bagelplane/list").split(" ")
        if len(names) == world_size and names[rank] == mine:
            called = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]
            if called != heard:
                heard = called
                store.set(confirmed[rank], called)
            if rank == 0 and store.check(confirmed) and set(store.multi_get(confirmed)) == {called.encode()}:
                store.set("bagelplane/gathered", called)
            if _get(store, "bagelplane/gathered") == called:
                return called
        if time.monotonic() > deadline:
            absent = [other for other, key in enumerate(signed_in) if not store.check([key])]
            silent = [other for other, key in enumerate(confirmed) if _get(store, key) != heard]
            raise _late(absent or silent or [0], world_size, timeout_seconds)
        time.sleep(look_seconds)
        look_seconds = min(look_seconds * 2, _LOOK_SECONDS)


def _get(store: distributed_c10d.Store, key: str) -> str:
    """Waits for nothing: "" is a key that is not there."""
    return store.get(key).decode() if store.check([key]) else ""


def _late(missing: Sequence[int], world_size: int, timeout_seconds: float) -> ProtocolError:
    shown = ", ".join(map(str, missing[:_SHOWN_RANKS])) + (", ..." if len(missing) > _SHOWN_RANKS else "")
    return ProtocolError(
        f"waited {timeout_seconds:g} s for all {world_size} ranks to say where they stand",
        got=f"nothing from rank {shown}",
        fix="take the first pack on every rank, and load a state on all of them or on none",
    )


def _identify(directory: Path, timeout_seconds: float) -> str:
    """What processes have in common that reach one sidecar, and no others: its run directory, once that is there."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            status = directory.stat()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ProtocolError(
                    f"waited {timeout_seconds:g} s for the sidecar's directory {directory}",
                    got=error.strerror or str(error),
                    fix="start the sidecar, or correct BAGELPLANE_DIR",
                ) from None
            time.sleep(_LOOK_SECONDS)
        else:
            return f"{socket.gethostname()} {status.st_dev} {status.st_ino}"
