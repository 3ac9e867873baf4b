"""Training jobs of two ranks under torchrun: each rank its own packs, over kills, to the bit and to the last weight."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagelplane.sidecar.producer import DEFAULT_STREAM_FACTORY
from tests.golden.hashing import digest
from tests.golden.recordings import load_recording, resource_of
from tests.integration.sidecar_harness import REPOSITORY, Sidecar, recorded, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
SCRIPT = Path(__file__).with_name("training_rank.py")
RECORDING = load_recording("a_default")
RANKS, STEPS = 2, 16
DEADLINE_SECONDS = 400.0


class Job:
    """Two ranks under torchrun on this machine. `folder` keeps what they record and the checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, directory: Path, *options: str, restarts: int = 0) -> None:
        torchrun = [
            "--standalone", "--local-addr=127.0.0.1", "--monitor-interval=0.2",
            f"--nproc-per-node={RANKS}", f"--max-restarts={restarts}",
        ]  # fmt: skip
        words = [str(SCRIPT), str(directory), str(self.folder), str(STEPS), *options]
        variables = {
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # Else ranks that come again may find the gloo addresses of the dead (pytorch issue 135712).
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *torchrun, *words],
                cwd=REPOSITORY,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def finish(self) -> None:
        assert self._process is not None
        try:
            status = self._process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job still runs after {DEADLINE_SECONDS} s; {self.log()}") from None
        assert status == 0, self.log()

    def kill(self) -> None:
        """torchrun first, which would mourn its ranks, then the ranks, which torchrun gave sessions of their own."""
        if self._process is None:
            return
        running = self._process.poll() is None
        self._process.kill()
        self._process.wait()
        for rank in range(RANKS):
            for pid in self.facts(rank, "pid")[-1:] if running else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def wait_hanging(self) -> None:
        def look() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log()
            return all(self.facts(rank, "hangs") for rank in range(RANKS))

        wait_for(look, "all ranks to hang", DEADLINE_SECONDS)

    def facts(self, rank: int, name: str) -> list[Any]:
        told = [json.loads(line) for line in recorded(self.folder / f"rank-{rank}.jsonl")]
        return [fact[name] for fact in told if name in fact]

    def check_packs(self, *stretches: range) -> None:
        """Each rank took the packs of these stretches, its own ones, as they were recorded."""
        steps = [step for stretch in stretches for step in stretch]
        for rank in range(RANKS):
            assert self.facts(rank, "begins") == [stretch.start for stretch in stretches], self.log()
            assert self.facts(rank, "step") == steps, self.log()
            expected = [digest(RECORDING.ranks[rank][step]) for step in steps]
            assert self.facts(rank, "digest") == expected, f"rank {rank}"

    def log(self) -> str:
        return f"the end of the job's log: {(self.folder / 'log').read_text()[-4000:]}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with serving(folder) as sidecar, running(folder) as job:
        job.start(sidecar.directory)
        job.finish()
        yield job


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Sidecar]:
    plane = {"ring": {"packs": 2}, "decodeThreads": 1}
    sidecar = Sidecar(
        folder,
        resource_of(RECORDING, dataplane=plane),
        stream_factory=DEFAULT_STREAM_FACTORY,
        local_ranks=RANKS,
    )
    try:
        sidecar.wait_serving()
        yield sidecar
    finally:
        sidecar.kill()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Job]:
    job = Job(folder / "job")
    try:
        yield job
    finally:
        job.kill()


def test_each_rank_trains_on_its_own_recorded_packs(undisturbed: Job) -> None:
    undisturbed.check_packs(range(STEPS))
    weights = [undisturbed.facts(rank, "weights") for rank in range(RANKS)]
    assert weights[0] == weights[1] != []


def test_a_job_killed_after_a_distributed_checkpoint_ends_with_the_weights_of_an_undisturbed_one(
    undisturbed: Job, tmp_path: Path
) -> None:
    with running(tmp_path) as job:
        with serving(tmp_path) as sidecar:
            job.start(sidecar.directory, "--save-at=5", "--hang-at=8")
            job.wait_hanging()
            job.kill()
            sidecar.kill()
        with serving(tmp_path) as sidecar:
            job.start(sidecar.directory)
            job.finish()
        job.check_packs(range(8), range(5, STEPS))
        assert job.facts(0, "weights") == undisturbed.facts(0, "weights")


def test_a_rank_that_is_killed_comes_back_by_torchrun_and_all_go_on_at_its_step(tmp_path: Path) -> None:
    with running(tmp_path) as job, serving(tmp_path) as sidecar:
        job.start(sidecar.directory, "--die-at=7", restarts=1)
        job.finish()
        for rank, before in enumerate((range(8), range(7))):
            assert job.facts(rank, "begins") == [0, 7], job.log()
            steps = [*before, *range(7, STEPS)]
            assert job.facts(rank, "step") == steps, job.log()
            assert job.facts(rank, "digest") == [digest(RECORDING.ranks[rank][step]) for step in steps]
        assert "rank 0: its sidecar stood at step 8, another rank's at 7: all go on there" in job.log()
