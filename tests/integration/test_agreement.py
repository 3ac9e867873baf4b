"""Ranks whose sidecars know different things begin at one step, or are told which of them is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bagelplane.engine.pack import Pack
from bagelplane.shm.record import Image
from tests.integration.fake_sidecar import FakeSidecar, make_pack

Maker = Callable[[int], tuple[Pack, list[Image]]]

SCRIPT = Path(__file__).with_name("ranks_that_agree.py")
pytestmark = pytest.mark.timeout(600)  # of a busy machine; torch alone takes it half a minute to load


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def run_ranks(
    stack: ExitStack,
    folder: Path,
    standing: list[int],
    *,
    world_size: int | None = None,
    timeout_seconds: float = 30,
    load: tuple[int, ...] = (),
    wishes: tuple[str, ...] = (),
    makers: tuple[Maker, ...] = (),
) -> list[list[dict[str, Any]]]:
    """What each rank prints; its sidecar stands at the given step."""
    world_size = world_size or len(standing)
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("RANK", "WORLD"))}
    processes = []
    for rank, step in enumerate(standing):
        directory = folder / f"pod-{rank}"
        directory.mkdir()
        sidecar = FakeSidecar(directory, unacknowledged=step, make=makers[rank] if makers else make_pack)
        stack.callback(sidecar.crash)
        command = [
            sys.executable, SCRIPT, folder / "store", rank, world_size, directory, timeout_seconds,
            *(["load"] if rank in load else []), *wishes,
        ]  # fmt: skip
        processes.append(
            subprocess.Popen(
                [str(word) for word in command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        stack.callback(processes[-1].kill)
    outputs = [process.communicate(timeout=240) for process in processes]
    return [
        [json.loads(line) for line in out.splitlines() if line.startswith(b"{")] or [err]
        for out, err in outputs
    ]


@pytest.mark.slow
def test_ranks_begin_at_the_lowest_step_that_one_of_their_sidecars_stands_at(
    stack: ExitStack, tmp_path: Path
) -> None:
    first, second, third = run_ranks(stack, tmp_path, [8, 3, 8])
    assert first == [{"begins": 3}, {"took": 3}]
    assert second == third == [{"took": 3}]


@pytest.mark.slow
def test_a_rank_that_loaded_a_state_alone_is_named_to_the_others(stack: ExitStack, tmp_path: Path) -> None:
    waiting, _ = run_ranks(stack, tmp_path, [0, 0], timeout_seconds=4, load=(1,))
    (said,) = waiting
    assert "nothing from rank 1" in said["error"]
    assert "load a state on all of them or on none" in said["error"]


def make_pack_with_one_other_pixel(step: int) -> tuple[Pack, list[Image]]:
    pack, images = make_pack(step)
    if step == 4:
        images[1][3, 2, 1] ^= 1
    return pack, images


@pytest.mark.slow
def test_pods_of_one_rank_compare_their_packs_and_leave_no_keys_for_it(
    stack: ExitStack, tmp_path: Path
) -> None:
    said = run_ranks(stack, tmp_path, [0, 0, 0], timeout_seconds=150, wishes=("verify",))
    assert said == [[{"steps": 8, "readers": 1}, {"kept": []}]] * 3


@pytest.mark.slow
def test_a_pack_that_differs_between_pods_of_one_rank_is_an_error_that_names_both(
    stack: ExitStack, tmp_path: Path
) -> None:
    makers = (make_pack, make_pack_with_one_other_pixel)
    said = run_ranks(stack, tmp_path, [0, 0], timeout_seconds=150, wishes=("verify",), makers=makers)
    errors = [(rank, line["error"]) for rank, lines in enumerate(said) for line in lines if "error" in line]
    assert len(errors) == 1, said
    ((rank, error),) = errors
    assert f"at rank {rank}; expected" in error
    assert f"which rank {1 - rank} was given first" in error
    assert "data-parallel rank 0 were given different packs of step 4" in error
    assert sorted(lines[0]["steps"] for lines in said) == [4, 8]
