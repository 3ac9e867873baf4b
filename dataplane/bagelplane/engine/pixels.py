"""From uint8 pixels to the floats that a model sees: normalised, planar or cut into patches.

Every result equals float32 arithmetic `(x / 255 - mean) / std`, step by step, bit for bit. It releases the GIL
while it works, keeps nothing but tables, may run in any number of threads. NumPy does it all; planes are written by
compiled code where there is some, from a table of the 256 floats that NumPy gives.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from bagelplane.native import SIDE_LIMIT_PIXELS, NativeError, PlaneWriter, load_planes

HALF = (0.5, 0.5, 0.5)

# Pixels normalised at a time, so that the scratch stays in the second-level cache (768 KiB of float32).
_BLOCK_PIXELS = 1 << 16


def normalised_chw(
    out: np.ndarray, rgb: np.ndarray, mean: Sequence[float] = HALF, std: Sequence[float] = HALF
) -> None:
    """Writes uint8 `rgb` [h, w, 3] into float32 `out` [3, h, w], any strides, normalised per channel."""
    height, width = rgb.shape[:2]
    if out.shape != (3, height, width) or out.dtype != np.float32:
        raise ValueError(f"out is {out.dtype} {out.shape}, expected float32 {(3, height, width)}")
    writer = _plane_writer()
    if writer is not None and _is_for_writer(rgb, out):
        writer.write(rgb, float_tables(tuple(mean), tuple(std)), out)
        return
    # Arithmetic on pixels as they lie, planes last. Planes first costs up to twice as much; a table of 256
    # floats two to three times, because NumPy widens each index to eight bytes.
    rows = min(height, max(1, _BLOCK_PIXELS // max(width, 1)))
    scratch = np.empty((rows, width, 3), dtype=np.float32)
    for begin in range(0, height, rows):
        source = rgb[begin : begin + rows]
        block = scratch[: len(source)]
        np.copyto(block, source)
        _normalise(block, mean, std)
        np.copyto(out[:, begin : begin + rows], block.transpose(2, 0, 1))


@functools.cache
def _plane_writer() -> PlaneWriter | None:
    try:
        return load_planes()
    except NativeError:  # the resampler's choice, in the process that resizes, has said so
        return None


def _is_for_writer(rgb: np.ndarray, out: np.ndarray) -> bool:
    """Whether the two lie as `PlaneWriter` takes them; pixels out of the ring and padded batches do."""
    plane, row, step = out.strides
    return (
        rgb.dtype == np.uint8
        and rgb.flags.c_contiguous
        and all(1 <= side <= SIDE_LIMIT_PIXELS for side in rgb.shape[:2])
        and out.flags.aligned
        and step == out.itemsize
        and row >= step * rgb.shape[1]
        and plane >= row * rgb.shape[0]
        and not np.may_share_memory(rgb, out)
    )


@functools.lru_cache(maxsize=16)
def float_tables(mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """float32 [3, 256]: what each value of a byte becomes, by channel. Kept, so not to be written to."""
    values = np.repeat(np.arange(256, dtype=np.float32)[None, :, None], 3, axis=2)
    _normalise(values, mean, std)
    return np.ascontiguousarray(values[0].T)


def patchify(
    rgb: np.ndarray, patch: int, out: np.ndarray, mean: Sequence[float] = HALF, std: Sequence[float] = HALF
) -> None:
    """Writes uint8 `rgb` [h, w, 3] into C-contiguous float32 `out` [patches, patch * patch * 3], normalised.

    Patches are row-major over the grid, each flattened as (row in patch, column in patch, channel). Height
    and width are multiples of `patch`.
    """
    height, width = rgb.shape[:2]
    rows, columns = height // patch, width // patch
    expected = (rows * columns, patch * patch * 3)
    if (rows * patch, columns * patch) != (height, width):
        raise ValueError(f"an image of {width}x{height} pixels is not whole patches of {patch}")
    if out.shape != expected or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(f"out is {out.dtype} {out.shape}, expected C-contiguous float32 {expected}")
    # Permuting while casting, then arithmetic in place, was a fifth of the time of permuting finished floats
    # the plain way, and shorter than any variant with a scratch block.
    np.copyto(out.reshape(rows, columns, patch, patch * 3), cut_pixels(rgb, patch))
    _normalise(out.reshape(height, width, 3), mean, std)


def cut_pixels(rgb: np.ndarray, patch: int) -> np.ndarray:
    """The patches of C-contiguous [h, w, 3] as a view [rows, columns, patch, patch * 3]."""
    rows, columns = rgb.shape[0] // patch, rgb.shape[1] // patch
    return rgb.reshape(rows, patch, columns, patch * 3).transpose(0, 2, 1, 3)


def cut_planes(planes: np.ndarray, patch: int) -> np.ndarray:
    """The patches of [3, h, w] as `patchify` lays them out, [patches, patch * patch * 3], C-contiguous."""
    rows, columns = planes.shape[1] // patch, planes.shape[2] // patch
    grid = planes.reshape(3, rows, patch, columns, patch).transpose(1, 3, 2, 4, 0)
    return np.ascontiguousarray(grid).reshape(rows * columns, -1)


def _normalise(pixels: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> None:
    """Normalises C-contiguous float32 [h, w, 3], values 0..255, in place."""
    if all(value == 0.5 for value in (*mean, *std)):
        # Exact for x in 0..255: halving and doubling never round, so (x/255 - 0.5)/0.5 = x/127.5 - 1.
        np.divide(pixels, np.float32(127.5), out=pixels)
        np.subtract(pixels, np.float32(1), out=pixels)
        return
    # One value a channel, repeated along a row: NumPy's inner loop over three channels would be all overhead.
    width = pixels.shape[1]
    lines = pixels.reshape(-1, width * 3)
    np.divide(lines, np.float32(255), out=lines)
    np.subtract(lines, np.tile(np.asarray(mean, dtype=np.float32), width), out=lines)
    np.divide(lines, np.tile(np.asarray(std, dtype=np.float32), width), out=lines)
