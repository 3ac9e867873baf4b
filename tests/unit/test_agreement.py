"""Processes that share a store find each other, whatever dead ones left in it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from bagelplane.client.agreement import gather
from bagelplane.errors import ProtocolError

DEADLINE_SECONDS = 60.0


def gather_all(
    store: HashStore, ranks: list[int], world_size: int, timeout_seconds: float
) -> list[str | None]:
    """What each of these ranks, in this order of starts, gets: None is the deadline."""

    def run(rank: int) -> str | None:
        try:
            return gather(store, rank, world_size, timeout_seconds)
        except ProtocolError:
            return None

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 4).flatmap(
        lambda size: st.tuples(
            st.permutations(range(size)),
            st.lists(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1), max_size=3),
        )
    )
)
def test_processes_that_come_again_find_each_other_and_none_of_the_dead(
    case: tuple[list[int], list[set[int]]],
) -> None:
    order, died_alone = case
    store, names = HashStore(), []
    for ranks in died_alone:
        assert set(gather_all(store, sorted(ranks), len(order), 0.02)) == {None}
        names += gather_all(store, order, len(order), DEADLINE_SECONDS)[:1]
    together = gather_all(store, order, len(order), DEADLINE_SECONDS)
    assert len(set(together)) == 1
    assert None not in {*names, *together}
    assert len({*names, together[0]}) == len(names) + 1, "a name of an earlier gathering"


def test_a_rank_that_died_is_missed_though_it_has_signed_in() -> None:
    store = HashStore()
    gather_all(store, [0, 1, 2], 3, DEADLINE_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(gather_all, store, [0], 3, 1.0)
        with pytest.raises(ProtocolError, match="nothing from rank 1"):
            gather(store, 2, 3, 0.8)
        assert other.result() == [None]
