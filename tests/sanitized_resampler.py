"""Exercises the compiled code, built with sanitizers: python -m tests.sanitized_resampler LIBRARY PAIRS [overflow].

Run by tests/unit/test_native_sanitized.py in a process of its own, into which the sanitizer's library is loaded first.
Every array has memory of exactly its size, with the sanitizer's guard around it. `overflow` makes a wrong call on
purpose, to see that it is found.
"""

from __future__ import annotations

import ctypes
import random
import sys
from pathlib import Path

import numpy as np

from bagelplane import native
from bagelplane.native import AxisWeights, PlaneWriter, Resampler, axis_weights

LONGEST = 200


def main(library: Path, pairs: int) -> None:
    draw = random.Random(3)
    writer, tables = PlaneWriter(library), np.zeros((3, 256), np.float32)
    resamplers = [Resampler(library, portable=portable) for portable in (False, True)]
    refused = 0
    for number in range(pairs):
        before, after = ((side(draw), side(draw)) for _ in range(2))
        if number % 5 == 0:  # a side that stays as it is
            after = (before[0], after[1]) if number % 2 else (after[0], before[1])
        content = draw.choice([0, 255, None])
        for resampler in resamplers:
            for vertical_first in (False, True):
                source, out = arrays(before, after, content, number)
                resampler.resize(source, out, vertical_first=vertical_first)
                writer.write(out, tables, np.empty((3, *out.shape[:2]), np.float32))
        refused += damaged(draw, resamplers, before, after)
    print(f"{pairs} size pairs, {4 * pairs} calls, {refused} of {pairs} calls with damaged weights refused")


def side(draw: random.Random) -> int:
    return int(2 ** draw.uniform(0, np.log2(LONGEST)))


def arrays(
    before: tuple[int, int], after: tuple[int, int], content: int | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    source = np.empty((before[1], before[0], 4), np.uint8)
    source[:] = np.random.default_rng(seed).integers(0, 256, source.shape) if content is None else content
    return source, np.empty((after[1], after[0], 3), np.uint8)


def damaged(
    draw: random.Random, resamplers: list[Resampler], before: tuple[int, int], after: tuple[int, int]
) -> bool:
    """One call with a number among the weights changed: refused, or without harm."""
    if before[0] == after[0]:
        return False
    good = axis_weights(before[0], after[0])
    parts = {name: getattr(good, name).copy() for name in ("start", "count", "weights")}
    flat = parts[draw.choice(list(parts))].reshape(-1)
    flat[draw.randrange(flat.size)] = draw.choice([-(2**31), -1, 0, 1, 7, before[0], 2**22, 2**31 - 1])
    source, out = arrays(before, after, None, 0)
    genuine = native.axis_weights

    def weights(inputs: int, outputs: int) -> AxisWeights:
        is_horizontal = (inputs, outputs) == (before[0], after[0])
        return AxisWeights(**parts) if is_horizontal else genuine(inputs, outputs)

    native.axis_weights = weights
    try:
        draw.choice(resamplers).resize(source, out, vertical_first=draw.random() < 0.5)
    except ValueError:
        return True
    finally:
        native.axis_weights = genuine
    return False


def overflow(library: Path) -> None:
    """Past the Python face, which would refuse it: an output one row shorter than is said."""
    resize = ctypes.CDLL(str(library)).bagelplane_resample
    source, out = arrays((40, 40), (40, 39), 0, 0)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    nothing = (pointer(None), pointer(None), pointer(None), size(0))
    at = (pointer(array.ctypes.data) for array in (source, out))
    resize(*(part for address in at for part in (address, size(40), size(40))), *nothing, *nothing, 0, 0)


if __name__ == "__main__":
    if sys.argv[3:] == ["overflow"]:
        overflow(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]))
