"""Whatever is given to the compiled resampler: Pillow's bits or a ValueError, never a crash."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from bagelplane.native import Resampler, is_vertical_first
from tests.native_library import compiled_library

SIDES = st.one_of(st.integers(1, 12), st.integers(1, 200))
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def odd_arrays(draw: st.DrawFn) -> np.ndarray:
    """An array near to what is expected: another dtype, shape, order or step, now and then none of these."""
    shape = draw(st.one_of(st.tuples(SIDES, SIDES, st.sampled_from([3, 4])), arrays.array_shapes(min_side=0)))
    dtype = draw(st.sampled_from([np.uint8, np.uint8, np.uint8, np.int8, np.uint16, np.float32, np.bool_]))
    array = np.zeros(shape, dtype=dtype, order=draw(st.sampled_from(["C", "F"])))
    array.flags.writeable = draw(st.booleans())
    step = draw(st.sampled_from([1, 1, 2, -1]))
    return array[::step]


@given(odd_arrays(), odd_arrays(), st.booleans(), st.booleans())
@settings(max_examples=1000, deadline=None)
def test_any_two_arrays_are_resized_or_refused(
    source: np.ndarray, out: np.ndarray, vertical_first: bool, portable: bool
) -> None:
    resampler = Resampler(compiled_library(), portable=portable)
    try:
        resampler.resize(source, out, vertical_first=vertical_first)
    except ValueError:
        return
    assert source.shape[2] == 4
    assert out.shape[2] == 3
    assert not out.any()


@given(SIDES, SIDES, SIDES, SIDES, SEEDS, st.sampled_from([1, 2, 256]), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_picture_gets_pillows_bits(
    width: int, height: int, out_width: int, out_height: int, seed: int, levels: int, portable: bool
) -> None:
    noise = np.random.default_rng(seed).integers(0, levels, (height, width, 3))
    image = Image.fromarray((noise * (255 // max(1, levels - 1))).astype(np.uint8))
    source = np.frombuffer(image.tobytes("raw", "RGBX"), dtype=np.uint8).reshape(height, width, 4)
    out = np.empty((out_height, out_width, 3), dtype=np.uint8)
    order = is_vertical_first((width, height), (out_width, out_height))
    Resampler(compiled_library(), portable=portable).resize(source, out, vertical_first=order)
    assert np.array_equal(out, np.asarray(image.resize((out_width, out_height), Image.Resampling.BICUBIC)))
