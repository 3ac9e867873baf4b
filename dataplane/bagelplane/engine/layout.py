"""From placed samples to the arrays of a pack, and from a pack with its pixels to the yielded mapping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from bagelplane.engine.masks import attention_mask
from bagelplane.engine.pack import Pack
from bagelplane.engine.packer import PackingConfig, PlacedSample, Segment, SpecialTokens
from bagelplane.engine.pixels import cut_planes, normalised_chw, patchify
from bagelplane.engine.positions import grid_positions
from bagelplane.engine.samples import PlannedImage

INT_ARRAYS = (
    "packed_text_ids",
    "packed_text_indexes",
    "packed_position_ids",
    "packed_latent_position_ids",
    "packed_vae_token_indexes",
    "packed_vit_position_ids",
    "packed_vit_token_indexes",
    "vit_token_seqlens",
    "mse_loss_indexes",
    "packed_label_ids",
    "ce_loss_indexes",
)
FLOAT_ARRAYS = ("packed_timesteps", "ce_loss_weights")
IMAGE_MEAN = IMAGE_STD = (0.5, 0.5, 0.5)

PixelEntry = tuple[str, Callable[[], Any]]
"""A key of the mapping, and what makes the pixels under it."""


class _Arrays:
    """Pieces of each array, in the order of the pack's segments."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[Any]] = {name: [] for name in (*INT_ARRAYS, *FLOAT_ARRAYS)}

    def add(self, name: str, piece: Any) -> None:
        self.pieces[name].append(piece)

    def joined(self) -> dict[str, np.ndarray]:
        arrays = {}
        for name, pieces in self.pieces.items():
            dtype = np.float32 if name in FLOAT_ARRAYS else np.int64
            parts = [np.asarray(piece, dtype=dtype) for piece in pieces]
            arrays[name] = np.concatenate(parts) if parts else np.empty(0, dtype)
        return arrays


def layout_arrays(
    placed_samples: Sequence[PlacedSample], config: PackingConfig, tokens: SpecialTokens
) -> dict[str, np.ndarray]:
    """All index arrays, 1-D, int64 or float32, under the yielded names; an empty kind is an empty array.

    Indexes are absolute in the pack (they start at the samples' own `start`).
    """
    arrays = _Arrays()
    for placed in placed_samples:
        for segment in placed.segments:
            if segment.image is None:
                _add_text(arrays, segment, tokens)
            else:
                _add_image(arrays, segment, segment.image, config, tokens)
    return arrays.joined()


def _add_text(arrays: _Arrays, segment: Segment, tokens: SpecialTokens) -> None:
    start, count = segment.start, segment.length
    arrays.add("packed_text_ids", [tokens.bos, *segment.ids, tokens.eos])
    arrays.add("packed_text_indexes", np.arange(start, start + count))
    arrays.add("packed_position_ids", np.arange(segment.rope, segment.rope + segment.position_count))
    if segment.item.loss == 1:
        learnt = count - 1  # bos and the ids
        arrays.add("ce_loss_indexes", np.arange(start, start + learnt))
        arrays.add("ce_loss_weights", np.full(learnt, 1.0 / math.sqrt(learnt)))
        arrays.add("packed_label_ids", [*segment.ids, tokens.eos])
    _add_special_token_loss(arrays, segment)


def _add_image(
    arrays: _Arrays, segment: Segment, image: PlannedImage, config: PackingConfig, tokens: SpecialTokens
) -> None:
    start, count = segment.start, segment.length
    rows, columns = config.grid(segment.item.kind, image)
    inside = np.arange(start + 1, start + count - 1)
    arrays.add("packed_text_ids", [tokens.start_of_image, tokens.end_of_image])
    arrays.add("packed_text_indexes", [start, start + count - 1])
    arrays.add("packed_position_ids", np.full(segment.position_count, segment.rope))
    if segment.item.kind == "vit_image":
        arrays.add(
            "packed_vit_position_ids",
            grid_positions(rows, columns, config.max_patches_per_side, config.interpolate_positions),
        )
        arrays.add("packed_vit_token_indexes", inside)
        arrays.add("vit_token_seqlens", [len(inside)])
    else:
        arrays.add(
            "packed_latent_position_ids",
            grid_positions(rows, columns, config.max_latent_size, config.interpolate_positions),
        )
        arrays.add("packed_vae_token_indexes", inside)
        arrays.add("packed_timesteps", np.full(len(inside), segment.timestep))
        if segment.item.loss == 1:
            arrays.add("mse_loss_indexes", inside)
    _add_special_token_loss(arrays, segment)


def _add_special_token_loss(arrays: _Arrays, segment: Segment) -> None:
    """The end token itself as a position of cross-entropy loss, with weight 1."""
    if segment.item.special_token_loss == 1:
        arrays.add("ce_loss_indexes", [segment.start + segment.length - 1])
        arrays.add("ce_loss_weights", [1.0])
        arrays.add("packed_label_ids", [segment.item.special_token_label])


def emitted_images(placed_samples: Sequence[PlacedSample], kind: str) -> list[PlannedImage]:
    """The images of one kind that conditioning left in, in order."""
    return [
        segment.image
        for placed in placed_samples
        for segment in placed.segments
        if segment.image is not None and segment.item.kind == kind
    ]


def latent_shapes(placed_samples: Sequence[PlacedSample], config: PackingConfig) -> list[tuple[int, int]]:
    """(rows, columns) of each emitted VAE image's tokens."""
    return [config.grid("vae_image", image) for image in emitted_images(placed_samples, "vae_image")]


def build_pack(
    placed_samples: Sequence[PlacedSample],
    *,
    step: int,
    length: int,
    data_indexes: list[dict[str, Any]],
    config: PackingConfig,
    tokens: SpecialTokens,
    all_keys: bool = False,
) -> tuple[Pack, list[PlannedImage]]:
    """The pack without pixels and state, and the distinct images that its `image_shapes` stand for.

    With `all_keys` the yielded mapping has those of an empty kind too (profile Strict).
    """
    vae, vit = emitted_images(placed_samples, "vae_image"), emitted_images(placed_samples, "vit_image")
    distinct: dict[tuple[Any, ...], tuple[int, PlannedImage]] = {}

    def number_of(image: PlannedImage) -> int:
        # Normalised otherwise it is another image: where floats travel, each lies there once.
        key = (image.source.key, image.height, image.width, image.mean, image.std)
        return distinct.setdefault(key, (len(distinct), image))[0]

    vae_numbers, vit_numbers = [number_of(image) for image in vae], [number_of(image) for image in vit]
    images = [image for _, image in distinct.values()]
    pack = Pack(
        step=step,
        scalars={
            "sequence_length": length,
            "sample_lens": [placed.length for placed in placed_samples],
            "split_lens": [split for placed in placed_samples for split in placed.split_lens],
            "attn_modes": [mode for placed in placed_samples for mode in placed.attn_modes],
            "sample_split_counts": [len(placed.split_lens) for placed in placed_samples],
            "max_num_tokens": config.max_tokens,
            "use_flex": config.use_flex,
            "patchified_vae_latent_shapes": latent_shapes(placed_samples, config),
            "batch_data_indexes": data_indexes,
            "vae_normalisation": _normalisation(vae),
            "vit_normalisation": _normalisation(vit),
            **({"all_keys": True} if all_keys else {}),
        },
        arrays=layout_arrays(placed_samples, config, tokens),
        image_shapes=[(image.height, image.width) for image in images],
        vae_images=vae_numbers,
        vit_images=vit_numbers,
        patch_size=config.vit_patch_size,
        state={},
    )
    return pack, images


def _normalisation(images: Sequence[PlannedImage]) -> list[list[list[float]]] | None:
    """`[mean, std]` per channel for each emitted image; None where all have the usual 0.5."""
    if all(image.mean == IMAGE_MEAN and image.std == IMAGE_STD for image in images):
        return None
    return [[list(image.mean), list(image.std)] for image in images]


def assemble(pack: Pack, images: Sequence[np.ndarray]) -> dict[str, Any]:
    """The yielded mapping as NumPy arrays, keys and order as Automodel gives them (STREAM, Yielded mapping).

    Keys of an empty kind are left out, or (profile Strict) there with empty arrays of the right type and rank.

    `images` are the pixels of `pack.image_shapes`: uint8 [h, w, 3], or float32 [3, h, w] already normalised.
    Nothing in the result refers to `images` or to the pack's arrays.
    """
    return arrange(
        pack,
        vae=("padded_images", lambda: pad_images(pack, images)),
        vit=("packed_vit_tokens", lambda: patchify_images(pack, images)),
    )


def arrange(
    pack: Pack,
    *,
    vae: PixelEntry,
    vit: PixelEntry,
    array: Callable[[Any], Any] = np.array,
    mask: Callable[[Sequence[int], Sequence[str]], Any] | None = attention_mask,
) -> dict[str, Any]:
    """The mapping with pixels made by others: all else of it, each key in its place.

    `vae` and `vit` are asked for pixels only where their keys belong. `array` makes the caller's own of an index
    array. `mask` makes one sample's dense mask of its splits; without it `split_lens` and `attn_modes` stand there.
    """
    arrays = {name: array(values) for name, values in pack.arrays.items()}
    scalars, all_keys = pack.scalars, bool(pack.scalars.get("all_keys"))
    batch: dict[str, Any] = {
        "sequence_length": scalars["sequence_length"],
        "sample_lens": list(scalars["sample_lens"]),
        "packed_text_ids": arrays["packed_text_ids"],
        "packed_text_indexes": arrays["packed_text_indexes"],
        "packed_position_ids": arrays["packed_position_ids"],
    }
    _arrange_attention(batch, scalars, mask)
    if pack.vae_images or all_keys:
        key, make_pixels = vae
        batch[key] = make_pixels()
        batch["patchified_vae_latent_shapes"] = [
            tuple(shape) for shape in scalars["patchified_vae_latent_shapes"]
        ]
        batch["packed_latent_position_ids"] = arrays["packed_latent_position_ids"]
        batch["packed_vae_token_indexes"] = arrays["packed_vae_token_indexes"]
    if pack.vit_images or all_keys:
        key, make_pixels = vit
        batch[key] = make_pixels()
        for name in ("packed_vit_position_ids", "packed_vit_token_indexes", "vit_token_seqlens"):
            batch[name] = arrays[name]
    if len(arrays["packed_timesteps"]) or all_keys:
        batch["packed_timesteps"] = arrays["packed_timesteps"]
        batch["mse_loss_indexes"] = arrays["mse_loss_indexes"]
    if len(arrays["packed_label_ids"]) or all_keys:
        for name in ("packed_label_ids", "ce_loss_indexes", "ce_loss_weights"):
            batch[name] = arrays[name]
    batch["batch_data_indexes"] = [dict(entry) for entry in scalars["batch_data_indexes"]]
    return batch


def _arrange_attention(
    batch: dict[str, Any],
    scalars: dict[str, Any],
    mask: Callable[[Sequence[int], Sequence[str]], Any] | None,
) -> None:
    split_lens, attn_modes = list(scalars["split_lens"]), list(scalars["attn_modes"])
    if scalars["use_flex"]:
        padding = scalars["max_num_tokens"] - scalars["sequence_length"]
        batch["sample_lens"].append(padding)
        batch["split_lens"], batch["attn_modes"] = [*split_lens, padding], [*attn_modes, "causal"]
        return
    if mask is None:
        batch["split_lens"], batch["attn_modes"] = split_lens, attn_modes
        return
    masks, begin = [], 0
    for count in scalars["sample_split_counts"]:
        masks.append(mask(split_lens[begin : begin + count], attn_modes[begin : begin + count]))
        begin += count
    batch["nested_attention_masks"] = masks


def pad_images(pack: Pack, images: Sequence[np.ndarray]) -> np.ndarray:
    """float32 [n, 3, H, W]: emitted VAE images, normalised, zero-padded to the largest height and width."""
    shapes = [pack.image_shapes[number] for number in pack.vae_images]
    height, width = (max((shape[side] for shape in shapes), default=0) for side in (0, 1))
    ragged = any(shape != (height, width) for shape in shapes)
    padded = (np.zeros if ragged else np.empty)((len(shapes), 3, height, width), dtype=np.float32)
    for place, number, (mean, std) in emitted_pixels(pack, "vae"):
        target, pixels = padded[place, :, : shapes[place][0], : shapes[place][1]], images[number]
        if pixels.dtype == np.float32:
            target[...] = pixels
        else:
            normalised_chw(target, pixels, mean, std)
    return padded


def patchify_images(pack: Pack, images: Sequence[np.ndarray]) -> np.ndarray:
    """float32 [N, patch * patch * 3]: patches of the emitted ViT images, row-major, (row, column, channel) inside."""
    patch = pack.patch_size
    counts = [(height // patch) * (width // patch) for height, width in pack.image_shapes]
    total = sum(counts[number] for number in pack.vit_images)
    vit_tokens = np.empty((total, patch * patch * 3), dtype=np.float32)
    begin = 0
    for _, number, (mean, std) in emitted_pixels(pack, "vit"):
        target, pixels = vit_tokens[begin : begin + counts[number]], images[number]
        if pixels.dtype == np.float32:
            target[...] = cut_planes(pixels, patch)
        else:
            patchify(pixels, patch, target, mean, std)
        begin += counts[number]
    return vit_tokens


def write_planes(pack: Pack, images: Sequence[np.ndarray], planes: Sequence[np.ndarray]) -> None:
    """Writes the pixels of `pack.image_shapes`, uint8 [h, w, 3], normalised into `planes`, float32 [3, h, w]."""
    normalisation = {
        number: part for _, number, part in (*emitted_pixels(pack, "vae"), *emitted_pixels(pack, "vit"))
    }
    for number, (pixels, out) in enumerate(zip(images, planes, strict=True)):
        normalised_chw(out, pixels, *normalisation[number])


def emitted_pixels(pack: Pack, kind: Literal["vae", "vit"]) -> list[tuple[int, int, Any]]:
    """(place, distinct image's number, (mean, std)) of each emitted image of one kind."""
    numbers = pack.vae_images if kind == "vae" else pack.vit_images
    normalisation = pack.scalars[f"{kind}_normalisation"]
    return [
        (place, number, normalisation[place] if normalisation else (IMAGE_MEAN, IMAGE_STD))
        for place, number in enumerate(numbers)
    ]
