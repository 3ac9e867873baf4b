"""Where a rank begins under elastic sharding: the nearest states of its streams, wherever they are known from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from bagelplane.engine.elastic import ElasticPlace, packs_behind
from bagelplane.errors import SnapshotError
from bagelplane.shm.protocol import Resume
from bagelplane.sidecar.elastic import ElasticRun
from bagelplane.sidecar.rank import Progress, StartingPoint
from bagelplane.sidecar.snapshots import SnapshotStore, StreamTopology
from bagelplane.storage import StorageSettings, open_storage

STREAMS = 8


def make_store(folder: Path) -> SnapshotStore:
    return SnapshotStore(open_storage(StorageSettings()), str(folder), "a" * 64, streams=STREAMS)


def state_at(position: int, rank: int, world_size: int, *, made: bool = True) -> dict[str, Any]:
    """A rank's whole state; `made` says by whom each stream's is."""
    served = ElasticPlace(rank, world_size, STREAMS, position % world_size).served()
    states = {
        str(stream): {"packs": packs_behind(position, stream, STREAMS), "state": f"{stream} at {position}"}
        for stream in served
        if made
    }
    return {
        "sharding": "Elastic",
        "streams": STREAMS,
        "position": position,
        "states": states,
        "known_bad": {},
    }


def write(store: SnapshotStore, position: int, world_size: int) -> None:
    for rank in range(world_size):
        topology = StreamTopology(world_size, 0, STREAMS)
        store.write_rank(position, rank, topology, state_at(position, rank, world_size))


def begin(
    store: SnapshotStore | None,
    rank: int,
    world_size: int,
    resume: Resume,
    *,
    setting: Literal["latest", "none"] | int = "latest",
    progress: Mapping[int, Progress] | None = None,
    after: tuple[dict[int, Progress], int] | None = None,
) -> StartingPoint:
    async def look() -> StartingPoint:
        run = ElasticRun(STREAMS, store, setting)
        if after is not None:
            run.end_world(*after)
        return await run.starting_point(rank, world_size, resume, progress or {})

    return asyncio.run(look())


def at(point: StartingPoint, world_size: int) -> int:
    return point.offset + point.target_step * world_size


@pytest.mark.parametrize("readers", [1, 2, 4, 8])
@pytest.mark.parametrize("writers", [1, 2, 4, 8])
def test_a_snapshot_of_any_world_gives_every_rank_of_another_its_streams(
    writers: int, readers: int, tmp_path: Path
) -> None:
    store = make_store(tmp_path)
    write(store, 12, writers)
    for rank in range(readers):
        point = begin(store, rank, readers, Resume())
        assert at(point, readers) == 12
        assert point.state is not None
        served = ElasticPlace(rank, readers, STREAMS, 12 % readers).served()
        assert {name: found["state"] for name, found in point.state["states"].items()} == {
            str(stream): f"{stream} at 12" for stream in served
        }


def test_worlds_of_other_sizes_that_died_at_one_position_do_not_mix(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.write_rank(12, 0, StreamTopology(4, 0, STREAMS), state_at(12, 0, 4))
    assert store.nearest(None) is None
    write(store, 12, 2)
    manifest = store.nearest(None)
    assert manifest is not None
    assert [item.name for item in manifest.ranks] == [
        "rank-00000-of-00002.json.zst",
        "rank-00001-of-00002.json.zst",
    ]


def test_a_position_below_the_newest_snapshot_takes_the_one_before_it(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write(store, 8, 2)
    write(store, 16, 2)
    point = begin(store, 0, 4, Resume("position", position=15))
    assert (at(point, 4), point.offset) == (15, 3)
    assert point.state is not None
    assert {found["state"] for found in point.state["states"].values()} == {"3 at 8", "7 at 8"}


def test_a_trainer_s_own_state_goes_before_an_older_snapshot_and_the_rest_comes_from_there(
    tmp_path: Path,
) -> None:
    store = make_store(tmp_path)
    write(store, 8, 2)
    own = state_at(18, 0, 2)
    own["states"] = {"0": own["states"]["0"]}
    point = begin(store, 0, 4, Resume("state", 9, own))
    assert point.state is not None
    # Rank 0 of 4 at position 18 has the streams 2 and 6; the state that came along is of none of them.
    assert {found["state"] for found in point.state["states"].values()} == {"2 at 8", "6 at 8"}
    point = begin(store, 2, 4, Resume("state", 9, own))
    assert point.state is not None
    assert {found["state"] for found in point.state["states"].values()} == {"0 at 18", "4 at 8"}


def test_a_step_counts_at_the_present_world_size_and_is_refused_between_two(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write(store, 12, 4)
    assert at(begin(store, 0, 4, Resume("step", 2)), 4) == 8
    assert at(begin(None, 0, 8, Resume("step", 2)), 8) == 16
    assert at(begin(store, 0, 8, Resume("step", 0)), 8) == 0, "the start is the start"
    with pytest.raises(SnapshotError, match=r"position 12, 1.5 steps.*resume\(position=12\)"):
        begin(store, 0, 8, Resume("step", 1))


@pytest.mark.parametrize(("setting", "position"), [("latest", 16), ("none", 0), (5, 20)])
def test_what_the_sidecar_was_told_holds_for_trainers_that_say_nothing(
    setting: Literal["latest", "none"] | int, position: int, tmp_path: Path
) -> None:
    store = make_store(tmp_path)
    write(store, 16, 4)
    assert at(begin(store, 1, 4, Resume(), setting=setting), 4) == position
    assert at(begin(store, 1, 4, Resume("none"), setting=setting), 4) == 0


def at_step(step: int, world_size: int) -> Progress:
    return Progress(StartingPoint(step, None, step), world_size)


def test_a_world_that_ended_here_goes_on_where_all_its_ranks_were(tmp_path: Path) -> None:
    ended = {0: at_step(5, 2), 1: at_step(4, 2)}
    assert at(begin(None, 0, 4, Resume(), after=(ended, 2)), 4) == 8


def test_a_world_that_ended_in_part_elsewhere_goes_on_from_a_snapshot_or_not_at_all(tmp_path: Path) -> None:
    ended = {0: at_step(5, 4)}
    with pytest.raises(SnapshotError, match="is not known here"):
        begin(None, 0, 2, Resume(), after=(ended, 4))
    store = make_store(tmp_path)
    write(store, 16, 4)
    assert at(begin(store, 0, 2, Resume(), after=(ended, 4)), 2) == 16


@pytest.mark.parametrize("change", [{"streams": 4}, {"sharding": None}, {"states": None}, {"position": "3"}])
def test_a_trainer_s_state_of_another_run_or_a_damaged_one_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(SnapshotError):
        begin(None, 0, 2, Resume("state", 4, {**state_at(8, 0, 2), **change}))


def test_a_snapshot_s_listing_says_position_and_streams(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write(store, 16, 4)
    [entry] = store.entries()
    assert entry.manifest is not None
    assert (entry.step, entry.uri) == (16, f"{tmp_path}/position-000000000016")
    assert str(entry.manifest.topology) == "8 streams (Elastic), world size 4"
    assert SnapshotStore(open_storage(StorageSettings()), str(tmp_path), "").load(16) == entry.manifest
