"""The stream that a resource declares is every recorded one, with any number of decode threads."""

from __future__ import annotations

import contextlib

import pytest

from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology
from tests.golden.resource import DECLARABLE_PLACES, load_recording, next_batch, resource_of

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
