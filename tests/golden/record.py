"""Records what NVIDIA NeMo Automodel's packer yields; runs in the peer's environment, never in ours.

    python tests/golden/record.py verify tests/golden/stream_a_default.json     # does the peer still yield it?
    python tests/golden/record.py extra [NAME ...]                               # write tests/golden/extra/

The peer takes files in directory order, which no file system promises, so `os.listdir` is made to sort. The
peer's environment is what `make bench` builds; its source is not needed and was not read: only documented
classes are called.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from hashing import describe, differences  # noqa: E402

_listdir = os.listdir
os.listdir = lambda *args: sorted(_listdir(*args))  # type: ignore[assignment]

SPECIAL_TOKENS = {
    "bos_token_id": "<|im_start|>",
    "eos_token_id": "<|im_end|>",
    "start_of_image": "<|vision_start|>",
    "end_of_image": "<|vision_end|>",
}
CONDITIONING_AND_MODEL = (
    "text_cond_dropout_prob",
    "vit_cond_dropout_prob",
    "vae_cond_dropout_prob",
    "vae_image_downsample",
    "max_latent_size",
    "vit_patch_size",
    "max_num_patch_per_side",
)
NOT_FOR_THE_CLASS = (*CONDITIONING_AND_MODEL, "data_seed")


class Tokenizer:
    """`encode(str) -> list[int]` over a `tokenizer.json`, as the peer wants it; picklable for spawned workers."""

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer as Backend

        self.path = path
        self.backend = Backend.from_file(path)

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text).ids)

    def special_tokens(self) -> dict[str, int]:
        return {name: self.backend.token_to_id(token) for name, token in SPECIAL_TOKENS.items()}


def absolute_parquet_info(data: Path) -> str:
    """Write `parquet_info` with the absolute file names that the peer looks up; returns its path."""
    relative = json.loads((data / "edit_info.rel.json").read_text())
    handle, path = tempfile.mkstemp(prefix="parquet-info-", suffix=".json")
    with os.fdopen(handle, "w") as file:
        json.dump({str(data / name): entry for name, entry in relative.items()}, file)
    return path


def dataset_info(data: Path, parquet_info_path: str) -> dict[str, Any]:
    edit_files = len(list((data / "edit").glob("*.parquet")))
    return {
        "t2i_pretrain": {
            "t2i": {"data_dir": str(data / "t2i"), "num_files": edit_files, "num_total_samples": 96}
        },
        "unified_edit": {
            "edit": {
                "data_dir": str(data / "edit"),
                "num_files": edit_files,
                "num_total_samples": 96,
                "parquet_info_path": parquet_info_path,
            }
        },
        "vlm_sft": {
            "vlm": {
                "data_dir": str(data / "vlm" / "images"),
                "jsonl_path": str(data / "vlm" / "train.jsonl"),
                "num_total_samples": 96,
            }
        },
    }


def build(
    packing_module: Any, config: dict[str, Any], data: Path, rank: int, tokenizer: Tokenizer | None = None
) -> Any:
    """A `PackedDataset` of `packing_module` (the peer's, or ours: same signature) for one rank of a recording."""
    config = copy.deepcopy(config)
    knobs = config["packing"]
    tokenizer = tokenizer or Tokenizer(str(data / "tokenizer.json"))
    dataset = packing_module.PackedDataset(
        packing_module.DataConfig(
            grouped_datasets=config["grouped_datasets"],
            **{name: knobs[name] for name in CONDITIONING_AND_MODEL},
        ),
        tokenizer=tokenizer,
        special_tokens=tokenizer.special_tokens(),
        local_rank=rank,
        world_size=config["world_size"],
        num_workers=config.get("constructor_num_workers", max(1, config["num_workers"])),
        dataset_info=dataset_info(data, absolute_parquet_info(data)),
        global_seed=config["global_seed"],
        **{name: value for name, value in knobs.items() if name not in NOT_FOR_THE_CLASS},
    )
    dataset.set_epoch(knobs["data_seed"])
    return dataset


def iterate(dataset: Any, num_workers: int) -> Iterator[dict[str, Any]]:
    if num_workers == 0:
        return iter(dataset)
    from torch.utils.data import DataLoader

    return iter(DataLoader(dataset, batch_size=None, num_workers=num_workers))


def record(config: dict[str, Any], data: Path, packing_module: Any = None) -> dict[str, list[Any]]:
    """Yield `config["packs"]` described packs of every rank."""
    if packing_module is None:
        from nemo_automodel.components.datasets.multimodal import packing as packing_module
    ranks = {}
    for rank in range(config["world_size"]):
        packs = iterate(build(packing_module, config, data, rank), config["num_workers"])
        ranks[str(rank)] = [describe(next(packs)) for _ in range(config["packs"])]
    return ranks


def data_of(recording: Path, config: dict[str, Any]) -> Path:
    """Which of our data sets a recording is made from: it says so, or its name does."""
    return HERE / str(config.get("data", "odd" if recording.stem.startswith("stream_odd") else "data"))


def _budgets(
    config: dict[str, Any], expected: int, most: int, per_sample: int, prefer: int, buffer: int
) -> None:
    config["packing"] |= {
        "expected_num_tokens": expected,
        "max_num_tokens": most,
        "max_num_tokens_per_sample": per_sample,
        "prefer_buffer_before": prefer,
        "max_buffer_size": buffer,
    }


def _odd_workers(config: dict[str, Any]) -> None:
    """Rows that drop, in two workers of two ranks: each worker's draws shift alone."""
    config |= {"data": "odd", "num_workers": 2, "global_seed": 77, "packs": 20}


def _frames(config: dict[str, Any]) -> None:
    """Frame folders, fewer wanted than there are: intervals of many frames, and permutations where they end."""
    groups = config["grouped_datasets"]
    groups["vlm_sft"]["frame_sampler_args"] = {"max_num_frames": 6, "min_num_frames": 2}
    config["grouped_datasets"] = {"vlm_sft": groups["vlm_sft"]}
    config |= {"data": "odd", "world_size": 1, "global_seed": 6, "packs": 60}
    _budgets(config, 600, 1024, 900, 300, 4)


def _large(config: dict[str, Any]) -> None:
    """The sizes and budgets of a real run: up to 1024 and 980 pixels, 32768 tokens expected."""
    groups = config["grouped_datasets"]
    groups["t2i_pretrain"]["image_transform_args"] |= {"max_image_size": 1024, "min_image_size": 512}
    groups["unified_edit"]["image_transform_args"] |= {"max_image_size": 1024, "min_image_size": 512}
    groups["unified_edit"]["vit_image_transform_args"] |= {"max_image_size": 518, "min_image_size": 224}
    groups["vlm_sft"]["image_transform_args"] |= {"max_image_size": 980, "min_image_size": 378}
    config |= {"world_size": 1, "packs": 4}
    _budgets(config, 32768, 36864, 16384, 16384, 50)


def _uneven_workers(config: dict[str, Any]) -> None:
    """Three workers: tails are cut off; dense masks and interpolated positions in workers."""
    config["packing"] |= {"use_flex": False, "interpolate_pos": True, "max_latent_size": 32}
    config |= {"world_size": 1, "num_workers": 3, "global_seed": 12, "packs": 15}


def _wraps(config: dict[str, Any]) -> None:
    """Few units, so that every group starts over several times; files repeated; lines cut and not shuffled."""
    groups = config["grouped_datasets"]
    groups["t2i_pretrain"]["num_used_data"] = [2]
    groups["unified_edit"]["num_used_data"] = [1]
    groups["vlm_sft"] |= {"num_used_data": [7], "shuffle_lines": False}
    config |= {"data": "odd", "world_size": 1, "global_seed": 21, "packs": 40}


def _full_buffer(config: dict[str, Any]) -> None:
    """A buffer that is hardly ever drawn from fills to its fifty samples, then samples are lost."""
    for group in config["grouped_datasets"].values():
        group["is_mandatory"] = False
    config |= {"world_size": 1, "global_seed": 8, "packs": 90}
    _budgets(config, 590, 600, 560, 1, 50)


def _mandatory_only(config: dict[str, Any]) -> None:
    """Weight 0 with mandatory, weights far apart, no global seed: group choice at its edges."""
    groups = config["grouped_datasets"]
    groups["t2i_pretrain"]["weight"] = 0
    groups["unified_edit"] |= {"weight": 0.125, "is_mandatory": True}
    groups["vlm_sft"] |= {"weight": 2.5, "is_mandatory": False}
    config |= {"world_size": 2, "global_seed": None, "packs": 20}


def _constructor_alone(config: dict[str, Any]) -> None:
    """In the process, though the constructor is told of three workers: its number goes into the seed."""
    config |= {"world_size": 2, "constructor_num_workers": 3, "packs": 8}


def _constructor_differs(config: dict[str, Any]) -> None:
    """Two workers, though the constructor is told of four."""
    config |= {"data": "odd", "world_size": 2, "num_workers": 2, "constructor_num_workers": 4, "packs": 8}


def _four_ranks(config: dict[str, Any]) -> None:
    """Four ranks of one worker each: what two pods of two processes train on."""
    config |= {"world_size": 4, "num_workers": 1, "packs": 24}


EXTRA = {
    "four_ranks": _four_ranks,
    "constructor_alone": _constructor_alone,
    "constructor_differs": _constructor_differs,
    "odd_workers": _odd_workers,
    "frames": _frames,
    "large": _large,
    "uneven_workers": _uneven_workers,
    "wraps": _wraps,
    "full_buffer": _full_buffer,
    "mandatory_only": _mandatory_only,
}


def write_extra(name: str) -> Path:
    """Record one stream of our own: the configuration of `a_default`, changed for one corner."""
    config = json.loads((HERE / "stream_a_default.json").read_text())["config"]
    config["data"] = "data"
    EXTRA[name](config)
    path = HERE / "extra" / f"stream_{name}.json"
    path.parent.mkdir(exist_ok=True)
    recording = {"config": config, "ranks": record(config, HERE / config["data"])}
    path.write_text(json.dumps(recording, separators=(",", ":")) + "\n")
    return path


def verify(path: Path) -> list[str]:
    recorded = json.loads(path.read_text())
    got = json.loads(json.dumps(record(recorded["config"], data_of(path, recorded["config"]))))
    return differences(got, recorded["ranks"], path.stem)


def main(arguments: list[str]) -> int:
    logging.disable(logging.WARNING)
    command, *names = arguments
    if command == "verify":
        failed = 0
        for name in names:
            lines = verify(Path(name))
            failed += bool(lines)
            print(f"{name}: {'as recorded' if not lines else lines[0]}", flush=True)
        return 1 if failed else 0
    if command == "extra":
        for name in names or EXTRA:
            path = write_extra(name)
            print(f"{path.relative_to(HERE)}: {path.stat().st_size} bytes", flush=True)
        return 0
    raise SystemExit(f"unknown command {command!r}: verify or extra")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
