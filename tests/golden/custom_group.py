"""A group of a user's own in the mix, recorded: what Automodel yields with it, and the class itself.

    python tests/golden/custom_group.py        # in the peer's environment: writes fixtures/peer/custom_group.json

The class draws its samples from the global generators, as such classes do at the peer; it replaces the first
group of a recording whose other groups meet dropped rows and undecodable images. `custom_class` takes the base
class, so that the peer's recording and our test run the same code.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
FIXTURE = HERE.parent / "fixtures" / "peer" / "custom_group.json"
PACKS = 24


def custom_class(base: type) -> type:
    """A group of made samples over eight named paths, for one kind of base class."""

    class MadeSamples(base):  # type: ignore[misc]
        def __init__(
            self, dataset_name: str, *, tokenizer: Any = None, local_rank: int, world_size: int,
            num_workers: int, **options: Any,
        ) -> None:  # fmt: skip
            super().__init__(dataset_name, local_rank, world_size, num_workers)
            self.options = options
            self.data_paths = [f"made-{number}" for number in range(8)]
            self.set_epoch()

        def __iter__(self) -> Any:
            paths, worker_id = self.get_data_paths_per_worker()
            last = self._get_worker_data_status(worker_id) if self.data_status is not None else None
            index = 0 if last is None else last[0] + 1
            while True:
                index %= len(paths)
                yield made_sample(self.dataset_name, worker_id, index, int(paths[index][5:]))
                index += 1

    return MadeSamples


def made_sample(name: str, worker_id: int, index: int, number: int) -> dict[str, Any]:
    """A text, an image as condition and one with loss; sizes, ids and pixels are drawn."""
    import torch

    ids = [100 + number, *(random.randrange(5, 90) for _ in range(random.randint(1, 40)))]
    height = 16 * random.randint(6, 16)
    images = [
        torch.from_numpy(np.random.randn(3, 28, 42).astype(np.float32)),
        torch.from_numpy(np.random.rand(3, height, 128).astype(np.float32)),
    ]
    plain = {"special_token_loss": 0, "special_token_label": None}
    return {
        "image_tensor_list": images,
        "text_ids_list": [ids],
        "sequence_plan": [
            {"type": "vit_image", "enable_cfg": 1, "loss": 0, **plain},
            {"type": "text", "enable_cfg": 1, "loss": 1, **plain, "special_token_loss": 1, "special_token_label": 4},
            {"type": "vae_image", "enable_cfg": 0, "loss": 1, **plain},
        ],
        "num_tokens": len(ids) + height * 128 // 256 + 6,
        "data_indexes": {"data_indexes": [index], "worker_id": worker_id, "dataset_name": name},
    }  # fmt: skip


def recorded_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((HERE / "stream_odd_buffer.json").read_text())["config"]
    config |= {"data": "odd", "world_size": 2}
    config["packing"]["prefer_buffer_before"] = (
        100  # so that samples wait in the buffer when a pack is yielded
    )
    return config


def replace_first_group(dataset: Any, base: type, rank: int) -> None:
    name = "t2i_pretrain"
    assert next(iter(dataset.data_config.grouped_datasets), name) == name
    dataset.grouped_datasets[0] = custom_class(base)(name, local_rank=rank, world_size=2, num_workers=1)
    dataset.grouped_datasets[0].set_epoch(recorded_config()["packing"]["data_seed"])


def main() -> None:
    from hashing import describe
    from nemo_automodel.components.datasets.multimodal import packing
    from nemo_automodel.components.datasets.multimodal.distributed_iterable import DistributedIterableDataset
    from record import build

    config = recorded_config()
    ranks = []
    for rank in range(2):
        dataset = build(packing, config, HERE / config["data"], rank)
        replace_first_group(dataset, DistributedIterableDataset, rank)
        packs = iter(dataset)
        ranks.append([describe(next(packs)) for _ in range(PACKS)])
    FIXTURE.write_text(json.dumps({"ranks": ranks}, separators=(",", ":")) + "\n")
    print(FIXTURE.name, FIXTURE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
