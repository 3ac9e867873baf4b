"""The sidecar as real processes: what it serves, what it survives, what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.sidecar_harness import (
    Sidecar,
    Trainer,
    digest,
    make_dataset,
    processes_of,
    recorded,
    undisturbed,
    wait_for,
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for pid in processes_of(tmp_path):
        raise AssertionError(f"process {pid} was left over: {Path(f'/proc/{pid}/cmdline').read_text()}")


def test_a_rank_gets_the_undisturbed_stream(folder: Path) -> None:
    dataset = make_dataset(snapshots=folder / "snapshots")
    sidecar = Sidecar(folder, dataset)
    try:
        sidecar.wait_serving()
        with sidecar.reader() as reader:
            digests = [digest(*reader.next_pack()) for _ in range(50)]
        assert digests == undisturbed(dataset, 0, 1, 50)
        assert sidecar.terminate() == 0, sidecar.tail()
        assert not sidecar.directory.exists(), list(sidecar.directory.iterdir())
    finally:
        sidecar.kill()
