"""`DataConfig`, and what a `grouped_datasets` mapping means."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from bagelplane.engine.packer import PackingConfig
from bagelplane.engine.resizing import DEFAULT_MAX_PIXELS, ResizeRule
from bagelplane.engine.samples import FrameSampler, ImageTransform
from bagelplane.errors import SpecError
from bagelplane.sources.config import DatasetConfig, GroupConfig
from bagelplane.sources.registry import STORED_TYPES
from bagelplane.storage import Storage

_COMMON_OPTIONS = {"dataset_names", "weight", "is_mandatory", "resume_data_status"}
_STORED_OPTIONS = {
    "image_transform_args",
    "vit_image_transform_args",
    "frame_sampler_args",
    "num_used_data",
    "shuffle_lines",
    "shuffle_seed",
}
_TRANSFORM_OPTIONS = {
    "image_stride",
    "max_image_size",
    "min_image_size",
    "max_pixels",
    "image_mean",
    "image_std",
}
_NEEDED_TRANSFORMS = {
    "t2i_pretrain": ("image_transform_args",),
    "unified_edit": ("image_transform_args", "vit_image_transform_args"),
    "vlm_sft": ("image_transform_args",),
}


@dataclass
class DataConfig:
    """The mix and the conditioning. Probabilities 0 to 1; downsample and patch size in pixels; sizes in patches.

    `grouped_datasets` maps a group type to its options: `dataset_names`, `weight` (0.0), `is_mandatory` (False),
    `image_transform_args`, `vit_image_transform_args`, `frame_sampler_args`, `num_used_data`, `shuffle_lines`,
    `shuffle_seed`, `resume_data_status` (True).
    """

    grouped_datasets: Mapping[str, Mapping[str, Any]]
    text_cond_dropout_prob: float = 0.1
    vit_cond_dropout_prob: float = 0.4
    vae_cond_dropout_prob: float = 0.1
    vae_image_downsample: int = 16
    max_latent_size: int = 32
    vit_patch_size: int = 14
    max_num_patch_per_side: int = 70

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name.endswith("_prob") and not 0 <= getattr(self, field.name) <= 1:
                raise ValueError(
                    f"{field.name} is {getattr(self, field.name)}, expected a probability from 0 to 1"
                )


class ArgumentError(SpecError, ValueError):
    """An argument that cannot be. A ValueError too, since that is what the documented classes raise."""


def check_place(local_rank: Any, world_size: Any, num_workers: Any) -> None:
    """ArgumentError for what is no place among ranks and workers."""
    _check_number("world_size", world_size, 1, "the number of ranks, from torch.distributed or WORLD_SIZE")
    _check_number("num_workers", num_workers, 0, "the DataLoader's number of workers")
    _check_number("local_rank", local_rank, 0, "the rank among all ranks")
    if local_rank >= world_size:
        raise ArgumentError(
            "local_rank is outside its world",
            got=f"local_rank {local_rank}, world_size {world_size}",
            expected=f"a rank from 0 to {world_size - 1}",
            fix="pass the rank among all ranks, and the number of them",
        )


def _check_number(name: str, value: Any, least: int, meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ArgumentError(
            f"{name} is no number that it can be",
            got=repr(value)[:80],
            expected=f"a whole number of at least {least}",
            fix=f"pass {meaning}",
        )


def check_mapping(name: str, value: Any, meaning: str) -> None:
    """ArgumentError for what is no mapping."""
    if not isinstance(value, Mapping):
        raise ArgumentError(
            f"{name} is no mapping", got=type(value).__name__, expected="a mapping", fix=f"pass {meaning}"
        )


def packing_config(
    data_config: Any,
    *,
    expected_num_tokens: int,
    max_num_tokens_per_sample: int,
    max_num_tokens: int,
    prefer_buffer_before: int,
    max_buffer_size: int,
    interpolate_pos: bool,
    use_flex: bool,
) -> PackingConfig:
    """Raises ArgumentError for a budget that no pack can have."""
    for name, value, least in (
        ("expected_num_tokens", expected_num_tokens, 1),
        ("max_num_tokens_per_sample", max_num_tokens_per_sample, 1),
        ("max_num_tokens", max_num_tokens, 1),
        ("prefer_buffer_before", prefer_buffer_before, 0),
        ("max_buffer_size", max_buffer_size, 0),
    ):
        _check_number(name, value, least, "the recipe's number")
    return PackingConfig(
        expected_tokens=expected_num_tokens,
        max_tokens=max_num_tokens,
        max_tokens_per_sample=max_num_tokens_per_sample,
        prefer_buffer_before=prefer_buffer_before,
        max_buffer_size=max_buffer_size,
        interpolate_positions=interpolate_pos,
        use_flex=use_flex,
        text_dropout=data_config.text_cond_dropout_prob,
        vit_dropout=data_config.vit_cond_dropout_prob,
        vae_dropout=data_config.vae_cond_dropout_prob,
        vae_downsample=data_config.vae_image_downsample,
        max_latent_size=data_config.max_latent_size,
        vit_patch_size=data_config.vit_patch_size,
        max_patches_per_side=data_config.max_num_patch_per_side,
    )


def group_config(
    name: str, options: Mapping[str, Any], dataset_info: Mapping[str, Any], storage: Storage
) -> GroupConfig:
    """One entry of `grouped_datasets`. Raises ValueError that names the group and the option."""
    if not options.get("dataset_names"):
        raise ValueError(f"group {name} names no data sets: dataset_names is missing or empty")
    weight = options.get("weight", 0.0)
    if not isinstance(weight, (int, float)) or weight < 0:
        raise ValueError(f"group {name} has the weight {weight!r}, expected a number of at least 0")
    common: dict[str, Any] = {
        "name": name,
        "type": name,
        "weight": weight,
        "mandatory": bool(options.get("is_mandatory")),
    }
    if name not in STORED_TYPES:
        own = {key: value for key, value in options.items() if key not in _COMMON_OPTIONS}
        return GroupConfig(**common, datasets=(), options=own)
    unknown = sorted(set(options) - _COMMON_OPTIONS - _STORED_OPTIONS)
    if unknown:
        raise ValueError(f"group {name} has unknown options: {', '.join(unknown)}")
    for needed in (*_NEEDED_TRANSFORMS[name], "num_used_data"):
        if options.get(needed) is None:
            raise ValueError(f"group {name} lacks {needed}")
    frames = options.get("frame_sampler_args") or {}
    return GroupConfig(
        **common,
        datasets=_dataset_configs(name, options, dataset_info, storage),
        image_transform=_transform(name, options.get("image_transform_args")),
        vit_image_transform=_transform(name, options.get("vit_image_transform_args")),
        frames=FrameSampler(frames.get("min_num_frames", 8), frames.get("max_num_frames", 8)),
        shuffle_lines=bool(options.get("shuffle_lines", False)),
        shuffle_seed=options.get("shuffle_seed", 0),
    )


def _dataset_configs(
    group: str, options: Mapping[str, Any], dataset_info: Mapping[str, Any], storage: Storage
) -> tuple[DatasetConfig, ...]:
    names, used = options["dataset_names"], options["num_used_data"]
    if not isinstance(used, Sequence) or len(used) < len(names):
        raise ValueError(
            f"group {group}: num_used_data is {used!r}, expected a list with one number a data set"
        )
    return tuple(
        _dataset_config(group, name, count, dataset_info, storage)
        for name, count in zip(names, used, strict=False)
    )


def _dataset_config(
    group: str, name: str, num_used: int, dataset_info: Mapping[str, Any], storage: Storage
) -> DatasetConfig:
    try:
        info = dataset_info[group][name]
    except (KeyError, TypeError):
        raise ValueError(f"dataset_info has no entry [{group!r}][{name!r}]") from None

    def needed(key: str) -> str:
        if not info.get(key):
            raise ValueError(f"dataset_info[{group!r}][{name!r}] lacks {key}")
        return str(info[key])

    if group == "vlm_sft":
        return DatasetConfig(
            name, jsonl_uri=needed("jsonl_path"), images_uri=needed("data_dir"), num_used=num_used
        )
    if group == "t2i_pretrain":
        return DatasetConfig(name, uri=needed("data_dir"), num_used=num_used)
    counts = json.loads(storage.read_bytes(needed("parquet_info_path")))
    row_groups = {path: int(entry["num_row_groups"]) for path, entry in counts.items()}
    return DatasetConfig(name, uri=needed("data_dir"), row_groups=row_groups, num_used=num_used)


def _transform(group: str, options: Mapping[str, Any] | None) -> ImageTransform | None:
    if options is None:
        return None
    unknown = sorted(set(options) - _TRANSFORM_OPTIONS)
    missing = [name for name in ("image_stride", "max_image_size", "min_image_size") if name not in options]
    if unknown or missing:
        raise ValueError(f"an image transform of group {group}: unknown {unknown}, missing {missing}")
    rule = ResizeRule(
        options["image_stride"],
        options["max_image_size"],
        options["min_image_size"],
        options.get("max_pixels") or DEFAULT_MAX_PIXELS,
    )
    mean, std = options.get("image_mean") or (0.5, 0.5, 0.5), options.get("image_std") or (0.5, 0.5, 0.5)
    return ImageTransform(rule, tuple(mean), tuple(std))
