"""How much shared memory a resource asks for: the sizes of packs and rings, from the resource alone.

The sidecar makes its rings by them, the operator the volume that they lie on.
"""

from __future__ import annotations

from bagelplane.errors import SpecError
from bagelplane.spec import BagelDataset

ARRAY_BYTES_A_TOKEN = 96
"""All index arrays of a token together: at most eleven of 8 or 4 bytes."""
META_BYTES = 1024 * 1024
"""State (64 KB at most), lengths, lineage and alignment of a record."""
_CHANNELS = 3
_BYTES_A_VALUE = {"uint8": 1, "float32": 4}


def largest_pack_bytes(dataset: BagelDataset) -> int:
    """Upper bound of a record: tokens that a pack can hold, each an image's.

    A token of an image stands for stride**2 pixels. In profile Automodel mandatory samples may lie past
    maxTokens, one for each mandatory group.
    """
    spec = dataset.spec
    mandatory = 0 if spec.profile == "Strict" else sum(group.mandatory for group in spec.groups)
    tokens = spec.budgets.max_tokens + mandatory * spec.budgets.max_tokens_per_sample
    strides = [1]
    for group in spec.groups:
        transforms = (group.image_transform, group.vit_image_transform)
        strides += [transform.stride for transform in transforms if transform is not None]
    values = tokens * max(strides) ** 2 * _CHANNELS
    pixels = values * _BYTES_A_VALUE[spec.dataplane.pixel_format]
    return pixels + tokens * ARRAY_BYTES_A_TOKEN + META_BYTES


def ring_bytes(dataset: BagelDataset) -> int:
    """Capacity of one rank's ring: `dataplane.ring.size`, else `ring.packs` packs of the largest size."""
    ring = dataset.spec.dataplane.ring
    return ring.size or ring.packs * largest_pack_bytes(dataset)


def check_ring(dataset: BagelDataset) -> None:
    """SpecError when a pack that the budgets allow may not fit into the ring: now, and not when it comes."""
    size, needed = dataset.spec.dataplane.ring.size, largest_pack_bytes(dataset)
    if size is not None and size < needed:
        raise SpecError(
            "the ring is smaller than the largest pack that spec.budgets allows",
            got=f"{size} bytes",
            expected=f"at least {needed} bytes",
            fix="raise spec.dataplane.ring.size, leave it out and set ring.packs, or lower budgets.maxTokens",
        )
