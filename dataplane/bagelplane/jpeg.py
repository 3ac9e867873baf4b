"""JPEG files: what their headers say, and plain ones decoded by libjpeg-turbo directly, with Pillow's pixels.

Pillow decodes JPEG with the same library, but hands it the file in pieces and takes the rows out through its own
unpacking. `decode_plain` leaves that out (simplejpeg). Plain is what `JpegHeader.is_plain` says, from the header
alone. Whatever the library only warns of (a file that ends early, damaged data) is no result here: Pillow decodes
such a file, so its pixels and its refusals are Pillow's. docs/adr/0017-jpeg-by-libjpeg-turbo.md.

Which of the two decodes is a matter of speed alone. `auto` takes libjpeg-turbo if simplejpeg is there and gives the
installed Pillow's bits on a few small files of each kind; BAGELPLANE_JPEG overrides. The choice is made once a
process, by whichever thread comes first; after that any number of threads may decode, without the GIL.
"""

from __future__ import annotations

import functools
import io
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

import numpy as np
import PIL
import pyarrow as pa
from PIL import Image

from bagelplane.errors import SpecError

log = logging.getLogger(__name__)

VARIABLE = "BAGELPLANE_JPEG"
_CHOICES = ("auto", "turbo", "pillow")
_FIX_MISSING = f"install simplejpeg, or unset {VARIABLE}"

_FRAMES = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended, progressive, all with Huffman codes
_STEPPED_OVER = frozenset({0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)})  # tables, comment, APPn
_ADOBE = 0xEE
_ADOBE_YCC = 1
_ADOBE_SHORT = -1  # a marker that ends before it says how
START_MARKERS = frozenset({*_STEPPED_OVER, *_FRAMES, 0xFF})
"""What may follow the two bytes that begin a JPEG for `read_header` to take it: a segment, or a fill byte."""

# (horizontal, vertical) sampling of the first component; the colours have one sample for all of these:
# 4:4:4, 4:2:2, 4:4:0, 4:2:0, 4:1:1. simplejpeg writes no others, so no others could be tried before use.
_LUMA_SAMPLING = frozenset({0x11, 0x21, 0x12, 0x22, 0x41})
_ONE_SAMPLE = 0x11

# Neither is a multiple of any block: edges take part.
_PROBE_SIZE = (37, 43)
_PROBE_SAMPLINGS = ("444", "422", "440", "420", "411")

Decode = Callable[[bytes], np.ndarray]
"""Gives uint8 [h, w, 4], the last byte of a pixel 255. Raises ValueError for the slightest flaw in the file."""


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """What a JPEG says before its first scan: size in pixels, components, and how an Adobe marker reads them."""

    size: tuple[int, int]
    components: bytes
    """Three bytes each: identifier, sampling (horizontal in the high half), number of the quantization table."""
    adobe_transforms: frozenset[int]
    """Of all Adobe markers; empty if there is none."""

    @property
    def is_plain(self) -> bool:
        """Whether this is 8-bit grey or YCbCr in a usual sampling: what `decode_plain` is tried for."""
        identifiers, samplings = self.components[::3], self.components[1::3]
        if len(samplings) == 1:
            return samplings[0] == _ONE_SAMPLE and not self.adobe_transforms
        return (
            len(samplings) == 3
            and samplings[0] in _LUMA_SAMPLING
            and samplings[1] == samplings[2] == _ONE_SAMPLE
            and identifiers != b"RGB"
            and self.adobe_transforms <= {_ADOBE_YCC}
        )


def read_header(data: bytes) -> JpegHeader | None:
    """The header of a baseline, extended or progressive JPEG of 8 bits, None if anything about it is unusual.

    Walks the segments up to the start of the scan, as decoders do: thumbnails inside a segment are stepped
    over, and a header that ends early is for Pillow to judge.
    """
    frame: bytes | None = None
    transforms: set[int] = set()
    position, last = 2, len(data) - 4
    while position <= last:
        if data[position] != 0xFF:
            return None
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        if marker == 0xDA:  # start of scan
            return _header(frame, transforms) if frame is not None else None
        length = data[position + 2] << 8 | data[position + 3]
        body = position + 4
        position += 2 + length
        if marker in _FRAMES and frame is None:
            frame = data[body:position]
            if not _is_sound(frame):
                return None
        elif marker not in _STEPPED_OVER or length < 2:
            return None
        elif marker == _ADOBE and data.startswith(b"Adobe", body):
            transforms.update(data[body + 11 : min(body + 12, position)] or {_ADOBE_SHORT})
    return None


def _is_sound(frame: bytes) -> bool:
    components = frame[5] if len(frame) > 5 else 0
    return components in {1, 3, 4} and len(frame) == 6 + 3 * components and frame[0] == 8


def _header(frame: bytes, transforms: set[int]) -> JpegHeader:
    size = frame[3] << 8 | frame[4], frame[1] << 8 | frame[2]
    return JpegHeader(size, frame[6:], frozenset(transforms))


def decode_plain(data: bytes, size: tuple[int, int]) -> Image.Image | None:
    """The decoded image, mode RGB, if `data` is a plain JPEG of that size without any flaw; else None.

    None says nothing about the file: it is to be decoded by Pillow. The image is read-only and in one piece.
    """
    decode = choice().decode
    if decode is None:
        return None
    header = read_header(data)
    if header is None or header.size != size or not header.is_plain:
        return None
    try:
        pixels = decode(data)
    except (ValueError, RuntimeError, MemoryError):
        return None
    if pixels.shape != (size[1], size[0], 4):
        return None
    # Pillow keeps four bytes a pixel too, and takes over memory as it is.
    return Image.fromarrow(pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), 4), "RGB", size)


@dataclass(frozen=True, slots=True)
class Choice:
    """What decodes plain JPEG in this process: `name`. `decode` is None if Pillow does; `why` is then a clause."""

    decode: Decode | None
    name: str = "pillow"
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


@functools.cache
def choice() -> Choice:
    """The decoder of this process. Raises SpecError if the variable asks for what there is not."""
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in _CHOICES:
        raise SpecError(
            VARIABLE, got=repr(wanted), expected="auto, turbo or pillow", fix="unset the variable"
        )
    made = Choice(None, why=f"{VARIABLE} says so") if wanted == "pillow" else _tried()
    if wanted == "turbo" and made.decode is None:
        raise SpecError(f"{VARIABLE} is turbo, but there is none: {made.why}", fix=_FIX_MISSING)
    log.log(
        logging.DEBUG if made.decode or wanted == "pillow" else logging.INFO, "JPEGs are decoded by %s", made
    )
    return made


def _tried() -> Choice:
    try:
        import simplejpeg  # noqa: PLC0415  # there may be none for this machine
    except ImportError as error:
        return Choice(None, why=f"simplejpeg is not installed: {error}")
    version = metadata.version("simplejpeg")

    def decode(data: bytes) -> np.ndarray:
        pixels: np.ndarray = simplejpeg.decode_jpeg(data, colorspace="RGBA", strict=True)
        return pixels

    try:
        differing = next((name for name, data in _probes(simplejpeg) if not _agrees(decode, data)), None)
    except Exception as error:  # noqa: BLE001  # whatever a foreign library does, Pillow is there
        differing = f"{type(error).__name__}: {error}"
    if differing is not None:
        why = f"simplejpeg {version} differs from Pillow {PIL.__version__}"
        log.warning("%s: %s", why, differing)
        return Choice(None, why=why)
    return Choice(decode, f"libjpeg-turbo (simplejpeg {version})")


def _agrees(decode: Decode, data: bytes) -> bool:
    """Whether both give the same pixels, and `decode` refuses the file without its last bytes."""
    with Image.open(io.BytesIO(data)) as opened:
        expected = opened.convert("RGB").tobytes()
    try:
        decode(data[:-12])
    except ValueError:
        return bool(decode(data)[:, :, :3].tobytes() == expected)
    return False


def _probes(simplejpeg: ModuleType) -> Iterator[tuple[str, bytes]]:
    """(name, small JPEG) of each kind that is plain: both decoders are tried on them."""
    width, height = _PROBE_SIZE
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
    pixels[:, : width // 2] = np.linspace(0, 255, height, dtype=np.uint8)[
        :, None, None
    ]  # smooth beside noise
    for sampling in _PROBE_SAMPLINGS:
        for quality in (40, 95):
            made = simplejpeg.encode_jpeg(pixels, quality=quality, colorsubsampling=sampling)
            yield f"{sampling}, quality {quality}", made
    picture = Image.fromarray(pixels)

    def written(image: Image.Image, **options: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, "JPEG", **options)
        return file.getvalue()

    yield "grey", written(picture.convert("L"))
    yield "restart markers", written(picture, restart_marker_blocks=3)
    progressive = written(picture, progressive=True, quality=60)
    yield "progressive", progressive
    # The first scans alone: what is missing is estimated, and how has changed between releases of the library.
    yield "first scans", first_scans(progressive, 2)


def first_scans(data: bytes, number: int) -> bytes:
    """A progressive JPEG that ends, as it should, after `number` of its scans."""
    at = -1
    for _ in range(number + 1):
        at = data.index(b"\xff\xda", at + 1)
    # Tables of the next scan may stand before it; they do no harm.
    return data[:at] + b"\xff\xd9"
