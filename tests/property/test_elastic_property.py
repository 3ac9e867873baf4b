"""Elastic sharding: whatever world sizes a run goes through, it gives the undisturbed run's packs in its order."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagelplane.engine.elastic import (
    ElasticPlace,
    check_state,
    check_world_size,
    fitting_world_sizes,
    merge_states,
    newest_states,
    packs_behind,
)
from bagelplane.errors import SnapshotError, SpecError
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology
from tests.golden.elastic_streams import name_of_plan, next_name, resource, world

PACKS = 48


@st.composite
def places(draw: st.DrawFn) -> tuple[int, int, int]:
    """(streams, a world size that divides them, a position)."""
    streams = draw(st.integers(1, 96))
    return streams, draw(st.sampled_from(fitting_world_sizes(streams))), draw(st.integers(0, 10**6))


# --- numbers ------------------------------------------------------------------------------------------


@given(places())
def test_the_steps_of_a_world_take_every_pack_from_a_position_on_once(place: tuple[int, int, int]) -> None:
    streams, size, position = place
    ranks = [ElasticPlace(rank, size, streams, position % size) for rank in range(size)]
    first = position // size
    taken = [rank.pack(step) for step in range(first, first + 3) for rank in ranks]
    assert taken == list(range(position, position + 3 * size))
    assert ranks[0].position(first + 3) == position + 3 * size


@given(places())
def test_a_rank_keeps_to_its_streams_and_a_world_has_them_all(place: tuple[int, int, int]) -> None:
    streams, size, position = place
    ranks = [ElasticPlace(rank, size, streams, position % size) for rank in range(size)]
    assert sorted(stream for rank in ranks for stream in rank.served()) == list(range(streams))
    for rank in ranks:
        steps = range(position // size, position // size + 2 * streams // size)
        assert {rank.pack(step) % streams for step in steps} == set(rank.served())


@given(places())
def test_the_packs_behind_a_position_are_those_below_it(place: tuple[int, int, int]) -> None:
    streams, _, position = place
    position %= 500
    counts = [sum(number % streams == stream for number in range(position)) for stream in range(streams)]
    assert [packs_behind(position, stream, streams) for stream in range(streams)] == counts


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_the_world_sizes_that_work_are_the_divisors(streams: int, world_size: int) -> None:
    assert (world_size in fitting_world_sizes(streams)) == (streams % world_size == 0)
    if streams % world_size:
        with pytest.raises(SpecError, match="one of the world sizes 1"):
            check_world_size(streams, world_size)


def test_the_refusal_lists_the_world_sizes_that_work() -> None:
    with pytest.raises(SpecError, match="one of the world sizes 1, 2, 3, 4, 6, 12"):
        check_world_size(12, 8)


def test_the_nearest_state_that_is_not_past_the_position_is_taken() -> None:
    def states(**packs: int) -> dict[str, dict[str, Any]]:
        return {name[1:]: {"packs": count, "from": count} for name, count in packs.items()}

    # Behind position 9 of four streams lie 3, 2, 2, 2 packs.
    found = newest_states([states(_0=1, _1=3), states(_0=3, _1=1, _2=2), states(_0=4)], 9, 4, [0, 1, 3])
    assert {name: state["packs"] for name, state in found.items()} == {"0": 3, "1": 1}


def test_a_pack_s_state_is_put_to_what_is_known_of_the_other_streams() -> None:
    before = {"position": 4, "states": {"0": {"packs": 2}, "1": {"packs": 1}}}
    merged = merge_states(before, {"position": 6, "states": {"1": {"packs": 2}}})
    assert merged == {"position": 6, "states": {"0": {"packs": 2}, "1": {"packs": 2}}}
    bagel = {"step": 3, "workers": []}
    assert merge_states({"step": 2, "workers": []}, bagel) is bagel


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"sharding": None, "topology": {"world_size": 2}},
            ["Bagel sharding", "Elastic sharding, 8 streams"],
        ),
        ({"streams": 4}, ["4 streams", "8 streams", "sharding.streams"]),
        ({"position": -1}, ["no position"]),
        ({"states": {"0": {}}}, ["damaged"]),
        ({"states": None}, ["damaged"]),
    ],
)
def test_a_state_of_another_run_is_refused_with_both_sides(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SnapshotError) as refused:
        check_state({"sharding": "Elastic", "streams": 8, "position": 3, "states": {}, **change}, 8)
    assert all(word in str(refused.value) for word in words), str(refused.value)


# --- planned packs ------------------------------------------------------------------------------------


@functools.cache
def undisturbed(streams: int) -> list[str]:
    with world(resource(streams), 1) as [stream]:
        return [name_of_plan(stream.plan_pack()) for _ in range(PACKS)]


@st.composite
def chains(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, float]]]:
    """(streams, [(world size, steps, share of the streams' states that the next world finds)])."""
    streams = draw(st.sampled_from([4, 6, 8, 12]))
    worlds, left = [], PACKS
    while left and len(worlds) < 5:
        size = draw(st.sampled_from([size for size in fitting_world_sizes(streams) if size <= left] or [1]))
        steps = draw(st.integers(1, max(1, min(left // size, 6))))
        worlds.append((size, steps, draw(st.sampled_from([0.0, 0.5, 1.0]))))
        left -= size * steps
    return streams, worlds


@example((8, [(8, 1, 1.0), (4, 3, 1.0), (2, 1, 1.0), (8, 2, 0.0)]))
@example((8, [(4, 3, 1.0), (8, 2, 0.5), (1, 5, 1.0), (2, 2, 1.0)]))
@settings(max_examples=30)
@given(chains())
def test_a_chain_of_worlds_gives_the_undisturbed_order_pack_for_pack(
    chain: tuple[int, list[tuple[int, int, float]]],
) -> None:
    streams, worlds = chain
    dataset, position = resource(streams), 0
    known: list[Any] = []
    for size, steps, share in worlds:
        found = newest_states(known, position, streams, range(streams))
        kept = dict(list(found.items())[: round(share * len(found))])
        state = {
            "version": 1,
            "sharding": "Elastic",
            "streams": streams,
            "position": position,
            "states": kept,
        }
        with world(dataset, size, json.loads(json.dumps(state))) as ranks:
            assert {rank.position for rank in ranks} == {position}
            taken = [name_of_plan(rank.plan_pack()) for _ in range(steps) for rank in ranks]
            known += [rank.state()["states"] for rank in ranks]
        assert taken == undisturbed(streams)[position : position + size * steps]
        position += size * steps


# --- with pixels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recording", ["a_default", "odd_default"])
def test_the_chain_8_4_2_8_gives_the_undisturbed_packs_with_their_pixels(recording: str) -> None:
    dataset, position, seen = resource(8, recording), 0, []
    states: dict[str, Any] = {}
    for size, steps in ((8, 1), (4, 3), (2, 1), (8, 1)):
        state = {"version": 1, "sharding": "Elastic", "streams": 8, "position": position, "states": states}
        with world(dataset, size, state) as ranks:
            seen += [next_name(rank) for _ in range(steps) for rank in ranks]
            states = {name: found for rank in ranks for name, found in rank.state()["states"].items()}
        position += size * steps
    with world(dataset, 1) as [alone]:
        assert seen == [next_name(alone) for _ in range(position)]


@pytest.mark.parametrize("stream", [0, 5])
def test_a_stream_is_a_rank_of_as_many_read_in_the_process(stream: int) -> None:
    elastic, bagel = resource(6), resource(6, mode="Bagel")
    with world(elastic, 6) as ranks:
        packs = [next_name(ranks[stream]) for _ in range(3)]
    peer = open_rank_stream(bagel, Topology(stream, 6, 0), decode_threads=0)
    assert packs == [next_name(peer) for _ in range(3)]


def test_decode_threads_and_planning_ahead_change_nothing() -> None:
    dataset = resource(4, "odd_default")
    with world(dataset, 2) as ranks:
        plain = [[next_name(rank) for _ in range(8)] for rank in ranks]
    for rank, packs in enumerate(plain):
        stream = open_rank_stream(dataset, Topology(rank, 2, 1), decode_threads=2)
        try:
            assert [next_name(stream) for _ in range(8)] == packs
        finally:
            stream.close()
