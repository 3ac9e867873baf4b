"""Which packs a process of the trainer reads: its data-parallel rank, and who reads the same ones beside it.

Processes that differ in their tensor, context or pipeline parallel rank alone read the same packs. A place comes from
a DeviceMesh, from a data-parallel rank that is given, or is the process's own rank. No torch here: of a mesh only its
names and its table of ranks are read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bagelplane.errors import SpecError

GENERATION_VARIABLE = "BAGELPLANE_GENERATION"
_DEFAULT_DIMENSION = "dp"


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the trainer's processes this is, and whose packs it reads."""

    rank: int
    """Data-parallel rank."""
    local_rank: int
    """Of the process, in its pod."""
    world_size: int
    """Data-parallel ranks in all."""
    generation: int = 0
    """Generation of the BagelDataset that the pod was made for; 0 is unknown."""
    readers: int | None = 1
    """Processes of this pod that read this data-parallel rank; None: nobody said."""


class MeshLike(Protocol):
    """What is read of a torch DeviceMesh."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...
    @property
    def mesh(self) -> Any: ...


def resolve_place(
    rank: int | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
    generation: int | None = None,
    *,
    dp_rank: int | None = None,
    dp_size: int | None = None,
    mesh: MeshLike | None = None,
    dp_dim: str | Sequence[str] | None = None,
    readers: int | None = None,
) -> Place:
    """The place of a process. SpecError for one that cannot be, with what to pass instead.

    rank, local_rank, world_size, generation: of the process; what is not given comes from RANK, LOCAL_RANK, WORLD_SIZE
        (as torchrun sets them), else rank 0 of 1. A rank that was given without a local rank, where LOCAL_RANK is not
        set, is taken as the local rank too: right where all ranks are on one machine.
    dp_rank, dp_size: data-parallel rank and how many there are; default: every process is one.
    mesh, dp_dim: a DeviceMesh and the name of its data-parallel dimension (default "dp"), or the names of several,
        which count row by row as torch flattens them. A sub-mesh of only these dimensions will do.
    readers: how many processes of this pod have this data-parallel rank. Counted from a mesh of the whole world where
        LOCAL_WORLD_SIZE is set, 1 where every process is a data-parallel rank, else None.
    """
    numbers = {
        "rank": _number_from("RANK", 0) if rank is None else rank,
        "world_size": _number_from("WORLD_SIZE", 1) if world_size is None else world_size,
        "generation": _number_from(GENERATION_VARIABLE, 0) if generation is None else generation,
    }
    numbers["local_rank"] = _number_from("LOCAL_RANK", numbers["rank"]) if local_rank is None else local_rank
    given = {"dp_rank": dp_rank, "dp_size": dp_size, "readers": readers}
    for name, value in (
        numbers | {name: number for name, number in given.items() if number is not None}
    ).items():
        if type(value) is not int:
            raise SpecError(f"{name} is no whole number", got=repr(value), fix=f"pass {name}= as an int")
    process = Place(numbers["rank"], numbers["local_rank"], numbers["world_size"], numbers["generation"])
    _check_process(process)
    if readers is not None and readers < 1:
        raise SpecError("readers must be 1 or more", got=str(readers))
    if mesh is not None:
        if dp_rank is not None or dp_size is not None:
            raise SpecError(
                "a mesh says the data-parallel rank: it cannot be given beside it",
                got=f"mesh and dp_rank {dp_rank}, dp_size {dp_size}",
                fix="pass mesh= and dp_dim=, or dp_rank= and dp_size=",
            )
        numbers["dp_rank"], numbers["dp_size"], counted = _find_in_mesh(mesh, dp_dim, process)
    elif dp_dim is not None:
        raise SpecError("dp_dim names a dimension of no mesh", got=repr(dp_dim), fix="pass mesh= too")
    elif dp_rank is None and dp_size is None:
        return process if readers is None else _placed(process, process.rank, process.world_size, readers)
    elif dp_rank is None or dp_size is None:
        raise SpecError(
            "a data-parallel rank and their number go together",
            got=f"dp_rank {dp_rank}, dp_size {dp_size}",
            fix="pass dp_rank= and dp_size=",
        )
    else:
        world_is_known = world_size is not None or bool(os.environ.get("WORLD_SIZE"))
        _check_data_parallel(dp_rank, dp_size, process.world_size if world_is_known else None)
        numbers["dp_rank"], numbers["dp_size"] = dp_rank, dp_size
        counted = 1 if world_is_known and dp_size == process.world_size else None
    return _placed(process, numbers["dp_rank"], numbers["dp_size"], counted if readers is None else readers)


def _placed(process: Place, rank: int, world_size: int, readers: int | None) -> Place:
    return Place(rank, process.local_rank, world_size, process.generation, readers)


def _check_process(place: Place) -> None:
    if not 0 <= place.rank < place.world_size or place.local_rank < 0 or place.generation < 0:
        raise SpecError(
            "the rank is outside its world",
            got=f"rank {place.rank}, local rank {place.local_rank}, world size {place.world_size}",
            expected="0 <= rank < world size",
            fix="set RANK, LOCAL_RANK and WORLD_SIZE, or pass rank=, local_rank= and world_size=",
        )


def _check_data_parallel(dp_rank: int, dp_size: int, world_size: int | None) -> None:
    if not 0 <= dp_rank < dp_size:
        raise SpecError(
            "the data-parallel rank is outside its size",
            got=f"dp_rank {dp_rank}, dp_size {dp_size}",
            expected="0 <= dp_rank < dp_size",
            fix="pass the process's place among the data-parallel ranks, and their number",
        )
    if world_size is not None and world_size % dp_size:
        raise SpecError(
            "the data-parallel ranks do not divide the world",
            got=f"dp_size {dp_size}, world size {world_size}",
            expected="a divisor of the world size",
            fix="pass dp_size= as the world size divided by the tensor, context and pipeline parallel sizes",
        )


# -- meshes


def _find_in_mesh(
    mesh: MeshLike, dp_dim: str | Sequence[str] | None, process: Place
) -> tuple[int, int, int | None]:
    """(data-parallel rank, how many, readers in this pod or None)."""
    if not hasattr(mesh, "mesh") or not hasattr(mesh, "mesh_dim_names"):
        raise SpecError(
            "mesh is no DeviceMesh",
            got=repr(mesh)[:100],
            fix="pass what init_device_mesh gave, or a part of it",
        )
    table = np.asarray(mesh.mesh.tolist())
    dims = _find_dimensions(mesh.mesh_dim_names, table.ndim, dp_dim)
    found = np.argwhere(table == process.rank)
    if len(found) != 1:
        raise SpecError(
            "this process is not in the mesh",
            got=f"rank {process.rank} of {process.world_size}, a mesh of {table.size} ranks",
            fix="pass a mesh that this process is part of",
        )
    sizes = [table.shape[dim] for dim in dims]
    dp_rank = int(np.ravel_multi_index([found[0][dim] for dim in dims], sizes))
    readers = None
    if (
        table.size == process.world_size
    ):  # else it may be a part of one, and others with this place are not seen
        here = tuple(found[0][dim] if dim in dims else slice(None) for dim in range(table.ndim))
        readers = _count_in_pod(table[here].ravel(), process)
    return dp_rank, math.prod(sizes), readers


def _find_dimensions(
    names: tuple[str, ...] | None, count: int, dp_dim: str | Sequence[str] | None
) -> list[int]:
    """Numbers of the data-parallel dimensions. A mesh of one dimension needs no name for it."""
    if not names:
        if count == 1 and dp_dim is None:
            return [0]
        raise SpecError(
            "the mesh's dimensions have no names",
            got=f"{count} dimensions",
            fix="make it with mesh_dim_names=, and pass the data-parallel one as dp_dim=",
        )
    wanted = [_DEFAULT_DIMENSION] if dp_dim is None else [dp_dim] if isinstance(dp_dim, str) else dp_dim
    if not isinstance(wanted, (list, tuple)):
        raise SpecError("dp_dim is no name and no list of names", got=repr(dp_dim))
    dims = [names.index(name) if name in names else -1 for name in wanted]
    if not dims or -1 in dims or dims != sorted(set(dims)):
        raise SpecError(
            "the mesh has no such data-parallel dimension",
            got=f"dp_dim {list(wanted)}",
            expected=f"of {list(names)}, one or several in this order",
            fix='pass dp_dim= as they are named, for example dp_dim=("dp_replicate", "dp_shard"), '
            'or the sub-mesh itself, mesh["dp"]',
        )
    return dims


def _count_in_pod(ranks: npt.NDArray[np.int64], process: Place) -> int | None:
    """How many of these are in this process's pod, whose ranks follow each other. None: its size is not known."""
    if len(ranks) == 1:
        return 1
    local_size = _number_from("LOCAL_WORLD_SIZE", 0)
    if not local_size:
        return None
    first = process.rank - process.local_rank
    return int(np.count_nonzero((first <= ranks) & (ranks < first + local_size)))


def _number_from(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise SpecError(f"the environment variable {variable} is no number", got=repr(text)) from None
