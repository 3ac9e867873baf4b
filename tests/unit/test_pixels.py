"""Normalised pixels equal float32 arithmetic, bit for bit, in each layout."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from bagelplane.engine import pixels
from bagelplane.engine.pixels import normalised_chw, patchify
from bagelplane.native import PlaneWriter
from tests.native_library import compiled_library

NORMALISATIONS = [
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
]


@pytest.fixture(autouse=True, params=["compiled", "numpy"])
def writer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlaneWriter | None]:
    made = PlaneWriter(compiled_library()) if request.param == "compiled" else None
    monkeypatch.setattr(pixels, "_plane_writer", lambda: made)
    return made


def random_pixels(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def expected_floats(rgb: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    scaled = rgb.astype(np.float32) / np.float32(255)
    return (scaled - np.array(mean, dtype=np.float32)) / np.array(std, dtype=np.float32)


@pytest.mark.parametrize(("mean", "std"), NORMALISATIONS)
def test_every_value_of_a_pixel_has_the_bits_of_plain_arithmetic(
    mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    rgb = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    out = np.empty((3, 16, 16), dtype=np.float32)
    normalised_chw(out, rgb, mean, std)
    assert out.tobytes() == expected_floats(rgb, mean, std).transpose(2, 0, 1).tobytes()


@pytest.mark.parametrize("size", [(1, 1), (3, 70_000), (200, 700)])
def test_planes_go_into_a_corner_of_a_larger_array_and_nowhere_else(size: tuple[int, int]) -> None:
    height, width = size
    rgb = random_pixels(height, width)
    padded = np.zeros((3, height + 2, width + 3), dtype=np.float32)
    normalised_chw(padded[:, :height, :width], rgb)
    expected = np.zeros_like(padded)
    expected[:, :height, :width] = expected_floats(rgb, *NORMALISATIONS[0]).transpose(2, 0, 1)
    assert np.array_equal(padded, expected)


@pytest.mark.parametrize(("mean", "std"), NORMALISATIONS)
def test_patches_are_row_major_and_flattened_by_row_column_channel(
    mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    rgb = random_pixels(28, 42)
    out = np.empty((6, 14 * 14 * 3), dtype=np.float32)
    patchify(rgb, 14, out, mean, std)
    floats = expected_floats(rgb, mean, std)
    patches = [floats[y : y + 14, x : x + 14].reshape(-1) for y in (0, 14) for x in (0, 14, 28)]
    assert np.array_equal(out, np.stack(patches))


@pytest.mark.parametrize("way", ["rows turned", "columns apart", "planes last", "pixels apart", "floats"])
def test_arrays_that_lie_otherwise_get_the_same_floats(way: str) -> None:
    rgb = random_pixels(20, 30)
    out = np.zeros((3, 20, 60), dtype=np.float32)[:, :, :30]
    if way == "rows turned":
        out = out[:, ::-1]
    elif way == "columns apart":
        out = np.zeros((3, 20, 60), dtype=np.float32)[:, :, ::2]
    elif way == "planes last":
        out = np.zeros((20, 30, 3), dtype=np.float32).transpose(2, 0, 1)
    elif way == "pixels apart":
        rgb = random_pixels(20, 60)[:, ::2]
    else:
        rgb = rgb.astype(np.float32)
    normalised_chw(out, rgb)
    assert np.array_equal(out, expected_floats(rgb, *NORMALISATIONS[0]).transpose(2, 0, 1))


def test_tables_follow_mean_and_std_of_each_image() -> None:
    rgb = random_pixels(8, 8)
    for mean, std in (*NORMALISATIONS, *NORMALISATIONS):
        out = np.empty((3, 8, 8), dtype=np.float32)
        normalised_chw(out, rgb, list(mean), list(std))
        assert out.tobytes() == expected_floats(rgb, mean, std).transpose(2, 0, 1).tobytes()


GOOD_RGB, GOOD_TABLES = np.zeros((4, 5, 3), np.uint8), np.zeros((3, 256), np.float32)


@pytest.mark.parametrize(
    ("rgb", "tables", "out"),
    [
        (np.zeros((4, 5, 3), np.int8), None, None),
        (np.zeros((4, 5, 4), np.uint8), None, None),
        (np.zeros((4, 10, 3), np.uint8)[:, ::2], None, None),
        (np.zeros((0, 5, 3), np.uint8), None, None),
        (None, np.zeros((3, 256), np.float64), None),
        (None, np.zeros((3, 255), np.float32), None),
        (None, np.zeros((256, 3), np.float32).T, None),
        (None, [[0.0] * 256] * 3, None),
        (None, None, np.zeros((3, 5, 4), np.float32)),
        (None, None, np.zeros((3, 4, 5), np.float64)),
        (None, None, np.zeros((3, 4, 10), np.float32)[:, :, ::2]),
        (None, None, np.zeros((3, 4, 5), np.float32)[:, ::-1]),
        (None, None, np.zeros((3, 4, 5), np.float32)[::-1]),
        (None, None, np.broadcast_to(np.zeros((1, 4, 5), np.float32), (3, 4, 5))),
        (None, None, np.lib.stride_tricks.as_strided(np.zeros(60, np.float32), (3, 4, 5), (80, 16, 4))),
        (None, None, np.zeros(241, np.uint8)[1:].view(np.float32).reshape(3, 4, 5)),
        (None, None, [0.0]),
    ],
)
def test_the_compiled_code_refuses_arrays_of_another_kind(
    writer: PlaneWriter | None, rgb: object, tables: object, out: object
) -> None:
    if writer is None:
        return
    rgb = GOOD_RGB if rgb is None else rgb
    tables = GOOD_TABLES if tables is None else tables
    out = np.zeros((3, 4, 5), np.float32) if out is None else out
    with pytest.raises(ValueError, match=r"rgb|tables|out"):
        writer.write(rgb, tables, out)  # type: ignore[arg-type]


def test_arrays_of_another_shape_are_refused() -> None:
    rgb = random_pixels(28, 28)
    with pytest.raises(ValueError, match="expected float32"):
        normalised_chw(np.empty((3, 28, 27), dtype=np.float32), rgb)
    with pytest.raises(ValueError, match="not whole patches of 13"):
        patchify(rgb, 13, np.empty((4, 507), dtype=np.float32))
    with pytest.raises(ValueError, match="expected C-contiguous"):
        patchify(rgb, 14, np.empty((588, 4), dtype=np.float32).T)
