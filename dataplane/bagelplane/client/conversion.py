"""What a trainer wants of a pack: the choices, and the mapping that they give as NumPy arrays.

Pure functions from a pack and its images to a mapping that refers to neither. No torch: `tensors` has the same for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bagelplane.engine.layout import arrange, emitted_pixels, pad_images, patchify_images
from bagelplane.engine.masks import attention_mask
from bagelplane.engine.pack import Pack
from bagelplane.engine.pixels import cut_pixels, normalised_chw
from bagelplane.errors import SpecError
from bagelplane.shm.record import Image

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a pack becomes a mapping. As it stands: the mapping that Automodel's packer yields, bit for bit.

    SpecError for choices that contradict each other.
    """

    dtype: str | None = None
    """Of pixels, "float32" (the default), "bfloat16", "float16" or "float64": the float32 value, cast."""
    normalise: bool = True
    """False: pixels as they travelled, uint8 [h, w, 3]."""
    pad: bool = True
    """False: `vae_images`, a list of images [3, h, w], instead of `padded_images` [n, 3, H, W]."""
    patchify: bool = True
    """False: `vit_images`, a list of images [3, h, w], instead of the patches in `packed_vit_tokens`."""
    masks: bool = True
    """False: `split_lens` and `attn_modes` instead of dense masks (budgets.attention: DenseMasks)."""

    def __post_init__(self) -> None:
        for name in ("normalise", "pad", "patchify", "masks"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name} must be True or False", got=repr(getattr(self, name)))
        if self.dtype not in (None, *FLOAT_DTYPES):
            raise SpecError(
                "dtype is no float type of pixels", got=repr(self.dtype), expected=_listed(FLOAT_DTYPES)
            )
        if not self.normalise and self.pad:
            raise SpecError(
                "images that are not normalised cannot be padded",
                got="normalise=False with pad=True",
                expected="padding of 0 after normalising, which no byte stands for",
                fix="pass pad=False, and pad after normalising",
            )
        if not self.normalise and self.dtype is not None:
            raise SpecError(
                "pixels that are not normalised stay uint8",
                got=f"normalise=False with dtype={self.dtype}",
                fix="leave dtype out",
            )

    @property
    def vae_key(self) -> str:
        return "padded_images" if self.pad else "vae_images"

    @property
    def vit_key(self) -> str:
        return "packed_vit_tokens" if self.patchify else "vit_images"

    def check_pixels(self, images: Sequence[Image]) -> None:
        """SpecError where bytes are asked for and the ring has finished floats."""
        if not self.normalise and any(image.dtype != np.uint8 for image in images):
            raise SpecError(
                "the sidecar sends finished floats, not bytes",
                got="normalise=False with dataplane.pixelFormat: float32",
                fix="write `pixelFormat: uint8` into the resource, or leave normalise out",
            )


def to_arrays(pack: Pack, images: Sequence[Image], conversion: Conversion) -> dict[str, Any]:
    """The mapping as NumPy arrays. `images` are uint8 [h, w, 3], or float32 [3, h, w] already normalised.

    (NumPy has no bfloat16: `dtype` is one of the others here.)
    """
    conversion.check_pixels(images)
    return arrange(
        pack,
        vae=(conversion.vae_key, lambda: _vae_pixels(pack, images, conversion)),
        vit=(conversion.vit_key, lambda: _vit_pixels(pack, images, conversion)),
        mask=attention_mask if conversion.masks else None,
    )


def _vae_pixels(pack: Pack, images: Sequence[Image], conversion: Conversion) -> Any:
    if conversion.pad:
        return _cast(pad_images(pack, images), conversion)
    return [_whole(images[number], norm, conversion) for _, number, norm in emitted_pixels(pack, "vae")]


def _vit_pixels(pack: Pack, images: Sequence[Image], conversion: Conversion) -> Any:
    if not conversion.patchify:
        return [_whole(images[number], norm, conversion) for _, number, norm in emitted_pixels(pack, "vit")]
    if conversion.normalise:
        return _cast(patchify_images(pack, images), conversion)
    side = pack.patch_size
    cut = [cut_pixels(images[number], side).reshape(-1, side * side * 3) for number in pack.vit_images]
    return np.concatenate(cut) if cut else np.empty((0, side * side * 3), np.uint8)


def _whole(image: np.ndarray, normalisation: Any, conversion: Conversion) -> np.ndarray:
    """One image, its own memory: uint8 [h, w, 3], or floats [3, h, w]."""
    if not conversion.normalise:
        return image.copy()
    if image.dtype != np.uint8:
        return _cast(image.copy(), conversion)
    planes = np.empty((3, *image.shape[:2]), np.float32)
    normalised_chw(planes, image, *normalisation)
    return _cast(planes, conversion)


def _cast(pixels: np.ndarray, conversion: Conversion) -> np.ndarray:
    return pixels.astype(conversion.dtype or "float32", copy=False)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" or {names[-1]}"
