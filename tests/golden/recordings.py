"""Recorded streams, and how each face of the project is told to make them again.

A recording holds the peer's configuration and what the peer yielded. `packed_dataset` gives the drop-in class
for it, `resource_of` the resource; both are made of the configuration alone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bagelplane.engine.layout import assemble
from bagelplane.engine.pack import Pack
from bagelplane.spec import BagelDataset
from bagelplane.stream import RankStream
from tests.golden.hashing import describe, differences

HERE = Path(__file__).parent
SPECIAL_TOKENS = {
    "bos_token_id": "<|im_start|>",
    "eos_token_id": "<|im_end|>",
    "start_of_image": "<|vision_start|>",
    "end_of_image": "<|vision_end|>",
}
DATA_CONFIG_FIELDS = (
    "text_cond_dropout_prob",
    "vit_cond_dropout_prob",
    "vae_cond_dropout_prob",
    "vae_image_downsample",
    "max_latent_size",
    "vit_patch_size",
    "max_num_patch_per_side",
)


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded stream: configuration, data folder, and the described packs of each rank."""

    name: str
    config: dict[str, Any]
    data: Path
    ranks: list[list[Any]]

    @property
    def num_workers(self) -> int:
        return int(self.config["num_workers"])

    def check(self, rank: int, step: int, pack: object) -> None:
        """Pack `step` of `rank` is what was recorded, to the bit."""
        lines = differences(describe(pack), self.ranks[rank][step], f"{self.name}, rank {rank}, pack {step}")
        assert not lines, "\n".join(lines[:8])


@cache
def load_recording(name: str) -> Recording:
    path = recording_paths()[name]
    recorded = json.loads(path.read_text())
    config = recorded["config"]
    data = HERE / config.get("data", "odd" if name.startswith("odd") else "data")
    ranks = [recorded["ranks"][str(rank)] for rank in range(config["world_size"])]
    return Recording(name, config, data, ranks)


@cache
def recording_paths() -> dict[str, Path]:
    paths = [*sorted(HERE.glob("stream_*.json")), *sorted((HERE / "extra").glob("stream_*.json"))]
    return {path.stem.removeprefix("stream_"): path for path in paths}


RECORDINGS = tuple(recording_paths())
PLACES = tuple((name, rank) for name in RECORDINGS for rank in range(len(load_recording(name).ranks)))
"""Every rank of every recording."""
DECLARABLE = tuple(
    name for name in RECORDINGS if "constructor_num_workers" not in load_recording(name).config
)
"""Recordings that a resource can declare; it cannot say one number of workers and use another."""
DECLARABLE_PLACES = tuple(place for place in PLACES if place[0] in DECLARABLE)


@cache
def tokenizer_of(data: Path) -> Tokenizer:
    return Tokenizer.from_file(str(data / "tokenizer.json"))


def special_tokens_of(tokenizer: Tokenizer) -> dict[str, int]:
    return {name: tokenizer.token_to_id(token) for name, token in SPECIAL_TOKENS.items()}


def dataset_info(data: Path, scratch: Path) -> dict[str, Any]:
    """The paths of a data folder. `scratch` keeps its parquet info, which has to name files in full."""
    info = scratch / f"parquet-info-{data.name}.json"
    if not info.exists():
        counts = json.loads((data / "edit_info.rel.json").read_text())
        info.write_text(json.dumps({str(data / name): entry for name, entry in counts.items()}))
    return {
        "t2i_pretrain": {"t2i": {"data_dir": str(data / "t2i")}},
        "unified_edit": {"edit": {"data_dir": str(data / "edit"), "parquet_info_path": str(info)}},
        "vlm_sft": {
            "vlm": {"data_dir": str(data / "vlm/images"), "jsonl_path": str(data / "vlm/train.jsonl")}
        },
    }


def packed_dataset(
    recording: Recording, rank: int, scratch: Path, *, set_epoch: bool = True, **options: Any
) -> Any:
    """The drop-in class as the recording was made. `options` go to the constructor over the recording's."""
    from bagelplane.packing import DataConfig, PackedDataset

    config = copy.deepcopy(recording.config)
    knobs = config["packing"]
    data_seed = knobs.pop("data_seed")
    data_config = DataConfig(
        config["grouped_datasets"], **{name: knobs.pop(name) for name in DATA_CONFIG_FIELDS}
    )
    tokenizer = tokenizer_of(recording.data)
    arguments = {
        "tokenizer": tokenizer,
        "special_tokens": special_tokens_of(tokenizer),
        "local_rank": rank,
        "world_size": config["world_size"],
        "num_workers": config.get("constructor_num_workers", max(1, config["num_workers"])),
        "dataset_info": dataset_info(recording.data, scratch),
        "global_seed": config["global_seed"],
        **knobs,
        **options,
    }
    dataset = PackedDataset(data_config, **arguments)
    if set_epoch:
        dataset.set_epoch(data_seed)
    return dataset


def resource_of(recording: Recording, root: str | None = None, **parts: Any) -> BagelDataset:
    """The resource that declares a recording's stream. `root`: where its data lie; `parts` go over `spec`."""
    config, knobs = recording.config, recording.config["packing"]
    root = root or str(recording.data)
    spec = {
        "profile": "Automodel",
        "tokenizer": {"uri": f"{root}/tokenizer.json"},
        "groups": [_group(kind, group, root) for kind, group in config["grouped_datasets"].items()],
        "budgets": {
            "expectedTokens": knobs["expected_num_tokens"],
            "maxTokens": knobs["max_num_tokens"],
            "maxTokensPerSample": knobs["max_num_tokens_per_sample"],
            "preferBufferBefore": knobs["prefer_buffer_before"],
            "maxBufferSize": knobs["max_buffer_size"],
            "attention": "Flex" if knobs["use_flex"] else "DenseMasks",
            "flexBlockSize": 1,
        },
        "conditioning": {
            "textDropout": knobs["text_cond_dropout_prob"],
            "vitDropout": knobs["vit_cond_dropout_prob"],
            "vaeDropout": knobs["vae_cond_dropout_prob"],
        },
        "model": {
            "vaeImageDownsample": knobs["vae_image_downsample"],
            "maxLatentSize": knobs["max_latent_size"],
            "vitPatchSize": knobs["vit_patch_size"],
            "maxPatchesPerSide": knobs["max_num_patch_per_side"],
            "interpolatePositions": knobs["interpolate_pos"],
        },
        "sharding": {
            "mode": "Bagel",
            "workersPerRank": config["num_workers"],
            "dataSeed": knobs["data_seed"],
            "globalSeed": config["global_seed"] or 0,
        },
        "drops": {"maxConsecutive": 10_000},
        **parts,
    }
    return BagelDataset.from_mapping(
        {
            "apiVersion": "bagelplane.io/v1alpha1",
            "kind": "BagelDataset",
            "metadata": {"name": recording.name.replace("_", "-")},
            "spec": spec,
        }
    )


def _group(kind: str, group: dict[str, Any], root: str) -> dict[str, Any]:
    [name], [used] = group["dataset_names"], group["num_used_data"]
    dataset: dict[str, Any] = {"name": name, "uri": f"{root}/{name}", "numUsedData": used}
    if kind == "unified_edit":
        dataset["parquetInfo"] = f"{root}/edit_info.rel.json"
    if kind == "vlm_sft":
        dataset |= {"jsonl": "train.jsonl", "images": "images"}
    resource: dict[str, Any] = {
        "name": name,
        "type": kind,
        "weight": float(group["weight"]),
        "mandatory": group["is_mandatory"],
        "datasets": [dataset],
        "imageTransform": _transform(group["image_transform_args"]),
    }
    if "vit_image_transform_args" in group:
        resource["vitImageTransform"] = _transform(group["vit_image_transform_args"])
    if kind == "vlm_sft":
        frames = group["frame_sampler_args"]
        resource["frameSampler"] = {
            "minFrames": frames["min_num_frames"],
            "maxFrames": frames["max_num_frames"],
        }
        resource |= {"shuffleLines": group["shuffle_lines"], "shuffleSeed": group["shuffle_seed"]}
    return resource


def _transform(options: dict[str, Any]) -> dict[str, Any]:
    names = {
        "image_stride": "stride",
        "max_image_size": "maxSize",
        "min_image_size": "minSize",
        "max_pixels": "maxPixels",
    }
    return {names[option]: value for option, value in options.items()}


def next_batch(stream: RankStream) -> tuple[Pack, dict[str, Any]]:
    """A rank stream's next pack, and the mapping that a trainer would get of it."""
    pixels: list[np.ndarray] = []

    def allocate(pack: Pack) -> list[np.ndarray]:
        pixels[:] = [np.empty((*shape, 3), np.uint8) for shape in pack.image_shapes]
        return pixels

    pack = stream.next_pack(allocate)
    return pack, assemble(pack, pixels)


def batches(stream: RankStream) -> Iterator[dict[str, Any]]:
    while True:
        yield next_batch(stream)[1]
