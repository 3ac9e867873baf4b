"""How long a trainer waits for a pack that is ready, at 1 and at 8 ranks; the sidecar makes packs of nothing.

    python tests/benchmarks/handover.py [--packs 40] [--ranks 1 8]

README.md beside it says what the rows are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from bagelplane.client import NumpyReader  # noqa: E402
from bagelplane.engine.pack import Pack  # noqa: E402
from bagelplane.spec import BagelDataset  # noqa: E402
from tests.integration import fake_stream  # noqa: E402
from tests.integration.fake_sidecar import make_pack  # noqa: E402
from tests.integration.sidecar_harness import Sidecar, make_dataset  # noqa: E402

IMAGES, SIDE_PIXELS = 12, 504
RING_BYTES = 64 << 20
WARM_UP_PACKS = 5
DEADLINE_SECONDS = 600.0
ROWS = {
    "hand-over alone": {"prefetch": 0, "convert": False},
    "converted when asked for": {"prefetch": 0, "convert": True},
    "converted ahead": {"prefetch": 1, "convert": True},
}


class Stream(fake_stream.FakeStream):
    """Packs of one size with a whole mapping: 12 images of 504 x 504, two of them for the ViT too."""

    def _build(self, draws: Any, state: dict[str, Any]) -> Pack:
        pack, _ = make_pack(self.step)
        shapes = [(SIDE_PIXELS, SIDE_PIXELS)] * IMAGES
        images = {"image_shapes": shapes, "vae_images": list(range(IMAGES)), "vit_images": [0, 1]}
        return replace(pack, state=state, **images)


def open_rank_stream(dataset: BagelDataset, topology: fake_stream.Topology, **options: Any) -> Stream:
    """What a producer of this benchmark runs."""
    options.pop("decode_threads", None)
    state, known_bad = options.pop("state", None), options.pop("known_bad", None) or {}
    return Stream(dataset, topology, state, known_bad, options.pop("on_bad_images", lambda _: None))


Topology, source_looks = fake_stream.Topology, fake_stream.source_looks


def trainer(directory: str, rank: int, ranks: int, packs: int, row: Mapping[str, Any]) -> None:
    """Takes packs, with pauses in which the sidecar makes more; prints (wall, CPU) seconds of its thread for each."""
    reader = NumpyReader(
        directory, rank=rank, local_rank=rank, world_size=ranks, prefetch=row["prefetch"],
        timeout_seconds=DEADLINE_SECONDS,
    )  # fmt: skip
    take = reader.__next__ if row["convert"] else lambda: reader.take(_nothing)
    seconds = []
    with reader:
        for number in range(WARM_UP_PACKS + packs):
            begun, begun_cpu = time.perf_counter(), time.thread_time()
            take()
            if number >= WARM_UP_PACKS:
                seconds.append((time.perf_counter() - begun, time.thread_time() - begun_cpu))
            time.sleep(0.05 + 0.05 * ranks)  # the step
    print(json.dumps(seconds))


def _nothing(pack: Pack, images: Any) -> None:
    pass


def measure(ranks: int, packs: int, row: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(wall, CPU) seconds for each pack of each rank."""
    resource = make_dataset(snapshots=None).to_mapping()
    resource["spec"]["dataplane"]["ring"] = {"size": RING_BYTES}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        dataset = BagelDataset.from_mapping(resource)
        factory = "tests.benchmarks.handover:open_rank_stream"
        sidecar = Sidecar(Path(folder), dataset, stream_factory=factory, local_ranks=ranks, world_size=ranks)
        trainers = []
        try:
            sidecar.wait_serving(DEADLINE_SECONDS)
            for rank in range(ranks):
                task = json.dumps([str(sidecar.directory), rank, ranks, packs, row])
                arguments = [sys.executable, __file__, "--trainer", task]
                trainers.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True))
            told = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in trainers]
            assert not any(process.returncode for process in trainers), sidecar.tail()
            return [(wall, cpu) for text in told for wall, cpu in json.loads(text)]
        finally:
            for process in trainers:
                process.kill()
                process.wait()
            sidecar.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packs", type=int, default=40, help="packs measured for each rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer:
        trainer(*json.loads(arguments.trainer))
        return
    megabytes = IMAGES * SIDE_PIXELS**2 * 3 / 1e6
    print(f"Waiting for a ready pack of {megabytes:.1f} MB of pixels, milliseconds")
    print(f"{'ranks':>5}  {'row':<26}{'median':>8}{'p90':>8}{'median CPU':>12}")
    for ranks in arguments.ranks:
        for name, row in ROWS.items():
            wall, cpu = zip(*measure(ranks, arguments.packs, row), strict=True)
            figures = (statistics.median(wall), statistics.quantiles(wall, n=10)[-1], statistics.median(cpu))
            median, p90, median_cpu = (figure * 1e3 for figure in figures)
            print(f"{ranks:>5}  {name:<26}{median:8.2f}{p90:8.2f}{median_cpu:12.2f}", flush=True)


if __name__ == "__main__":
    main()
