"""From the bytes of an image to RGB pixels of a planned size: the one place that knows Pillow.

Three steps, each usable alone: the size from the header, the decoded image, the pixels in a buffer that is
given. Colour follows the recorded streams (Automodel profile): alpha is laid on white, everything else is
Pillow's plain conversion, the first frame of several counts, EXIF orientation is ignored, truncated pixels
load. How profile Strict reads is strict_images.py's.

Every function may run in any number of threads; Pillow releases the GIL while it decodes and resizes.
Pillow's limits are process-wide: they are set when the first image is looked at, or earlier by
`configure_pillow`. What resizes, compiled code or Pillow, is resampling.py's, and what decodes plain JPEGs is
jpeg.py's: the bits are the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import re
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageFile, PngImagePlugin, UnidentifiedImageError

from bagelplane import jpeg
from bagelplane.png_text import MAX_CHUNK_BYTES, without_bulky_text
from bagelplane.resampling import choice, resize_rgb

PIXEL_LIMIT = 200_000_000
"""Pillow's limit in pixels; as with Pillow, images are refused above twice that."""

_CAUSE_LIMIT_CHARACTERS = 160

# Formats whose `size` after opening is known to be that of the decoded image. Others (icons hold several
# images, and say the size of another than they decode) are decoded to be sure.
_HEADER_IS_EXACT = frozenset(
    {"AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "MPO", "PCX", "PNG", "PPM", "QOI", "TGA", "TIFF"}
    | {"WEBP"}
)

# Pillow hands these to Ghostscript, an external interpreter: not for bytes out of a data set.
_REFUSED_FORMATS = frozenset({"EPS"})

_PNG_PREFIX = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"

# (bit depth, colour type) pairs that PNG defines.
_PNG_KINDS = frozenset(
    {(depth, 0) for depth in (1, 2, 4, 8, 16)}
    | {(depth, 3) for depth in (1, 2, 4, 8)}
    | {(depth, kind) for depth in (8, 16) for kind in (2, 4, 6)}
)

# Only one thread at a time may exchange the process's warning filters.
_WARNING_FILTERS = threading.Lock()

_Result = TypeVar("_Result")


class ImageError(Exception):
    """An image does not open or does not decode; the text says why, without the image's name."""


class TruncatedImageError(ImageError):
    """An image ends before its last pixel."""


class _TruncatedLoads(threading.local):
    """In the place of Pillow's switch of that name, which is one for the process: here every thread has its own."""

    are_allowed = True

    def __bool__(self) -> bool:
        return self.are_allowed


_truncated_loads = _TruncatedLoads()


@contextlib.contextmanager
def whole_pixels() -> Iterator[None]:
    """In this thread, truncated pixels raise meanwhile, whatever other threads do."""
    _truncated_loads.are_allowed = False
    try:
        yield
    finally:
        _truncated_loads.are_allowed = True


@dataclass(frozen=True, slots=True)
class ImageReading:
    """How a profile reads images: (width, height) from the header, and the RGB pixels, of that very size."""

    size: Callable[[bytes], tuple[int, int]]
    decode: Callable[[bytes], Image.Image]


def configure_pillow() -> None:
    """Sets Pillow's process-wide limits to those of the recorded streams, and loads all of its formats.

    Chooses what resizes and what decodes JPEG, too. Raises SpecError if BAGELPLANE_RESAMPLER or BAGELPLANE_JPEG
    asks for what there is not.
    """
    pillow: Any = ImageFile
    pillow.LOAD_TRUNCATED_IMAGES = _truncated_loads
    Image.MAX_IMAGE_PIXELS = PIXEL_LIMIT
    PngImagePlugin.MAX_TEXT_CHUNK = MAX_CHUNK_BYTES
    # Left to itself, Pillow does this at the first image of a rare format; a second thread that opens one
    # meanwhile is told that there is no such format.
    Image.init()
    _silence_libtiff()
    # So that a wrong setting is told before the first image.
    choice()
    jpeg.choice()


def _silence_libtiff() -> None:
    """It prints what is wrong with a file to stderr, past all logging. Pillow raises the same, and switches off only
    the warnings. Called in the copy of the library that Pillow has loaded; where there is none of its own, it prints.
    """
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        for library in set(re.findall(r"(/\S*/libtiff[^/\s]*)$", maps, re.MULTILINE)):
            with contextlib.suppress(AttributeError):
                ctypes.CDLL(library).TIFFSetErrorHandler(None)


# Once a process, however often images are looked at.
_configure_once = functools.cache(configure_pillow)


def header_size(data: bytes) -> tuple[int, int]:
    """(width, height) in pixels that `decode_rgb` will give, from the header alone. Raises ImageError.

    Plain JPEG, PNG and WebP are read here, without Pillow (ten times as fast, WebP a hundred); whatever is
    unusual about them, and all other formats, goes to Pillow. An image that opens may still not decode.
    """
    size = None if is_short_webp(data) else plain_size(data)
    if size is None:
        size = guarded(_opened_size, data)
    check_size(*size)
    return size


def head_size(head: bytes, length_bytes: int) -> tuple[int, int] | None:
    """What `header_size` gives for a file of that length, from its beginning; None where that takes more of it."""
    is_short = head[:4] == b"RIFF" and length_bytes < 8 + int.from_bytes(head[4:8], "little")
    size = None if is_short else plain_size(head)
    return size if size is not None and _is_allowed(*size) else None


_MAGIC = {
    b"\xff\xd8\xff": "JPEG", b"\x89PNG": "PNG", b"GIF8": "GIF", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF",
}  # fmt: skip


def image_format(data: bytes) -> str | None:
    """The format by the first bytes, of those that data sets have; None for another."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((name for magic, name in _MAGIC.items() if data.startswith(magic)), None)


def plain_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) of a plain JPEG, PNG or WebP as its header has it; None for whatever is unusual."""
    parse = _PARSERS.get(data[:4])
    return parse(data) if parse else None


def decode_rgb(data: bytes) -> Image.Image:
    """The decoded image in mode RGB. Raises ImageError, and nothing else, whatever is wrong with `data`."""
    return guarded(_decode, data)


def resize_into(image: Image.Image, out: np.ndarray) -> None:
    """Writes RGB `image`, resized to `out` (BICUBIC), into `out`: uint8 [h, w, 3], C-contiguous.

    An image of that size already is copied unchanged, as Pillow does.
    """
    height, width = out.shape[:2]
    if image.mode != "RGB" or out.shape != (height, width, 3) or out.dtype != np.uint8:
        raise ValueError(f"cannot write a {image.mode} image into {out.dtype} {out.shape}")
    resize_rgb(image, out)


def _decode(data: bytes) -> Image.Image:
    image = open_image(data)
    check_size(*image.size)
    if image.format == "JPEG":
        decoded = jpeg.decode_plain(data, image.size)
        if decoded is not None:
            return decoded
    # Both are asked before loading: loading may turn a palette into colours.
    if image.mode == "RGBA" or "transparency" in image.info:
        rgba = image.convert("RGBA")
        ground = Image.new("RGB", rgba.size, (255, 255, 255))
        ground.paste(rgba, mask=rgba)
        return ground
    image.load()
    # Converting RGB to RGB would be a copy of all pixels.
    return image if image.mode == "RGB" else image.convert("RGB")


def _opened_size(data: bytes) -> tuple[int, int]:
    image = open_image(data)
    if image.format not in _HEADER_IS_EXACT:
        check_size(*image.size)
        image.load()
    return image.size


def open_image(data: bytes) -> ImageFile.ImageFile:
    """As Pillow opens it: the header alone. For use inside of `guarded`."""
    if not data:
        raise ImageError("no bytes")
    if data[:4] == b"\x89PNG":
        data = without_bulky_text(data)
    image = Image.open(io.BytesIO(data))
    if image.format in _REFUSED_FORMATS:
        raise ImageError(f"{image.format} is not opened: it would run an external program")
    return image


def guarded(action: Callable[[bytes], _Result], data: bytes) -> _Result:
    """`action(data)`, with whatever Pillow raises turned into an ImageError."""
    _configure_once()
    try:
        try:
            return action(data)
        except Warning:
            # The process turns warnings into errors, and Pillow warned (say, of more than 200 M pixels). What
            # is an image must not depend on that.
            with _WARNING_FILTERS, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return action(data)
    except ImageError:
        raise
    except Exception as error:
        raise ImageError(_cause(error)) from error


def _cause(error: Exception) -> str:
    """A short reason that is the same for the same bytes: it is kept in snapshots."""
    if isinstance(error, UnidentifiedImageError):
        return "no known image format, or its header is damaged"
    text = re.sub(r"<[^<>]* at 0x[0-9a-f]+>", "the image", str(error))
    return f"{type(error).__name__}: {text}"[:_CAUSE_LIMIT_CHARACTERS]


def _is_allowed(width: int, height: int) -> bool:
    try:
        check_size(width, height)
    except ImageError:
        return False
    return True


def check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ImageError(f"no pixels: {width}x{height}")
    if width * height > 2 * PIXEL_LIMIT:
        raise ImageError(f"{width}x{height} pixels, more than the limit of {2 * PIXEL_LIMIT:,}")


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Size from the frame header of a JPEG, None if anything is unusual."""
    header = jpeg.read_header(data)
    return header.size if header else None


def _png_size(data: bytes) -> tuple[int, int] | None:
    """Size from the header chunk of a PNG, None if anything is unusual."""
    header = data[:33]
    if len(header) < 33 or header[:16] != _PNG_PREFIX:
        return None
    plain = (header[24], header[25]) in _PNG_KINDS and header[26] == header[27] == 0
    if not plain or zlib.crc32(header[12:29]) != int.from_bytes(header[29:33], "big"):
        return None
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Size from the first chunk of a WebP file, None if anything is unusual."""
    head = data[:30]
    if len(head) < 30 or head[8:12] != b"WEBP":
        return None
    kind = head[12:16]
    if kind == b"VP8X":  # a canvas, for all frames
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if kind == b"VP8L" and head[20] == 0x2F:
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and head[20] & 1 == 0 and head[23:26] == b"\x9d\x01\x2a":
        sides = int.from_bytes(head[26:30], "little")
        return sides & 0x3FFF, sides >> 16 & 0x3FFF
    return None


def is_short_webp(data: bytes) -> bool:
    """Whether it ends before it says; Pillow opens no such file."""
    return data[:4] == b"RIFF" and len(data) < 8 + int.from_bytes(data[4:8], "little")


_PARSERS: dict[bytes, Callable[[bytes], tuple[int, int] | None]] = {
    b"\x89PNG": _png_size,
    b"RIFF": _webp_size,
    **{b"\xff\xd8\xff" + bytes([marker]): _jpeg_size for marker in jpeg.START_MARKERS},
}

PLAIN_READING = ImageReading(header_size, decode_rgb)
"""As the recorded streams have it."""
