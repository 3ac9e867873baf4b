"""What is measured: one mix of data and budgets, for the peer's classes, for ours, and as a resource.

Budgets and sizes are those of a real BAGEL run. Runs in both environments: needs the standard library alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VAE = {"image_stride": 16, "max_image_size": 1024, "min_image_size": 512}
VIT = {"image_stride": 14, "max_image_size": 980, "min_image_size": 378}
EDIT_VIT = {"image_stride": 14, "max_image_size": 518, "min_image_size": 224}
SEED = 4396


def packing_config(lines: int) -> dict[str, Any]:
    """In the form of the recorded streams, as `tests/golden/record.py` builds a `PackedDataset` from it."""
    return {
        "grouped_datasets": {
            "t2i_pretrain": {
                "dataset_names": ["t2i"],
                "image_transform_args": dict(VAE),
                "is_mandatory": True,
                "num_used_data": [8],
                "weight": 1,
            },
            "unified_edit": {
                "dataset_names": ["edit"],
                "image_transform_args": dict(VAE),
                "vit_image_transform_args": dict(EDIT_VIT),
                "is_mandatory": False,
                "num_used_data": [8],
                "weight": 1,
            },
            "vlm_sft": {
                "dataset_names": ["vlm"],
                "image_transform_args": dict(VIT),
                "frame_sampler_args": {"max_num_frames": 12, "min_num_frames": 8},
                "is_mandatory": True,
                "shuffle_lines": True,
                "shuffle_seed": 0,
                "num_used_data": [lines],
                "weight": 1,
            },
        },
        "packing": {
            "expected_num_tokens": 32768,
            "max_num_tokens": 36864,
            "max_num_tokens_per_sample": 16384,
            "prefer_buffer_before": 16384,
            "max_buffer_size": 50,
            "interpolate_pos": False,
            "use_flex": True,
            "data_seed": 42,
            "text_cond_dropout_prob": 0.1,
            "vit_cond_dropout_prob": 0.4,
            "vae_cond_dropout_prob": 0.1,
            "vae_image_downsample": 16,
            "max_latent_size": 64,
            "vit_patch_size": 14,
            "max_num_patch_per_side": 70,
        },
        "world_size": 1,
        "num_workers": 0,
        "global_seed": SEED,
    }


def resource(data: Path, lines: int) -> dict[str, Any]:
    """The same stream as a BagelDataset."""

    def transform(arguments: dict[str, int]) -> dict[str, int]:
        return {
            "stride": arguments["image_stride"],
            "maxSize": arguments["max_image_size"],
            "minSize": arguments["min_image_size"],
        }

    vlm = {"name": "vlm", "uri": str(data / "vlm"), "jsonl": "train.jsonl", "images": "images/"}
    groups = [
        {
            "name": "t2i_pretrain",
            "type": "t2i_pretrain",
            "mandatory": True,
            "datasets": [{"name": "t2i", "uri": str(data / "t2i"), "numUsedData": 8}],
            "imageTransform": transform(VAE),
        },
        {
            "name": "unified_edit",
            "type": "unified_edit",
            "datasets": [
                {
                    "name": "edit",
                    "uri": str(data / "edit"),
                    "numUsedData": 8,
                    "parquetInfo": "parquet_info.json",
                }
            ],
            "imageTransform": transform(VAE),
            "vitImageTransform": transform(EDIT_VIT),
        },
        {
            "name": "vlm_sft",
            "type": "vlm_sft",
            "mandatory": True,
            "shuffleLines": True,
            "datasets": [{**vlm, "numUsedData": lines}],
            "imageTransform": transform(VIT),
            "frameSampler": {"maxFrames": 12, "minFrames": 8},
        },
    ]
    return {
        "apiVersion": "bagelplane.io/v1alpha1",
        "kind": "BagelDataset",
        "metadata": {"name": "benchmark"},
        "spec": {
            "profile": "Automodel",
            "tokenizer": {"uri": str(data / "tokenizer.json")},
            "groups": groups,
            "budgets": {"attention": "Flex"},
            "model": {"maxLatentSize": 64},
            "sharding": {"mode": "Bagel", "workersPerRank": 0, "dataSeed": 42, "globalSeed": SEED},
            "dataplane": {"decodeThreads": 1, "ring": {"packs": 2}},
        },
    }


def prepare(data: Path) -> int:
    """Write the `parquet_info` that `record.py` looks for; the number of conversations."""
    info = json.loads((data / "edit" / "parquet_info.json").read_text())
    relative = {f"edit/{name}": entry for name, entry in info.items()}
    (data / "edit_info.rel.json").write_text(json.dumps(relative))
    return len((data / "vlm" / "train.jsonl").read_text().splitlines())
