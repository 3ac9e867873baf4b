"""Position ids of image tokens on a grid with a largest side, plain or interpolated."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_BLOCK = 16  # elements that torch's vectorised arange makes at a time, as two halves
_HALF = 8


def float32_arange(start: float, end: float, step: float) -> np.ndarray:
    """`torch.arange(start, end, step)` in float32, bit for bit as torch's x86 kernel rounds it.

    Blocks of 16 are made as two halves of 8, each from its first element; the tail element by element
    (STREAM, vit_image; the recorded streams hold grids where plain arithmetic differs).
    """
    count = int(np.ceil((end - start) / step))
    index = np.arange(count)
    plain = (start + step * index).astype(np.float32)
    vectorised = count - count % _BLOCK
    first = plain[:vectorised:_HALF].astype(np.float64)
    lanes = step * np.arange(_HALF)
    plain[:vectorised] = (first[:, None] + lanes[None, :]).astype(np.float32).reshape(-1)
    return plain


@lru_cache(maxsize=4096)
def _interpolated_steps(count: int, max_per_side: int) -> np.ndarray:
    boundaries = float32_arange(1 / max_per_side, 1.0, 1 / max_per_side)
    fractions = float32_arange(0.0, 1 - 1e-6, 1 / count)
    return np.searchsorted(boundaries, fractions, side="right").astype(np.int64)


@lru_cache(maxsize=4096)
def grid_positions(rows: int, columns: int, max_per_side: int, interpolate: bool) -> np.ndarray:
    """Row-major int64 [rows * columns] of `row * max_per_side + column`; read-only, shared between calls."""
    if interpolate:
        row_ids, column_ids = (
            _interpolated_steps(rows, max_per_side),
            _interpolated_steps(columns, max_per_side),
        )
    else:
        row_ids, column_ids = np.arange(rows), np.arange(columns)
    positions: np.ndarray = (
        (row_ids[:, None] * max_per_side + column_ids[None, :]).reshape(-1).astype(np.int64)
    )
    positions.setflags(write=False)
    return positions
