"""Many small packs through a real sidecar: memory, descriptors and threads stay what they are after the warm-up.

    python -m tests.soak.memory [--packs 200000] [--chart soak-out/memory.png] [--real]

Two ranks: one takes its packs as tensors (PackedLoader), the other as arrays (NumpyReader), each as fast as it can;
a third client reads status and metrics all the time. `--real`: a made data set with pictures is planned and decoded,
instead of packs made up from their step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagelplane import demo_data
from bagelplane.sidecar.producer import DEFAULT_STREAM_FACTORY
from bagelplane.spec import BagelDataset
from tests.benchmarks import workload
from tests.integration.sidecar_harness import (
    Process,
    Sidecar,
    fetch,
    free_port,
    leftovers,
    make_dataset,
    wait_for,
)

RANKS = 2
LARGEST_GROWTH = 0.05
_WARM_UP = 0.2
"""Share of the packs after which the figures count: allocators and caches have what they need by then."""
_SAMPLES = 400
_SILENCE_SECONDS = 300.0
"""Without a single pack, the run has failed."""
_PROGRESS_PACKS = 20
_GO = "go"
"""The file that trainers wait for after their first packs."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one process at one moment, from /proc."""

    resident_bytes: int
    own_bytes: int
    """Resident without files and shared memory: without the ring, above all."""
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Soak:
    packs: list[int]
    """Packs taken by all ranks at each sample."""
    figures: dict[str, list[Figures]]
    """By process, as many as `packs`."""
    seconds: float

    @property
    def first(self) -> int:
        """The first sample after the warm-up."""
        return next(number for number, packs in enumerate(self.packs) if packs >= _WARM_UP * self.packs[-1])

    def growth(self, process: str) -> float:
        """The largest resident size after the warm-up against the median of the first tenth of those samples."""
        resident = [figures.resident_bytes for figures in self.figures[process][self.first :]]
        return max(resident) / statistics.median(resident[: max(1, len(resident) // 10)]) - 1

    def faults(self) -> list[str]:
        """What did not stay as it was."""
        found = []
        for process, all_figures in self.figures.items():
            if self.growth(process) > LARGEST_GROWTH:
                found.append(f"{process}: resident memory grew by {self.growth(process):.1%}")
            counted = all_figures[self.first :]
            before, after = counted[: len(counted) // 2], counted[len(counted) // 2 :]
            for name in ("descriptors", "threads"):
                # The fewest of each half: a snapshot or an answer has a thread and files for a moment.
                fewest = [min(getattr(figures, name) for figures in half) for half in (before, after)]
                if fewest[1] > fewest[0]:
                    found.append(f"{process}: {name} grew from {fewest[0]} to {fewest[1]}")
        return found

    def __str__(self) -> str:
        head = f"{self.packs[-1]} packs in {self.seconds:.0f} s, {len(self.packs)} samples; "
        lines = [f"{head}after the warm-up of {self.packs[self.first]} packs:"]
        for process, all_figures in self.figures.items():
            counted = all_figures[self.first :]
            resident = [figures.resident_bytes / 2**20 for figures in counted]
            lines.append(
                f"  {process:10} resident {min(resident):6.1f} to {max(resident):6.1f} MiB "
                f"(at most {self.growth(process):+.1%}), own {counted[-1].own_bytes / 2**20:.1f} MiB, "
                f"{_span(figures.descriptors for figures in counted)} descriptors, "
                f"{_span(figures.threads for figures in counted)} threads"
            )
        return "\n".join(lines)


def run_soak(folder: Path, *, packs: int, real: bool = False) -> Soak:
    """Takes `packs` in all, half of them on each rank. AssertionError: they stopped coming, or something is left."""
    begun = time.monotonic()
    with ExitStack() as cleanup:
        sidecar, port = _start_sidecar(folder, real, cleanup)
        trainers = {}
        for rank, kind in enumerate(("tensors", "arrays")):
            process = Process(folder / f"{kind}.log", "tests.soak.memory", "--take", kind, str(sidecar.directory),
                              str(rank), str(packs // RANKS), str(folder / f"{kind}.progress"))  # fmt: skip
            cleanup.callback(process.kill)
            trainers[kind] = process
        soak = _sample(sidecar, trainers, folder, packs, port, begun)
        # One trainer may be far behind the other: it has as long as it goes on.
        _await_packs(sidecar, trainers, folder, lambda counts: min(counts) == packs // RANKS)
        for process in trainers.values():
            assert process.wait(_SILENCE_SECONDS) == 0, process.tail()
        assert sidecar.terminate() == 0, sidecar.tail()
        left = leftovers(sidecar.directory, folder / "snapshots")
        assert not left, f"left over: {left}"
    return soak


def _start_sidecar(folder: Path, real: bool, cleanup: ExitStack) -> tuple[Sidecar, int]:
    port = free_port()
    if real:
        dataset, factory = _real_dataset(folder), DEFAULT_STREAM_FACTORY
    else:
        dataset = make_dataset(snapshots=folder / "snapshots", every=500)
        factory = "tests.soak.small_packs:open_rank_stream"
    sidecar = Sidecar(
        folder, dataset, local_ranks=RANKS, world_size=RANKS, status_port=port, stream_factory=factory
    )
    cleanup.callback(sidecar.kill)
    sidecar.wait_serving(_SILENCE_SECONDS)
    return sidecar, port


def _real_dataset(folder: Path) -> BagelDataset:
    """The benchmark's resource over the demo's small pictures, in packs of a fourth of its size."""
    data = folder / "data"
    demo_data.make_data_set(data)
    resource = workload.resource(data, workload.prepare(data))
    budgets = {
        "expectedTokens": 8192, "maxTokens": 9216, "maxTokensPerSample": 8192, "preferBufferBefore": 4096
    }  # fmt: skip
    resource["spec"]["budgets"].update(budgets)
    resource["spec"]["snapshots"] = {"uri": str(folder / "snapshots"), "everySteps": 100}
    return BagelDataset.from_mapping(resource)


# ---- measuring


def _sample(
    sidecar: Sidecar, trainers: dict[str, Process], folder: Path, packs: int, port: int, begun: float
) -> Soak:
    """Looks each time that another four-hundredth of the packs was taken, until the first trainer has all of its."""
    taken: list[int] = []
    figures: dict[str, list[Figures]] = {}
    counts = _await_packs(sidecar, trainers, folder, lambda counts: min(counts) > 0)
    (folder / _GO).touch()
    names = {"supervisor": sidecar.pid}
    names |= {f"producer {number}": pid for number, pid in enumerate(sorted(sidecar.children()))}
    names |= {kind: process.pid for kind, process in trainers.items()}
    while max(counts) < packs // RANKS:
        assert fetch(port, "/v1/status")[0] == fetch(port, "/metrics")[0] == 200
        taken.append(sum(counts))
        for name, pid in names.items():
            figures.setdefault(name, []).append(figures_of(pid))
        due = sum(counts) + packs / _SAMPLES
        counts = _await_packs(
            sidecar,
            trainers,
            folder,
            lambda counts, due=due: sum(counts) >= due or max(counts) >= packs // RANKS,
        )
    return Soak(taken, figures, time.monotonic() - begun)


def _await_packs(
    sidecar: Sidecar, trainers: dict[str, Process], folder: Path, enough: Callable[[list[int]], bool]
) -> list[int]:
    """The packs that each trainer has taken, once they are enough."""
    changed, last = time.monotonic(), [-1]
    while True:
        counts = [_progress(folder / f"{kind}.progress") for kind in trainers]
        if enough(counts):
            return counts
        if counts != last:
            changed, last = time.monotonic(), counts
        ended = [process for process in (sidecar, *trainers.values()) if process.popen.poll()]
        silent = time.monotonic() - changed
        if ended or silent > _SILENCE_SECONDS:
            tails = "\n".join(process.tail() for process in (sidecar, *trainers.values()))
            raise AssertionError(
                f"no pack for {silent:.0f} s after {counts}, {len(ended)} processes ended; {tails}"
            )
        time.sleep(0.02)


def figures_of(pid: int) -> Figures:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )

    def size(name: str) -> int:
        return int(status[name].split()[0]) * 1024

    descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Figures(size("VmRSS"), size("RssAnon"), descriptors, int(status["Threads"]))


def _progress(path: Path) -> int:
    return int(path.read_text() or 0) if path.exists() else 0


def _span(values: Iterator[int]) -> str:
    found = list(values)
    return str(found[0]) if len(set(found)) == 1 else f"{min(found)} to {max(found)}"


def write_chart(soak: Soak, path: Path) -> None:
    """Resident memory over packs, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.subplots()
    for process, all_figures in soak.figures.items():
        axes.plot(soak.packs, [figures.resident_bytes / 2**20 for figures in all_figures], label=process)
    axes.axvline(soak.packs[soak.first], color="#b4bec7", linestyle="--", label="end of the warm-up")
    axes.set(
        xlabel="packs taken",
        ylabel="resident memory, MiB",
        title=f"{soak.packs[-1]} packs through one sidecar",
    )
    axes.set_ylim(bottom=0)
    axes.grid(color="#e3e8ec")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")


# ---- a trainer


def _take(kind: str, directory: str, rank: str, packs: str, progress: str) -> None:
    place: dict[str, Any] = {
        "rank": int(rank), "local_rank": int(rank), "world_size": RANKS, "timeout_seconds": _SILENCE_SECONDS
    }  # fmt: skip
    if kind == "tensors":
        from bagelplane.client import PackedLoader

        reader: Any = PackedLoader(directory, **place)
    else:
        from bagelplane.client import NumpyReader

        reader = NumpyReader(directory, **place)
    with reader, Path(progress).open("w") as file:
        for number in range(1, int(packs) + 1):
            next(reader)
            if number == 2:  # the other trainer may still be loading torch
                os.pwrite(file.fileno(), b"1\n", 0)
                wait_for((Path(progress).parent / _GO).exists, "the other trainer", _SILENCE_SECONDS)
            if number % _PROGRESS_PACKS == 0 or number == int(packs):
                os.pwrite(file.fileno(), f"{number}\n".encode(), 0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--packs", type=int, default=200_000, help="of both ranks together (default 200,000)")
    parser.add_argument("--chart", type=Path, default=Path("soak-out/memory.png"))
    parser.add_argument("--real", action="store_true", help="plan and decode a made data set")
    parser.add_argument("--take", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.take:
        _take(*options.take)
        return 0
    with tempfile.TemporaryDirectory(prefix="bagelplane-soak-") as folder:
        soak = run_soak(Path(folder), packs=options.packs, real=options.real)
    print(soak)
    write_chart(soak, options.chart)
    print(f"memory over packs: {options.chart}")
    faults = soak.faults()
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
