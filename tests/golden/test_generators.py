"""A stream has its own generators: what user code draws, seeds or forks changes nothing, nor the other way round."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology
from tests.golden.recordings import batches, load_recording, packed_dataset, resource_of

# Rows that drop, frames, timesteps and captions: every kind of draw is made in these.
NAMES = ("odd_default", "odd_tight", "frames", "c_dropout")
PACKS = 6


def drop_in(name: str, scratch: Path) -> Iterator[Any]:
    return iter(packed_dataset(load_recording(name), 0, scratch))


def sidecar_side(name: str, scratch: Path) -> Iterator[Any]:
    recording = load_recording(name)
    topology = Topology(0, len(recording.ranks), recording.num_workers)
    return batches(open_rank_stream(resource_of(recording), topology, decode_threads=0))


FACES = pytest.mark.parametrize("face", [drop_in, sidecar_side])
Face = Callable[[str, Path], Iterator[Any]]


def global_states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, keys.tobytes(), *rest), torch.get_rng_state().numpy().tobytes()


def disturb(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    random.gauss(0, 1)
    np.random.randn(3)
    torch.rand(2)


@FACES
@pytest.mark.parametrize("name", NAMES)
def test_user_code_that_seeds_between_packs_changes_nothing(face: Face, name: str, scratch: Path) -> None:
    packs = face(name, scratch)
    for step in range(PACKS):
        disturb(step)
        load_recording(name).check(0, step, next(packs))


@FACES
@pytest.mark.parametrize("name", NAMES)
def test_the_stream_changes_no_global_generator(face: Face, name: str, scratch: Path) -> None:
    disturb(3)
    before = global_states()
    list(itertools.islice(face(name, scratch), PACKS))
    assert global_states() == before


@FACES
@pytest.mark.parametrize("name", NAMES)
def test_two_streams_in_turn_do_not_disturb_each_other(face: Face, name: str, scratch: Path) -> None:
    first, second = face(name, scratch), face(name, scratch)
    recording = load_recording(name)
    recording.check(0, 0, next(first))
    for step in range(PACKS):
        recording.check(0, step, next(second))
        recording.check(0, step + 1, next(first))


@pytest.mark.parametrize("name", NAMES)
def test_two_iterators_of_one_object_do_not_disturb_each_other(name: str, scratch: Path) -> None:
    dataset, recording = packed_dataset(load_recording(name), 0, scratch), load_recording(name)
    first = iter(dataset)
    for step in range(2):
        recording.check(0, step, next(first))
    second = iter(dataset)
    for step in range(PACKS):
        recording.check(0, step, next(second))
        recording.check(0, step + 2, next(first))


def test_state_dict_follows_the_iterator_that_yielded_last(scratch: Path) -> None:
    recording = load_recording("odd_default")
    dataset = packed_dataset(recording, 0, scratch)
    first, second = iter(dataset), iter(dataset)
    for _ in range(3):
        next(first)
    next(second)
    assert dataset.state_dict()["yielded_batches"] == 1
    next(first)
    assert dataset.state_dict()["yielded_batches"] == 4


@FACES
def test_streams_in_threads_of_one_process_do_not_disturb_each_other(face: Face, scratch: Path) -> None:
    failures: list[BaseException] = []

    def run(name: str) -> None:
        try:
            packs = face(name, scratch)
            for step in range(PACKS):
                load_recording(name).check(0, step, next(packs))
        except BaseException as error:  # noqa: BLE001 (handed to the test's own thread)
            failures.append(error)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), f"{thread.name} still packs after 60 s"
    assert not failures, failures[0]


def in_a_fork(action: Callable[[], None]) -> None:
    """Runs `action` in a forked child; fails unless it ends well."""
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            action()
            status = 0
        os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "packs differ in the forked child"


@FACES
@pytest.mark.timeout(60)
def test_a_fork_before_the_first_pack_changes_nothing(face: Face, scratch: Path) -> None:
    recording = load_recording("odd_default")
    packs = face("odd_default", scratch)

    def take_all() -> None:
        for step in range(PACKS):
            recording.check(0, step, next(packs))

    in_a_fork(take_all)
    take_all()


@pytest.mark.timeout(60)
def test_a_fork_between_packs_leaves_both_sides_their_stream(scratch: Path) -> None:
    recording = load_recording("odd_default")
    packs = drop_in("odd_default", scratch)

    def take_from(start: int) -> None:
        for step in range(start, start + 3):
            recording.check(0, step, next(packs))

    take_from(0)
    in_a_fork(lambda: take_from(3))
    take_from(3)
