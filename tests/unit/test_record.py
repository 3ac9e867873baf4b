"""What holds of a pack's layout in a record."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bagelplane.engine.pack import Pack
from bagelplane.errors import RingError
from bagelplane.shm.record import (
    PIXEL_FORMATS,
    PREFIX_BYTES,
    PixelFormat,
    read_record,
    record_size,
    write_record,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3)
    ),
    max_leaves=10,
)
SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=4)
ARRAYS = st.dictionaries(
    st.text(max_size=12),
    hnp.arrays(st.sampled_from([np.dtype("<i8"), np.dtype("<f4")]), st.integers(0, 50)),
    max_size=4,
)


@st.composite
def packs(draw: st.DrawFn) -> Pack:
    shapes = draw(SHAPES)
    numbers = st.lists(st.integers(0, len(shapes) - 1), max_size=4) if shapes else st.just([])
    return Pack(
        step=draw(st.integers(0, 2**40)),
        scalars=draw(st.dictionaries(st.text(max_size=8), JSON, max_size=4)),
        arrays=draw(ARRAYS),
        image_shapes=shapes,
        vae_images=draw(numbers),
        vit_images=draw(numbers),
        patch_size=draw(st.integers(1, 32)),
        state=draw(st.dictionaries(st.text(max_size=8), JSON, max_size=4)),
    )


def pack_of(**changes: Any) -> Pack:
    fields: dict[str, Any] = {
        "step": 3,
        "scalars": {"sequence_length": 5},
        "arrays": {"packed_text_ids": np.arange(5), "packed_timesteps": np.float32([1.5, -np.inf])},
        "image_shapes": [(16, 32), (14, 14)],
        "vae_images": [0],
        "vit_images": [1, 0],
        "patch_size": 14,
        "state": {"rng": [1, 2]},
    }
    return Pack(**{**fields, **changes})


def written(pack: Pack, pixel_format: PixelFormat = "uint8") -> memoryview:
    buffer = memoryview(bytearray(record_size(pack, pixel_format)))
    for number, view in enumerate(write_record(pack, buffer, pixel_format)):
        view[:] = values_of(number, view)
    return buffer


def values_of(number: int, view: np.ndarray) -> np.ndarray:
    random = np.random.RandomState(number)
    if view.dtype == np.uint8:
        return random.randint(0, 256, view.shape, np.uint8)
    return random.standard_normal(view.shape).astype(np.float32)


@given(packs(), st.sampled_from(sorted(PIXEL_FORMATS)))
def test_a_pack_survives_the_journey(pack: Pack, pixel_format: PixelFormat) -> None:
    back, images = read_record(written(pack, pixel_format))
    for name in ("step", "scalars", "image_shapes", "vae_images", "vit_images", "patch_size", "state"):
        assert getattr(back, name) == getattr(pack, name), name
    assert list(back.arrays) == list(pack.arrays)
    for name, array in pack.arrays.items():
        assert back.arrays[name].dtype == array.dtype
        assert back.arrays[name].tobytes() == array.tobytes()
    for number, (shape, image) in enumerate(zip(pack.image_shapes, images, strict=True)):
        assert image.dtype == pixel_format
        assert image.shape == ((*shape, 3) if pixel_format == "uint8" else (3, *shape))
        assert np.array_equal(image, values_of(number, image))


def test_views_are_read_only_aligned_and_not_copied() -> None:
    buffer = written(pack_of())
    back, images = read_record(buffer)
    whole = np.frombuffer(buffer, np.uint8)
    for array in [*images, *back.arrays.values()]:
        assert not array.flags.writeable
        assert np.shares_memory(array, whole)
        assert (array.ctypes.data - whole.ctypes.data) % 64 == 0


def test_places_of_images_depend_on_their_shapes_alone() -> None:
    pack = pack_of()
    changed = pack_of(scalars={"x": "y" * 1000}, arrays={}, state={"more": list(range(500))})
    places = []
    for one in (pack, changed):
        buffer = memoryview(bytearray(record_size(one)))
        start = np.frombuffer(buffer, np.uint8).ctypes.data
        places.append([view.ctypes.data - start for view in write_record(one, buffer)])
    assert places[0] == places[1] == [PREFIX_BYTES, PREFIX_BYTES + 16 * 32 * 3]


def test_a_state_known_after_decoding_is_written_without_touching_pixels() -> None:
    pack = pack_of(state={})
    buffer = memoryview(bytearray(record_size(pack) + 1000))
    for view in write_record(pack, buffer):
        view[:] = 7
    pack.state = {"rng": list(range(100))}
    write_record(pack, buffer)
    back, images = read_record(buffer)
    assert back.state == pack.state
    assert all((image == 7).all() for image in images)


def test_a_place_too_short_is_an_error_with_both_numbers() -> None:
    pack = pack_of()
    size = record_size(pack)
    with pytest.raises(RingError, match=rf"step 3.*{size} bytes.*at most {size - 1}"):
        write_record(pack, memoryview(bytearray(size - 1)))


@pytest.mark.parametrize("array", [np.zeros((2, 2), np.float32), np.zeros(2, np.float64), np.zeros(2, ">i8")])
def test_an_array_that_no_reader_expects_is_refused_by_name(array: np.ndarray) -> None:
    with pytest.raises(RingError, match="'odd'"):
        record_size(pack_of(arrays={"odd": array}))


@pytest.mark.parametrize("number", [0, 3, 2**32 - 1])
def test_a_pixel_format_of_tomorrow_is_refused_and_those_of_today_are_named(number: int) -> None:
    buffer = written(pack_of())
    buffer[12:16] = number.to_bytes(4, "little")
    with pytest.raises(RingError, match=rf"pixel format {number}; expected .* pixel format 1 or 2"):
        read_record(buffer)


def test_a_record_of_bytes_is_too_short_to_be_one_of_floats() -> None:
    buffer = written(pack_of(image_shapes=[(160, 320)], vit_images=[0]))
    buffer[12:16] = (2).to_bytes(4, "little")
    with pytest.raises(RingError, match="lie outside the record"):
        read_record(buffer)


@given(st.binary(max_size=300))
def test_garbage_is_a_ring_error(data: bytes) -> None:
    for body in (data, b"BGLPPACK\x01\x00\x00\x00\x01\x00\x00\x00" + data):
        with pytest.raises(RingError):
            read_record(memoryview(body))


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_record_is_read_or_refused_and_nothing_else(changes: list[tuple[int, int]]) -> None:
    buffer = written(pack_of())
    for place, value in changes:
        buffer[-1 - place % (len(buffer) - 2300)] = value
    try:
        back, images = read_record(buffer)
    except RingError:
        return
    for array in [*images, *back.arrays.values()]:
        array.tobytes()


@pytest.mark.parametrize("length", [0, 10, 64, 100])
def test_a_record_cut_short_is_a_ring_error(length: int) -> None:
    with pytest.raises(RingError):
        read_record(written(pack_of())[:length])


def test_writing_changes_nothing_of_the_pack() -> None:
    pack = pack_of()
    before = copy.deepcopy(pack)
    written(pack)
    assert pack.arrays.keys() == before.arrays.keys()
    assert pack.scalars == before.scalars
    assert all(np.array_equal(pack.arrays[name], before.arrays[name]) for name in pack.arrays)
