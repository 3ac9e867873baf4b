"""Dense attention masks of one sample, for attention without flex blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def attention_mask(split_lens: Sequence[int], attn_modes: Sequence[str]) -> np.ndarray:
    """float32 [n, n] with n the sum of `split_lens`: 0 where a row may attend to a column, -inf elsewhere.

    Every split sees all before it; `causal` sees itself as a lower triangle, `full` and `noise` as a block;
    the columns of a `noise` split are closed to all rows but its own.
    """
    total = sum(split_lens)
    allowed = np.zeros((total, total), dtype=bool)
    start = 0
    for length, mode in zip(split_lens, attn_modes, strict=False):
        stop = start + length
        allowed[start:stop, :start] = True
        allowed[start:stop, start:stop] = np.tri(length, dtype=bool) if mode == "causal" else True
        start = stop
    start = 0
    for length, mode in zip(split_lens, attn_modes, strict=False):
        stop = start + length
        if mode == "noise":
            allowed[:start, start:stop] = False
            allowed[stop:, start:stop] = False
        start = stop
    mask = np.full((total, total), -np.inf, dtype=np.float32)
    mask[allowed] = 0.0
    return mask
