"""Runs a training script as it is, and tells the digest of every pack that its PackedLoader hands over.

    torchrun watch.py train.py

A line of JSON a pack on stdout.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from hashing import describe, digest

from bagelplane.client import PackedLoader

_next = PackedLoader.__next__


def watched_next(loader: PackedLoader) -> dict[str, Any]:
    step = loader.step
    batch = _next(loader)
    # One write below the size that a pipe keeps whole: two ranks share the log.
    line = {"rank": loader.place.rank, "step": step, "pack": digest(describe(batch))}
    os.write(1, f"{json.dumps(line)}\n".encode())
    return batch


PackedLoader.__next__ = watched_next  # type: ignore[method-assign]
runpy.run_path(sys.argv[1], run_name="__main__")
