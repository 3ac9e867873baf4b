"""Spawned DataLoader workers against a recording, in a process that ends before its workers do.

    python -m tests.golden.spawned packs NAME RANK SCRATCH
    python -m tests.golden.spawned resume NAME RANK SCRATCH

A spawned worker of torch 2.15 sometimes aborts as it exits ("terminate called without an active exception"; seen
with a data set of zeros and nothing of ours loaded), and torch raises that in the parent wherever it stands. What
is claimed here is about packs, so this process ends by `os._exit` while its workers are still alive.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from pathlib import Path

from tests.golden.recordings import load_recording, packed_dataset


def check_packs(name: str, rank: int, scratch: Path) -> None:
    from torch.utils.data import DataLoader

    recording = load_recording(name)
    dataset = packed_dataset(recording, rank, scratch)
    packs = iter(
        DataLoader(
            dataset,
            batch_size=None,
            num_workers=recording.num_workers,
            multiprocessing_context="spawn",
            timeout=300,
        )
    )
    for step in range(6):
        recording.check(rank, step, next(packs))
    finish()


def check_resume(name: str, rank: int, scratch: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    recording = load_recording(name)
    options = {"num_workers": recording.num_workers, "multiprocessing_context": "spawn", "timeout": 60}
    first = StatefulDataLoader(packed_dataset(recording, rank, scratch), batch_size=None, **options)
    running = iter(first)
    list(itertools.islice(running, 3))
    second = StatefulDataLoader(packed_dataset(recording, rank, scratch), batch_size=None, **options)
    second.load_state_dict(first.state_dict())
    continued = iter(second)
    for step in range(3, 6):
        recording.check(rank, step, next(continued))
    finish()


def finish() -> None:
    print("agrees", flush=True)
    os._exit(0)


if __name__ == "__main__":
    # torchdata asks torch for something that torch has come to call deprecated.
    warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
    # Three workers were recorded; this machine may have fewer cores.
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    claim, recorded, place, folder = sys.argv[1:]
    {"packs": check_packs, "resume": check_resume}[claim](recorded, int(place), Path(folder))
