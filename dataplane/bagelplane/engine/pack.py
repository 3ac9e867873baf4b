"""One pack as it travels from the planner through the ring to the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from bagelplane.engine.planner import PackPlan


@dataclass(slots=True)
class Pack:
    """A finished or to-be-filled pack of one rank. Pixels are not in it: they lie beside it, uint8 [h, w, 3]
    each.

    `arrays` are 1-D, int64 or float32, under the key names of the yielded mapping (docs: STREAM, Yielded
    mapping).
    """

    step: int
    """0-based number of this pack in the rank's stream."""
    scalars: dict[str, Any]
    """Ints, floats, strings, lists and dicts: sequence_length, sample_lens, split_lens, attn_modes,
    sample_split_counts, max_num_tokens, use_flex, patchified_vae_latent_shapes, batch_data_indexes."""
    arrays: dict[str, np.ndarray]
    image_shapes: list[tuple[int, int]]
    """(height, width) in pixels of each distinct image."""
    vae_images: list[int]
    """Emitted VAE images in order, as indexes into `image_shapes`."""
    vit_images: list[int]
    """Emitted ViT images in order, as indexes into `image_shapes`."""
    patch_size: int
    """Side of a ViT patch in pixels."""
    state: dict[str, Any]
    """JSON-able state of the rank after this pack, usually about 10 KB."""
    plan: PackPlan | None = field(default=None, repr=False, compare=False)
    """What it was made from, where it was made; it does not travel through the ring."""
