"""Elastic streams over the recorded data, for tests of any world size."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from bagelplane.elastic import ElasticStream
from bagelplane.engine.planner import PackPlan
from bagelplane.spec import BagelDataset
from bagelplane.stream import RankStream, open_rank_stream
from bagelplane.topology import Topology
from tests.golden.hashing import describe
from tests.golden.recordings import load_recording, next_batch, resource_of


def resource(streams: int, recording: str = "a_default", mode: str = "Elastic", **parts: Any) -> BagelDataset:
    """The recording's data with enough units for 24 streams. In Bagel mode the stream is read in the process."""
    sharding = {"mode": mode, "streams": streams, "dataSeed": 42, "globalSeed": 7}
    if mode == "Bagel":
        sharding["workersPerRank"] = 0
    data = resource_of(load_recording(recording), sharding=sharding, **parts).to_mapping()
    for group in data["spec"]["groups"]:
        for entry in group["datasets"]:
            if group["type"] == "vlm_sft":
                entry.pop("numUsedData", None)
            else:
                entry["numUsedData"] = 24
    return BagelDataset.from_mapping(data)


@contextlib.contextmanager
def world(
    dataset: BagelDataset, world_size: int, state: Mapping[str, Any] | None = None
) -> Iterator[list[ElasticStream]]:
    """The streams of all ranks, each where `state` says."""
    with contextlib.ExitStack() as life:
        ranks = []
        for rank in range(world_size):
            stream = open_rank_stream(dataset, Topology(rank, world_size, 1), state=state, decode_threads=0)
            assert isinstance(stream, ElasticStream)
            ranks.append(life.enter_context(contextlib.closing(stream)))
        yield ranks


def name_of_plan(plan: PackPlan) -> str:
    """Tells planned packs apart: samples, what was dropped of them, and every draw of a timestep."""
    placed = [
        [p.sample.data_indexes, p.start, p.end, [[s.start, s.length, s.timestep] for s in p.segments]]
        for p in plan.pack.placed
    ]
    return hashlib.sha256(json.dumps([placed, len(plan.after.buffer)]).encode()).hexdigest()[:16]


def name_of_batch(batch: dict[str, Any]) -> str:
    """Of everything that a trainer sees of a pack, pixels included."""
    return hashlib.sha256(json.dumps(describe(batch), sort_keys=True).encode()).hexdigest()[:16]


def next_name(stream: ElasticStream | RankStream) -> str:
    return name_of_batch(next_batch(stream)[1])
