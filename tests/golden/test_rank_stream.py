"""The stream that a resource declares is every recorded one, with any number of decode threads."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest

from bagelplane.errors import SnapshotError
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology
from tests.golden.recordings import DECLARABLE_PLACES, load_recording, next_batch, resource_of

THREADS = (0, 1, 3)


@pytest.mark.parametrize("decode_threads", THREADS)
@pytest.mark.parametrize(("name", "rank"), DECLARABLE_PLACES)
def test_every_recorded_pack_comes_from_a_resource(name: str, rank: int, decode_threads: int) -> None:
    recording = load_recording(name)
    topology = Topology(rank, len(recording.ranks), recording.num_workers)
    stream = open_rank_stream(resource_of(recording), topology, decode_threads=decode_threads)
    # Whole streams where planning runs ahead of one thread; the others decode in another order, no more.
    count = len(recording.ranks[rank]) if decode_threads == 1 else 12
    with contextlib.closing(stream):
        for step in range(min(count, len(recording.ranks[rank]))):
            pack, batch = next_batch(stream)
            assert pack.step == step
            recording.check(rank, step, batch)
        assert stream.step == pack.step + 1


@pytest.mark.parametrize("decode_threads", THREADS)
@pytest.mark.parametrize("sharding", [{"mode": "Bagel"}, {"mode": "Elastic", "streams": 2}], ids=str)
def test_a_stream_tells_what_its_packs_cost(sharding: dict[str, Any], decode_threads: int) -> None:
    dataset = resource_of(load_recording("a_default"), sharding=sharding)
    with contextlib.closing(
        open_rank_stream(dataset, Topology(0, 2, 0), decode_threads=decode_threads)
    ) as stream:
        opened = stream.costs.as_json()
        assert opened["decode_seconds"] == 0
        next_batch(stream)
        costs = stream.costs.as_json()
    assert costs["decode_seconds"] > 0
    assert costs["storage_seconds"] > 0
    assert costs["read_bytes"] > 1000
    assert costs["requests"]["list"] > 0
    assert costs["retries"] == {}


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("step"),
        lambda state: state.update(step="third"),
        lambda state: state.update(known_bad=5),
        lambda state: state.update(drops=[1]),
        lambda state: state.update(workers=None),
        lambda state: state.update(workers=[]),
        lambda state: state.update(workers=["x"]),
        lambda state: state["workers"][0].update(buffer=[{}]),
        lambda state: state["workers"][0].update(rng={}),
        lambda state: state["workers"][0].update(rng=float("nan")),
        lambda state: state["workers"][0].update(groups=[]),
        lambda state: state["workers"][0].update(packs=None),
    ],
)
def test_a_damaged_state_is_refused_as_one(damage: Callable[[dict[str, Any]], object]) -> None:
    dataset, topology = resource_of(load_recording("a_default")), Topology(0, 2, 0)
    with contextlib.closing(open_rank_stream(dataset, topology)) as stream:
        next_batch(stream)
        state = copy.deepcopy(stream.state())
    damage(state)
    with pytest.raises(SnapshotError, match="state"):
        open_rank_stream(dataset, topology, state=state, decode_threads=0)
