"""Whatever bytes come, an image is read or refused with an ImageError; headers agree with pixels."""

from __future__ import annotations

import io

import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from bagelplane.engine.resizing import ResizeRule
from bagelplane.images import ImageError, decode_rgb, header_size

# What a damaged header may claim before decoding it is no longer a light test.
MOST_PIXELS = 2_000_000


def encoded(file_format: str, mode: str, **options: object) -> bytes:
    pixels = np.random.default_rng(3).integers(0, 256, (24, 31, 4), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, file_format, **options)
    return file.getvalue()


GOOD = [
    encoded("JPEG", "RGB"),
    encoded("JPEG", "L", progressive=True),
    encoded("JPEG", "CMYK"),
    encoded("PNG", "RGBA"),
    encoded("PNG", "P", transparency=3),
    encoded("GIF", "P"),
    encoded("WEBP", "RGB"),
    encoded("WEBP", "RGBA", lossless=True),
    encoded("TIFF", "RGB"),
    encoded("TIFF", "L", compression="tiff_lzw"),
    encoded("BMP", "P"),
    encoded("ICO", "RGBA"),
    encoded("TGA", "RGB"),
    encoded("AVIF", "RGB"),
    encoded("JPEG2000", "RGB"),
]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good file with bytes changed, cut out, put in, and maybe its end gone."""
    data = bytearray(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        removed = draw(st.integers(0, 4))
        data[at : at + removed] = draw(st.binary(max_size=4))
    if draw(st.booleans()):
        del data[draw(st.integers(0, len(data))) :]
    return bytes(data)


def read(data: bytes) -> None:
    try:
        width, height = header_size(data)
    except ImageError:
        return
    assert width > 0
    assert height > 0
    assume(width * height <= MOST_PIXELS)
    try:
        decoded = decode_rgb(data)
    except ImageError:
        return
    assert decoded.mode == "RGB"


@given(damaged())
@settings(max_examples=400)
def test_damaged_files_are_read_or_refused(data: bytes) -> None:
    read(data)


@given(
    st.one_of(
        st.binary(max_size=200),
        st.sampled_from(GOOD).flatmap(lambda good: st.binary().map(good[:16].__add__)),
    )
)
@settings(max_examples=300)
@example(b"\xff\xd8\xff\xff\xff\xff")
@example(b"\xff\xd8\xff\xc0\x00\x02\xff\xda")
@example(b"\xff\xd8\xff\xee\x00\x0eAdobe")
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    read(data)


@given(
    st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"]),
    st.sampled_from(["L", "RGB", "RGBA", "P", "CMYK"]),
    st.integers(1, 300),
    st.integers(1, 300),
)
def test_header_size_is_the_size_of_the_pixels(file_format: str, mode: str, width: int, height: int) -> None:
    file = io.BytesIO()
    try:
        Image.new(mode, (width, height)).save(file, file_format)
    except (OSError, ValueError):
        assume(False)  # the format has no such mode
    data = file.getvalue()
    assert header_size(data) == decode_rgb(data).size == (width, height)


@given(
    st.builds(
        ResizeRule,
        stride=st.integers(1, 64),
        max_size=st.integers(1, 2048),
        min_size=st.integers(1, 1024),
        max_pixels=st.integers(1, 3_000_000),
    ),
    st.integers(1, 100_000),
    st.integers(1, 100_000),
    st.integers(1, 20),
)
def test_a_resized_image_is_whole_strides_and_symmetric(
    rule: ResizeRule, width: int, height: int, num_images: int
) -> None:
    target = rule.target_size(width, height, num_images)
    assert all(side >= rule.stride and side % rule.stride == 0 for side in target)
    assert rule.target_size(height, width, num_images) == target[::-1]
