"""Makes tests/fixtures/peer/ from the peer: what its documented members return for small made inputs.

    python tests/golden/record_fixtures.py        # in the peer's environment, beside record.py

Fixtures hold the inputs too (or how to build them), so that a test needs nothing of the peer.
"""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hashing import describe
from nemo_automodel.components.datasets.multimodal import packing
from nemo_automodel.components.datasets.multimodal.distributed_iterable import DistributedIterableDataset
from record import HERE, build, data_of
from torchdata.stateful_dataloader import StatefulDataLoader

FIXTURES = HERE.parent / "fixtures" / "peer"


def item(kind: str, **fields: Any) -> dict[str, Any]:
    plain = {"type": kind, "enable_cfg": 0, "loss": 0, "special_token_loss": 0, "special_token_label": None}
    return {**plain, **fields}


def pixels(height: int, width: int, seed: int) -> Any:
    """An image of a fixture: `RandomState(seed).rand(3, height, width) * 2 - 1`, as float32."""
    return torch.from_numpy((np.random.RandomState(seed).rand(3, height, width) * 2 - 1).astype(np.float32))


FRAMES = {"split_start": True, "split_end": False}
LAST_FRAME = {"split_start": False, "split_end": True}
CASES: dict[str, dict[str, Any]] = {
    "text_with_special_token": {
        "texts": [[10, 11]],
        "plan": [item("text", loss=1, special_token_loss=1, special_token_label=4)],
    },
    "special_token_without_text_loss": {
        "texts": [[10, 11]],
        "plan": [item("text", special_token_loss=1, special_token_label=4)],
    },
    "special_token_after_vit_image": {
        "images": [[28, 42, 0]],
        "plan": [item("vit_image", special_token_loss=1, special_token_label=4)],
    },
    "special_token_after_vae_image": {
        "images": [[32, 48, 0]],
        "plan": [item("vae_image", loss=1, special_token_loss=1, special_token_label=4)],
    },
    "frames_share_a_split_with_deltas": {
        "images": [[32, 32, 0], [32, 32, 1]],
        "plan": [
            item("vae_image", loss=1, frame_delta=2, **FRAMES),
            item("vae_image", loss=1, frame_delta=3, **LAST_FRAME),
        ],
    },
    "three_frames_then_text": {
        "texts": [[7]],
        "images": [[32, 32, 0], [32, 32, 1], [32, 32, 2]],
        "plan": [
            item("vae_image", loss=1, frame_delta=1, **FRAMES),
            item("vae_image", loss=1, frame_delta=4, split_start=False, split_end=False),
            item("vae_image", loss=1, frame_delta=0, **LAST_FRAME),
            item("text", loss=1),
        ],
    },
    "last_frame_without_delta": {
        "texts": [[7]],
        "images": [[32, 32, 0], [32, 32, 1]],
        "plan": [
            item("vae_image", loss=1, frame_delta=2, **FRAMES),
            item("vae_image", loss=1, **LAST_FRAME),
            item("text", loss=1),
        ],
    },
    "last_frame_alone_has_delta": {
        "texts": [[7]],
        "images": [[32, 32, 0], [32, 32, 1]],
        "plan": [
            item("vae_image", loss=1, **FRAMES),
            item("vae_image", loss=1, frame_delta=2, **LAST_FRAME),
            item("text", loss=1),
        ],
    },
    "frames_without_loss_or_delta": {
        "texts": [[7]],
        "images": [[32, 32, 0], [32, 16, 1]],
        "plan": [item("vae_image", **FRAMES), item("vae_image", **LAST_FRAME), item("text", loss=1)],
    },
    "condition_frame_then_loss_frame": {
        "images": [[32, 32, 0], [32, 32, 1]],
        "plan": [
            item("vae_image", frame_delta=1, **FRAMES),
            item("vae_image", loss=1, frame_delta=1, **LAST_FRAME),
        ],
    },
    "delta_of_zero": {
        "texts": [[7]],
        "images": [[32, 32, 0]],
        "plan": [item("vae_image", loss=1, frame_delta=0), item("text", loss=1)],
    },
    "two_texts_share_a_split": {
        "texts": [[7, 8], [9]],
        "plan": [item("text", loss=1, split_end=False), item("text", loss=1, split_start=False)],
    },
    "size_off_the_grid": {"images": [[33, 40, 0]], "plan": [item("vae_image", loss=1)]},
    "empty_text": {"texts": [[]], "plan": [item("text", loss=1)]},
    "everything_dropped": {
        "texts": [[5]],
        "images": [[28, 28, 0]],
        "plan": [item("text", enable_cfg=1), item("vit_image", enable_cfg=1)],
        "dropout": {"text": 1.0, "vit": 1.0},
    },
    "dropped_images_move_the_positions": {
        "texts": [[5], [6]],
        "images": [[28, 28, 0], [32, 32, 1]],
        "plan": [
            item("text", loss=1),
            item("vit_image", enable_cfg=1),
            item("vae_image", enable_cfg=1),
            item("text", loss=1),
        ],
        "dropout": {"vit": 1.0, "vae": 1.0},
    },
    "dense_masks": {
        "texts": [[5], [6, 7]],
        "images": [[32, 16, 0], [28, 28, 1], [16, 32, 2]],
        "plan": [
            item("text"),
            item("vae_image", loss=1),
            item("vit_image"),
            item("text", loss=1),
            item("vae_image", loss=1, frame_delta=1),
        ],
        "use_flex": False,
    },
    "interpolated_positions": {
        "images": [[28, 42, 0], [48, 32, 1]],
        "plan": [item("vit_image"), item("vae_image", loss=1)],
        "interpolate_pos": True,
    },
}


def recorded_config(name: str) -> tuple[dict[str, Any], Path]:
    path = HERE / f"stream_{name}.json"
    config = json.loads(path.read_text())["config"]
    return config, data_of(path, config)


def dataset_for(case: dict[str, Any]) -> Any:
    config, data = recorded_config("a_default")
    knobs = config["packing"]
    knobs["use_flex"] = case.get("use_flex", True)
    knobs["interpolate_pos"] = case.get("interpolate_pos", False)
    for kind in ("text", "vit", "vae"):
        knobs[f"{kind}_cond_dropout_prob"] = case.get("dropout", {}).get(kind, 0.0)
    return build(packing, config, data, 0)


def sample_of(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "image_tensor_list": [pixels(*shape) for shape in case.get("images", [])],
        "text_ids_list": [list(ids) for ids in case.get("texts", [])],
        "sequence_plan": [dict(entry) for entry in case["plan"]],
        "num_tokens": 8,
        "data_indexes": {"data_indexes": [0], "worker_id": 0, "dataset_name": "custom"},
    }


def pack_sequence_fixture() -> dict[str, Any]:
    """Each case packed twice into one status (so that offsets show), both generators seeded with 1 before."""
    cases = {}
    for name, case in CASES.items():
        dataset = dataset_for(case)
        random.seed(1)
        np.random.seed(1)
        status = dataset.pack_sequence(sample_of(case), dataset.set_sequence_status())
        status = dataset.pack_sequence(sample_of(case), status)
        described_status = describe(status)
        cases[name] = {**case, "status": described_status, "yielded": describe(dataset.to_tensor(status))}
    empty = dataset_for({})
    return {
        "note": "images: [height, width, seed] -> float32(RandomState(seed).rand(3, height, width) * 2 - 1); "
        "both generators seeded with 1; the sample is packed twice; knobs of stream_a_default.json",
        "fresh_status": describe(empty.set_sequence_status()),
        "cases": cases,
        "empty_pack": describe(empty.to_tensor(empty.set_sequence_status())),
    }


class Paths(DistributedIterableDataset):
    def __init__(self, paths: list[Any], **keywords: Any) -> None:
        super().__init__(**keywords)
        self.data_paths = paths

    def get_data_paths(self) -> list[str]:
        return self.data_paths

    def __iter__(self) -> Any:
        paths, worker_id = self.get_data_paths_per_worker()
        yield from ([worker_id, path] for path in paths)


def distributed_fixture() -> list[dict[str, Any]]:
    """Shares of made path lists for several sizes, seeds and kinds of path, in the process and by workers."""
    results = []
    for count, world_size, num_workers, seed, kind in (
        (8, 1, 1, 42, "text"),
        (8, 2, 2, 42, "text"),
        (13, 2, 3, 7, "text"),
        (13, 3, 2, 0, "tuple"),
        (5, 5, 1, 2**31, "text"),
        (40, 4, 4, 1234, "tuple"),
    ):
        paths: list[Any] = [f"p{(index * 7) % count:02d}" for index in range(count)]
        if kind == "tuple":
            paths = [(path, (index * 3) % 5) for index, path in enumerate(paths)]
        for rank in range(world_size):
            dataset = Paths(
                list(paths),
                dataset_name="made",
                local_rank=rank,
                world_size=world_size,
                num_workers=num_workers,
            )
            dataset.set_epoch(seed)
            loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=num_workers)
            results.append(
                {
                    "paths": paths,
                    "kind": kind,
                    "world_size": world_size,
                    "num_workers": num_workers,
                    "seed": seed,
                    "rank": rank,
                    "data_paths_per_rank": dataset.data_paths_per_rank,
                    "num_files_per_rank": dataset.num_files_per_rank,
                    "in_process": dataset.get_data_paths_per_worker(),
                    "by_workers": list(loader),
                }
            )
    return results


STATES = (
    ("a_default", 0, 3),
    ("a_default", 1, 5),
    ("b_masks_interp", 0, 3),
    ("c_dropout", 0, 3),
    ("e_tight", 0, 1),
    ("e_tight", 0, 2),
    ("e_tight", 0, 13),
    ("e_tight", 0, 32),
    ("odd_buffer", 0, 3),
    ("odd_default", 0, 3),
    ("odd_tight", 0, 10),
)


def save_states() -> None:
    """The peer's own states after k packs, by torch.save as its checkpointing does."""
    for name, rank, packs in STATES:
        config, data = recorded_config(name)
        dataset = build(packing, config, data, rank)
        iterator = iter(dataset)
        for _ in range(packs):
            next(iterator)
        state = dataset.state_dict()
        path = FIXTURES / f"state_{name}_rank{rank}_after{packs}.pt"
        torch.save(state, path)
        print(path.name, path.stat().st_size, "bytes,", len(state["buffer"]), "in the buffer", flush=True)
    for name, rank, packs in (("a_default", 0, 3), ("d_workers", 0, 3), ("d_workers", 1, 6)):
        config, data = recorded_config(name)
        loader = StatefulDataLoader(
            build(packing, config, data, rank), batch_size=None, num_workers=config["num_workers"]
        )
        iterator = iter(loader)
        for _ in range(packs):
            next(iterator)
        path = FIXTURES / f"loader_{name}_rank{rank}_after{packs}.pt"
        torch.save(loader.state_dict(), path)
        print(path.name, path.stat().st_size, "bytes", flush=True)
        del iterator


def main() -> None:
    logging.disable(logging.WARNING)
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for name, value in (
        ("pack_sequence", pack_sequence_fixture()),
        ("distributed_iterable", distributed_fixture()),
    ):
        (FIXTURES / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")
        print(name, flush=True)
    save_states()


if __name__ == "__main__":
    main()
