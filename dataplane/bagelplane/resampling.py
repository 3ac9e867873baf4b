"""Resizing with Pillow's BICUBIC bits: by the compiled resampler where it may be used, else by Pillow itself.

Which of the two is a matter of speed alone. `auto` takes the compiled one if there is one and it gives the
installed Pillow's bits on a few small pictures; BAGELPLANE_RESAMPLER overrides. A few pictures are always
Pillow's: those for which an older Pillow's order of passes is not known, sides above 65,535 pixels, and pictures
so large that copying them would cost more memory than is saved in time.

The choice is made once a process, by whichever thread comes first; after that any number of threads may resize.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass

import numpy as np
import PIL
import pyarrow as pa
from PIL import Image

from bagelplane.errors import SpecError
from bagelplane.native import SIDE_LIMIT_PIXELS, NativeError, Resampler, is_vertical_first, load

log = logging.getLogger(__name__)

VARIABLE = "BAGELPLANE_RESAMPLER"
_CHOICES = ("auto", "native", "pillow")
_FIX_MISSING = f"install a C compiler and install bagelplane again, or unset {VARIABLE}"

# Pillow keeps pictures above 16 MB in several pieces. Such a picture is copied, in bands of at most this size.
_BAND_PIXELS = 1 << 20
# Copies above this (128 MB) are not made.
_COPY_LIMIT_PIXELS = 32_000_000

# (width, height) before and after: shrinking, growing, both, one side only, and both orders of the passes on
# either side of where Pillow changes from one to the other.
_PROBES = (
    ((61, 47), (32, 16)),
    ((23, 19), (64, 48)),
    ((40, 81), (20, 40)),
    ((40, 80), (20, 40)),
    ((33, 90), (48, 16)),
    ((90, 33), (16, 48)),
    ((50, 40), (50, 16)),
    ((50, 40), (16, 40)),
    ((3, 2), (17, 5)),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What resizes in this process. `native` is None if Pillow does; `why` is then one clause."""

    native: Resampler | None
    why: str = ""

    def __str__(self) -> str:
        return f"native ({self.native.instructions})" if self.native else f"pillow ({self.why})"


@functools.cache
def choice() -> Choice:
    """The resampler of this process. Raises SpecError if the variable asks for what there is not."""
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in _CHOICES:
        raise SpecError(
            VARIABLE, got=repr(wanted), expected="auto, native or pillow", fix="unset the variable"
        )
    made = Choice(None, f"{VARIABLE} says so") if wanted == "pillow" else _tried()
    if wanted == "native" and made.native is None:
        raise SpecError(f"{VARIABLE} is native, but there is none: {made.why}", fix=_FIX_MISSING)
    log.log(
        logging.DEBUG if made.native or wanted == "pillow" else logging.INFO, "images are resized by %s", made
    )
    return made


def resize_rgb(image: Image.Image, out: np.ndarray) -> None:
    """Writes `image`, mode RGB, resized (BICUBIC) to `out`, into `out`: uint8 [h, w, 3], C-contiguous.

    An image of that size already is copied unchanged, as Pillow does.
    """
    native = choice().native
    height, width = out.shape[:2]
    if native is not None and _is_for_native(image.size, (width, height)):
        pixels = _pixels(image)
        if pixels is not None:
            native.resize(pixels, out, vertical_first=is_vertical_first(image.size, (width, height)))
            return
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    # Pillow keeps four bytes a pixel. Its own packing and one copy take a fiftieth of decoding and resizing;
    # copying out of an Arrow view of the four takes NumPy 1.3 times as long by channel, 7 times by pixel.
    np.copyto(out, np.frombuffer(image.tobytes(), dtype=np.uint8).reshape(height, width, 3))


def _tried() -> Choice:
    try:
        native = load()
    except NativeError as error:
        log.warning("the compiled resampler cannot be used: %s", error)
        return Choice(None, str(error))
    if native is None:
        return Choice(None, "the compiled resampler is not installed")
    for before, after in _PROBES:
        if _is_for_native(before, after) and not _agrees(native, before, after):
            why = f"the compiled resampler differs from Pillow {PIL.__version__}"
            log.warning("%s: %s to %s", why, before, after)
            return Choice(None, why)
    return Choice(native)


def _agrees(native: Resampler, before: tuple[int, int], after: tuple[int, int]) -> bool:
    pixels = np.random.default_rng(0).integers(0, 256, (before[1], before[0], 4), dtype=np.uint8)
    out = np.empty((after[1], after[0], 3), dtype=np.uint8)
    native.resize(pixels, out, vertical_first=is_vertical_first(before, after))
    image = Image.fromarray(np.ascontiguousarray(pixels[:, :, :3]))
    return out.tobytes() == image.resize(after, Image.Resampling.BICUBIC).tobytes()


def _is_for_native(before: tuple[int, int], after: tuple[int, int]) -> bool:
    if not all(1 <= side <= SIDE_LIMIT_PIXELS for side in (*before, *after)):
        return False
    # Releases before 13 began with the horizontal pass, the last of them except for very tall pictures.
    exceptional = is_vertical_first(before, after) or before[1] > 100 * before[0]
    return _pillow_major() >= 13 or before[0] == after[0] or before[1] == after[1] or not exceptional


@functools.cache
def _pillow_major() -> int:
    return int(PIL.__version__.partition(".")[0])


def _pixels(image: Image.Image) -> np.ndarray | None:
    """The pixels as uint8 [h, w, 4], the last byte of no meaning; None if that would take too much memory.

    A view of the image's own memory, which it keeps alive; a copy where the image is not in one piece.
    """
    image.load()
    view = _view(image)
    width, height = image.size
    if view is not None or width * height > _COPY_LIMIT_PIXELS:
        return view
    pixels = np.empty((height, width, 4), dtype=np.uint8)
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):
        band = image.crop((0, top, width, min(top + rows, height)))
        view = _view(band)
        if view is None:
            view = np.frombuffer(band.tobytes("raw", "RGBX"), dtype=np.uint8).reshape(-1, width, 4)
        pixels[top : top + rows] = view
    return pixels


def _view(image: Image.Image) -> np.ndarray | None:
    if not hasattr(image, "__arrow_c_array__"):  # Pillow before 11.2
        return None
    try:
        array = pa.array(image)
    except ValueError:  # in several pieces
        return None
    kind = array.type
    if not pa.types.is_fixed_size_list(kind) or kind.list_size != 4 or kind.value_type != pa.uint8():
        return None
    view: np.ndarray = array.flatten().to_numpy(zero_copy_only=True)
    return view.reshape(image.height, image.width, 4)
