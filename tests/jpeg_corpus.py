"""JPEG files of every kind that data sets hold, good and damaged, made here: the same in every run."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator

import numpy as np
import simplejpeg
from PIL import Image

from bagelplane.jpeg import first_scans

SAMPLINGS = ("444", "422", "420", "440", "411")
QUALITIES = (1, 10, 25, 50, 75, 90, 95, 100)
BIT_FLIPS = 12  # of each file that is damaged
END = b"\xff\xd9"

Named = Iterator[tuple[str, bytes]]


def picture(width: int, height: int, seed: int) -> np.ndarray:
    """Something of everything: a smooth part, noise, and hard edges in strong colours."""
    draw = np.random.default_rng(seed)
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack([across, down, 255 - across], axis=2).astype(np.uint8)
    pixels[height // 2 :, : width // 2] = draw.integers(0, 256, pixels[height // 2 :, : width // 2].shape)
    pixels[height // 2 :, width // 2 :] = draw.integers(0, 2, pixels[height // 2 :, width // 2 :].shape) * 255
    return pixels


def by_turbo(pixels: np.ndarray, sampling: str, quality: int) -> bytes:
    return bytes(simplejpeg.encode_jpeg(pixels, quality=quality, colorsubsampling=sampling))


def by_pillow(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def with_segment(data: bytes, marker: int, body: bytes) -> bytes:
    """`data` with one more segment behind its first two bytes."""
    return data[:2] + bytes([0xFF, marker]) + (len(body) + 2).to_bytes(2, "big") + body + data[2:]


def with_frame(data: bytes, frame: int) -> bytes:
    """The same coefficients under another frame marker: 0xC1 is read alike, others are another process."""
    at = data.index(b"\xff\xc0")
    return data[: at + 1] + bytes([frame]) + data[at + 2 :]


def without_header(data: bytes) -> bytes:
    """No JFIF segment: what the components are is to be guessed from their identifiers."""
    length = int.from_bytes(data[4:6], "big")
    return data[:2] + data[4 + length :]


def with_identifiers(data: bytes, identifiers: bytes) -> bytes:
    changed = bytearray(data)
    frame, scan = data.index(b"\xff\xc0"), data.index(b"\xff\xda")
    for number, identifier in enumerate(identifiers):
        changed[frame + 10 + 3 * number] = changed[scan + 5 + 2 * number] = identifier
    return bytes(changed)


def sound_files() -> Named:
    """What has no flaw, in kinds that are decoded directly and kinds that are not."""
    for side in range(1, 41):
        for number, sampling in enumerate(SAMPLINGS):
            other = 1 + (13 * side + 8 * number) % 40  # 13 and 40 have no common divisor: each side once
            yield f"{sampling} {side}x{other}", by_turbo(picture(side, other, side), sampling, 80)
    for quality in QUALITIES:
        for sampling in SAMPLINGS:
            yield f"{sampling} quality {quality}", by_turbo(picture(61, 47, quality), sampling, quality)
        image = Image.fromarray(picture(61, 47, quality))
        yield f"grey quality {quality}", by_pillow(image.convert("L"), quality=quality)
        yield f"progressive quality {quality}", by_pillow(image, quality=quality, progressive=True)
        yield f"cmyk quality {quality}", by_pillow(image.convert("CMYK"), quality=quality)
    for width, height in ((1, 1), (8, 8), (16, 15), (17, 33), (39, 40)):
        image = Image.fromarray(picture(width, height, width))
        for mode in ("RGB", "L"):
            for subsampling in (0, 1, 2):
                made = by_pillow(image.convert(mode), progressive=True, subsampling=subsampling)
                yield f"progressive {mode} {subsampling} {width}x{height}", made
        for blocks in (1, 2, 5):
            yield f"restart {blocks} {width}x{height}", by_pillow(image, restart_marker_blocks=blocks)
        rows = by_pillow(image, restart_marker_rows=1, progressive=True)
        yield f"progressive, restart rows {width}x{height}", rows
    image = Image.fromarray(picture(90, 70, 3))
    yield "kept as RGB", by_pillow(image, keep_rgb=True)
    yield "optimized", by_pillow(image, optimize=True)
    yield "large, over one block of Pillow's", by_pillow(Image.fromarray(picture(700, 500, 4)), quality=95)
    large = by_pillow(Image.fromarray(picture(700, 500, 5)), quality=95, progressive=True)
    yield "large and progressive", large
    yield from marked_files(by_pillow(image))


def marked_files(data: bytes) -> Named:
    """One good file among segments, bytes and markers that change how it is read, or should not."""
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x112] = orientation
        yield f"orientation {orientation}", by_pillow(Image.open(io.BytesIO(data)), exif=exif)
    yield "exif without an end", with_segment(data, 0xE1, b"Exif\0\0MM\0*")
    yield "thumbnail", with_segment(data, 0xE1, b"Exif\0\0" + data[:5000])
    yield "comment", with_segment(data, 0xFE, b"x" * 60_000)
    yield "profile", with_segment(data, 0xE2, b"ICC_PROFILE\0\1\1" + bytes(3000))
    yield "profile cut off", with_segment(data, 0xE2, b"ICC_PROFILE\0")
    yield "short JFIF", with_segment(data, 0xE0, b"JFIF\0")
    yield "short photoshop", with_segment(data, 0xED, b"Photoshop 3.0\x008BIM\4\4\xff")
    yield "malformed index of several", with_segment(data, 0xE2, b"MPF\0MM\0*" + bytes(12))
    for transform in (0, 1, 2, 255):
        adobe = b"Adobe\0\x64\0\0\0\0" + bytes([transform])
        yield f"adobe {transform}", with_segment(data, 0xEE, adobe)
        yield f"adobe {transform} without JFIF", with_segment(without_header(data), 0xEE, adobe)
        grey = by_pillow(Image.open(io.BytesIO(data)).convert("L"))
        yield f"grey, adobe {transform}", with_segment(grey, 0xEE, adobe)
    yield "short adobe", with_segment(data, 0xEE, b"Adobe\0\x64")
    yield "without JFIF", without_header(data)
    for identifiers in (b"\0\1\2", b"RGB", b"rgb", b"\1\1\1", b"\1\2\2"):
        yield f"identifiers {identifiers!r}", with_identifiers(data, identifiers)
        yield f"identifiers {identifiers!r}, no JFIF", without_header(with_identifiers(data, identifiers))
    for frame in range(0xC0, 0xD0):
        yield f"frame {frame:02X}", with_frame(data, frame)
    cmyk = by_pillow(Image.open(io.BytesIO(data)).convert("CMYK"))
    at = cmyk.index(b"Adobe") + 11
    for transform in (0, 1, 2):
        yield f"four components, adobe {transform}", cmyk[:at] + bytes([transform]) + cmyk[at + 1 :]
    for name, rest in (
        ("zeros", bytes(100)),
        ("text", b"trailer" * 50),
        ("markers", b"\xff\xd8\xff\xe0" * 9),
    ):
        yield f"{name} after the end", data + rest
    yield "two in one file", data + by_pillow(Image.new("RGB", (20, 30), (255, 0, 0)))
    yield "two ends", data + END
    yield "fill bytes", data[:2] + b"\xff\xff\xff" + data[2:]
    yield "bytes between segments", data[:2] + b"\0\1\2" + data[2:]
    yield "bytes before the end", data[:-2] + b"\0\0\0\0" + END
    yield "no end", data[:-2]
    yield "12 bits", data.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c")
    for sampling in range(0x11, 0x45):
        if all(1 <= part <= 4 for part in divmod(sampling, 16)):
            at = data.index(b"\xff\xc0") + 11
            yield f"sampling {sampling:02x}", data[:at] + bytes([sampling]) + data[at + 1 :]
            yield f"colours' sampling {sampling:02x}", data[: at + 3] + bytes([sampling]) + data[at + 4 :]


def bases() -> list[tuple[str, bytes]]:
    """Files to be damaged, of each process, some longer than a block of Pillow's."""
    image = Image.fromarray(picture(75, 58, 9))
    large = Image.fromarray(picture(420, 320, 9))
    return [
        *((f"base {sampling}", by_turbo(picture(75, 58, 9), sampling, 85)) for sampling in SAMPLINGS),
        ("base grey", by_pillow(image.convert("L"))),
        ("base progressive", by_pillow(image, progressive=True)),
        ("base restart", by_pillow(image, restart_marker_blocks=2)),
        ("base progressive restart", by_pillow(image, progressive=True, restart_marker_rows=1)),
        ("base optimized", by_pillow(image, optimize=True)),
        ("base cmyk", by_pillow(image.convert("CMYK"))),
        ("base large", by_pillow(large, quality=98)),
        ("base large progressive", by_pillow(large, quality=98, progressive=True)),
    ]


def damaged_files(flips: int = BIT_FLIPS, seed: int = 11) -> Named:
    """Each base cut at each tenth, with bits turned, with bytes lost, put in or swapped."""
    draw = random.Random(seed)
    for name, data in bases():
        for tenth in range(1, 10):
            cut = data[: len(data) * tenth // 10]
            yield f"{name} cut at {tenth}0 %", cut
            yield f"{name} ended at {tenth}0 %", cut + END
        scan = data.index(b"\xff\xda")
        for number in range(flips):
            changed = bytearray(data)
            # Every third in the header, the others behind it.
            at = draw.randrange(2, scan) if number % 3 == 0 else draw.randrange(scan, len(data))
            changed[at] ^= 1 << draw.randrange(8)
            yield f"{name} bit {number} at {at}", bytes(changed)
        for number in range(flips // 4):
            at = draw.randrange(scan, len(data))
            yield f"{name} lost {number}", data[:at] + data[at + draw.randrange(1, 40) :]
            marker = bytes([0xFF, draw.randrange(256)])
            yield f"{name} put in {number}", data[:at] + marker + data[at:]
            block = data[at : at + 64]
            yield f"{name} repeated {number}", data[:at] + block + data[at:]
        if "progressive" in name:
            for number in range(1, data.count(b"\xff\xda")):
                yield f"{name} first scans {number}", first_scans(data, number)


def corpus() -> Named:
    yield from sound_files()
    yield from damaged_files()
