"""Compiled code: Pillow's BICUBIC resize, bit for bit, several times as fast, and pixels into planes of floats.

`resample.c` and `planes.c` are plain C without Python, compiled when the package is built or installed
(hatch_build.py) and called through ctypes, which releases the GIL. Where they could not be compiled there is no
library, `load` gives None, `bagelplane.resampling` lets Pillow resize, and NumPy makes the planes. What is
computed, and why like this: docs/adr/0009-native-resampler.md.

No Pillow in here, no choice of resampler, no log lines: those are resampling.py's. Nothing here keeps state but the
weights of the last sizes; any number of threads may resize at once.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LIBRARY_PATH = Path(__file__).with_name("libresample.so")
INTERFACE_VERSION = 2
"""That of the library (in resample.c). A library of another version, left over in a source tree, is not used."""

SIDE_LIMIT_PIXELS = 65_535
"""Longer sides are not resized here."""

_PRECISION_BITS = 22
_CACHED_AXES = 128  # of 50 KB each for usual sizes, of 1.6 MB for the longest side
_BAD_ARGUMENTS, _NO_MEMORY = 1, 2


class NativeError(Exception):
    """The library is there and cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class AxisWeights:
    """How one side is resized: output i is the sum over k < count[i] of input[start[i] + k] * weights[i, k].

    start, count: int32 [outputs]; weights: int32 [outputs, taps], in units of 2^-22, zero from count[i] on.
    """

    start: np.ndarray
    count: np.ndarray
    weights: np.ndarray


@functools.lru_cache(maxsize=_CACHED_AXES)
def axis_weights(inputs: int, outputs: int) -> AxisWeights:
    """Pillow's BICUBIC weights for a side of `inputs` pixels that becomes `outputs` long.

    Each step is done in the order in which Pillow does it: the weights are its own to the last bit.
    """
    scale = inputs / outputs
    widening = max(scale, 1.0)  # of the filter: when shrinking, it covers two output pixels to each side
    support = 2.0 * widening
    centre = (np.arange(outputs) + 0.5) * scale
    # Rounded half up and clamped; what is negative is clamped anyhow, so cutting off is rounding down.
    start = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + support + 0.5).astype(np.int64), inputs)
    count = end - start
    places = np.arange(int(count.max()))
    distance = (places + start[:, None] - centre[:, None] + 0.5) * (1.0 / widening)
    values = np.where(places < count[:, None], _bicubic(distance), 0.0)
    # One after the other, as in a loop; NumPy's sum() would add in pairs.
    total = np.add.accumulate(values, axis=1)[:, -1:]
    scaled = values / total * (1 << _PRECISION_BITS)
    fixed = np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5)).astype(np.int32)  # half away from zero
    return AxisWeights(*(np.ascontiguousarray(part, dtype=np.int32) for part in (start, count, fixed)))


def _bicubic(distance: np.ndarray) -> np.ndarray:
    """The cubic convolution filter (Keys 1981) with a = -0.5."""
    a = -0.5
    x = np.abs(distance)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def is_vertical_first(in_size: tuple[int, int], out_size: tuple[int, int]) -> bool:
    """Whether Pillow from 13.0 on makes the vertical pass first; sizes are (width, height).

    Found by asking Pillow: it does when the height shrinks by more than twice what the width shrinks. Before
    that it began with the horizontal pass, some releases with exceptions for very tall images.
    """
    (in_width, in_height), (out_width, out_height) = in_size, out_size
    return out_height < in_height and in_height - out_height > 2 * (in_width - out_width)


class _Library:
    """The loaded library. Raises NativeError if it does not load or belongs to another version of this package."""

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            version = library.bagelplane_interface_version()
            self.resample = library.bagelplane_resample
            self.to_planes = library.bagelplane_to_planes
            self.has_avx2 = bool(library.bagelplane_has_avx2())
        except (OSError, AttributeError) as error:
            raise NativeError(f"{path.name} does not load: {error}") from error
        if version != INTERFACE_VERSION:
            raise NativeError(f"{path.name} is of version {version}, this package needs {INTERFACE_VERSION}")
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        picture, axis = (pointer, size, size), (pointer, pointer, pointer, size)
        self.resample.argtypes = (*picture, *picture, *axis, *axis, ctypes.c_int, ctypes.c_int)
        self.to_planes.argtypes = (*picture, *picture, pointer)
        self.resample.restype = self.to_planes.restype = ctypes.c_int


class Resampler:
    """The loaded library. `instructions` says which code runs: "avx2" or "portable"."""

    def __init__(self, path: Path, *, portable: bool = False) -> None:
        """Raises NativeError if the library does not load or belongs to another version of this package."""
        library = _Library(path)
        self._resample = library.resample
        self._use_avx2 = library.has_avx2 and not portable
        self.instructions = "avx2" if self._use_avx2 else "portable"

    def resize(self, source: np.ndarray, out: np.ndarray, *, vertical_first: bool = False) -> None:
        """Writes `source`, uint8 [h, w, 4] of which the last byte of a pixel is ignored, resized into `out`.

        `out` is uint8 [h, w, 3] and decides the size. Both are C-contiguous and do not overlap. A side of
        unchanged length is not filtered; otherwise `vertical_first` says which pass comes first (the pixels are
        rounded between the two). Raises ValueError for anything else, MemoryError.
        """
        _check("source", source, 4)
        _check("out", out, 3)
        if not out.flags.writeable:
            raise ValueError("out is read-only")
        if np.may_share_memory(source, out):
            raise ValueError("source and out overlap")
        (in_height, in_width, _), (out_height, out_width, _) = source.shape, out.shape
        horizontal, vertical = _axis(in_width, out_width), _axis(in_height, out_height)
        result = self._resample(
            *(source.ctypes.data, in_width, in_height, out.ctypes.data, out_width, out_height),
            *_addresses(horizontal),
            *_addresses(vertical),
            vertical_first,
            self._use_avx2,
        )
        if result == _NO_MEMORY:
            raise MemoryError("no memory for the rows between the two passes")
        if result == _BAD_ARGUMENTS:
            raise ValueError(f"cannot resize {in_width}x{in_height} to {out_width}x{out_height}")


class PlaneWriter:
    """Writes pixels into planes of floats, by tables that hold the float for each value of a byte."""

    def __init__(self, path: Path) -> None:
        """Raises NativeError if the library does not load or belongs to another version of this package."""
        self._to_planes = _Library(path).to_planes

    def write(self, rgb: np.ndarray, tables: np.ndarray, out: np.ndarray) -> None:
        """Writes tables[c, rgb[y, x, c]] to out[c, y, x].

        `rgb` is uint8 [h, w, 3], `tables` float32 [3, 256], both C-contiguous; `out` is float32 [3, h, w], rows
        without gaps, one behind the other (a corner of a larger such array is). Raises ValueError for anything else.
        """
        _check("rgb", rgb, 3)
        if not _are_tables(tables):
            raise ValueError("tables is not a C-contiguous float32 array [3, 256]")
        height, width, _ = rgb.shape
        if not isinstance(out, np.ndarray) or out.dtype != np.float32 or out.shape != (3, height, width):
            raise ValueError(f"out is not a float32 array {(3, height, width)}")
        if not out.flags.writeable or not out.flags.aligned or any(part % 4 for part in out.strides):
            raise ValueError("out is read-only or not aligned")
        if np.may_share_memory(rgb, out) or np.may_share_memory(tables, out):
            raise ValueError("out overlaps what is read")
        plane, row, step = (part // 4 for part in out.strides)
        arguments = (rgb.ctypes.data, width, height, out.ctypes.data, plane, row, tables.ctypes.data)
        if (step != 1 and width > 1) or self._to_planes(*arguments) == _BAD_ARGUMENTS:
            raise ValueError(f"out has strides {out.strides}: rows or planes overlap or have gaps")


def load_planes() -> PlaneWriter | None:
    """The same for planes: None without a library. Raises NativeError if it cannot be used."""
    return PlaneWriter(LIBRARY_PATH) if LIBRARY_PATH.exists() else None


def load() -> Resampler | None:
    """The library beside this file, None if there is none. Raises NativeError if it cannot be used."""
    return Resampler(LIBRARY_PATH) if LIBRARY_PATH.exists() else None


def _check(name: str, array: np.ndarray, channels: int) -> None:
    good = isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.ndim == 3
    if not good or array.shape[2] != channels or not array.flags.c_contiguous:
        raise ValueError(f"{name} is not a C-contiguous uint8 array [height, width, {channels}]")
    if not all(1 <= side <= SIDE_LIMIT_PIXELS for side in array.shape[:2]):
        raise ValueError(f"{name} has a side outside of 1 to {SIDE_LIMIT_PIXELS}: {array.shape}")


def _are_tables(array: np.ndarray) -> bool:
    good = isinstance(array, np.ndarray) and array.dtype == np.float32 and array.shape == (3, 256)
    return good and bool(array.flags.c_contiguous and array.flags.aligned)


def _axis(inputs: int, outputs: int) -> AxisWeights | None:
    return None if inputs == outputs else axis_weights(inputs, outputs)


def _addresses(axis: AxisWeights | None) -> tuple[int | None, int | None, int | None, int]:
    if axis is None:
        return None, None, None, 0
    return axis.start.ctypes.data, axis.count.ctypes.data, axis.weights.ctypes.data, axis.weights.shape[1]
