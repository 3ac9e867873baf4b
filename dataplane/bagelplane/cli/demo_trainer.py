"""A trainer of the demo: takes packs as a real one does, and writes down what it got instead of training.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 BAGELPLANE_DIR=... python -m bagelplane.cli.demo_trainer OUT.jsonl UNTIL

Uses `PackedLoader`; where torch is not installed, or with `numpy` behind all that, `NumpyReader`, which starts sooner.
Writes one line a pack, at once, so that a kill loses nothing. Ends before pack UNTIL; with `hold` behind it, it stays
there, attached, until it is killed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bagelplane.errors import BagelplaneError

TRAINING_SECONDS = 0.05
"""How long a step of this trainer takes beside its data."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One pack as a trainer got it: digests of its entries by key, and how many bits they are made from."""

    step: int
    digests: dict[str, str]
    bits: int
    tokens: int
    wait_seconds: float = 0.0


def describe(step: int, batch: Mapping[str, Any], wait_seconds: float = 0.0) -> Taken:
    """The SHA-256 of each entry: dtype, shape and bytes of arrays, JSON of everything else."""
    digests, total = {}, 0
    for key, value in batch.items():
        digest = hashlib.sha256()
        for part in _parts(value):
            digest.update(part)
            total += len(part)
        digests[key] = digest.hexdigest()
    return Taken(step, digests, 8 * total, int(batch["sequence_length"]), wait_seconds)


def _parts(value: Any) -> Iterator[bytes]:
    items = value if isinstance(value, list) and value and hasattr(value[0], "dtype") else [value]
    for item in items:
        if hasattr(item, "dtype"):
            array = np.ascontiguousarray(item)  # of a tensor as well
            yield f"{array.dtype} {array.shape}".encode()
            yield array.tobytes()
        else:
            yield json.dumps(item, sort_keys=True).encode()


def read_taken(path: Path) -> list[Taken]:
    """What a trainer wrote so far; a line that a kill cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [Taken(**json.loads(line)) for line in lines if line.endswith("\n")]


def open_loader(*, numpy: bool = False) -> Any:
    """The client for this process."""
    if numpy or importlib.util.find_spec("torch") is None:
        from bagelplane.client import NumpyReader

        return NumpyReader()
    from bagelplane.client import PackedLoader

    return PackedLoader()


def train(out: Path, until: int, *, hold: bool, numpy: bool = False) -> None:
    """Takes packs, from wherever the sidecar says that this rank stands."""
    with open_loader(numpy=numpy) as loader, out.open("a", encoding="utf-8") as lines:
        step = loader.state_dict()["step"]
        while step < until:
            asked = time.monotonic()
            batch = next(loader)
            taken = describe(step, batch, time.monotonic() - asked)
            lines.write(json.dumps(asdict(taken)) + "\n")
            lines.flush()
            step += 1
            time.sleep(TRAINING_SECONDS)
        while hold:
            signal.pause()


if __name__ == "__main__":
    try:
        train(Path(sys.argv[1]), int(sys.argv[2]), hold="hold" in sys.argv[3:], numpy="numpy" in sys.argv[3:])
    except BagelplaneError as error:
        sys.exit(f"error: {error}")
