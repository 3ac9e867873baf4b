"""How profile Strict reads images: upright, in their full range, on white, whole or not at all.

The size depends on headers alone, so that a plan does. EXIF orientation is a header too, wherever a PNG or WebP
file keeps it. What differs from images.py: orientation is applied; grey of more than 8 bits is scaled instead of
clipped; every kind of alpha is laid on white; pixels that end early raise TruncatedImageError.

Range of deep greys: 16 bits from 0 to 65535 (or to what a TIFF says its samples have); of 32-bit integers and floats
the smallest of 0..1 (floats), 0..255 and 0..65535 that holds all values, else from the least to the greatest value.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from PIL import Image

from bagelplane import jpeg
from bagelplane.images import (
    ImageError,
    ImageReading,
    TruncatedImageError,
    check_size,
    guarded,
    head_size,
    is_short_webp,
    open_image,
    plain_size,
    whole_pixels,
)

_ORIENTATION_TAG = 0x0112
_BITS_PER_SAMPLE_TAG = 258
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = frozenset({5, 6, 7, 8})
_WITH_ALPHA = frozenset({"RGBA", "RGBa", "LA", "La", "PA"})
_MULTIPLE = b"MPF\0"  # several pictures in one file: Pillow looks for the others
_PNG, _JPEG, _RIFF = b"\x89PNG", b"\xff\xd8\xff", b"RIFF"
_INTEGER_TOPS, _FLOAT_TOPS = (255.0, 65535.0), (1.0, 255.0, 65535.0)


def upright_size(data: bytes) -> tuple[int, int]:
    """(width, height) after decoding, from the header. Raises ImageError."""
    size = plain_size(data)
    turned = guarded(orientation, data)
    if size is None:
        size = guarded(_opened_size, data)
    check_size(*size)
    return (size[1], size[0]) if turned in _SIDEWAYS else size


def upright_head_size(head: bytes, length_bytes: int) -> tuple[int, int] | None:
    """What `upright_size` gives for a file of that length, from its beginning; None where that takes more of it.

    PNG and WebP keep their orientation anywhere, JPEG before its pixels.
    """
    size = head_size(head, length_bytes) if head[:3] == _JPEG and _MULTIPLE not in head else None
    if size is None:
        return None
    return (size[1], size[0]) if guarded(orientation, head) in _SIDEWAYS else size


def decode_upright(data: bytes) -> Image.Image:
    """The decoded image in mode RGB. Raises TruncatedImageError or ImageError, and nothing else."""
    try:
        return guarded(_decode, data)
    except ImageError as error:
        if "truncated" in str(error).lower() or is_short_webp(data):
            raise TruncatedImageError(str(error)) from error
        raise


STRICT_READING = ImageReading(upright_size, decode_upright)


def orientation(data: bytes) -> int:
    """The EXIF orientation, 1 to 8, of the image as Pillow decodes it; 1 where there is none that can be read."""
    try:
        value = _stored_orientation(data)
    except Warning:
        raise  # an error by the process's own settings: `guarded` knows what to do
    except Exception:  # noqa: BLE001 - whatever is wrong with it, the picture may be good
        return 1
    return value if isinstance(value, int) and value in _TRANSPOSES else 1


def _stored_orientation(data: bytes) -> Any:
    if data[:4] in (_PNG, _RIFF):
        # Pillow would have to decode the one, and cannot open the other when it is short.
        block = _png_exif(data) if data[:4] == _PNG else _webp_exif(data)
        exif = Image.Exif()
        exif.load(block)
        return exif.get(_ORIENTATION_TAG, 1)
    if data[:3] == _JPEG and not _has_app1(data):
        return 1  # many of them, and looking costs a tenth of opening
    image = open_image(data)
    # Pillow turns TIFF by itself.
    return 1 if image.format == "TIFF" else image.getexif().get(_ORIENTATION_TAG, 1)


def _has_app1(data: bytes) -> bool:
    """Whether there is a segment that may hold an orientation (EXIF, XMP) before the scan; True if unsure."""
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
        elif marker in (0xDA, 0xE1):
            return marker == 0xE1
        else:
            position += 2 + (data[position + 2] << 8 | data[position + 3])
    return True


def _png_exif(data: bytes) -> bytes:
    position = 8
    while position + 8 <= len(data):
        length = int.from_bytes(data[position : position + 4], "big")
        kind = data[position + 4 : position + 8]
        if kind in (b"eXIf", b"IEND"):
            return data[position + 8 : position + 8 + length]
        position += 12 + length
    return b""


def _webp_exif(data: bytes) -> bytes:
    position = 12
    while position + 8 <= len(data):
        length = int.from_bytes(data[position + 4 : position + 8], "little")
        if data[position : position + 4] == b"EXIF":
            return data[position + 8 : position + 8 + length]
        position += 8 + length + length % 2
    return b""


def _opened_size(data: bytes) -> tuple[int, int]:
    return open_image(data).size


def _decode(data: bytes) -> Image.Image:
    image = open_image(data)
    check_size(*image.size)
    turned = _TRANSPOSES.get(orientation(data))
    # Asked before loading: that may turn a palette into colours.
    has_alpha = image.mode in _WITH_ALPHA or "transparency" in image.info
    # What libjpeg-turbo takes is without a flaw.
    plain = jpeg.decode_plain(data, image.size) if image.format == "JPEG" else None
    if plain is not None:
        return plain if turned is None else plain.transpose(turned)
    with whole_pixels():
        image.load()
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        rgb = _from_deep_grey(image)
    elif has_alpha:
        rgb = _on_white(image)
    else:
        rgb = image if image.mode == "RGB" else image.convert("RGB")
    return rgb if turned is None else rgb.transpose(turned)


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode == "La":
        image = image.convert("LA")
    rgba = image.convert("RGBA")
    ground = Image.new("RGB", rgba.size, (255, 255, 255))
    ground.paste(rgba, mask=rgba)
    return ground


def _from_deep_grey(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    if image.mode.startswith("I;16"):
        bits = _bits_a_sample(image)
        grey = _table(2**bits - 1)[values]
    else:
        low, high = _range_of(image, values)
        scale = 255.0 / (high - low) if high > low else 0.0
        scaled = (np.nan_to_num(values.astype(np.float32), posinf=high, neginf=low) - low) * scale + 0.5
        grey = np.clip(scaled, 0, 255).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return Image.fromarray(grey).convert("RGB")


def _bits_a_sample(image: Image.Image) -> int:
    bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE_TAG, (16,))[0]
    return int(bits) if 8 < bits < 16 else 16


@functools.cache
def _table(top: int) -> np.ndarray:
    """uint8 for each of 65536 values, `top` and all above it being white; rounded half up."""
    values = np.minimum(np.arange(65536, dtype=np.int64), top)
    return ((values * 255 + top // 2) // top).astype(np.uint8)


def _range_of(image: Image.Image, values: np.ndarray) -> tuple[float, float]:
    """What is black and what is white in 32-bit integers or floats."""
    if image.format in ("PNG", "PPM"):
        return 0.0, 65535.0  # Pillow has brought 16 bits to this
    finite = values[np.isfinite(values)] if image.mode == "F" else values
    if not finite.size:
        return 0.0, 1.0
    least, greatest = float(finite.min()), float(finite.max())
    for top in _FLOAT_TOPS if image.mode == "F" else _INTEGER_TOPS:
        if least >= 0 and greatest <= top:
            return 0.0, top
    return least, greatest
