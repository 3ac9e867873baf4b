"""Units are shared out in contiguous blocks: none twice, the tail said, too few refused with the arithmetic."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagelplane.engine.sharding import (
    ShardingError,
    repeat_to_count,
    shard_to_rank,
    shard_to_worker,
    sort_units,
)
from bagelplane.errors import DataError

COUNTS = st.integers(1, 60)


def names(count: int) -> list[str]:
    return [f"unit-{number:03d}" for number in range(count)]


def block_of(units: list[str], rank: int, world_size: int, seed: int = 42) -> tuple[list[str], int]:
    return shard_to_rank(
        units, rng=random.Random(), epoch_seed=seed, rank=rank, world_size=world_size, group="cats"
    )


@given(COUNTS, st.integers(1, 12), st.integers(0, 2**32))
def test_every_unit_goes_to_one_rank_or_to_the_tail(count: int, world_size: int, seed: int) -> None:
    units = names(count)
    if count < world_size:
        with pytest.raises(ShardingError):
            block_of(units, 0, world_size, seed)
        return
    blocks = [block_of(units, rank, world_size, seed) for rank in range(world_size)]
    given_out = [unit for block, _ in blocks for unit in block]
    assert len(set(given_out)) == len(given_out)
    assert {len(block) for block, _ in blocks} == {count // world_size}
    assert {unread for _, unread in blocks} == {count - len(given_out)}
    shuffled = sorted(units)
    random.Random(seed).shuffle(shuffled)
    assert given_out == shuffled[: len(given_out)], "blocks lie one after the other"


@given(st.permutations(names(9)), st.integers(0, 1000))
def test_the_order_of_a_listing_does_not_matter(listing: list[str], seed: int) -> None:
    before = list(listing)
    assert block_of(listing, 1, 3, seed) == block_of(names(9), 1, 3, seed)
    assert listing == before


@given(COUNTS, st.integers(1, 12))
def test_every_unit_of_a_rank_goes_to_one_worker_or_to_the_tail(count: int, num_workers: int) -> None:
    units = names(count)
    if count < num_workers:
        with pytest.raises(ShardingError):
            shard_to_worker(units, num_workers=num_workers, worker_id=0, group="cats")
        return
    parts = [
        shard_to_worker(units, num_workers=num_workers, worker_id=worker, group="cats")
        for worker in range(num_workers)
    ]
    in_order = [unit for part, _ in parts for unit in reversed(part)]
    assert in_order == units[: len(in_order)], "contiguous, and each worker's reversed"
    assert {unread for _, unread in parts} == {count - len(in_order)}


def test_without_workers_the_block_is_read_in_order() -> None:
    assert shard_to_worker(names(5), num_workers=0, worker_id=0, group="cats") == (names(5), 0)


def test_texts_sort_by_value_and_tuples_by_their_first_two() -> None:
    assert sort_units(["b", "a", "B"]) == ["B", "a", "b"]
    assert sort_units([("a", 10), ("a", 9), ("A", 11)]) == [("A", 11), ("a", 9), ("a", 10)]
    # Equal in both keys: they stay as they came, for what follows may not be comparable.
    assert sort_units([("a", 1, None), ("a", 1, 3), ("a", 0, 0)]) == [
        ("a", 0, 0),
        ("a", 1, None),
        ("a", 1, 3),
    ]


def test_too_few_for_the_ranks_says_group_count_and_world_size() -> None:
    with pytest.raises(ValueError, match=r"cats.*3 units for world size 4") as caught:
        block_of(names(3), 0, 4)
    assert isinstance(caught.value, DataError)


def test_too_few_for_the_workers_says_group_and_both_counts() -> None:
    with pytest.raises(ValueError, match=r"cats.*2 units for 8 workers"):
        shard_to_worker(names(2), num_workers=8, worker_id=0, group="cats")


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (0, -3)])
def test_a_rank_outside_its_world_is_refused_with_both_numbers(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"cats.*rank {rank} of world size {world_size}"):
        block_of(names(9), rank, world_size)


@pytest.mark.parametrize("worker_id", [-1, 3])
def test_a_worker_that_there_is_not_is_refused_with_both_numbers(worker_id: int) -> None:
    with pytest.raises(ValueError, match=f"cats.*worker {worker_id} of 3"):
        shard_to_worker(names(9), num_workers=3, worker_id=worker_id, group="cats")


def test_no_units_at_all_says_so() -> None:
    with pytest.raises(ValueError, match=r"cats has no units"):
        block_of([], 0, 1)


@given(st.integers(0, 9), st.integers(0, 40))
def test_files_repeat_in_order_until_there_are_enough(files: int, count: int) -> None:
    repeated = repeat_to_count(names(files), count)
    assert repeated == [f"unit-{number % files:03d}" for number in range(count)] if files else repeated == []
