"""The documented open pack as a mapping of lists, for custom code that packs its own samples."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bagelplane.engine.layout import emitted_images, latent_shapes, layout_arrays
from bagelplane.engine.masks import attention_mask
from bagelplane.engine.packer import PackingConfig, SpecialTokens, place_sample
from bagelplane.engine.pixels import cut_planes
from bagelplane.engine.positions import grid_positions
from bagelplane.engine.raw_samples import sample_from_mapping
from bagelplane.engine.samples import PlannedImage

STATUS_LISTS = (
    "sample_lens",
    "packed_position_ids",
    "nested_attention_masks",
    "split_lens",
    "attn_modes",
    "packed_text_ids",
    "packed_text_indexes",
    "packed_label_ids",
    "ce_loss_indexes",
    "ce_loss_weights",
    "vae_image_tensors",
    "packed_latent_position_ids",
    "vae_latent_shapes",
    "packed_vae_token_indexes",
    "packed_timesteps",
    "mse_loss_indexes",
    "packed_vit_tokens",
    "vit_token_seqlens",
    "packed_vit_position_ids",
    "packed_vit_token_indexes",
)
_FLAT_LISTS = (
    "packed_position_ids",
    "packed_text_ids",
    "packed_text_indexes",
    "packed_label_ids",
    "ce_loss_indexes",
    "packed_vae_token_indexes",
    "mse_loss_indexes",
    "vit_token_seqlens",
    "packed_vit_token_indexes",
)
# What the peer draws from when custom code packs: the generators of the process.
_GLOBAL_GENERATORS = SimpleNamespace(python=random, numpy=np.random)


def fresh_status() -> dict[str, Any]:
    """An open pack with nothing in it: `curr` 0 tokens, and the empty lists."""
    return {"curr": 0, **{name: [] for name in STATUS_LISTS}}


def append_sample(
    sample: Any, status: dict[str, Any], config: PackingConfig, tokens: SpecialTokens
) -> dict[str, Any]:
    """Put one sample into `status`, drawing from the process's global generators; `sample` is not modified.

    Raises ValueError for a plan that its texts and images do not fill, or a ViT image that is no whole patches.
    """
    planned = sample_from_mapping(sample, "this call")
    for image in planned_vit_images(planned):
        if image.height % config.vit_patch_size or image.width % config.vit_patch_size:
            raise ValueError(
                f"a ViT image of {image.height}x{image.width} pixels is not whole patches of {config.vit_patch_size}"
            )
    placed = place_sample(planned, start=status["curr"], config=config, rng=_GLOBAL_GENERATORS)
    arrays = layout_arrays([placed], config, tokens)
    for name in _FLAT_LISTS:
        status[name].extend(arrays[name].tolist())
    for segment in placed.segments:
        _append_floats(status, segment)
    for image in emitted_images([placed], "vae_image"):
        status["vae_image_tensors"].append(torch.from_numpy(np.array(image.source.pixels)))
        status["packed_latent_position_ids"].append(_positions(image, "vae_image", config))
    for image in emitted_images([placed], "vit_image"):
        status["packed_vit_tokens"].append(_patches(image, config.vit_patch_size))
        status["packed_vit_position_ids"].append(_positions(image, "vit_image", config))
    status["vae_latent_shapes"].extend(latent_shapes([placed], config))
    status["sample_lens"].append(placed.length)
    if config.use_flex:
        status["split_lens"].extend(placed.split_lens)
        status["attn_modes"].extend(placed.attn_modes)
    else:
        mask = attention_mask(placed.split_lens, placed.attn_modes)
        status["nested_attention_masks"].append(torch.from_numpy(mask))
    status["curr"] = placed.end
    return status


def planned_vit_images(sample: Any) -> list[PlannedImage]:
    images = [item.kind for item in sample.items if item.kind != "text"]
    return [image for kind, image in zip(images, sample.images, strict=False) if kind == "vit_image"]


def _append_floats(status: dict[str, Any], segment: Any) -> None:
    """Weights and timesteps stay float64 in the lists; they are rounded once, in `status_to_tensors`."""
    if segment.item.kind == "text" and segment.item.loss == 1:
        learnt = segment.length - 1
        status["ce_loss_weights"].extend([1.0 / math.sqrt(learnt)] * learnt)
    if segment.item.kind == "vae_image":
        status["packed_timesteps"].extend([segment.timestep] * (segment.length - 2))
    if segment.item.special_token_loss == 1:
        status["ce_loss_weights"].append(1.0)


def _positions(image: PlannedImage, kind: Any, config: PackingConfig) -> torch.Tensor:
    rows, columns = config.grid(kind, image)
    most = config.max_latent_size if kind == "vae_image" else config.max_patches_per_side
    return torch.from_numpy(np.array(grid_positions(rows, columns, most, config.interpolate_positions)))


def _patches(image: PlannedImage, patch: int) -> torch.Tensor:
    return torch.from_numpy(cut_planes(image.source.pixels, patch))


def status_to_tensors(status: dict[str, Any], config: PackingConfig) -> dict[str, Any]:
    """The yielded mapping without `batch_data_indexes`. `status` is not modified."""
    batch: dict[str, Any] = {
        "sequence_length": status["curr"],
        "sample_lens": list(status["sample_lens"]),
        "packed_text_ids": _int64(status["packed_text_ids"]),
        "packed_text_indexes": _int64(status["packed_text_indexes"]),
        "packed_position_ids": _int64(status["packed_position_ids"]),
    }
    if config.use_flex:
        padding = config.max_tokens - status["curr"]
        batch["sample_lens"].append(padding)
        batch["split_lens"] = [*status["split_lens"], padding]
        batch["attn_modes"] = [*status["attn_modes"], "causal"]
    else:
        batch["nested_attention_masks"] = list(status["nested_attention_masks"])
    if status["vae_image_tensors"]:
        batch["padded_images"] = _padded(status["vae_image_tensors"])
        batch["patchified_vae_latent_shapes"] = list(status["vae_latent_shapes"])
        batch["packed_latent_position_ids"] = torch.cat(status["packed_latent_position_ids"])
        batch["packed_vae_token_indexes"] = _int64(status["packed_vae_token_indexes"])
    if status["packed_vit_tokens"]:
        batch["packed_vit_tokens"] = torch.cat(status["packed_vit_tokens"])
        batch["packed_vit_position_ids"] = torch.cat(status["packed_vit_position_ids"])
        batch["packed_vit_token_indexes"] = _int64(status["packed_vit_token_indexes"])
        batch["vit_token_seqlens"] = _int64(status["vit_token_seqlens"])
    if status["packed_timesteps"]:
        batch["packed_timesteps"] = torch.tensor(status["packed_timesteps"], dtype=torch.float32)
        batch["mse_loss_indexes"] = _int64(status["mse_loss_indexes"])
    if status["packed_label_ids"]:
        batch["packed_label_ids"] = _int64(status["packed_label_ids"])
        batch["ce_loss_indexes"] = _int64(status["ce_loss_indexes"])
        batch["ce_loss_weights"] = torch.tensor(status["ce_loss_weights"], dtype=torch.float32)
    return batch


def _int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _padded(images: list[torch.Tensor]) -> torch.Tensor:
    height, width = max(image.shape[1] for image in images), max(image.shape[2] for image in images)
    padded = torch.zeros(len(images), 3, height, width)
    for place, image in enumerate(images):
        padded[place, :, : image.shape[1], : image.shape[2]] = image
    return padded
