"""Ranks whose sidecars know different things begin at one step, or are told which of them is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fake_sidecar import FakeSidecar

SCRIPT = Path(__file__).with_name("ranks_that_agree.py")


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
) -> list[list[dict[str, Any]]]:
    """What each rank prints; its sidecar stands at the given step."""
    world_size = world_size or len(standing)
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("RANK", "WORLD"))}
    processes = []
    for rank, step in enumerate(standing):
        directory = folder / f"pod-{rank}"
        directory.mkdir()
        sidecar = FakeSidecar(directory, unacknowledged=step)
        stack.callback(sidecar.crash)
        command = [
            sys.executable, SCRIPT, folder / "store", rank, world_size, directory, timeout_seconds,
            *(["load"] if rank in load else []),
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
    outputs = [process.communicate(timeout=90) for process in processes]
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
