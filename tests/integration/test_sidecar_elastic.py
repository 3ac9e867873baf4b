"""Elastic sharding through real sidecars: two ranks begin, four and then one continue, over kills, pack for pack."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagelplane.client.reader import NumpyReader
from bagelplane.errors import SnapshotError, SpecError
from bagelplane.sidecar.store import open_snapshot_store
from bagelplane.spec import BagelDataset
from tests.golden.elastic_streams import name_of_batch, next_name, resource, world
from tests.integration.sidecar_harness import attached, served, wait_for
from tests.services.s3 import serve_versitygw

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first use may build versitygw
STREAMS = 12
PLANE = {"ring": {"packs": 2}, "decodeThreads": 1}


def dataset_of(
    snapshots: str | None, *, streams: int = STREAMS, every: int = 2, **parts: Any
) -> BagelDataset:
    stored = {"snapshots": {"uri": snapshots, "everySteps": every}} if snapshots else {}
    return resource(streams, "odd_default", dataplane=PLANE, **stored, **parts)


@functools.cache
def undisturbed(count: int) -> list[str]:
    with world(dataset_of(None), 1) as [stream]:
        return [next_name(stream) for _ in range(count)]


def take(readers: list[NumpyReader], steps: int) -> list[str]:
    """Packs of `steps` steps of all ranks, in the run's order."""
    return [name_of_batch(next(reader)) for _ in range(steps) for reader in readers]


def wait_for_snapshot(reader: NumpyReader, position: int) -> None:
    wait_for(lambda: reader.status()["snapshots"]["last_position"] == position, f"the snapshot of {position}")


@pytest.fixture(params=["local", "versitygw"])
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Makes data sets with snapshots in a place of the test's own."""
    if request.param == "local":
        yield functools.partial(dataset_of, str(tmp_path / "snapshots"))
        return
    with serve_versitygw(tmp_path / "s3") as server:
        storage = {"endpointURL": server.url, "credentialsDir": str(server.credentials_dir)}
        yield functools.partial(dataset_of, f"s3://{server.bucket}/snapshots/", storage=storage)


def test_two_ranks_then_four_in_mid_round_then_one_give_the_undisturbed_run(
    build: Any, tmp_path: Path
) -> None:
    dataset, run = build(), undisturbed(28)
    with served(tmp_path, dataset) as sidecar, attached(sidecar, 2) as readers:
        assert take(readers, 5) == run[:10]
        wait_for_snapshot(readers[0], 8)
        saved = [json.loads(json.dumps(reader.state_dict())) for reader in readers]
        sidecar.kill()
    assert [state["position"] for state in saved] == [10, 10]
    assert all(len(json.dumps(state)) < 64 * 1024 for state in saved)
    with served(tmp_path, dataset) as sidecar, attached(sidecar, 4) as readers:
        for rank, reader in enumerate(readers):
            reader.load_state_dict(saved[rank % 2])  # any rank's will do
            assert (reader.position, reader.step) == (10, 2)
        assert take(readers, 3) == run[10:22]
        assert {reader.position for reader in readers} == {22}
        wait_for_snapshot(readers[0], 18)
        sidecar.kill()
    with served(tmp_path, dataset) as sidecar, attached(sidecar, 1) as readers:
        assert readers[0].position == 18, "the newest snapshot, of four ranks"
        assert take(readers, 10) == run[18:28]
        assert sidecar.terminate() == 0, sidecar.tail()
    store = open_snapshot_store(dataset)
    assert store is not None
    entries = store.entries()
    assert [entry.step for entry in entries][-1] == 28
    assert {entry.condition for entry in entries} == {"complete"}
    assert entries[-1].uri.endswith(f"/position-000000000028-{entries[-1].run}")


def test_a_running_sidecar_goes_on_at_another_world_size_without_snapshots(tmp_path: Path) -> None:
    run, position = undisturbed(28), 0
    with served(tmp_path, dataset_of(None)) as sidecar:
        for size, steps in ((4, 3), (6, 1), (2, 2), (1, 2)):
            with attached(sidecar, size) as readers:
                assert {reader.position for reader in readers} == {position}
                assert take(readers, steps) == run[position : position + size * steps]
                position += size * steps


def test_a_state_and_any_position_are_reached_without_snapshots(tmp_path: Path) -> None:
    run, dataset = undisturbed(28), dataset_of(None)
    with served(tmp_path, dataset) as sidecar, attached(sidecar, 2) as readers:
        take(readers, 7)
        saved = readers[1].state_dict()
    with served(tmp_path, dataset) as sidecar, attached(sidecar, 4) as readers:
        for reader in readers:
            reader.load_state_dict(saved)
        assert take(readers, 1) == run[14:18]
        for reader in readers:
            reader.resume(position=7)
        assert take(readers, 2) == run[7:15]
        for reader in readers:
            reader.close()
            reader.resume(position=8)
        assert take(readers, 1) == run[8:12]
        for reader in readers:
            reader.resume(step=4)
        assert take(readers, 1) == run[16:20]


def test_a_killed_producer_is_made_again_at_the_pack_that_was_due(tmp_path: Path) -> None:
    import os
    import signal

    with served(tmp_path, dataset_of(None)) as sidecar, attached(sidecar, 2) as readers:
        seen = take(readers, 4)
        for rank in readers[0].status()["ranks"]:
            os.kill(rank["producer_pid"], signal.SIGKILL)
        assert seen + take(readers, 6) == undisturbed(28)[:20]


def test_world_sizes_that_do_not_divide_the_streams_are_refused_with_those_that_do(tmp_path: Path) -> None:
    with (
        served(tmp_path, dataset_of(None)) as sidecar,
        sidecar.reader(0, 5) as reader,
        pytest.raises(SpecError, match="one of the world sizes 1, 2, 3, 4, 6, 12"),
    ):
        next(reader)


def test_a_step_is_refused_where_the_run_stands_between_two_and_a_position_is_not(tmp_path: Path) -> None:
    dataset, run = dataset_of(str(tmp_path / "snapshots")), undisturbed(28)
    with served(tmp_path, dataset) as sidecar, attached(sidecar, 2) as readers:
        take(readers, 5)
        assert sidecar.terminate() == 0, sidecar.tail()
    with served(tmp_path, dataset) as sidecar, attached(sidecar, 4) as readers:
        readers[0].resume(step=2)
        with pytest.raises(SnapshotError, match=r"position 10, 2.5 steps.*resume\(position=10\)"):
            next(readers[0])
        for reader in readers:
            reader.resume(position=10)
        assert take(readers, 1) == run[10:14]


def test_snapshots_of_other_shardings_are_refused_with_both_sides(tmp_path: Path) -> None:
    place = str(tmp_path / "snapshots")
    with served(tmp_path, dataset_of(place)) as sidecar, attached(sidecar, 2) as readers:
        take(readers, 2)
        assert sidecar.terminate() == 0, sidecar.tail()
    bagel = dataset_of(place).to_mapping()
    bagel["spec"]["sharding"] = {"mode": "Bagel", "workersPerRank": 0}
    for other, expected in (
        (dataset_of(place, streams=6), "6 streams"),
        (BagelDataset.from_mapping(bagel), "Bagel"),
    ):
        store = open_snapshot_store(other)
        assert store is not None
        with pytest.raises(SnapshotError, match="another sharding; got 12 streams") as refused:
            store.check_owner()
        assert expected in str(refused.value)


def test_a_state_of_bagel_sharding_is_refused(tmp_path: Path) -> None:
    with served(tmp_path, dataset_of(None)) as sidecar, sidecar.reader(0, 2) as reader:
        state = {"version": 1, "step": 3, "topology": {"rank": 0, "world_size": 2}, "workers": []}
        reader.load_state_dict(
            {"version": 1, "step": 3, "rank": 0, "world_size": 2, "spec_hash": "", "state": json.dumps(state)}
        )
        with pytest.raises(SnapshotError, match="a state of another sharding; got Bagel"):
            next(reader)
