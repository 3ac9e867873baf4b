"""Images: sizes from headers, colours, refusals. Each image is made here or comes from the recorded sets."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, UnidentifiedImageError

from bagelplane import images
from bagelplane.demo_pictures import as_undecodable
from bagelplane.images import ImageError, decode_rgb, header_size, resize_into

GOLDEN = Path(__file__).parents[1] / "golden"
WIDTH, HEIGHT = 50, 40


def photo(mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(7).integers(0, 256, (HEIGHT, WIDTH, 4), dtype=np.uint8)
    image = Image.fromarray(pixels)
    if mode == "I;16":
        return image.convert("L").convert("I").point(lambda value: value * 257).convert("I;16")
    return image.convert(mode)


def encode(image: Image.Image, file_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def pixels_of(image: Image.Image) -> np.ndarray:
    return np.asarray(image)


FORMATS: list[tuple[str, str, dict[str, Any]]] = [
    ("JPEG", "RGB", {}),
    ("JPEG", "RGB", {"progressive": True}),
    ("JPEG", "RGB", {"comment": b"x" * 300}),
    ("JPEG", "L", {}),
    ("JPEG", "CMYK", {}),
    *(("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
    ("PNG", "P", {"transparency": 3}),
    ("PNG", "P", {"transparency": bytes(range(256))}),
    ("PNG", "L", {"transparency": 100}),
    ("PNG", "RGB", {"transparency": (1, 2, 3)}),
    *(("GIF", mode, {}) for mode in ("L", "P", "RGBA")),
    *(("WEBP", mode, options) for mode in ("RGB", "RGBA") for options in ({}, {"lossless": True})),
    ("WEBP", "RGB", {"exif": b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x00"}),
    *(("TIFF", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F", "YCbCr")),
    *(("BMP", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")),
    *(("AVIF", mode, {}) for mode in ("RGB", "RGBA")),
    *(("JPEG2000", mode, {}) for mode in ("L", "RGB", "RGBA")),
    *(("ICO", mode, {}) for mode in ("RGB", "RGBA")),
    ("PPM", "RGB", {}),
    ("TGA", "RGBA", {}),
]


def laid_on_white(image: Image.Image) -> np.ndarray:
    ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return pixels_of(Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB"))


@pytest.mark.parametrize(("file_format", "mode", "options"), FORMATS)
def test_header_size_and_colours_of_each_format(file_format: str, mode: str, options: dict[str, Any]) -> None:
    data = encode(photo(mode), file_format, **options)
    decoded = decode_rgb(data)
    assert decoded.mode == "RGB"
    assert header_size(data) == decoded.size
    if file_format != "ICO":  # an icon is scaled to a size of its own
        assert decoded.size == (WIDTH, HEIGHT)
    opened = Image.open(io.BytesIO(data))
    has_alpha = opened.mode == "RGBA" or "transparency" in opened.info
    expected = laid_on_white(opened) if has_alpha else pixels_of(opened.convert("RGB"))
    assert np.array_equal(pixels_of(decoded), expected)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_common_formats_do_not_need_pillow_for_their_size(
    monkeypatch: pytest.MonkeyPatch, file_format: str
) -> None:
    data = encode(photo(), file_format)

    def no_pillow(file: object) -> None:
        raise AssertionError(f"{file_format} was opened")

    monkeypatch.setattr(Image, "open", no_pillow)
    assert header_size(data) == (WIDTH, HEIGHT)


def test_clear_pixels_become_white() -> None:
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert decode_rgb(encode(clear, "PNG")).getpixel((0, 0)) == (255, 255, 255)


def test_grey_with_alpha_keeps_its_black_ground() -> None:
    clear = Image.new("LA", (4, 4), (0, 0))
    assert decode_rgb(encode(clear, "PNG")).getpixel((0, 0)) == (0, 0, 0)


def test_bright_sixteen_bit_grey_is_clipped_to_white() -> None:
    grey = Image.fromarray(np.full((4, 4), 300, dtype=np.uint16))
    assert decode_rgb(encode(grey, "PNG")).getpixel((0, 0)) == (255, 255, 255)


def test_cmyk_is_read_with_and_without_its_adobe_marker() -> None:
    data = encode(photo("CMYK"), "JPEG")
    begin = data.index(b"\xff\xee\x00\x0eAdobe")
    without_marker = data[:begin] + data[begin + 16 :]
    for variant in (data, without_marker):
        assert header_size(variant) == decode_rgb(variant).size == (WIDTH, HEIGHT)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "TIFF", "WEBP", "AVIF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_header_size_agrees_whatever_the_orientation(file_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    data = encode(photo(), file_format, exif=exif)
    assert header_size(data) == decode_rgb(data).size
    if file_format in {"JPEG", "PNG", "WEBP"}:
        assert header_size(data) == (WIDTH, HEIGHT)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "TIFF", "MPO", "PNG", "AVIF"])
def test_the_first_of_several_frames_counts(file_format: str) -> None:
    frames = [Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in ((200, 0, 0), (0, 200, 0))]
    data = encode(frames[0], file_format, save_all=True, append_images=frames[1:])
    red, green, _ = decode_rgb(data).getpixel((25, 20))
    assert red > 150
    assert green < 50
    assert header_size(data) == (WIDTH, HEIGHT)


def test_interlaced_png_has_the_pixels_of_a_plain_one() -> None:
    # Pillow writes none; four passes of a 2x2 grey image are short enough to write here.
    passes = b"\x00\x0a" + b"\x00\x14" + b"\x00\x1e\x28"
    header = struct.pack(">IIBBBBB", 2, 2, 8, 0, 0, 0, 1)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(passes))
    data += chunk(b"IEND", b"")
    assert header_size(data) == (2, 2)
    assert pixels_of(decode_rgb(data))[..., 0].tolist() == [[10, 20], [30, 40]]


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_fill_bytes_and_unusual_segments_leave_the_size_right() -> None:
    data = encode(photo(), "JPEG")
    filled = data[:2] + b"\xff\xff\xff" + data[2:]
    assert header_size(filled) == decode_rgb(filled).size == (WIDTH, HEIGHT)
    unusual = data[:2] + b"\xff\xdc\x00\x04\x00\x09" + data[2:]
    assert header_size(unusual) == decode_rgb(unusual).size == (WIDTH, HEIGHT)


def test_a_thumbnail_does_not_lend_its_size() -> None:
    thumbnail = encode(photo().resize((8, 8)), "JPEG")
    data = encode(photo(), "JPEG", exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x00" + thumbnail)
    assert header_size(data) == (WIDTH, HEIGHT)


def test_a_jpeg_without_its_second_half_loads() -> None:
    data = encode(photo(), "JPEG", quality=95)
    half = data[: len(data) // 2]
    assert header_size(half) == decode_rgb(half).size == (WIDTH, HEIGHT)


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"no image", bytes(1000)]
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    for read in (header_size, decode_rgb):
        with pytest.raises(ImageError) as caught:
            read(data)
        assert "0x" not in str(caught.value)  # an address would differ from run to run
        assert len(str(caught.value)) < 200


def test_a_header_that_says_no_pixels_is_refused() -> None:
    data = bytearray(encode(photo(), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = bytes(4)
    for read in (header_size, decode_rgb):
        with pytest.raises(ImageError):
            read(bytes(data))


def bomb(side: int) -> bytes:
    """A PNG that claims `side` x `side` pixels of one bit, and holds one row of them."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    row = zlib.compress(bytes(1 + (side + 7) // 8))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", row) + chunk(b"IEND", b"")


def test_up_to_twice_the_pixel_limit_opens_although_pillow_warns() -> None:
    data = bomb(19_000)
    assert header_size(data) == (19_000, 19_000)
    # Pillow's own way, where warnings are errors: the side of a GIF's screen, patched.
    gif = bytearray(encode(photo("P"), "GIF"))
    gif[6:10] = struct.pack("<HH", 19_000, 19_000)
    assert header_size(bytes(gif)) == (19_000, 19_000)


def test_above_twice_the_pixel_limit_is_refused_from_the_header() -> None:
    data = bomb(20_001)
    for read in (header_size, decode_rgb):
        with pytest.raises(ImageError, match=r"400,?000,?000"):
            read(data)


def test_postscript_is_never_given_to_an_interpreter() -> None:
    data = encode(photo(), "EPS")
    for read in (header_size, decode_rgb):
        with pytest.raises(ImageError, match="EPS"):
            read(data)


@pytest.mark.parametrize(
    "error", [OSError, SyntaxError, MemoryError, OverflowError, EOFError, struct.error, zlib.error]
)
def test_whatever_a_decoder_raises_is_an_image_error(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def broken(file: object) -> None:
        raise error("of the decoder")

    monkeypatch.setattr(Image, "open", broken)
    with pytest.raises(ImageError, match="of the decoder"):
        decode_rgb(b"data")


def test_the_reason_does_not_name_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: object) -> None:
        raise OSError(f"cannot read {file!r}")

    monkeypatch.setattr(Image, "open", broken)
    with pytest.raises(ImageError, match=r"^OSError: cannot read the image$"):
        decode_rgb(b"data")
    assert images._cause(UnidentifiedImageError("at 0x7f")) == images._cause(
        UnidentifiedImageError("at 0x80")
    )


@pytest.mark.parametrize("size", [(64, 32), (17, 90), (WIDTH, HEIGHT), (1, 1)])
def test_pixels_are_pillows_bicubic_in_the_buffer_that_is_given(size: tuple[int, int]) -> None:
    width, height = size
    buffer = np.zeros(height * width * 3 + 128, dtype=np.uint8)
    out = buffer[64:-64].reshape(height, width, 3)
    image = photo()
    resize_into(image, out)
    assert np.array_equal(out, pixels_of(image.resize(size, Image.Resampling.BICUBIC)))
    assert not buffer[:64].any()
    assert not buffer[-64:].any()


def test_a_buffer_or_image_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        resize_into(photo(), np.empty((4, 4, 3), dtype=np.float32))
    with pytest.raises(ValueError, match="RGBA"):
        resize_into(photo("RGBA"), np.empty((4, 4, 3), dtype=np.uint8))


def test_threads_that_meet_a_rare_format_first_all_know_it() -> None:
    # In a process of its own: which formats Pillow has loaded is global.
    code = """
import io, sys, threading
from bagelplane.images import decode_rgb
data, results = sys.stdin.buffer.read(), []
start = threading.Barrier(8)
def work():
    start.wait()
    results.append(decode_rgb(data).size)
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert results == [(50, 40)] * 8, results
"""
    data = encode(photo(), "AVIF")
    subprocess.run([sys.executable, "-c", code], input=data, check=True, timeout=60)


def test_threads_get_the_same_pixels_as_one() -> None:
    data = [encode(photo(), name) for name in ("JPEG", "PNG", "WEBP", "TIFF")]
    expected = [decode_rgb(item).tobytes() for item in data]
    seen: list[bool] = []

    def work() -> None:
        seen.extend([decode_rgb(item).tobytes() for item in data] == expected for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert seen == [True] * 40


def recorded_images(name: str) -> Iterator[tuple[str, bytes]]:
    """(place, bytes) of every image of a recorded data set."""
    root = GOLDEN / name
    for path in sorted(root.glob("t2i/*.parquet")):
        for row, data in enumerate(pq.read_table(path)["image"].to_pylist()):
            yield f"{path.stem} {row}", data
    for path in sorted(root.glob("edit/*.parquet")):
        for row, chain in enumerate(pq.read_table(path)["image_list"].to_pylist()):
            for place, data in enumerate(chain):
                yield f"{path.stem} {row} {place}", data
    for path in sorted((root / "vlm" / "images").rglob("*")):
        if path.is_file():
            yield str(path.relative_to(root)), path.read_bytes()


RECORDED_REFUSALS = {
    "data": {
        "open": "part-00001 1, part-00003 0, part-00004 11, part-00006 10, chunk-00000 4 1, "
        "chunk-00001 11 2, chunk-00003 6 1, chunk-00005 1 2, chunk-00006 8 1",
        "decode": "",
    },
    "odd": {
        "open": "part-00001 3, part-00003 8, part-00006 1, chunk-00000 4 1, chunk-00001 5 2, "
        "chunk-00002 6 3, chunk-00003 7 2, chunk-00004 8 3, chunk-00005 9 2, chunk-00006 10 2, "
        "chunk-00007 11 1",
        "decode": "part-00005 1",
    },
}


@pytest.mark.parametrize("name", RECORDED_REFUSALS)
def test_recorded_images_open_and_decode_as_recorded(name: str) -> None:
    refused: dict[str, list[str]] = {"open": [], "decode": []}
    for place, data in recorded_images(name):
        try:
            size = header_size(data)
        except ImageError:
            refused["open"].append(place)
            continue
        try:
            assert decode_rgb(data).size == size, place
        except ImageError:
            refused["decode"].append(place)
    assert {step: ", ".join(places) for step, places in refused.items()} == RECORDED_REFUSALS[name]


def test_a_library_prints_nothing_of_a_damaged_tiff(capfd: pytest.CaptureFixture[str]) -> None:
    data = as_undecodable(Image.effect_noise((64, 64), 50).convert("RGB"))
    with pytest.raises(ImageError, match="decoder error"):
        decode_rgb(data)
    assert capfd.readouterr() == ("", "")
