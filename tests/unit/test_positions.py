"""Position ids are those that torch gives, for every grid that can be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagelplane.engine.positions import float32_arange, grid_positions

SIDES = (32, 64, 70, 128)


def torch_steps(count: int, most: int) -> torch.Tensor:
    fractions = torch.arange(0, 1 - 1e-6, 1 / count)
    boundaries = torch.arange(1 / most, 1.0, 1 / most)
    return torch.bucketize(fractions, boundaries, right=True)


@pytest.mark.parametrize("most", SIDES)
def test_interpolated_positions_are_torchs_for_every_count(most: int) -> None:
    for count in range(1, 400):
        positions = grid_positions(count, 1, most, True)
        expected = torch_steps(count, most) * most + torch_steps(1, most)
        assert np.array_equal(positions, expected.numpy()), f"{count} rows on a side of {most}"


@pytest.mark.parametrize("count", [*range(1, 70), 127, 128, 129, 255, 1000, 2000])
def test_float32_ranges_are_torchs_bit_for_bit(count: int) -> None:
    for start, end, step in ((0, 1 - 1e-6, 1 / count), (1 / count, 1.0, 1 / count)):
        expected = torch.arange(start, end, step).numpy()
        assert float32_arange(start, end, step).tobytes() == expected.tobytes()


def test_plain_positions_are_row_times_side_plus_column() -> None:
    assert grid_positions(2, 3, 70, False).tolist() == [0, 1, 2, 70, 71, 72]


@pytest.mark.parametrize("interpolate", [False, True])
def test_positions_are_row_major_int64_and_cannot_be_written(interpolate: bool) -> None:
    positions = grid_positions(5, 9, 64, interpolate)
    assert (positions.dtype, positions.shape) == (np.int64, (45,))
    with pytest.raises(ValueError, match="read-only"):
        positions[0] = 1
    by_row = positions.reshape(5, 9)
    assert np.array_equal(by_row - by_row[:, :1], (by_row - by_row[:, :1])[:1].repeat(5, axis=0))


@pytest.mark.parametrize("most", SIDES)
def test_interpolated_positions_stay_inside_the_table(most: int) -> None:
    for count in (1, most // 2, most, 3 * most):
        positions = grid_positions(count, count, most, True)
        assert positions[0] == 0
        assert positions.max() < most * most
        assert (np.diff(positions.reshape(count, count)[:, 0]) >= 0).all()
