"""The demo's undisturbed run: the same packs by another way, to compare with.

    python -m bagelplane.cli.demo_reference LOCAL.yaml OUT_FOLDER WORLD_SIZE PACKS

Reads the files from disk, in one process without a sidecar, a ring or a store. Where torch is installed the
documented drop-in class `PackedDataset` makes the packs of Bagel sharding; all else, the stream that it shares with
the sidecar.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bagelplane.cli.demo_trainer import describe
from bagelplane.engine.layout import assemble
from bagelplane.engine.pack import Pack
from bagelplane.errors import BagelplaneError
from bagelplane.sources.tokenizer import load_tokenizer
from bagelplane.spec import BagelDataset, Group, ImageTransform, load_dataset
from bagelplane.storage import open_storage
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology


def undisturbed_packs(
    dataset: BagelDataset, rank: int, world_size: int, scratch: Path
) -> Iterator[dict[str, Any]]:
    """One rank's packs from the beginning, for ever. Small files that are needed go into `scratch`."""
    if importlib.util.find_spec("torch") is None or dataset.spec.sharding.mode == "Elastic":
        return _packs_of_stream(dataset, rank, world_size)
    return _packs_of_drop_in_class(dataset, rank, world_size, scratch)


def _packs_of_stream(dataset: BagelDataset, rank: int, world_size: int) -> Iterator[dict[str, Any]]:
    sharding = dataset.spec.sharding
    workers = 0 if sharding.mode == "Elastic" else sharding.workers_per_rank
    stream = open_rank_stream(dataset, Topology(rank, world_size, workers))
    images: list[np.ndarray] = []

    def allocate(pack: Pack) -> list[np.ndarray]:
        images[:] = [np.empty((height, width, 3), np.uint8) for height, width in pack.image_shapes]
        return images

    while True:
        pack = stream.next_pack(allocate)
        yield assemble(pack, images)


def _packs_of_drop_in_class(
    dataset: BagelDataset, rank: int, world_size: int, scratch: Path
) -> Iterator[dict[str, Any]]:
    from tokenizers import Tokenizer

    from bagelplane.packing import DataConfig, PackedDataset

    spec = dataset.spec
    tokenizer = Tokenizer.from_file(_path(spec.tokenizer.uri))
    _, tokens = load_tokenizer(open_storage(), spec.tokenizer)
    special = {
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "start_of_image": tokens.start_of_image,
        "end_of_image": tokens.end_of_image,
    }
    budgets = spec.budgets
    packed = PackedDataset(
        DataConfig(
            {group.type: _options(group) for group in spec.groups},
            text_cond_dropout_prob=spec.conditioning.text_dropout,
            vit_cond_dropout_prob=spec.conditioning.vit_dropout,
            vae_cond_dropout_prob=spec.conditioning.vae_dropout,
        ),
        tokenizer,
        special,
        local_rank=rank,
        world_size=world_size,
        num_workers=spec.sharding.workers_per_rank,
        expected_num_tokens=budgets.expected_tokens,
        max_num_tokens_per_sample=budgets.max_tokens_per_sample,
        max_num_tokens=budgets.max_tokens,
        prefer_buffer_before=budgets.prefer_buffer_before,
        max_buffer_size=budgets.max_buffer_size,
        dataset_info={group.type: _dataset_info(group, scratch) for group in spec.groups},
        global_seed=spec.sharding.global_seed,
    )
    packed.set_epoch(spec.sharding.data_seed)
    return iter(packed)


def _options(group: Group) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dataset_names": [dataset.name for dataset in group.datasets],
        "num_used_data": [dataset.num_used_data or 0 for dataset in group.datasets],
        "weight": group.weight,
        "is_mandatory": group.mandatory,
    }
    if group.image_transform is not None:
        options["image_transform_args"] = _transform(group.image_transform)
    if group.vit_image_transform is not None:
        options["vit_image_transform_args"] = _transform(group.vit_image_transform)
    return options


def _transform(transform: ImageTransform) -> dict[str, int]:
    return {
        "image_stride": transform.stride,
        "max_image_size": transform.max_size,
        "min_image_size": transform.min_size,
        "max_pixels": transform.max_pixels,
    }


def _dataset_info(group: Group, scratch: Path) -> dict[str, dict[str, Any]]:
    info = {}
    for dataset in group.datasets:
        paths: dict[str, Any] = {"data_dir": _path(dataset.images_uri or dataset.uri)}
        if dataset.jsonl_uri is not None:
            paths["jsonl_path"] = _path(dataset.jsonl_uri)
        if dataset.parquet_info_uri is not None:
            paths["parquet_info_path"] = _absolute_parquet_info(
                Path(_path(dataset.parquet_info_uri)), scratch
            )
        info[dataset.name] = paths
    return info


def _absolute_parquet_info(path: Path, scratch: Path) -> str:
    """The class knows full paths alone."""
    info = json.loads(path.read_text(encoding="utf-8"))
    absolute = scratch / "parquet_info.json"
    absolute.write_text(json.dumps({str(path.parent / name): entry for name, entry in info.items()}))
    return str(absolute)


def _path(uri: str) -> str:
    return uri.removeprefix("file://")


def main(resource: str, folder: str, world_size: int, packs: int) -> None:
    """Writes `rank-<n>.jsonl` for each rank."""
    logging.disable(logging.WARNING)  # dropped rows are shown by the run itself
    dataset = load_dataset(resource)
    for rank in range(world_size):
        with (Path(folder) / f"rank-{rank}.jsonl").open("w", encoding="utf-8") as lines:
            batches = undisturbed_packs(dataset, rank, world_size, Path(folder))
            for step in range(packs):
                lines.write(json.dumps(asdict(describe(step, next(batches)))) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    except BagelplaneError as error:
        sys.exit(f"error: {error}")
