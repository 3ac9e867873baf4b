"""One measurement in a process of its own: prints a JSON object. Started by run.py, in either environment.

python measure.py packed MODULE DATA WARMUP PACKS     iterate a PackedDataset of MODULE (the peer's or ours)
python measure.py client KIND DIRECTORY PID WARMUP PACKS   take packs from sidecar PID: `tensors` or `raw`
python measure.py sidecar DATA DIRECTORY              be that sidecar
python measure.py floor DATA WARMUP PACKS             Pillow alone, on the images those packs emit
python measure.py plan DATA WARMUP PACKS              plan without pixels
python measure.py profile COMMAND ARGUMENTS...        where the time of another measurement goes
python measure.py digest MODULE DATA PACKS            digest of the packs, to see that both yield the same
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import logging
import os
import pickle
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "golden")]

import workload  # noqa: E402


def timed(take: Callable[[], object], warmup: int, packs: int) -> dict[str, Any]:
    """Call `take` for each pack; wall and CPU seconds of the process for each, after the warm-up."""
    for _ in range(warmup):
        take()
    wall, cpu = [], []
    for _ in range(packs):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        take()
        wall.append(time.perf_counter() - wall_start)
        cpu.append(time.process_time() - cpu_start)
    return {"wall_seconds": wall, "cpu_seconds": cpu, **memory()}


def memory() -> dict[str, int]:
    """Largest resident size so far, and the proportional size now (pages shared by n count as 1/n)."""
    status = Path("/proc/self/status").read_text()
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return {"rss_peak_bytes": _kilobytes(status, "VmHWM"), "pss_bytes": _kilobytes(rollup, "Pss")}


def _kilobytes(text: str, field: str) -> int:
    line = next(line for line in text.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def bytes_of(value: object) -> int:
    """Of all tensors and arrays in a pack."""
    if hasattr(value, "element_size"):
        return int(value.numel() * value.element_size())  # type: ignore[attr-defined]
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(bytes_of, value))
    return 0


def processes_below(pid: int) -> list[int]:
    """The process and all its descendants."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in children.read_text().split()]
    return found


def resources_of(pids: list[int]) -> dict[str, float]:
    """Summed over processes: CPU seconds so far, largest resident size, proportional size now, and resident size now
    without shared memory, which is the ring."""
    ticks, peak, pss, own = 0, 0, 0, 0
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(stat[11]) + int(stat[12])
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            peak += int(line.split()[1]) * 1024 if line.startswith("VmHWM:") else 0
            own += int(line.split()[1]) * 1024 if line.startswith(("RssAnon:", "RssFile:")) else 0
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            pss += int(line.split()[1]) * 1024 if line.startswith("Pss:") else 0
    seconds = ticks / os.sysconf("SC_CLK_TCK")
    return {"cpu_seconds": seconds, "rss_peak_bytes": peak, "pss_bytes": pss, "own_bytes": own}


def build_packed(module: str, data: Path) -> Any:
    import record
    import torch

    torch.set_num_threads(1)
    lines = workload.prepare(data)
    return record.build(importlib.import_module(module), workload.packing_config(lines), data, rank=0)


def measure_packed(module: str, data: str, warmup: str, packs: str) -> dict[str, Any]:
    dataset = build_packed(module, Path(data))
    iterator = iter(dataset)
    sizes: dict[str, int] = {"pack_bytes": 0, "state_bytes": 0}

    def take() -> None:
        pack = next(iterator)
        sizes["pack_bytes"] = max(sizes["pack_bytes"], bytes_of(pack))
        sizes["sequence_length"] = pack["sequence_length"]

    result = timed(take, int(warmup), int(packs))
    for _ in range(5):  # not timed: the state grows with the buffer in the peer
        next(iterator)
        state = dataset.state_dict()
        sizes["state_bytes"] = max(sizes["state_bytes"], len(pickle.dumps(state)))
        sizes["state_buffered_samples"] = max(sizes.get("state_buffered_samples", 0), len(state["buffer"]))
    return {**result, **sizes}


def measure_client(kind: str, directory: str, pid: str, warmup: str, packs: str) -> dict[str, Any]:
    reader: Any
    if kind == "raw":
        from bagelplane.client import NumpyReader
        from bagelplane.engine.layout import assemble
        from bagelplane.shm.record import record_size

        reader = NumpyReader(directory)
        take_pack = reader.next_pack
    else:
        import torch

        from bagelplane.client import PackedLoader

        torch.set_num_threads(1)
        reader = PackedLoader(directory)
        take_pack = reader.__next__
    sizes = {"pack_bytes": 0, "state_bytes": 0}

    def take() -> None:
        pack = take_pack()
        if kind == "raw":
            pack = [pack[0].arrays, pack[1]]
        sizes["pack_bytes"] = max(sizes["pack_bytes"], bytes_of(pack))

    for _ in range(int(warmup)):  # first, so that the packs made ahead are behind us
        take()
    before = resources_of(processes_below(int(pid)))
    result = timed(take, 0, int(packs))
    after = resources_of(processes_below(int(pid)))
    result["sidecar_cpu_seconds"] = [(after["cpu_seconds"] - before["cpu_seconds"]) / int(packs)]
    result["sidecar_rss_peak_bytes"] = int(after["rss_peak_bytes"])
    result["sidecar_pss_bytes"] = int(after["pss_bytes"])
    result["sidecar_own_bytes"] = int(after["own_bytes"])
    for _ in range(5):
        pack = take_pack()
        sizes["state_bytes"] = max(sizes["state_bytes"], len(json.dumps(reader.state_dict())))
        if kind == "raw":
            sizes["record_bytes"] = sizes.get("record_bytes", 0) + record_size(pack[0])
            sizes["batch_bytes"] = sizes.get("batch_bytes", 0) + bytes_of(assemble(*pack))
    reader.close()
    return {**result, **sizes}


def open_stream(data: Path) -> Any:
    from bagelplane.engine.drops import DropLog
    from bagelplane.settings import StreamSettings
    from bagelplane.spec import BagelDataset
    from bagelplane.stream import open_worker_stream
    from bagelplane.topology import Topology

    dataset = BagelDataset.from_mapping(workload.resource(data, workload.prepare(data)))
    return open_worker_stream(
        StreamSettings.from_resource(dataset),
        Topology(0, 1, 0),
        0,
        known_bad={},
        drops=DropLog(logging.getLogger("bench")),
    )


def measure_plan(data: str, warmup: str, packs: str) -> dict[str, Any]:
    stream = open_stream(Path(data))
    return timed(lambda: stream.plan_pack(verify=False), int(warmup), int(packs))


def profile(command: str, *arguments: str) -> dict[str, Any]:
    """Another measurement under cProfile: the functions that take the most time of their own."""
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.runcall(COMMANDS[command], *arguments)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(25)
    rows = [line.strip() for line in text.getvalue().splitlines() if re.match(r"\s+\d", line)]
    return {"profile": [re.sub(r"\S*/(?=[^/]+/[^/]+\.py:)", "", row) for row in rows[1:]]}


def measure_floor(data: str, warmup: str, packs: str) -> dict[str, Any]:
    """Decode and resize what the packs emit, each distinct image and size once, with Pillow and nothing else."""
    from PIL import Image

    from bagelplane.engine.layout import build_pack

    stream = open_stream(Path(data))
    planner = stream._planner
    work = []
    for number in range(int(warmup) + int(packs)):
        plan = planner.plan()
        _, images = build_pack(
            plan.pack.placed,
            step=number,
            length=plan.pack.length,
            data_indexes=plan.pack.data_indexes(),
            config=planner.config,
            tokens=stream._tokens,
        )
        by_source: dict[str, tuple[bytes, list[tuple[int, int]]]] = {}
        for image in images:
            entry = by_source.setdefault(image.source.key, (image.source.data, []))
            entry[1].append((image.width, image.height))
        work.append(list(by_source.values()))
    pending = iter(work)

    def take() -> None:
        for encoded, sizes in next(pending):
            with Image.open(io.BytesIO(encoded)) as opened:
                picture = opened.convert("RGB")
            for size in sizes:
                picture.resize(size, Image.Resampling.BICUBIC)

    result = timed(take, int(warmup), int(packs))
    counted = work[int(warmup) :]
    result["images_a_pack"] = sum(len(pack) for pack in counted) / len(counted)
    result["resizes_a_pack"] = sum(len(sizes) for pack in counted for _, sizes in pack) / len(counted)
    return result


def measure_digest(module: str, data: str, packs: str) -> dict[str, Any]:
    from hashing import describe

    iterator = iter(build_packed(module, Path(data)))
    described = [json.dumps(describe(next(iterator))) for _ in range(int(packs))]
    return {"digest": hashlib.sha256("\n".join(described).encode()).hexdigest()}


def run_sidecar(data: str, directory: str) -> dict[str, Any]:
    from bagelplane.sidecar.supervisor import SidecarSettings, run_sidecar
    from bagelplane.spec import BagelDataset

    dataset = BagelDataset.from_mapping(workload.resource(Path(data), workload.prepare(Path(data))))
    run_sidecar(dataset, SidecarSettings(directory=Path(directory), resume="none", log_level=logging.ERROR))
    return {}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "packed": measure_packed,
    "client": measure_client,
    "sidecar": run_sidecar,
    "floor": measure_floor,
    "plan": measure_plan,
    "profile": profile,
    "digest": measure_digest,
}

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    command, *arguments = sys.argv[1:]
    print(json.dumps(COMMANDS[command](*arguments)))
