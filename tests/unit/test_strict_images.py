"""How profile Strict reads images, against plain reading: upright, scaled, on white, whole or not at all."""

from __future__ import annotations

import io
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from bagelplane.images import (
    ImageError,
    TruncatedImageError,
    configure_pillow,
    decode_rgb,
    header_size,
    whole_pixels,
)
from bagelplane.strict_images import decode_upright, orientation, upright_size

GOLDEN = Path(__file__).parents[1] / "golden"
WIDTH, HEIGHT = 50, 40
CORNERS = Image.fromarray(
    np.kron(np.arange(4, dtype=np.uint8).reshape(2, 2, 1) * 80, np.ones((20, 25, 3), np.uint8))
)


def encode(image: Image.Image, file_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def exif_of(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


@pytest.mark.parametrize("value", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "MPO"])
def test_orientation_is_applied_to_size_and_pixels(file_format: str, value: int) -> None:
    options: dict[str, Any] = {"lossless": True} if file_format == "WEBP" else {}
    data = encode(CORNERS, file_format, exif=exif_of(value), **options)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert upright_size(data) == expected.size == ((WIDTH, HEIGHT) if value < 5 else (HEIGHT, WIDTH))
    assert decode_upright(data).tobytes() == expected.tobytes()
    if file_format != "TIFF":  # Pillow turns those by itself
        assert header_size(data) == decode_rgb(data).size == (WIDTH, HEIGHT)


@pytest.mark.parametrize(
    "block", [b"", b"junk", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"MM\0*\xff\xff\xff\xff"]
)
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_exif_that_cannot_be_read_is_passed_over(file_format: str, block: bytes) -> None:
    data = encode(CORNERS, file_format, exif=block)
    assert upright_size(data) == decode_upright(data).size == (WIDTH, HEIGHT)


@pytest.mark.parametrize("value", [0, 9, 77])
def test_an_orientation_that_there_is_not_is_passed_over(value: int) -> None:
    data = encode(CORNERS, "JPEG", exif=exif_of(value))
    assert upright_size(data) == decode_upright(data).size == (WIDTH, HEIGHT)


def ramp(mode: type[np.generic], low: float, high: float) -> Image.Image:
    values = np.linspace(low, high, 256).reshape(16, 16)
    return Image.fromarray(values.astype(mode))


RAMP = np.arange(256, dtype=int).reshape(16, 16)


@pytest.mark.parametrize(
    ("image", "file_format"),
    [
        (ramp(np.uint16, 0, 65535), "PNG"),
        (ramp(np.uint16, 0, 65535), "TIFF"),
        (ramp(np.float32, 0, 1), "TIFF"),
        (ramp(np.float32, 0, 255), "TIFF"),
        (ramp(np.float32, 0, 65535), "TIFF"),
        (ramp(np.float32, -300, 900), "TIFF"),
        (ramp(np.int32, 0, 65535), "TIFF"),
        (ramp(np.int32, -1000, 2_000_000), "TIFF"),
    ],
)
def test_deep_greys_use_the_whole_range(image: Image.Image, file_format: str) -> None:
    pixels = np.asarray(decode_upright(encode(image, file_format))).astype(int)
    assert np.abs(pixels - RAMP[:, :, None]).max() <= 1
    assert (pixels[0, 0, 0], pixels[-1, -1, 0]) == (0, 255)


def test_a_dark_picture_of_16_bits_stays_dark() -> None:
    data = encode(ramp(np.uint16, 0, 2570), "PNG")
    assert np.asarray(decode_upright(data)).max() == 10


def test_numbers_that_are_none_have_a_place() -> None:
    values = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    values[0, 0], values[0, 1], values[0, 2] = np.nan, np.inf, -np.inf
    pixels = np.asarray(decode_upright(encode(Image.fromarray(values), "TIFF")))
    assert pixels[0, :3, 0].tolist() == [0, 255, 0]
    assert (np.asarray(decode_upright(encode(Image.fromarray(values * np.nan), "TIFF"))) == 0).all()


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_transparent_pixels_are_white(mode: str) -> None:
    data = encode(Image.new("RGBA", (8, 8), (0, 0, 0, 0)).convert(mode), "PNG")
    assert (np.asarray(decode_upright(data)) == 255).all()


def test_a_transparent_colour_of_a_palette_is_white() -> None:
    image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).convert("P")
    pixels = np.asarray(decode_upright(encode(image, "PNG", transparency=3)))
    assert pixels[0, 3].tolist() == [255, 255, 255]
    assert pixels[0, 4].tolist() == [4, 4, 4]


def test_a_transparent_16_bit_grey_is_white() -> None:
    data = encode(Image.fromarray(np.full((8, 8), 1000, np.uint16)), "PNG")
    # A tRNS chunk: that grey is transparent.
    body = struct.pack(">H", 1000)
    chunk = struct.pack(">I", 2) + b"tRNS" + body + struct.pack(">I", zlib.crc32(b"tRNS" + body))
    place = data.index(b"IDAT") - 4
    assert (np.asarray(decode_upright(data[:place] + chunk + data[place:])) == 255).all()


TRUNCATED = {
    "JPEG": {}, "progressive": {"progressive": True}, "PNG": {}, "GIF": {}, "WEBP": {"lossless": True}, "BMP": {},
}  # fmt: skip


@pytest.mark.parametrize("name", TRUNCATED)
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_truncated_pixels_are_an_error_and_the_size_is_still_known(name: str, part: float) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (96, 96, 3), dtype=np.uint8)
    whole = encode(Image.fromarray(pixels), "JPEG" if name == "progressive" else name, **TRUNCATED[name])
    data = whole[: int(len(whole) * part)]
    assert upright_size(data) == (96, 96)
    with pytest.raises(TruncatedImageError):
        decode_upright(data)
    assert decode_upright(whole).size == (96, 96)


def test_bytes_after_the_end_are_no_damage_and_a_missing_end_is() -> None:
    whole = encode(CORNERS, "JPEG")
    assert decode_upright(whole + b"\0" * 100).tobytes() == decode_upright(whole).tobytes()
    with pytest.raises(TruncatedImageError):
        decode_upright(whole[:-2])


def test_other_threads_load_truncated_pixels_meanwhile() -> None:
    configure_pillow()
    cut = encode(CORNERS.resize((200, 200)), "JPEG", quality=100)
    cut = cut[: len(cut) // 2]
    loaded: list[Any] = []
    with whole_pixels():
        thread = threading.Thread(target=lambda: loaded.append(decode_rgb(cut).size))
        thread.start()
        thread.join(10)
        with pytest.raises(ImageError):
            decode_rgb(cut)
    assert loaded == [(200, 200)]
    assert decode_rgb(cut).size == (200, 200)


def golden_images() -> list[bytes]:
    found = [path.read_bytes() for path in sorted((GOLDEN / "odd/vlm/images").rglob("*")) if path.is_file()]
    for path in sorted((GOLDEN / "odd/t2i").glob("*.parquet")):
        found += [value for value in pq.read_table(path, columns=["image"])["image"].to_pylist() if value]
    return found


def test_every_image_has_the_size_that_its_header_says_or_fails_as_an_image() -> None:
    outcomes = {"upright": 0, "fails": 0, "does not open": 0}
    for data in golden_images():
        try:
            size = upright_size(data)
        except ImageError:
            outcomes["does not open"] += 1
            continue
        try:
            image = decode_upright(data)
        except ImageError:
            outcomes["fails"] += 1
            continue
        assert (image.mode, image.size) == ("RGB", size)
        outcomes["upright"] += 1
    assert outcomes["upright"] > 50, outcomes
    assert outcomes["fails"] > 0, outcomes


def test_plain_pictures_are_read_as_ever() -> None:
    compared = 0
    for data in golden_images():
        try:
            image, strict = decode_rgb(data), decode_upright(data)
        except ImageError:
            continue
        opened = Image.open(io.BytesIO(data))
        if opened.mode == "RGB" and orientation(data) == 1:
            assert image.tobytes() == strict.tobytes()
            compared += 1
    assert compared > 30
