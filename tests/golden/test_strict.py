"""Streams of profile Strict: what they were when they were recorded, and the same from every step on."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology
from tests.golden.broken_images import make_data
from tests.golden.recordings import load_recording, next_batch, resource_of
from tests.golden.strict_streams import PACKS, STREAMS, dataset_of, described, open_stream, recorded

EACH = pytest.mark.parametrize("name", STREAMS)
MAX_STATE_BYTES = 64 * 1024


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`odd` with every sixth image replaced by one that opens and does not decode."""
    return make_data(tmp_path_factory.mktemp("strict") / "damaged")


def never(images: Any) -> None:
    raise AssertionError(f"told of images: {images}")


@EACH
@pytest.mark.parametrize("decode_threads", [0, 2])
def test_every_pack_is_as_recorded(name: str, decode_threads: int, damaged: Path) -> None:
    expected = recorded(name)
    with contextlib.closing(
        open_stream(name, damaged, decode_threads=decode_threads, on_bad_images=never)
    ) as stream:
        packs = [described(next_batch(stream)[1]) for _ in range(PACKS)]
        drops = stream.state()["drops"]
    assert json.loads(json.dumps(packs)) == expected["packs"]
    assert drops == expected["drops"]


def test_the_recordings_hold_what_is_to_be_held() -> None:
    reasons = {reason for name in STREAMS for row in recorded(name)["drops"].values() for reason in row}
    assert {"image_truncated", "image_undecodable", "image_surplus", "image_unreferenced"} <= reasons
    assert "buffer_full" not in reasons


@EACH
def test_no_pack_is_longer_than_its_budget(name: str, damaged: Path) -> None:
    budget = dataset_of(name, damaged).spec.budgets.max_tokens
    assert all(pack["length"] <= budget for pack in recorded(name)["packs"])


@EACH
def test_a_state_after_every_pack_continues_with_the_next(name: str, damaged: Path) -> None:
    expected = recorded(name)["packs"]
    with contextlib.closing(open_stream(name, damaged)) as stream:
        states = [stream.state()]
        for _ in range(PACKS):
            pack, _ = next_batch(stream)
            states.append(json.loads(json.dumps(stream.state())))
            assert pack.state == states[-1], "the state that travels with a pack is the one after it"
            assert "known_bad" not in pack.state
            assert len(json.dumps(pack.state)) <= MAX_STATE_BYTES
    for taken in range(PACKS):
        with contextlib.closing(open_stream(name, damaged, state=states[taken])) as resumed:
            assert resumed.state() == states[taken], "saved again before the first pack"
            for step in range(taken, min(taken + 2, PACKS)):
                assert json.loads(json.dumps(described(next_batch(resumed)[1]))) == expected[step]
                assert resumed.state() == states[step + 1]


@EACH
def test_every_step_is_reached_by_planning_alone(
    name: str, damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a pixel, from the beginning and from a state, though images on the way do not decode."""
    expected = recorded(name)["packs"]

    def refuse(*_: object) -> None:
        raise AssertionError("an image was decoded")

    with contextlib.closing(open_stream(name, damaged)) as stream:
        for _ in range(3):
            next_batch(stream)
        third = json.loads(json.dumps(stream.state()))
    for step in range(PACKS):
        for state in [None, *([third] if step >= 3 else [])]:
            with contextlib.closing(open_stream(name, damaged, state=state)) as stream:
                with monkeypatch.context() as patch:
                    patch.setattr("bagelplane.stream.decode_failure", refuse)
                    stream.skip_to(step)
                assert json.loads(json.dumps(described(next_batch(stream)[1]))) == expected[step]


@EACH
def test_a_verified_plan_tells_what_the_packs_will_hold(name: str, damaged: Path) -> None:
    expected = recorded(name)
    with contextlib.closing(open_stream(name, damaged)) as stream:
        for pack in expected["packs"]:
            plan = stream.plan_pack(verify=True)
            assert plan.pack.length == pack["length"]
            rows = [[row["dataset_name"][:3], row["data_indexes"]] for row in plan.pack.data_indexes()]
            assert rows == pack["rows"]
        assert stream.state()["drops"] == expected["drops"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_any_world_size_gives_the_packs_of_a_run_of_four_streams(world_size: int, damaged: Path) -> None:
    """Elastic sharding over the damaged data; resumed in mid-run by planning alone, on the other world size."""
    parts = {"sharding": {"mode": "Elastic", "streams": 4}}
    recording = load_recording("odd_default")
    dataset = resource_of(recording, str(damaged), profile="Strict", **parts)

    def packs_of(world_size: int, rank: int, step: int, count: int) -> dict[int, Any]:
        """By position in the whole run."""
        stream = open_rank_stream(
            dataset, Topology(rank, world_size, 0), decode_threads=0, on_bad_images=never
        )
        with contextlib.closing(stream):
            stream.skip_to(step)
            found = {}
            for number in range(step, step + count):
                pack, batch = next_batch(stream)
                assert "known_bad" not in pack.state
                found[number * world_size + rank] = described(batch)
            return found

    whole = packs_of(4, 0, 0, 3) | packs_of(4, 1, 0, 3) | packs_of(4, 2, 0, 3) | packs_of(4, 3, 0, 3)
    parts_of_run = [
        packs_of(world_size, rank, 4 // world_size, 8 // world_size) for rank in range(world_size)
    ]
    for part in parts_of_run:
        for position, pack in part.items():
            assert pack == whole[position], position
    assert sum(map(len, parts_of_run)) == 8
