"""A state after any pack of any recorded stream, carried through JSON, continues with the very next pack.

States of both faces are held to it, and so are those that Automodel itself saved.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from bagelplane.stream import RankStream, open_rank_stream
from bagelplane.topology import Topology
from tests.golden.recordings import (
    DECLARABLE_PLACES,
    PLACES,
    Recording,
    load_recording,
    next_batch,
    packed_dataset,
    resource_of,
)

PEER = Path(__file__).parents[1] / "fixtures" / "peer"
MAX_STATE_BYTES = 64 * 1024
COMPARED = 2  # packs after every state; the whole suffix after some
SUFFIX_AFTER_EVERY = 13

pytestmark = [
    # torchdata asks torch for something that torch has come to call deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(state)
    assert len(text) <= MAX_STATE_BYTES, f"a state of {len(text)} bytes"
    loaded: dict[str, Any] = json.loads(text)
    assert loaded == json.loads(json.dumps(loaded)) == state, "a state holds what JSON changes"
    return loaded


def compared_after(taken: int, count: int) -> range:
    """Which packs are compared after a state behind `taken` of `count` packs."""
    whole = taken % SUFFIX_AFTER_EVERY == 1
    return range(taken, count if whole else min(taken + COMPARED, count))


@pytest.fixture
def as_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes this process look like a DataLoader's worker, so that each of its packs is in reach of a test."""

    def pretend(worker_id: int, num_workers: int) -> None:
        info = SimpleNamespace(id=worker_id, num_workers=num_workers) if num_workers else None
        for module in ("bagelplane.packing.dataset", "bagelplane.distributed_iterable"):
            monkeypatch.setattr(f"{module}.get_worker_info", lambda: info)

    return pretend


@pytest.mark.parametrize(("name", "rank"), PLACES)
def test_the_drop_in_class_continues_after_every_pack(
    name: str, rank: int, scratch: Path, as_worker: Callable[[int, int], None]
) -> None:
    recording = load_recording(name)
    workers = max(1, recording.num_workers)
    for worker_id in range(workers):
        as_worker(worker_id, recording.num_workers)
        steps = list(range(len(recording.ranks[rank])))[worker_id::workers]  # the worker's own packs
        dataset = packed_dataset(recording, rank, scratch)
        states = [through_json(dataset.state_dict())]
        packs = iter(dataset)
        for step in steps:
            recording.check(rank, step, next(packs))
            states.append(through_json(dataset.state_dict()))
        for taken, state in enumerate(states):
            resumed = packed_dataset(recording, rank, scratch)
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state, "saved again before the first pack"
            packs = iter(resumed)
            for own in compared_after(taken, len(steps)):
                recording.check(rank, steps[own], next(packs))
                assert resumed.state_dict() == states[own + 1]


@pytest.mark.parametrize(("name", "rank"), DECLARABLE_PLACES)
def test_a_rank_stream_continues_after_every_pack(name: str, rank: int) -> None:
    recording = load_recording(name)
    dataset = resource_of(recording)
    topology = Topology(rank, len(recording.ranks), recording.num_workers)
    states, count = [], len(recording.ranks[rank])

    def opened(state: dict[str, Any] | None) -> contextlib.closing[RankStream]:
        return contextlib.closing(open_rank_stream(dataset, topology, state=state, decode_threads=0))

    with opened(None) as stream:
        states.append(through_json(stream.state()))
        for step in range(count):
            pack, batch = next_batch(stream)
            recording.check(rank, step, batch)
            states.append(through_json(stream.state()))
            assert pack.state == states[-1], "the state that travels with a pack is the one after it"
    for taken, state in enumerate(states):
        with opened(state) as resumed:
            assert resumed.state() == state, "saved again before the first pack"
            for step in compared_after(taken, count):
                recording.check(rank, step, next_batch(resumed)[1])
                assert resumed.state() == states[step + 1]


def test_a_full_buffer_of_fifty_samples_keeps_the_state_small(scratch: Path) -> None:
    recording = load_recording("full_buffer")
    dataset = packed_dataset(recording, 0, scratch)
    packs = iter(dataset)
    most = 0
    for _ in recording.ranks[0]:
        next(packs)
        most = max(most, len(dataset.state_dict()["buffer"]))
    assert most == 50
    assert len(json.dumps(dataset.state_dict())) < 16 * 1024


def peer_states(kind: str) -> list[Any]:
    """(file, recording, rank, packs taken) of the peer's saved states."""
    found = []
    for path in sorted(PEER.glob(f"{kind}_*.pt")):
        match = re.fullmatch(rf"{kind}_(.+)_rank(\d+)_after(\d+)", path.stem)
        assert match is not None
        found.append(pytest.param(path, match[1], int(match[2]), int(match[3]), id=path.stem))
    return found


def load_peer_state(path: Path) -> dict[str, Any]:
    # Made by the peer, kept in this repository: no stranger's pickle.
    state: dict[str, Any] = torch.load(path, weights_only=False)
    return state


def check_suffix(recording: Recording, rank: int, taken: int, packs: Iterator[Any]) -> None:
    for step in range(taken, len(recording.ranks[rank])):
        recording.check(rank, step, next(packs))


@pytest.mark.parametrize(("path", "name", "rank", "taken"), peer_states("state"))
def test_a_state_of_automodel_continues_here(
    path: Path, name: str, rank: int, taken: int, scratch: Path
) -> None:
    recording = load_recording(name)
    dataset = packed_dataset(recording, rank, scratch)
    dataset.load_state_dict(load_peer_state(path))
    check_suffix(recording, rank, taken, iter(dataset))


@pytest.mark.parametrize(("path", "name", "rank", "taken"), peer_states("state"))
def test_a_state_of_automodel_is_ours_after_one_pack(
    path: Path, name: str, rank: int, taken: int, scratch: Path
) -> None:
    """Also with taken-over samples in the buffer, whose pixels no file of ours has."""
    recording = load_recording(name)
    moved = packed_dataset(recording, rank, scratch)
    moved.load_state_dict(load_peer_state(path))
    recording.check(rank, taken, next(iter(moved)))
    resumed = packed_dataset(recording, rank, scratch)
    resumed.load_state_dict(json.loads(json.dumps(moved.state_dict())))
    for step, pack in zip(range(taken + 1, taken + 4), iter(resumed), strict=False):
        recording.check(rank, step, pack)


def test_the_states_of_automodel_include_filled_buffers() -> None:
    buffered = [len(load_peer_state(path)["buffer"]) for path in PEER.glob("state_*.pt")]
    assert max(buffered) >= 2
    assert sum(count > 0 for count in buffered) >= 4


@pytest.mark.parametrize(("path", "name", "rank", "taken"), peer_states("loader"))
def test_a_stateful_loaders_state_around_automodel_continues_here(
    path: Path, name: str, rank: int, taken: int, scratch: Path
) -> None:
    recording = load_recording(name)
    loader = StatefulDataLoader(
        packed_dataset(recording, rank, scratch),
        batch_size=None,
        num_workers=recording.num_workers,
        timeout=300 if recording.num_workers else 0,
    )
    loader.load_state_dict(load_peer_state(path))
    packs = iter(loader)
    check_suffix(recording, rank, taken, packs)


@pytest.mark.parametrize("name", ["a_default", "odd_tight"])
def test_a_loaded_state_serves_one_iterator_and_the_next_begins_anew(name: str, scratch: Path) -> None:
    recording = load_recording(name)
    dataset = packed_dataset(recording, 0, scratch)
    list(itertools.islice(iter(dataset), 2))
    resumed = packed_dataset(recording, 0, scratch)
    resumed.load_state_dict(dataset.state_dict())
    recording.check(0, 2, next(iter(resumed)))
    recording.check(0, 0, next(iter(resumed)))
