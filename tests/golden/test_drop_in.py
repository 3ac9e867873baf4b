"""`PackedDataset` yields every recorded stream to the bit: bare, in DataLoaders, and over a loader's own state."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.golden.recordings import PLACES, load_recording, packed_dataset

ROOT = Path(__file__).parents[2]
WITH_WORKERS = [place for place in PLACES if load_recording(place[0]).num_workers]
WITHOUT_WORKERS = [place for place in PLACES if not load_recording(place[0]).num_workers]
pytestmark = [
    # torchdata asks torch for something that torch has come to call deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    # Three workers were recorded; this machine may have fewer cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def loader(name: str, rank: int, scratch: Path, *, stateful: bool = False, **options: Any) -> Any:
    recording = load_recording(name)
    kind = StatefulDataLoader if stateful else DataLoader
    options = {"num_workers": recording.num_workers, **options}
    return kind(
        packed_dataset(recording, rank, scratch), batch_size=None, timeout=_timeout(options), **options
    )


def _timeout(options: dict[str, Any]) -> float:
    return 300.0 if options["num_workers"] else 0.0


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    return list(itertools.islice(iterator, count))


@pytest.mark.parametrize(("name", "rank"), WITHOUT_WORKERS)
def test_every_recorded_pack_comes_in_the_process(name: str, rank: int, scratch: Path) -> None:
    recording = load_recording(name)
    packs = iter(packed_dataset(recording, rank, scratch))
    for step in range(len(recording.ranks[rank])):
        recording.check(rank, step, next(packs))


@pytest.mark.parametrize(("name", "rank"), WITH_WORKERS)
def test_every_recorded_pack_comes_from_forked_workers(name: str, rank: int, scratch: Path) -> None:
    recording = load_recording(name)
    packs = iter(loader(name, rank, scratch, multiprocessing_context="fork"))
    for step in range(len(recording.ranks[rank])):
        recording.check(rank, step, next(packs))


@pytest.mark.parametrize(
    ("claim", "name", "rank"),
    [("packs", "d_workers", 1), ("packs", "odd_workers", 0), ("resume", "d_workers", 0)],
)
def test_spawned_workers_yield_the_same_and_continue(claim: str, name: str, rank: int, scratch: Path) -> None:
    command = [sys.executable, "-m", "tests.golden.spawned", claim, name, str(rank), str(scratch)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, check=False)
    assert result.stdout == "agrees\n", result.stderr[-2000:]


@pytest.mark.parametrize("name", ["a_default", "odd_tight"])
def test_a_data_loader_without_workers_yields_the_same(name: str, scratch: Path) -> None:
    recording = load_recording(name)
    for step, pack in enumerate(take(iter(loader(name, 0, scratch)), 4)):
        recording.check(0, step, pack)


@pytest.mark.parametrize(("name", "rank"), PLACES)
def test_a_stateful_loader_continues_from_its_state(name: str, rank: int, scratch: Path) -> None:
    recording = load_recording(name)
    count = len(recording.ranks[rank])
    taken = count // 2
    first = loader(name, rank, scratch, stateful=True)
    packs = iter(first)
    for step in range(taken):
        recording.check(rank, step, next(packs))
    state = json.loads(json.dumps(first.state_dict()))
    del packs
    second = loader(name, rank, scratch, stateful=True)
    second.load_state_dict(state)
    packs = iter(second)
    for step in range(taken, min(taken + 8, count)):
        recording.check(rank, step, next(packs))
