"""A rank's state stays small whatever its buffer holds: references, not samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagelplane.spec import BagelDataset
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology

DATA = Path(__file__).parent / "data"
SIDE = {"maxSize": 512, "minSize": 512}


@pytest.mark.slow
def test_a_state_with_fifty_samples_of_up_to_16k_tokens_in_the_buffer_stays_small() -> None:
    fine, coarse = {"stride": 4, **SIDE}, {"stride": 8, **SIDE}
    t2i = {"name": "t2i", "type": "t2i_pretrain", "imageTransform": fine}
    edit = {"name": "edit", "type": "unified_edit", "imageTransform": coarse, "vitImageTransform": coarse}
    groups = [
        {**group, "datasets": [{"name": "data", "uri": str(DATA / str(group["name"]))}]}
        for group in (t2i, edit)
    ]
    dataset = BagelDataset.from_mapping(
        {
            "apiVersion": "bagelplane.io/v1alpha1",
            "kind": "BagelDataset",
            "metadata": {"name": "large"},
            "spec": {
                "tokenizer": {"uri": str(DATA / "tokenizer.json")},
                "groups": groups,
                # A pack never takes from the buffer before it must, so the buffer fills.
                "budgets": {"maxTokensPerSample": 20_000, "preferBufferBefore": 0},
                "model": {
                    "vaeImageDownsample": 4,
                    "vitPatchSize": 4,
                    "maxLatentSize": 128,
                    "maxPatchesPerSide": 128,
                },
                "sharding": {"mode": "Bagel"},
            },
        }
    )
    stream = open_rank_stream(dataset, Topology(0, 1, 1))
    try:
        sizes = []
        for _ in range(400):
            plan = stream.plan_pack()
            sizes += [placed.sample.size for placed in plan.pack.placed]
            state = json.loads(json.dumps(stream.state()))
            if len(state["workers"][0]["buffer"]) == 50:
                break
        assert len(state["workers"][0]["buffer"]) == 50, "the buffer did not fill"
        assert sum(sizes) / len(sizes) > 10_000, "samples are too small to prove anything"
        text = json.dumps(state, separators=(",", ":"))
        assert len(text) <= 64 * 1024
        print(f"{len(text)} bytes with 50 samples of {sum(sizes) / len(sizes):.0f} tokens in the buffer")
    finally:
        stream.close()
