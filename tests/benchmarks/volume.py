"""What the size of a data set costs: start-up, memory and planning, with an index and without, as a table and a PNG.

    python tests/benchmarks/volume.py --units 10 1000 10000 --out volume-out

A unit is a Parquet file of 16 pictures of 960 x 800 pixels with captions. Each figure is of a process of its own.
Start-up is from the resource to the first plan; the rest is per pack over the next ones. CPU time, so that a busy
machine matters less.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

ROWS, PACKS = 16, 200
SPEC = """\
apiVersion: bagelplane.io/v1alpha1
kind: BagelDataset
metadata: {{name: volume}}
spec:
  profile: Strict
  tokenizer: {{uri: {tokenizer}}}
  groups:
  - name: pictures
    type: t2i_pretrain
    datasets: [{{name: t2i, uri: {data}}}]
    imageTransform: {{stride: 16, maxSize: 1024, minSize: 512}}
  sharding: {{mode: Bagel, workersPerRank: 0}}
  snapshots: {{uri: {snapshots}}}
"""


def make_data(folder: Path, units: int) -> None:
    """Eight files, and links to them: it is the number of objects that matters here, not their bytes."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    folder.mkdir(parents=True)
    for unit in range(min(8, units)):
        pictures, texts = [], []
        for row in range(ROWS):
            out = io.BytesIO()
            pixels = np.random.RandomState(unit * ROWS + row).randint(0, 255, (80, 96, 3), np.uint8)
            Image.fromarray(pixels).resize((960, 800)).save(out, "JPEG", quality=90)
            pictures.append(out.getvalue())
            texts.append(json.dumps({"a": f"picture number {row} of {unit}, as it is", "b": f"no. {row}"}))
        pq.write_table(pa.table({"image": pictures, "captions": texts}), folder / f"part-{unit:06d}.parquet")
    for unit in range(8, units):
        (folder / f"part-{unit:06d}.parquet").hardlink_to(folder / f"part-{unit % 8:06d}.parquet")


def measure(file: Path) -> dict[str, float]:
    """In this process."""
    from bagelplane.spec import load_dataset
    from bagelplane.stream import open_rank_stream
    from bagelplane.topology import Topology

    dataset = load_dataset(file)
    begun = time.process_time()
    with closing(open_rank_stream(dataset, Topology(0, 1, 0), decode_threads=0)) as stream:
        stream.plan_pack()
        opened = time.process_time()
        samples = sum(len(stream.plan_pack().pack.placed) for _ in range(PACKS))
        planned = time.process_time()
    return {
        "start_seconds": opened - begun,
        "ms_a_pack": 1000 * (planned - opened) / PACKS,
        "samples_a_pack": samples / PACKS,
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_process(*arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--units", type=int, nargs="+", default=[10, 1000, 10_000])
    parser.add_argument("--out", type=Path, default=Path("volume-out"))
    parser.add_argument("--measure", type=Path)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    tokenizer = Path(__file__).parents[1] / "golden/data/tokenizer.json"
    rows = []
    for units in arguments.units:
        folder = arguments.out / str(units)
        if not (folder / "data").exists():
            make_data(folder / "data", units)
        file = folder / "dataset.yaml"
        file.write_text(SPEC.format(tokenizer=tokenizer, data=folder / "data", snapshots=folder / "none"))
        row: dict[str, Any] = {"units": units, "data": json.loads(in_process(__file__, "--measure", file))}
        file.write_text(
            SPEC.format(tokenizer=tokenizer, data=folder / "data", snapshots=folder / "snapshots")
        )
        report = json.loads(in_process("-m", "bagelplane.cli.app", "index", file, "-o", "json"))
        row["index_seconds"] = report["seconds"]
        row["index_bytes"] = sum(
            path.stat().st_size for path in (folder / "snapshots/index").rglob("*.parquet")
        )
        row["index"] = json.loads(in_process(__file__, "--measure", file))
        rows.append(row)
        print(json.dumps(row))
    (arguments.out / "volume.json").write_text(json.dumps(rows, indent=1))
    draw(rows, arguments.out / "volume.png")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    names = {
        "start_seconds": "start-up, s",
        "ms_a_pack": "planning, ms a pack",
        "peak_megabytes": "peak memory, MB",
    }
    for axis, (name, title) in zip(axes, names.items(), strict=True):
        for source, colour in (("data", "#c44e52"), ("index", "#4c72b0")):
            units, values = [row["units"] for row in rows], [row[source][name] for row in rows]
            label = "from an index" if source == "index" else "from the data"
            axis.plot(units, values, "o-", color=colour, label=label)
        axis.set(xscale="log", xlabel="units", title=title)
        axis.set_ylim(bottom=0)
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
