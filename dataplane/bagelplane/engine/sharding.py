"""Which units (files, row groups, lines) a rank and its workers read, and in what order (STREAM, Sharding)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from bagelplane.errors import DataError

Unit = TypeVar("Unit", bound="str | tuple[object, ...]")

DEFAULT_EPOCH_SEED = 42


def sort_units(units: Sequence[Unit]) -> list[Unit]:
    """Texts by value, tuples by their first two members."""
    return sorted(units, key=lambda unit: unit if isinstance(unit, str) else unit[:2])


def shard_to_rank(
    units: Sequence[Unit], *, rng: random.Random, epoch_seed: int, rank: int, world_size: int, group: str
) -> tuple[list[Unit], int]:
    """This rank's contiguous block of the shuffled units, and how many units of the tail nobody reads.

    `rng` is the group's private generator; it is seeded with `epoch_seed` and used for the shuffle only.
    Raises ShardingError when there are no units at all, or fewer than ranks, or no such rank.
    """
    if not 0 <= rank < world_size:
        raise ShardingError(
            f"group {group} is asked for a rank outside its world",
            got=f"rank {rank} of world size {world_size}",
            expected="a rank from 0 to below the world size",
            fix="ranks count from 0; pass the run's own rank and world size",
        )
    if not units:
        raise ShardingError(
            f"group {group} has no units to read",
            got="0 files, row groups or lines",
            expected="at least one a rank",
            fix="look at the data set's location and at numUsedData",
        )
    ordered = order_units(units, rng=rng, epoch_seed=epoch_seed)
    per_rank = len(ordered) // world_size
    if per_rank == 0:
        raise ShardingError(
            f"group {group} has fewer units than ranks",
            got=f"{len(ordered)} units for world size {world_size}",
            expected=f"at least {world_size}",
            fix="use more (or smaller) files, a larger numUsedData, or fewer ranks",
        )
    return ordered[rank * per_rank : (rank + 1) * per_rank], len(ordered) - per_rank * world_size


def order_units(units: Sequence[Unit], *, rng: random.Random, epoch_seed: int) -> list[Unit]:
    """The units in the order in which they are shared out: sorted, then shuffled by the seed."""
    ordered = sort_units(units)
    rng.seed(epoch_seed)
    rng.shuffle(ordered)
    return ordered


def share_of_stream(ordered: Sequence[Unit], stream: int, streams: int, group: str) -> list[Unit]:
    """One stream's contiguous share of the ordered units, as `shard_to_rank` gives to a rank of as many.

    Raises ShardingError when there are fewer units than streams.
    """
    share = len(ordered) // streams
    if share == 0:
        raise ShardingError(
            f"group {group} has fewer units than streams",
            got=f"{len(ordered)} units for {streams} streams",
            expected=f"at least {streams} files, row groups or lines",
            fix="lower sharding.streams, use more (or smaller) files, or a larger numUsedData",
        )
    return list(ordered[stream * share : (stream + 1) * share])


def shard_to_worker(
    units: Sequence[Unit], *, num_workers: int, worker_id: int, group: str
) -> tuple[list[Unit], int]:
    """One worker's part of the rank's block, reversed, and how many of the tail nobody reads.

    `num_workers` 0 is reading without workers: the whole block in order.
    Raises ShardingError when there are fewer units than workers, or no such worker.
    """
    if num_workers == 0:
        return list(units), 0
    if not 0 <= worker_id < num_workers:
        raise ShardingError(
            f"group {group} is asked for a worker that there is not",
            got=f"worker {worker_id} of {num_workers}",
            expected="a worker from 0 to below their number",
            fix="pass the worker's own id and the number of workers",
        )
    per_worker = len(units) // num_workers
    if per_worker == 0:
        raise ShardingError(
            f"group {group} has fewer units than workers on this rank",
            got=f"{len(units)} units for {num_workers} workers",
            expected=f"at least {num_workers}",
            fix="use more (or smaller) files, a larger numUsedData, or fewer workers or ranks",
        )
    part = list(units[worker_id * per_worker : (worker_id + 1) * per_worker])
    part.reverse()
    return part, len(units) - per_worker * num_workers


def repeat_to_count(names: Sequence[str], count: int) -> list[str]:
    """`names` over and over until there are `count`: a directory's files against `numUsedData`."""
    if not names:
        return []
    return (list(names) * (count // len(names) + 1))[:count]


class ShardingError(DataError, ValueError):
    """Too few units, or no such consumer. A ValueError too, since that is what the documented classes raise."""
