"""Streams of profile Strict: recordings of our own, so that they stay what they are.

    python -m tests.golden.strict_streams        # writes strict/own_*.json anew

Nobody else packs like this, so these say nothing of right and wrong (the tests of properties do), only of change.
The configurations are those of recorded streams of the peer, over `data` and over the damaged copy of `odd` that
broken_images.py makes.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from bagelplane.spec import BagelDataset
from bagelplane.stream import RankStream, open_rank_stream
from bagelplane.topology import Topology
from tests.golden.broken_images import make_data
from tests.golden.hashing import describe
from tests.golden.recordings import HERE, load_recording, next_batch, resource_of

FOLDER = HERE / "strict"
PACKS = 12
STREAMS = {
    "a_default": False, "b_masks_interp": False, "e_tight": False, "full_buffer": False, "odd_default": True,
    "odd_tight": True, "odd_workers": True, "frames": True,
}  # fmt: skip
"""Configurations by name, and whether they read the damaged data."""


def dataset_of(name: str, damaged: Path) -> BagelDataset:
    return resource_of(load_recording(name), str(damaged) if STREAMS[name] else None, profile="Strict")


def open_stream(name: str, damaged: Path, **options: Any) -> RankStream:
    recording = load_recording(name)
    topology = Topology(0, len(recording.ranks), recording.num_workers)
    return open_rank_stream(dataset_of(name, damaged), topology, **{"decode_threads": 0, **options})


def described(batch: dict[str, Any]) -> dict[str, Any]:
    """A pack in a few words and a digest of all that a trainer gets."""
    text = json.dumps(describe(batch), sort_keys=True)
    return {
        "length": batch["sequence_length"],
        "rows": [[entry["dataset_name"][:3], entry["data_indexes"]] for entry in batch["batch_data_indexes"]],
        "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def recorded(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"own_{name}.json").read_text())
    return loaded


def record(name: str, damaged: Path) -> dict[str, Any]:
    stream = open_stream(name, damaged)
    packs = [described(next_batch(stream)[1]) for _ in range(PACKS)]
    return {"packs": packs, "drops": stream.state()["drops"]}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        damaged = make_data(Path(folder) / "damaged")
        for name in STREAMS:
            path = FOLDER / f"own_{name}.json"
            path.write_text(json.dumps(record(name, damaged), separators=(",", ":")) + "\n")
            print(path.name, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
