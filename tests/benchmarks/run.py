"""Measures the peer, our classes, the sidecar and the floor on the same data and cores, in one run.

    python tests/benchmarks/run.py [--packs 12] [--repeats 3] [-o json] [--write-docs]

Rows run one after the other, each in a fresh process pinned to one core, in turn forwards and backwards, so that
no row always follows the same one. Reported are medians. README.md beside it has the recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from bagelplane import jpeg, resampling

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / "bench-out"
PEER_ENVIRONMENT = ROOT / ".venv-peer"
PEER_PINS = ROOT / "constraints" / "peer.txt"
PEER_MODULE = "nemo_automodel.components.datasets.multimodal.packing"
OUR_MODULE = "bagelplane.packing"
MARKS = ("<!-- measured -->", "<!-- /measured -->")
DEADLINE_SECONDS = 900.0
SIZES = (
    "rss_peak_bytes", "pss_bytes", "sidecar_rss_peak_bytes", "sidecar_pss_bytes", "sidecar_own_bytes", "pack_bytes",
    "record_bytes", "batch_bytes", "state_bytes",
)  # fmt: skip
LARGEST_SIDECAR_BYTES = 350_000_000
"""Resident, of supervisor and one producer together, besides the ring."""
LARGEST_RECORD_SHARE = 0.25
"""Of a pack in the ring, against the bytes of the peer's batch."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result. `arguments` start with a command of measure.py."""

    name: str
    title: str
    arguments: tuple[str, ...]
    peer: bool = False
    sidecar: bool = False
    own_core: bool = False
    """The trainer's side on a core of its own, beside the sidecar's."""
    packs_factor: int = 1


@dataclass(slots=True)
class Result:
    row: Row
    runs: list[dict[str, Any]] = field(default_factory=list)

    def median(self, name: str) -> float:
        """Of the repeats' means of a list of seconds. A mean, since packs differ and all rows take the same ones."""
        return statistics.median(statistics.fmean(run[name]) for run in self.runs)

    def largest(self, name: str) -> int:
        return int(max(run.get(name, 0) for run in self.runs))


def rows(data: Path, warmup: int, packs: int) -> list[Row]:
    counts = (str(warmup), str(packs))
    return [
        Row(
            "peer",
            "NeMo Automodel 0.7.0, `PackedDataset`",
            ("packed", PEER_MODULE, str(data), *counts),
            peer=True,
        ),
        Row("drop_in", "`bagelplane.packing.PackedDataset`", ("packed", OUR_MODULE, str(data), *counts)),
        Row(
            "sidecar_raw",
            "sidecar, uint8 taken from the ring, all on one core",
            ("client", "raw", "{directory}", "{pid}", *counts),
            sidecar=True,
        ),
        Row(
            "sidecar_tensors",
            "sidecar, float32 tensors in the trainer, all on one core",
            ("client", "tensors", "{directory}", "{pid}", *counts),
            sidecar=True,
        ),
        Row(
            "sidecar_tensors_own_core",
            "sidecar on one core, trainer with float32 tensors on another",
            ("client", "tensors", "{directory}", "{pid}", *counts),
            sidecar=True,
            own_core=True,
        ),
        Row(
            "floor", "floor: Pillow's decode and resize of the emitted images", ("floor", str(data), *counts)
        ),
        Row(
            "plan",
            "planning alone, from headers and text",
            ("plan", str(data), str(warmup), "{many}"),
            packs_factor=20,
        ),
    ]


# --- the peer's environment and the data ------------------------------------------------------------


@cache
def peer_python() -> Path:
    """The interpreter of the peer's environment, made from pins on first use (BAGELPLANE_PEER_PYTHON: yours)."""
    chosen = os.environ.get("BAGELPLANE_PEER_PYTHON")
    if chosen:
        return Path(chosen)
    python = PEER_ENVIRONMENT / "bin" / "python"
    done = PEER_ENVIRONMENT / "installed"
    if not done.exists() or done.read_text() != PEER_PINS.read_text():
        note("making the peer's environment (a few GB with torch; kept in .venv-peer)")
        uv = [str(ROOT / "tools" / "environment.sh"), "uv"]
        subprocess.run(
            [*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(PEER_ENVIRONMENT)], check=True
        )
        # Without dependencies: what the peer's data classes import is in the pins; the rest of what the package
        # asks for is a training stack.
        install = ["pip", "install", "--quiet", "--python", str(python), "--no-deps", "--require-hashes"]
        subprocess.run([*uv, *install, "--requirement", str(PEER_PINS)], check=True)
        done.write_text(PEER_PINS.read_text())
    return python


def benchmark_data() -> Path:
    """The made data set, kept in bench-out/ as long as its recipe and maker stay the same."""
    from bagelplane import demo_data, demo_pictures

    recipe = demo_data.BENCHMARK
    sources = Path(demo_data.__file__).read_text() + Path(demo_pictures.__file__).read_text()
    key = f"{recipe!r}\n{sources}"
    folder, done = CACHE / "data", CACHE / "data.recipe"
    if not done.exists() or done.read_text() != key:
        note("making the data")
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        demo_data.make_data_set(folder, recipe)
        done.write_text(key)
    return folder


# --- running ----------------------------------------------------------------------------------------


def note(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def child_environment() -> dict[str, str]:
    """One thread for every library, so that a pinned core is all that a row has."""
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ARROW_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
    )
    return {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT / "dataplane")}


def pinned(core: int, python: Path, arguments: tuple[str, ...]) -> list[str]:
    pin = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"
    script = [str(python), "-W", "ignore", str(HERE / "measure.py"), *arguments]
    return [sys.executable, "-c", pin, str(core), *script]


def measure(core: int, python: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
    done = subprocess.run(
        pinned(core, python, arguments),
        env=child_environment(),
        stdout=subprocess.PIPE,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@contextmanager
def running_sidecar(data: Path, core: int, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = pinned(core, Path(sys.executable), ("sidecar", str(data), str(directory)))
    process = subprocess.Popen(command, env=child_environment(), stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (directory / "sidecar.sock").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the sidecar does not serve; its exit status so far: {process.poll()}")
            time.sleep(0.05)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_row(row: Row, data: Path, cores: list[int], packs: int) -> dict[str, Any]:
    python = peer_python() if row.peer else Path(sys.executable)
    many = str(packs * row.packs_factor)
    if not row.sidecar:
        return measure(cores[0], python, tuple(part.replace("{many}", many) for part in row.arguments))
    with tempfile.TemporaryDirectory(prefix="bp-bench-", dir="/dev/shm") as folder:
        directory = Path(folder) / "run"
        arguments = tuple(part.replace("{directory}", str(directory)) for part in row.arguments)
        with running_sidecar(data, cores[0], directory) as process:
            arguments = tuple(part.replace("{pid}", str(process.pid)) for part in arguments)
            result = measure(cores[-1] if row.own_core else cores[0], python, arguments)
    return result


def check_same_packs(data: Path, core: int, packs: int) -> str:
    digests = {
        module: measure(core, python, ("digest", module, str(data), str(packs)))["digest"]
        for module, python in ((PEER_MODULE, peer_python()), (OUR_MODULE, Path(sys.executable)))
    }
    if len(set(digests.values())) != 1:
        raise SystemExit(f"bench: the peer and the drop-in class yield different packs: {digests}")
    return next(iter(digests.values()))


# --- results ----------------------------------------------------------------------------------------


def summarize(results: list[Result]) -> list[dict[str, Any]]:
    peer = next((result for result in results if result.row.name == "peer"), results[0])
    lines = []
    for result in results:
        wall, cpu = result.median("wall_seconds"), result.median("cpu_seconds")
        sidecar_cpu = result.median("sidecar_cpu_seconds") if result.row.sidecar else 0.0
        line: dict[str, Any] = {
            "name": result.row.name,
            "title": result.row.title,
            "packs_per_second": 1 / wall,
            "milliseconds_a_pack": wall * 1000,
            "cpu_milliseconds_a_pack": cpu * 1000,
            "times_the_peer": peer.median("wall_seconds") / wall,
            "times_the_peer_in_cpu": peer.median("cpu_seconds") / (cpu + sidecar_cpu),
            "sidecar_cpu_milliseconds_a_pack": sidecar_cpu * 1000,
        }
        for name in SIZES:
            line[name] = result.largest(name) or None
        for name in ("images_a_pack", "resizes_a_pack", "state_buffered_samples"):
            if name in result.runs[0]:
                line[name] = result.runs[0][name]
        line["each_repeat_milliseconds"] = [
            1000 * statistics.fmean(run["wall_seconds"]) for run in result.runs
        ]
        lines.append(line)
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """The result as a Markdown table."""
    head = (
        "row", "packs/s", "ms a pack", "CPU ms a pack (+ sidecar)", "x peer", "x peer in CPU",
        "RSS peak MiB", "PSS MiB", "sidecar RSS / PSS MiB", "state KiB", "pack MiB",
    )  # fmt: skip

    def number(value: float | None, scale: float = 1.0, digits: int = 0) -> str:
        return "" if value is None else f"{value / scale:,.{digits}f}"

    body = []
    for line in lines:
        beside = ""
        if line["sidecar_rss_peak_bytes"]:
            beside = f"{number(line['sidecar_rss_peak_bytes'], 2**20)} / {number(line['sidecar_pss_bytes'], 2**20)}"
        cpu = number(line["cpu_milliseconds_a_pack"], 1, 1)
        if line["sidecar_cpu_milliseconds_a_pack"]:
            cpu += f" + {number(line['sidecar_cpu_milliseconds_a_pack'], 1, 1)}"
        body.append(
            (
                line["title"], number(line["packs_per_second"], 1, 2), number(line["milliseconds_a_pack"], 1, 1), cpu,
                number(line["times_the_peer"], 1, 2), number(line["times_the_peer_in_cpu"], 1, 2),
                number(line["rss_peak_bytes"], 2**20), number(line["pss_bytes"], 2**20), beside,
                number(line["state_bytes"], 2**10, 1), number(line["pack_bytes"], 2**20, 1),
            )
        )  # fmt: skip
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body))


def limits(lines: list[dict[str, Any]]) -> str:
    """What is promised of sizes, beside what was measured."""
    sentences = []
    own = max((line["sidecar_own_bytes"] or 0 for line in lines), default=0)
    if own:
        verdict = "" if own <= LARGEST_SIDECAR_BYTES else ": TOO MUCH"
        sentences.append(
            f"Supervisor and producer together have {own / 1e6:,.0f} MB resident besides the ring "
            f"(at most {LARGEST_SIDECAR_BYTES / 1e6:,.0f} are promised){verdict}."
        )
    for line in lines:
        if line["record_bytes"]:
            share = line["record_bytes"] / line["batch_bytes"]
            verdict = "" if share <= LARGEST_RECORD_SHARE else ": TOO MUCH"
            sentences.append(
                f"A pack takes {share:.1%} of the bytes in the ring that the peer's batch of it has "
                f"(at most {LARGEST_RECORD_SHARE:.0%} are promised){verdict}."
            )
    return " ".join(sentences)


def machine(cores: list[int], load: float) -> str:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    busy = (
        ""
        if load < 0.5
        else f" Load average at the start {load:.1f}: the machine was busy, trust the CPU columns."
    )
    system = f"{model}, cores {cores} of {os.cpu_count()}, Python {platform.python_version()}"
    return f"{system}, resampler of ours: {resampling.choice()}, JPEG decoder of ours: {jpeg.choice()}.{busy}"


def write_docs(text: str) -> None:
    """Put the table between the marks of docs/performance.md, which is made when it is missing."""
    path = ROOT / "docs" / "performance.md"
    intro = "# Performance\nMeasured by `make bench`; the recipe is in `tests/benchmarks/README.md`.\n\n"
    old = path.read_text() if path.exists() else f"{intro}{MARKS[0]}\n{MARKS[1]}\n"
    before, rest = old.split(MARKS[0], 1)
    _, after = rest.split(MARKS[1], 1)
    path.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")
    note(f"wrote {path.relative_to(ROOT)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--packs", type=int, default=12, help="packs timed in each run (default 12)")
    parser.add_argument("--warmup", type=int, default=3, help="packs before them (default 3)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each row (default 3)")
    parser.add_argument("--rows", nargs="*", help="only these rows (names as in -o json)")
    parser.add_argument("--data", type=Path, help="a data set made by demo_data, instead of bench-out/data")
    parser.add_argument(
        "--profile", action="store_true", help="also print where packing and planning spend their time"
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/performance.md")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    load = os.getloadavg()[0]
    CACHE.mkdir(exist_ok=True)
    data = options.data or benchmark_data()
    cores = sorted(os.sched_getaffinity(0), reverse=True)[:2]
    digest = check_same_packs(data, cores[0], 2)
    note(f"peer and drop-in class yield the same packs ({digest[:12]})")
    results = [
        Result(row)
        for row in rows(data, options.warmup, options.packs)
        if (not options.rows or row.name in options.rows) and (len(cores) > 1 or not row.own_core)
    ]
    for repeat in range(options.repeats):
        for result in results if repeat % 2 == 0 else reversed(results):
            run = run_row(result.row, data, cores, options.packs)
            result.runs.append(run)
            mean = statistics.fmean(run["wall_seconds"]) * 1000
            note(f"repeat {repeat + 1}, {result.row.name}: {mean:.1f} ms a pack")
    lines = summarize(results)
    head = f"{machine(cores, load)} Medians of {options.repeats} runs of {options.packs} packs."
    text = f"{head}\n\n{table(lines)}\n\n{limits(lines)}"
    profiles = {}
    if options.profile:
        for name, arguments in (
            ("packing", ("packed", OUR_MODULE, str(data), "1", str(options.packs))),
            ("planning", ("plan", str(data), "1", str(20 * options.packs))),
        ):
            profiles[name] = measure(cores[0], Path(sys.executable), ("profile", *arguments))["profile"]
    if options.output == "json":
        print(
            json.dumps(
                {"machine": machine(cores, load), "digest": digest, "rows": lines, "profiles": profiles}
            )
        )
    else:
        print(text)
        for name, entries in profiles.items():
            print(f"\nWhere {name} spends its time (calls, own seconds, ..., cumulative seconds, function)")
            print("\n".join(entries))
    if options.write_docs:
        write_docs(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
