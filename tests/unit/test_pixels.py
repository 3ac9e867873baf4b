"""Normalised pixels equal float32 arithmetic, bit for bit, in each layout."""

from __future__ import annotations

import numpy as np
import pytest

from bagelplane.engine.pixels import normalised_chw, patchify

NORMALISATIONS = [
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
]


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


def test_arrays_of_another_shape_are_refused() -> None:
    rgb = random_pixels(28, 28)
    with pytest.raises(ValueError, match="expected float32"):
        normalised_chw(np.empty((3, 28, 27), dtype=np.float32), rgb)
    with pytest.raises(ValueError, match="not whole patches of 13"):
        patchify(rgb, 13, np.empty((4, 507), dtype=np.float32))
    with pytest.raises(ValueError, match="expected C-contiguous"):
        patchify(rgb, 14, np.empty((588, 4), dtype=np.float32).T)
