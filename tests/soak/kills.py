"""SIGKILL at random moments to producers, supervisors and trainers: the packs come as if nothing had happened.

    python -m tests.soak.kills [--ranks 2] [--rounds 200] [--seed N]

Each round waits for a random moment and kills one victim, drawn too. After half of the rounds every trainer has to
go on before the next blow; after the others the next one falls before the damage is mended. A killed trainer starts
again at the step after the last that it recorded, a killed sidecar with `latest`. In the end the record of every
rank must equal its stream as it comes without ring, process or snapshot, and nothing may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.integration.sidecar_harness import (
    Sidecar,
    Trainer,
    leftovers,
    make_dataset,
    recorded,
    undisturbed,
    wait_for,
)

VICTIMS = ("producer", "supervisor", "trainer")
_GO_ON_SECONDS = 300.0
"""Until every trainer has its next pack: nine interpreters may have to start for it, on a busy machine."""
_LONGEST_PAUSE_SECONDS = 0.6
_PACK_SECONDS = 0.004
"""Of work a pack and rank, but for many ranks: all together make as many packs as two would."""


@dataclass(frozen=True, slots=True)
class Outcome:
    rounds: int
    kills: dict[str, int]
    steps: list[int]
    """Packs compared, by rank."""
    seed: int
    seconds: float

    def __str__(self) -> str:
        kills = ", ".join(f"{count} {victim}s" for victim, count in self.kills.items())
        return (
            f"{self.rounds} rounds of SIGKILL with {len(self.steps)} ranks ({kills}), {sum(self.steps)} steps checked "
            f"({min(self.steps)} to {max(self.steps)} a rank), seed {self.seed}, {self.seconds:.0f} s"
        )


class _Run:
    """One sidecar and a trainer for each of its ranks."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        self.ranks = ranks
        seconds = _PACK_SECONDS * max(1, ranks // 2)
        self.quick = make_dataset(snapshots=folder / "snapshots", every=50)
        self.dataset = make_dataset(snapshots=folder / "snapshots", every=50, pack_seconds=str(seconds))
        self.sidecar = self._start_sidecar()
        self.trainers = [self._start_trainer(rank) for rank in range(ranks)]

    def strike(self, victim: str, draws: random.Random) -> None:
        if victim == "producer":
            pids = self.sidecar.children()
            if pids:
                with contextlib.suppress(ProcessLookupError):  # it was ending anyway
                    os.kill(draws.choice(pids), signal.SIGKILL)
        elif victim == "supervisor":
            self.sidecar.kill()
            self.sidecar = self._start_sidecar()
        else:
            rank = draws.randrange(self.ranks)
            self.trainers[rank].kill()
            self.trainers[rank] = self._start_trainer(rank)

    def lengths(self) -> list[int]:
        return [len(recorded(trainer.record)) for trainer in self.trainers]

    def wait_to_go_on(self, before: list[int], why: str) -> None:
        """Until every trainer has recorded more than `before`."""
        for rank, trainer in enumerate(self.trainers):
            what = f"rank {rank} to go on after {before[rank]} steps ({why})"
            wait_for(lambda: len(recorded(trainer.record)) > before[rank], what, _GO_ON_SECONDS)  # noqa: B023

    def check_alive(self) -> None:
        for trainer in self.trainers:
            assert trainer.popen.poll() is None, f"a trainer ended with status {trainer.popen.poll()}"

    def check_streams(self) -> list[int]:
        """Every rank's record is its undisturbed stream. The steps of each."""
        for rank, trainer in enumerate(self.trainers):
            digests = recorded(trainer.record)
            wanted = undisturbed(self.quick, rank, self.ranks, len(digests))
            wrong = [
                step for step, pair in enumerate(zip(digests, wanted, strict=True)) if len(set(pair)) > 1
            ]
            assert not wrong, (
                f"rank {rank}: {len(wrong)} of {len(digests)} steps differ, the first is {wrong[0]}"
            )
        return self.lengths()

    def kill(self) -> None:
        for process in (*self.trainers, self.sidecar):
            process.kill()

    def _start_sidecar(self) -> Sidecar:
        sidecar = Sidecar(self.folder, self.dataset, local_ranks=self.ranks, world_size=self.ranks)
        try:
            sidecar.wait_serving(_GO_ON_SECONDS)
        except BaseException:
            sidecar.kill()
            raise
        return sidecar

    def _start_trainer(self, rank: int) -> Trainer:
        directory = self.sidecar.directory
        return Trainer(self.folder, directory, rank, self.ranks, sys.maxsize, timeout_seconds=_GO_ON_SECONDS)


def run_kills(folder: Path, *, ranks: int, rounds: int, seed: int | None = None) -> Outcome:
    """AssertionError for a step that differs, a trainer that ends or stops, or something that is left; it names the
    seed."""
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    begun = time.monotonic()
    try:
        kills, steps = _run_rounds(folder, ranks, rounds, random.Random(seed))
    except AssertionError as error:
        raise AssertionError(f"{error}\n(seed {seed}, {ranks} ranks)") from None
    return Outcome(rounds, kills, steps, seed, time.monotonic() - begun)


def _run_rounds(
    folder: Path, ranks: int, rounds: int, draws: random.Random
) -> tuple[dict[str, int], list[int]]:
    kills = dict.fromkeys(VICTIMS, 0)
    run = _Run(folder, ranks)
    try:
        run.wait_to_go_on([0] * ranks, "the beginning")
        for number in range(rounds):
            before = run.lengths()
            time.sleep(draws.uniform(0.0, _LONGEST_PAUSE_SECONDS))  # the random moment itself
            victim = draws.choice(VICTIMS)
            kills[victim] += 1
            run.strike(victim, draws)
            if draws.random() < 0.5:
                run.wait_to_go_on(before, f"round {number}: {victim}")
            run.check_alive()
        run.wait_to_go_on(run.lengths(), "the last round")
        run.check_alive()
        for trainer in run.trainers:
            trainer.kill()
        steps = run.check_streams()
        assert run.sidecar.terminate() == 0
        left = leftovers(run.sidecar.directory, folder / "snapshots")
        assert not left, f"left over: {left}"
    except AssertionError as error:
        tails = "\n".join(process.tail() for process in (run.sidecar, *run.trainers))
        raise AssertionError(f"{error}\n{tails}") from None
    finally:
        run.kill()
    return kills, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, help="of the moments and victims (default: a new one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bagelplane-kills-") as folder:
        print(run_kills(Path(folder), ranks=options.ranks, rounds=options.rounds, seed=options.seed))


if __name__ == "__main__":
    main()
