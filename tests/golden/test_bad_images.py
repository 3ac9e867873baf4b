"""Images that open and do not decode move the Automodel stream as they move the peer's; they are told in time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from bagelplane.errors import SnapshotError
from bagelplane.stream import RankStream, open_rank_stream
from bagelplane.topology import Topology
from tests.golden import broken_images
from tests.golden.hashing import describe
from tests.golden.recordings import Recording, load_recording, next_batch, packed_dataset, resource_of

PACKS = 12
THREADS = pytest.mark.parametrize("decode_threads", [0, 2])
STREAMS = pytest.mark.parametrize("name", broken_images.STREAMS)
PEER: dict[str, Any] = json.loads(broken_images.FIXTURE.read_text())
PLACES = [(name, rank) for name, recorded in PEER.items() for rank in range(len(recorded))]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recording]:
    """Recordings over data of which every sixth image does not decode."""
    data = broken_images.make_data(tmp_path_factory.mktemp("broken") / "data")

    def load(name: str) -> Recording:
        ranks = [PEER[name][str(rank)] for rank in range(len(PEER[name]))]
        return Recording(name.replace("/", "-"), broken_images.config_of(name), data, ranks)

    return load


Load = Callable[[str], Recording]


def open_stream(recording: Recording, **options: Any) -> contextlib.closing[RankStream]:
    topology = Topology(0, len(recording.ranks), recording.num_workers)
    return contextlib.closing(open_rank_stream(resource_of(recording), topology, **options))


@pytest.fixture(scope="module")
def known_bad(broken: Load) -> dict[str, dict[str, str]]:
    """By recording: the undecodable images that its first packs rest on, and causes."""
    found: dict[str, dict[str, str]] = {}
    for name in broken_images.STREAMS:
        recording = broken(name)
        bad: dict[str, str] = {}
        with open_stream(recording, decode_threads=0, on_bad_images=bad.update) as stream:
            for _ in range(PACKS):
                next_batch(stream)
        found[name] = bad
    return found


def count_allocations(stream: RankStream, packs: int) -> tuple[int, list[Any]]:
    """How often room for a pack was asked for, and the packs."""
    import numpy as np

    from bagelplane.engine.layout import assemble

    calls, batches = 0, []
    for _ in range(packs):
        pixels: list[np.ndarray] = []

        def allocate(pack: Any, pixels: list[Any] = pixels) -> list[Any]:
            nonlocal calls
            calls += 1
            pixels[:] = [np.empty((*shape, 3), np.uint8) for shape in pack.image_shapes]
            return pixels

        batches.append(assemble(stream.next_pack(allocate), pixels))
    return calls, batches


@pytest.mark.parametrize(("name", "rank"), PLACES)
def test_every_pack_of_a_resource_is_automodels(name: str, rank: int, broken: Load) -> None:
    recording = broken(name)
    topology = Topology(rank, len(recording.ranks), recording.num_workers)
    with contextlib.closing(open_rank_stream(resource_of(recording), topology, decode_threads=2)) as stream:
        for step in range(len(recording.ranks[rank])):
            recording.check(rank, step, next_batch(stream)[1])


@pytest.mark.parametrize(("name", "rank"), PLACES)
def test_every_pack_of_the_drop_in_class_is_automodels(
    name: str, rank: int, broken: Load, tmp_path: Path
) -> None:
    recording = broken(name)
    dataset = packed_dataset(recording, rank, tmp_path)
    timeout = 60 if recording.num_workers else 0
    loader = DataLoader(dataset, batch_size=None, num_workers=recording.num_workers, timeout=timeout)
    for step, pack in zip(range(len(recording.ranks[rank])), loader, strict=False):
        recording.check(rank, step, pack)


@STREAMS
def test_the_drop_in_class_continues_after_every_pack(name: str, broken: Load, tmp_path: Path) -> None:
    recording = broken(name)
    if recording.num_workers:
        recording.config["num_workers"] = 0  # in the process: another stream, which has to agree with itself
    dataset = packed_dataset(recording, 0, tmp_path)
    packs, states = [], [dataset.state_dict()]
    for _, pack in zip(range(PACKS), dataset, strict=False):
        packs.append(describe(pack))
        states.append(json.loads(json.dumps(dataset.state_dict())))
    for taken in range(PACKS):
        resumed = packed_dataset(recording, 0, tmp_path)
        resumed.load_state_dict(states[taken])
        suffix = [describe(pack) for _, pack in zip(packs[taken : taken + 2], resumed, strict=False)]
        assert suffix == packs[taken : taken + 2]


@STREAMS
def test_the_streams_rest_on_such_images(name: str, known_bad: dict[str, dict[str, str]]) -> None:
    assert len(known_bad[name]) >= (1 if name == "extra/frames" else 4), known_bad[name]


@THREADS
@STREAMS
def test_bad_images_are_told_before_the_pack_that_is_planned_without_them(
    name: str, decode_threads: int, broken: Load, known_bad: dict[str, dict[str, str]]
) -> None:
    recording, events = broken(name), []

    def on_bad(images: Any) -> None:
        assert images, "told of nothing"
        events.append(("bad", dict(images)))

    with open_stream(recording, decode_threads=decode_threads, on_bad_images=on_bad) as stream:
        for step in range(PACKS):
            pack, batch = next_batch(stream)
            recording.check(0, step, batch)
            told = {key for kind, images in events if kind == "bad" for key in images}
            # Whatever the state after this pack holds was told by then.
            assert set(pack.state["known_bad"]) <= told
            events.append(("pack", step))
    told_in_all: dict[str, str] = {}
    for kind, images in events:
        if kind == "bad":
            assert not set(images) & set(told_in_all), "told twice"
            told_in_all |= images
    assert told_in_all == known_bad[name]


@THREADS
@STREAMS
def test_a_stream_that_knows_them_gives_the_same_packs_and_never_goes_back(
    name: str, decode_threads: int, broken: Load, known_bad: dict[str, dict[str, str]]
) -> None:
    recording, told = broken(name), []
    with open_stream(
        recording, decode_threads=decode_threads, known_bad=known_bad[name], on_bad_images=told.append
    ) as stream:
        calls, batches = count_allocations(stream, PACKS)
    for step, batch in enumerate(batches):
        recording.check(0, step, batch)
    assert calls == PACKS
    assert told == []


@pytest.mark.parametrize("name", ["odd_default", "odd_tight"])
def test_a_stream_that_does_not_know_them_goes_back(name: str, broken: Load) -> None:
    with open_stream(broken(name), decode_threads=0) as stream:
        calls, _ = count_allocations(stream, PACKS)
    assert calls > PACKS


def taken_from(stream: RankStream, recording: Recording, start: int, packs: int = 3) -> None:
    assert stream.step == start
    for step in range(start, start + packs):
        recording.check(0, step, next_batch(stream)[1])


SKIPS = pytest.mark.parametrize("start", [1, 6, 9])


@SKIPS
@STREAMS
def test_planning_forward_with_verification_reaches_the_same_packs(
    name: str, start: int, broken: Load
) -> None:
    recording = broken(name)
    with open_stream(recording, decode_threads=1) as stream:
        seen: list[int] = []
        stream.skip_to(start, verify=True, on_progress=seen.append)
        assert seen == list(range(1, start + 1))
        taken_from(stream, recording, start)


@SKIPS
@STREAMS
def test_planning_forward_without_decoding_needs_the_bad_images_alone(
    name: str, start: int, broken: Load, known_bad: dict[str, dict[str, str]]
) -> None:
    recording = broken(name)
    with open_stream(recording, decode_threads=0, known_bad=known_bad[name]) as stream:
        stream.skip_to(start, verify=False)
        taken_from(stream, recording, start)


@pytest.mark.parametrize("verify", [False, True])
@STREAMS
def test_a_state_after_planning_forward_is_the_state_after_making_the_packs(
    name: str, verify: bool, broken: Load, known_bad: dict[str, dict[str, str]]
) -> None:
    """But for the drops, which are counted where packs are made."""
    recording = broken(name)
    with (
        open_stream(recording, decode_threads=0, known_bad=known_bad[name]) as made,
        open_stream(recording, decode_threads=0, known_bad=known_bad[name]) as planned,
    ):
        for _ in range(9):
            next_batch(made)
        planned.skip_to(9, verify=verify)
        states = [json.loads(json.dumps(stream.state())) for stream in (made, planned)]
    for state in states:
        state.pop("drops")
    assert states[0] == states[1]


@pytest.mark.parametrize("name", ["odd_default", "extra/odd_workers"])
def test_planning_forward_goes_on_from_a_state(name: str, broken: Load) -> None:
    recording = broken(name)
    with open_stream(recording, decode_threads=0) as first:
        for _ in range(5):
            next_batch(first)
        state = json.loads(json.dumps(first.state()))
    with open_stream(recording, decode_threads=0, state=state) as second:
        second.skip_to(9)
        taken_from(second, recording, 9)


def test_a_stream_does_not_go_back() -> None:
    recording = load_recording("a_default")
    with open_stream(recording, decode_threads=0) as stream:
        for _ in range(3):
            next_batch(stream)
        with pytest.raises(SnapshotError, match="step 2"):
            stream.skip_to(2)
        stream.skip_to(3)
        taken_from(stream, recording, 3)


@pytest.mark.parametrize("name", ["odd_default", "extra/odd_workers"])
def test_a_forecast_step_by_step_is_the_stream(name: str, broken: Load) -> None:
    recording = broken(name)
    with open_stream(recording, decode_threads=0) as stream:
        for step in range(6):
            plan = stream.plan_pack(verify=True)
            expected = recording.ranks[0][step]
            assert plan.pack.length == expected["sequence_length"]
            assert plan.pack.data_indexes() == expected["batch_data_indexes"]
        taken_from(stream, recording, 6)


def test_a_state_with_an_image_that_is_called_bad_leaves_it_out() -> None:
    """What a state says of an image holds, whether or not the image decodes here."""
    recording = load_recording("a_default")

    with open_stream(recording, decode_threads=0) as stream:
        key = next(iter(stream.plan_pack().opened))
    with open_stream(recording, decode_threads=0, known_bad={key: "said so"}) as stream:
        assert key not in stream.plan_pack().opened
