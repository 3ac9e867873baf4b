"""The resize rule, against values that the peer gave for the same arguments."""

from __future__ import annotations

import pytest

from bagelplane.engine.resizing import ResizeRule

VAE = ResizeRule(stride=16, max_size=1024, min_size=512)
VIT = ResizeRule(stride=14, max_size=980, min_size=224)
TIGHT = ResizeRule(stride=14, max_size=980, min_size=378, max_pixels=100_000)


@pytest.mark.parametrize(
    ("rule", "size", "num_images", "expected"),
    [
        (VAE, (500, 333), 1, (768, 512)),
        (VAE, (1, 1), 1, (512, 512)),
        (VAE, (20_000, 1), 1, (1024, 16)),
        (VAE, (640, 8), 1, (1024, 16)),
        (VIT, (640, 8), 1, (980, 14)),
        (VIT, (980, 980), 1, (980, 980)),
        (VIT, (4000, 3000), 1, (980, 728)),
        (TIGHT, (500, 500), 1, (196, 196)),
        (TIGHT, (500, 500), 4, (56, 56)),
    ],
)
def test_sizes_are_the_peers(
    rule: ResizeRule, size: tuple[int, int], num_images: int, expected: tuple[int, int]
) -> None:
    assert rule.target_size(*size, num_images=num_images) == expected


def test_sides_are_rounded_twice_and_half_to_even() -> None:
    rule = ResizeRule(stride=10, max_size=1000, min_size=1)
    # 25 is halfway between two strides: to the even one.
    assert rule.target_size(25, 35) == (20, 40)
    # 0.5 * 1001 = 500.5 pixels round to 500 first.
    assert ResizeRule(stride=1, max_size=1000, min_size=1).target_size(2000, 1001) == (1000, 500)


def test_no_side_is_shorter_than_a_stride() -> None:
    assert ResizeRule(stride=32, max_size=64, min_size=1).target_size(64, 1) == (64, 32)


def test_the_area_shrinks_by_the_ratio_itself_not_its_root() -> None:
    rule = ResizeRule(stride=1, max_size=1000, min_size=1, max_pixels=2500)
    # 10,000 pixels are four times too many; each side becomes a quarter.
    assert rule.target_size(100, 100) == (25, 25)


@pytest.mark.parametrize("field", ["stride", "max_size", "min_size", "max_pixels"])
def test_a_rule_without_pixels_is_refused(field: str) -> None:
    fields = {"stride": 16, "max_size": 1024, "min_size": 512, "max_pixels": 1000} | {field: 0}
    with pytest.raises(ValueError, match=field):
        ResizeRule(**fields)


def test_an_image_without_pixels_is_refused() -> None:
    with pytest.raises(ValueError, match="0x5"):
        VAE.target_size(0, 5)
