"""Pictures made of numbers: to a decoder like photographs (as much detail, as many bytes).

For the demo and the benchmark, which may not carry anybody's photographs. Reads and writes no files. The same
random generator in the same state gives the same pixels; the bytes are those of the installed Pillow.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

_OCTAVES = (3, 7, 17, 41, 97)
"""Cells along the long side of each layer of smooth noise, from skies and walls to leaves."""
_GRAIN_SIDE = 512
_EXIF_ORIENTATION = 0x0112


def photo(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """An RGB picture: layers of smooth noise and a gradient, some shapes with edges, film grain on top."""
    light = np.zeros((height, width), np.float32)
    for layer, cells in enumerate(_OCTAVES):
        light += _smooth_noise(rng, width, height, cells) * (90.0 / (1.6**layer))
    colour = rng.uniform(40, 215, 3).astype(np.float32)
    slope = rng.uniform(-70, 70, (2, 3)).astype(np.float32)
    down = np.linspace(-1, 1, height, dtype=np.float32)[:, None, None] * slope[0]
    right = np.linspace(-1, 1, width, dtype=np.float32)[None, :, None] * slope[1]
    pixels = colour + down + right + light[:, :, None] * rng.uniform(0.5, 1.0, 3).astype(np.float32)
    picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    _draw_shapes(rng, picture)
    return _with_grain(rng, picture)


def edited(rng: np.random.Generator, picture: Image.Image) -> Image.Image:
    """The picture with its light changed and some shapes added: what an instruction might have asked for."""
    gains = rng.uniform(0.75, 1.25, 3).astype(np.float32)
    changed = np.clip(np.asarray(picture, np.float32) * gains, 0, 255).astype(np.uint8)
    result = Image.fromarray(changed)
    _draw_shapes(rng, result, count=3)
    return result


def as_jpeg(picture: Image.Image, *, quality: int = 88, orientation: int | None = None) -> bytes:
    """JPEG bytes, with an EXIF orientation (1 to 8) when given."""
    options: dict[str, Any] = {}
    if orientation is not None:
        exif = Image.Exif()
        exif[_EXIF_ORIENTATION] = orientation
        options["exif"] = exif
    target = io.BytesIO()
    picture.save(target, "JPEG", quality=quality, **options)
    return target.getvalue()


def as_png_with_alpha(picture: Image.Image) -> bytes:
    """PNG bytes; the picture fades out to the right."""
    ramp = np.linspace(255, 0, picture.width).astype(np.uint8)
    picture = picture.copy()
    picture.putalpha(Image.fromarray(np.ascontiguousarray(np.tile(ramp, (picture.height, 1)))))
    target = io.BytesIO()
    picture.save(target, "PNG", compress_level=1)
    return target.getvalue()


def as_undecodable(picture: Image.Image) -> bytes:
    """TIFF bytes that open, with the right size, and whose pixels do not decode."""
    target = io.BytesIO()
    picture.save(target, "TIFF", compression="tiff_adobe_deflate")
    data = bytearray(target.getvalue())
    for position in range(12, 212):
        data[position] ^= 0x77
    return bytes(data)


def picture_size(rng: np.random.Generator, megapixels: tuple[float, float]) -> tuple[int, int]:
    """Width and height in pixels: an area from the range, an aspect ratio that cameras and screens have."""
    area = rng.uniform(*megapixels) * 1e6
    ratio = rng.choice([1.0, 4 / 3, 3 / 2, 16 / 9]) ** rng.choice([-1, 1])
    return max(1, round((area * ratio) ** 0.5)), max(1, round((area / ratio) ** 0.5))


def _smooth_noise(rng: np.random.Generator, width: int, height: int, cells: int) -> npt.NDArray[np.float32]:
    long = max(width, height)
    shape = (max(2, round(cells * height / long)), max(2, round(cells * width / long)))
    small = Image.fromarray(rng.uniform(-1, 1, shape).astype(np.float32))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def _draw_shapes(rng: np.random.Generator, picture: Image.Image, count: int = 9) -> None:
    draw = ImageDraw.Draw(picture, "RGBA")
    size = np.array(picture.size)
    for _ in range(count):
        colour = (*rng.integers(0, 256, 3).tolist(), int(rng.integers(60, 230)))
        centre = rng.uniform(0, 1, 2) * size
        reach = rng.uniform(0.03, 0.3, 2) * size
        kind = rng.integers(3)
        if kind == 0:
            draw.ellipse([*(centre - reach), *(centre + reach)], fill=colour)
        elif kind == 1:
            corners = centre + rng.uniform(-1, 1, (5, 2)) * reach
            draw.polygon([(float(x), float(y)) for x, y in corners], fill=colour)
        else:
            points = centre + np.cumsum(rng.uniform(-1, 1, (12, 2)) * reach * 0.5, axis=0)
            draw.line(
                [(float(x), float(y)) for x, y in points], fill=colour, width=int(size.max() // 150 + 1)
            )


def _with_grain(rng: np.random.Generator, picture: Image.Image) -> Image.Image:
    """Noise that is stronger in the bright, as sensors give it, from one tile laid out over the picture."""
    tile = np.clip(rng.normal(0, 5, (_GRAIN_SIDE, _GRAIN_SIDE)), -20, 20).astype(np.int16)
    repeats = (-(-picture.height // _GRAIN_SIDE), -(-picture.width // _GRAIN_SIDE))
    grain = np.tile(tile, repeats)[: picture.height, : picture.width, None]
    return Image.fromarray(np.clip(np.asarray(picture, np.int16) + grain, 0, 255).astype(np.uint8))
