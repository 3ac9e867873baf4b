"""Samples that bring their pixels along: from a user's own group type, or from a state of Automodel's."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from bagelplane.engine.samples import PlanItem, PlannedImage, Sample

_ITEM_FIELDS = ("enable_cfg", "loss", "special_token_loss", "special_token_label", "split_start", "split_end")


class RawPixels:
    """Pixels at hand: float32 [3, h, w], already normalised."""

    __slots__ = ("key", "pixels")

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = np.ascontiguousarray(pixels, dtype=np.float32)
        self.key = "raw:" + hashlib.sha256(self.pixels.tobytes()).hexdigest()


def sample_from_mapping(mapping: Mapping[str, Any], group: str) -> Sample:
    """A sample as `pack_sequence` takes it. Raises ValueError that names what is missing or does not fit."""
    missing = [
        name for name in ("sequence_plan", "text_ids_list", "image_tensor_list") if name not in mapping
    ]
    if missing:
        raise ValueError(f"a sample of {group} lacks {', '.join(missing)}")
    items = [_item_from_mapping(item) for item in mapping["sequence_plan"]]
    texts = [[int(token) for token in ids] for ids in mapping["text_ids_list"]]
    images = [_raw_image(tensor, group) for tensor in mapping["image_tensor_list"]]
    num_texts = sum(item.kind == "text" for item in items)
    if num_texts > len(texts) or len(items) - num_texts > len(images):
        raise ValueError(
            f"a sample of {group} plans {num_texts} texts and {len(items) - num_texts} images, "
            f"but brings {len(texts)} and {len(images)}"
        )
    indexes = mapping.get("data_indexes")
    return Sample(
        items=items,
        texts=list(texts),
        images=images,
        num_tokens=int(mapping.get("num_tokens", 0)),
        data_indexes=indexes,
        group=group,
        entry=indexes if isinstance(indexes, Mapping) else None,
    )


def _item_from_mapping(item: Mapping[str, Any]) -> PlanItem:
    kind = item.get("type")
    if kind not in ("text", "vit_image", "vae_image"):
        raise ValueError(
            f"a sequence plan has an item of type {kind!r}, expected text, vit_image or vae_image"
        )
    options = {name: item[name] for name in _ITEM_FIELDS if name in item}
    # A frame delta counts by being there, whatever its value.
    return PlanItem(kind, frame_delta=item.get("frame_delta"), **options)


def _raw_image(tensor: Any, group: str) -> PlannedImage:
    pixels = np.asarray(tensor, dtype=np.float32)
    if pixels.ndim != 3 or pixels.shape[0] != 3:
        raise ValueError(f"an image of {group} has the shape {pixels.shape}, expected [3, height, width]")
    return PlannedImage(RawPixels(pixels), height=pixels.shape[1], width=pixels.shape[2])


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """A raw sample in JSON types, pixels included: such a sample cannot be read again."""
    return {
        "sequence_plan": [
            {"type": item.kind, "frame_delta": item.frame_delta}
            | {name: getattr(item, name) for name in _ITEM_FIELDS}
            for item in sample.items
        ],
        "text_ids_list": [list(ids) for ids in sample.texts],
        "image_tensor_list": [
            {
                "shape": list(image.source.pixels.shape),
                "zlib": base64.b64encode(zlib.compress(image.source.pixels.tobytes(), 1)).decode("ascii"),
            }
            for image in sample.images
        ],
        "num_tokens": sample.num_tokens,
        "data_indexes": dict(sample.entry) if sample.entry is not None else sample.data_indexes,
        "group": sample.group,
    }


def sample_from_json(state: Mapping[str, Any]) -> Sample:
    """The inverse of `sample_to_json`. Raises ValueError or KeyError for anything else."""
    images = [
        np.frombuffer(zlib.decompress(base64.b64decode(image["zlib"])), dtype=np.float32).reshape(
            image["shape"]
        )
        for image in state["image_tensor_list"]
    ]
    return sample_from_mapping({**state, "image_tensor_list": images}, state["group"])
