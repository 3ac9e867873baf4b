"""Whose packs a process reads: from a mesh, from numbers, from the environment; and what is refused."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagelplane.client.place import Place, resolve_place
from bagelplane.errors import SpecError


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def mesh_of(*names: str, shape: tuple[int, ...], ranks: Any = None) -> Any:
    """What a DeviceMesh shows of itself; the real one is in tests/integration/test_data_parallel.py."""
    table = np.arange(int(np.prod(shape))) if ranks is None else np.asarray(ranks)
    return SimpleNamespace(mesh_dim_names=names or None, mesh=table.reshape(shape))


def test_every_process_is_a_data_parallel_rank_unless_told_otherwise() -> None:
    assert resolve_place() == Place(0, 0, 1)
    assert resolve_place(3, 1, 4, 7) == Place(3, 1, 4, 7, readers=1)


def test_a_mesh_gives_the_rank_and_the_readers_of_this_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_of("dp", "tp", shape=(2, 4))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    places = [resolve_place(rank, rank, 8, mesh=mesh) for rank in range(8)]
    assert [place.rank for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {(place.world_size, place.readers) for place in places} == {(2, 4)}
    assert [place.local_rank for place in places] == list(range(8))


def test_readers_are_counted_where_a_rank_spans_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    mesh = mesh_of("dp", "tp", shape=(2, 3), ranks=[0, 2, 4, 1, 3, 5])
    readers = {rank: resolve_place(rank, rank % 3, 6, mesh=mesh).readers for rank in range(6)}
    assert readers == {0: 2, 1: 1, 2: 2, 3: 2, 4: 1, 5: 2}


def test_two_dimensions_count_row_by_row_whatever_lies_between_them() -> None:
    mesh = mesh_of("pp", "dp_replicate", "dp_shard", "tp", shape=(2, 2, 3, 2))
    for rank in range(24):
        _, replicate, shard, _ = np.unravel_index(rank, (2, 2, 3, 2))
        place = resolve_place(rank, 0, 24, mesh=mesh, dp_dim=("dp_replicate", "dp_shard"))
        assert (place.rank, place.world_size) == (replicate * 3 + shard, 6)


def test_a_sub_mesh_gives_the_rank_and_leaves_the_readers_to_be_learned() -> None:
    row = mesh_of("dp", shape=(2,), ranks=[1, 5])
    assert resolve_place(5, 5, 8, mesh=row) == Place(1, 5, 2, readers=None)
    unnamed = mesh_of(shape=(4,))
    assert resolve_place(3, 3, 4, mesh=unnamed) == Place(3, 3, 4, readers=1)


def test_readers_that_are_given_count_and_else_nobody_said() -> None:
    assert resolve_place(6, 6, 8, dp_rank=1, dp_size=2).readers is None
    assert resolve_place(6, 6, 8, dp_rank=1, dp_size=2, readers=4) == Place(1, 6, 2, readers=4)
    assert resolve_place(6, 6, 8, dp_rank=6, dp_size=8).readers == 1
    # Without WORLD_SIZE the world is not known, and nothing is held against it.
    assert resolve_place(dp_rank=1, dp_size=2, local_rank=3, readers=4) == Place(1, 3, 2, readers=4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank 2, dp_size 2; expected 0 <= dp_rank < dp_size"),
        ({"dp_rank": -1, "dp_size": 2}, "outside its size"),
        ({"dp_rank": 0}, "pass dp_rank= and dp_size="),
        ({"dp_size": 2}, "pass dp_rank= and dp_size="),
        ({"dp_rank": 0, "dp_size": 3}, "dp_size 3, world size 8; expected a divisor"),
        ({"dp_rank": 0, "dp_size": 16}, "do not divide the world"),
        ({"dp_rank": "0", "dp_size": 2}, "dp_rank is no whole number"),
        ({"dp_rank": True, "dp_size": 2}, "dp_rank is no whole number"),
        ({"readers": 0}, "readers must be 1 or more"),
        ({"dp_dim": "dp"}, "pass mesh= too"),
        ({"mesh": mesh_of("dp", "tp", shape=(2, 4)), "dp_rank": 0, "dp_size": 2}, "beside it"),
        ({"mesh": mesh_of("fsdp", "tp", shape=(2, 4))}, r"of \['fsdp', 'tp'\]"),
        ({"mesh": mesh_of("tp", shape=(8,))}, "no such data-parallel dimension"),
        ({"mesh": mesh_of("a", "b", "tp", shape=(2, 2, 2)), "dp_dim": ("b", "a")}, "in this order"),
        ({"mesh": mesh_of("a", "b", shape=(2, 4)), "dp_dim": ()}, "no such data-parallel dimension"),
        ({"mesh": mesh_of(shape=(2, 4))}, "mesh_dim_names="),
        ({"mesh": mesh_of("dp", shape=(2,), ranks=[6, 7])}, "not in the mesh"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_pass(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        resolve_place(0, 0, 8, **options)


def test_a_local_world_size_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    with pytest.raises(SpecError, match="LOCAL_WORLD_SIZE is no number; got 'many'"):
        resolve_place(0, 0, 8, mesh=mesh_of("dp", "tp", shape=(2, 4)))


@given(shape=st.lists(st.integers(1, 3), min_size=2, max_size=4), data=st.data())
def test_the_readers_of_all_pods_are_all_processes_of_a_rank(shape: list[int], data: st.DataObject) -> None:
    """Each process has a place, all data-parallel ranks are equally large, and pods sum up to them."""
    world_size = int(np.prod(shape))
    names = [f"d{number}" for number in range(len(shape))]
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True).map(sorted))
    pod_size = data.draw(st.sampled_from([n for n in range(1, world_size + 1) if world_size % n == 0]))
    order = data.draw(st.permutations(range(world_size)))
    mesh = mesh_of(*names, shape=tuple(shape), ranks=order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(pod_size))
        places = [
            resolve_place(rank, rank % pod_size, world_size, mesh=mesh, dp_dim=chosen)
            for rank in range(world_size)
        ]
    sizes = {place.world_size for place in places}
    assert len(sizes) == 1
    (size,) = sizes
    for dp_rank, pod in product(range(size), range(world_size // pod_size)):
        here = [
            place for rank, place in enumerate(places) if place.rank == dp_rank and rank // pod_size == pod
        ]
        assert {place.readers for place in here} <= {len(here)}
    assert sorted(place.rank for place in places) == sorted(list(range(size)) * (world_size // size))


@pytest.mark.parametrize(
    "wrong", [{"mesh": "dp"}, {"mesh": object()}, {"mesh": mesh_of("dp", shape=(1,)), "dp_dim": 3}]
)
def test_what_is_no_mesh_or_no_name_is_refused_in_words(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"no DeviceMesh|no name"):
        resolve_place(0, 0, 1, **wrong)
