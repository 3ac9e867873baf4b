"""Measures the sidecar on local files and on a real S3 server behind 0, 20 and 200 ms a request, in one run.

    python tests/benchmarks/storage.py [--packs 24] [--repeats 3] [--latencies 0 20 200] [--chart FILE]

Every run is a fresh sidecar on one core, with default settings; the server, the proxy and the trainer have the others.
Rows take turns, and what is told of S3 is the median of its ratios to the local run of the same repeat. README.md
beside this has the recipe.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

import run as bench  # noqa: E402
import workload  # noqa: E402

PREFIX = "bench"
PROMISED = {20: 0.05, 200: 0.15}
"""Most that S3 may lose against local files, by milliseconds a request."""


@dataclass(slots=True)
class Row:
    latency_ms: int | None
    """None: local files."""
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def title(self) -> str:
        return "local files" if self.latency_ms is None else f"S3, {self.latency_ms} ms a request"


def resource(data: Path, storage: dict[str, Any] | None, bucket: str = "") -> dict[str, Any]:
    """The mix of `make bench` with default settings, from local files or from the bucket."""
    lines = workload.prepare(data)
    made = workload.resource(data, lines)
    if storage is not None:
        made = json.loads(json.dumps(made).replace(str(data), f"s3://{bucket}/{PREFIX}"))
        made["spec"]["storage"] = storage
    made["spec"]["dataplane"] = {}
    return made


def upload(data: Path, server: Any) -> None:
    from bagelplane.storage import open_storage

    storage = open_storage(server.settings)
    for path in sorted(path for path in data.rglob("*") if path.is_file()):
        uri = f"s3://{server.bucket}/{PREFIX}/{path.relative_to(data)}"
        storage.write_bytes(uri, path.read_bytes())


# --- in processes of their own -----------------------------------------------------------------------


def be_sidecar(file: str, directory: str) -> None:
    from bagelplane.sidecar.supervisor import SidecarSettings, run_sidecar
    from bagelplane.spec import BagelDataset

    dataset = BagelDataset.from_mapping(json.loads(Path(file).read_text()))
    run_sidecar(dataset, SidecarSettings(directory=Path(directory), resume="none", log_level=logging.WARNING))


def be_trainer(directory: str, pid: str, warmup: str, packs: str) -> None:
    import hashlib

    from measure import processes_below, resources_of

    from bagelplane.client import NumpyReader

    began = time.perf_counter()
    reader = NumpyReader(directory)
    hashed = hashlib.sha256()

    def take() -> None:
        pack, images = reader.next_pack()
        hashed.update(json.dumps([pack.step, pack.scalars]).encode())
        for image in images[:1]:
            hashed.update(image[0].tobytes())

    take()
    result: dict[str, Any] = {"first_pack_seconds": time.perf_counter() - began}
    for _ in range(int(warmup) - 1):
        take()
    before, before_status = resources_of(processes_below(int(pid))), reader.status()
    result["begins"] = begins = time.time()
    for _ in range(int(packs)):
        take()
    result["ends"] = time.time()
    after, after_status = resources_of(processes_below(int(pid))), reader.status()
    result["seconds_a_pack"] = (result["ends"] - begins) / int(packs)
    result["cpu_seconds_a_pack"] = (after["cpu_seconds"] - before["cpu_seconds"]) / int(packs)
    result["own_bytes"] = after["own_bytes"]
    result["digest"] = hashed.hexdigest()
    result["statuses"] = [before_status, after_status]
    reader.close()
    print(json.dumps(result, default=str))


# --- one run ---------------------------------------------------------------------------------------


def start(core: int | None, *arguments: str | Path, log: Any = None) -> subprocess.Popen[bytes]:
    pin = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), *map(str, arguments)]
    if core is not None:
        command = [sys.executable, "-c", pin, str(core), *command]
    return subprocess.Popen(command, env=bench.child_environment(), stdout=subprocess.PIPE, stderr=log)


def run_once(made: dict[str, Any], cores: list[int], warmup: int, packs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bp-bench-", dir="/dev/shm") as folder:
        file, directory, log = Path(folder) / "dataset.json", Path(folder) / "run", Path(folder) / "log"
        file.write_text(json.dumps(made))
        with log.open("wb") as output:
            sidecar = start(cores[0], "sidecar", file, directory, log=output)
        try:
            deadline = time.monotonic() + 60
            while not (directory / "sidecar.sock").exists():
                if sidecar.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the sidecar does not serve: {log.read_text()[-2000:]}")
                time.sleep(0.02)
            trainer = start(cores[-1], "trainer", directory, str(sidecar.pid), str(warmup), str(packs))
            try:
                output_bytes, _ = trainer.communicate(timeout=bench.DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                trainer.kill()
                raise
            if trainer.returncode:
                raise RuntimeError(f"the trainer ended with {trainer.returncode}: {log.read_text()[-2000:]}")
        finally:
            sidecar.terminate()
            sidecar.wait(60)
            assert sidecar.stdout
            sidecar.stdout.close()
    result: dict[str, Any] = json.loads(output_bytes.splitlines()[-1])
    return result


def account(requests: list[Any], packs: int) -> dict[str, Any]:
    """What was asked of the store in a whole run: by kind, a pack, and what was asked twice."""
    kinds: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for request in requests:
        path, _, query = request.target.partition("?")
        kind = "list" if "list-type=2" in query else request.method.lower()
        kinds[kind] += 1
        asked[f"{kind} {unquote(path)} {query if kind == 'list' else request.range}"] += 1
    twice = {name: count for name, count in asked.items() if count > 1}
    parquet = sum(request.body_bytes for request in requests if ".parquet" in request.target)
    return {
        "requests": dict(kinds),
        "requests_a_pack": sum(kinds.values()) / packs,
        "bytes_a_pack": sum(request.body_bytes for request in requests) / packs,
        "parquet_bytes": parquet,
        "asked_twice": twice,
    }


# --- results ---------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    local = rows[0]
    names = "packs/s, of local, ms a pack, sidecar CPU ms a pack, first pack s, requests a pack, MB a pack, lists, "
    names += "looked up, read"
    lines = ["| data | " + " | ".join(names.split(", ")) + " |", "|---|" + "---:|" * len(names.split(", "))]
    for row in rows:
        ratios = [
            a["seconds_a_pack"] / b["seconds_a_pack"] for a, b in zip(local.runs, row.runs, strict=True)
        ]

        def middle(name: str, row: Row = row) -> float:
            return statistics.median(run[name] for run in row.runs)

        cells = [
            row.title, f"{1 / middle('seconds_a_pack'):.2f}", f"{statistics.median(ratios):.3f}",
            f"{middle('seconds_a_pack') * 1000:.0f}", f"{middle('cpu_seconds_a_pack') * 1000:.0f}",
            f"{middle('first_pack_seconds'):.2f}",
        ]  # fmt: skip
        asked = row.runs[-1].get("account")
        if asked:
            kinds = asked["requests"]
            cells += [f"{asked['requests_a_pack']:.1f}", f"{asked['bytes_a_pack'] / 1e6:.1f}"]
            cells += [str(kinds.get(kind, 0)) for kind in ("list", "head", "get")]
        else:
            cells += [""] * 5
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    remote = [row for row in rows if row.latency_ms is not None]
    local = rows[0].runs
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for row in remote:
        ratios = [a["seconds_a_pack"] / b["seconds_a_pack"] for a, b in zip(local, row.runs, strict=True)]
        axes.plot([row.title.removeprefix("S3, ")] * len(ratios), ratios, "o", color="tab:blue", alpha=0.5)
    middles = [
        statistics.median(
            a["seconds_a_pack"] / b["seconds_a_pack"] for a, b in zip(local, row.runs, strict=True)
        )
        for row in remote
    ]
    axes.plot(
        [row.title.removeprefix("S3, ") for row in remote], middles, "-", color="tab:blue", label="median"
    )
    axes.axhline(1.0, color="tab:gray", label="local files")
    for row in remote:
        if row.latency_ms in PROMISED:
            least = 1 - PROMISED[row.latency_ms]
            axes.plot([row.title.removeprefix("S3, ")], [least], "_", color="tab:red", markersize=30)
    axes.set(ylim=(0, 1.2), ylabel="packs a second, of local files", title="Latency against throughput")
    axes.legend(loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--packs", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--latencies", type=int, nargs="*", default=[0, 20, 200], help="milliseconds a request"
    )
    parser.add_argument("--chart", type=Path, default=bench.CACHE / "storage.png")
    options = parser.parse_args()

    from tests.services.proxy import serve_proxy
    from tests.services.s3 import serve_versitygw

    bench.CACHE.mkdir(exist_ok=True)
    data = bench.benchmark_data()
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    if len(cores) > 1:
        os.sched_setaffinity(0, set(cores[1:]))  # the server and the proxy, which inherit it
    rows = [Row(None), *(Row(latency) for latency in options.latencies)]
    with (
        tempfile.TemporaryDirectory(prefix="bp-bench-", dir=bench.CACHE) as folder,
        serve_versitygw(Path(folder), say=bench.note) as server,
        serve_proxy(server.url) as proxy,
    ):
        bench.note("putting the data into the bucket")
        upload(data, server)
        storage = {"endpointURL": proxy.url, "credentialsDir": str(server.credentials_dir)}
        for repeat in range(options.repeats):
            for row in rows if repeat % 2 == 0 else reversed(rows):
                remote = None if row.latency_ms is None else storage
                proxy.latency_seconds, before = (row.latency_ms or 0) / 1000, len(proxy.requests)
                result = run_once(resource(data, remote, server.bucket), cores, options.warmup, options.packs)
                if remote is not None:
                    result["account"] = account(proxy.requests[before:], options.warmup + options.packs)
                row.runs.append(result)
                bench.note(
                    f"repeat {repeat + 1}, {row.title}: {result['seconds_a_pack'] * 1000:.0f} ms a pack, "
                    f"{result['cpu_seconds_a_pack'] * 1000:.0f} ms CPU, first after "
                    f"{result['first_pack_seconds']:.2f} s"
                )
    digests = {run["digest"] for row in rows for run in row.runs}
    print(
        f"{bench.machine(cores, os.getloadavg()[0])} Medians of {options.repeats} runs of {options.packs} packs.\n"
    )
    print(table(rows))
    print(f"\nAll rows gave the same packs: {'yes' if len(digests) == 1 else 'NO'}.")
    for row in rows[1:]:
        twice = row.runs[-1]["account"]["asked_twice"]
        print(f"{row.title}: asked for twice: {sum(count - 1 for count in twice.values())}", end="; ")
        print(", ".join(f"{name} ({count})" for name, count in sorted(twice.items())[:4]) or "nothing")
    draw(rows, options.chart)
    bench.note(f"wrote {options.chart}")
    return 0 if len(digests) == 1 else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["sidecar"]:
        be_sidecar(*sys.argv[2:])
    elif sys.argv[1:2] == ["trainer"]:
        be_trainer(*sys.argv[2:])
    else:
        raise SystemExit(main())
