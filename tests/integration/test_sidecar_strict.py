"""Profile Strict over damaged data through sidecar, ring and reader: killed, resumed, the same packs, drops counted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bagelplane.sidecar.producer import DEFAULT_STREAM_FACTORY
from bagelplane.spec import BagelDataset
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology
from tests.golden.broken_images import make_data
from tests.golden.recordings import load_recording, next_batch, resource_of
from tests.golden.strict_streams import described
from tests.integration.sidecar_harness import Sidecar

STEPS = 24


def dataset_of(folder: Path) -> BagelDataset:
    """`odd`, whose images are bad in many ways, with every sixth replaced by one that opens and does not decode."""
    data = make_data(folder / "damaged")
    parts = {
        "snapshots": {"uri": str(folder / "snapshots"), "everySteps": 5},
        "dataplane": {"ring": {"packs": 2}, "decodeThreads": 2},
    }
    return resource_of(load_recording("odd_default"), str(data), profile="Strict", **parts)


def undisturbed(dataset: BagelDataset) -> tuple[list[Any], dict[str, Any]]:
    topology = Topology(0, 1, dataset.spec.sharding.workers_per_rank)
    with contextlib.closing(open_rank_stream(dataset, topology, decode_threads=0)) as stream:
        packs = [through_json(described(next_batch(stream)[1])) for _ in range(STEPS)]
        return packs, stream.state()["drops"]


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def start(folder: Path, dataset: BagelDataset) -> Sidecar:
    sidecar = Sidecar(folder, dataset, stream_factory=DEFAULT_STREAM_FACTORY, local_ranks=1)
    sidecar.wait_serving()
    return sidecar


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_strict_over_damaged_data_survives_kills_with_the_same_packs(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path)
    expected, drops = undisturbed(dataset)
    reasons = {reason for row in drops.values() for reason in row}
    assert {"image_undecodable", "image_truncated", "image_unreferenced"} <= reasons
    taken: list[Any] = []

    def take(reader: Any, until: int) -> None:
        while len(taken) < until:
            taken.append(through_json(described(next(reader))))
            assert taken[-1] == expected[len(taken) - 1], f"step {len(taken) - 1}"

    sidecar = start(tmp_path, dataset)
    try:
        with sidecar.reader() as reader:
            take(reader, 4)
            status = reader.status()
            # The producer dies in the middle of a pack: the sidecar starts another, the reader attaches by itself.
            os.kill(status["ranks"][0]["producer_pid"], signal.SIGKILL)
            take(reader, 13)
            status = reader.status()
            [rank] = status["ranks"]
            assert rank["restarts"] == 1
            assert {reason for row in rank["drops"].values() for reason in row} & {
                "image_undecodable",
                "image_truncated",
            }
            assert status["known_bad_images"] == 0
        # Everything dies: a new sidecar has the snapshots alone, and plans from the last one on.
        sidecar.kill()
        sidecar = start(tmp_path, dataset)
        with sidecar.reader() as reader:
            reader.resume(step=13)
            take(reader, 17)
            assert sidecar.terminate() == 0, sidecar.tail()
        # Any step, back in the past, by planning alone.
        sidecar = start(tmp_path, dataset)
        with sidecar.reader() as reader:
            reader.resume(step=7)
            assert through_json(described(next(reader))) == expected[7]
        sidecar.kill()
        sidecar = start(tmp_path, dataset)
        with sidecar.reader() as reader:
            reader.resume(step=17)
            take(reader, STEPS)
        assert sidecar.terminate() == 0, sidecar.tail()
    finally:
        sidecar.kill()
    assert len(taken) == STEPS
    assert not [path for path in (tmp_path / "snapshots").rglob("*") if "known-bad" in str(path)]
