"""The recorded streams of the peer come through sidecar, ring and reader to the bit, also over a restart."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagelplane.packing.takeover import states_of_ranks, write_snapshot
from bagelplane.sidecar.producer import DEFAULT_STREAM_FACTORY
from bagelplane.sidecar.store import open_snapshot_store
from bagelplane.spec import BagelDataset
from tests.golden.hashing import describe, differences
from tests.integration.sidecar_harness import Sidecar
from tests.row_facts import make_index

GOLDEN = Path(__file__).parents[1] / "golden"
PEER = Path(__file__).parents[1] / "fixtures" / "peer"
RECORDINGS = sorted(GOLDEN.glob("stream_*.json"))


def resource_of(config: dict[str, Any], data: Path, snapshots: Path) -> BagelDataset:
    """The resource that declares what a recording was made with."""
    knobs = config["packing"]
    return BagelDataset.from_mapping(
        {
            "apiVersion": "bagelplane.io/v1alpha1",
            "kind": "BagelDataset",
            "metadata": {"name": "recorded"},
            "spec": {
                "profile": "Automodel",
                "tokenizer": {"uri": str(data / "tokenizer.json")},
                "groups": [_group(kind, group, data) for kind, group in config["grouped_datasets"].items()],
                "budgets": {
                    "expectedTokens": knobs["expected_num_tokens"],
                    "maxTokens": knobs["max_num_tokens"],
                    "maxTokensPerSample": min(knobs["max_num_tokens_per_sample"], knobs["max_num_tokens"]),
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
                    "globalSeed": config["global_seed"],
                },
                "snapshots": {"uri": str(snapshots), "everySteps": 5},
                "dataplane": {"ring": {"packs": 2}, "decodeThreads": 2},
            },
        }
    )


def _group(kind: str, group: dict[str, Any], data: Path) -> dict[str, Any]:
    name = group["dataset_names"][0]
    dataset: dict[str, Any] = {"name": name, "numUsedData": group["num_used_data"][0]}
    if kind == "vlm_sft":
        dataset |= {"uri": str(data / "vlm"), "jsonl": "train.jsonl", "images": "images"}
    else:
        dataset["uri"] = str(data / name)
    body: dict[str, Any] = {
        "name": name,
        "type": kind,
        "weight": float(group["weight"]),
        "mandatory": group["is_mandatory"],
        "datasets": [dataset],
        "imageTransform": _transform(group["image_transform_args"]),
    }
    if "vit_image_transform_args" in group:
        body["vitImageTransform"] = _transform(group["vit_image_transform_args"])
    if kind == "vlm_sft":
        sampler = group.get("frame_sampler_args", {})
        body["frameSampler"] = {
            "minFrames": sampler.get("min_num_frames", 8),
            "maxFrames": sampler.get("max_num_frames", 12),
        }
        body |= {
            "shuffleLines": group.get("shuffle_lines", False),
            "shuffleSeed": group.get("shuffle_seed", 0),
        }
    return body


def _transform(arguments: dict[str, int]) -> dict[str, int]:
    body = {
        "stride": arguments["image_stride"],
        "maxSize": arguments["max_image_size"],
        "minSize": arguments["min_image_size"],
    }
    if "max_pixels" in arguments:
        body["maxPixels"] = arguments["max_pixels"]
    return body


def take(sidecar: Sidecar, world_size: int, counts: list[int]) -> Iterator[tuple[int, Any]]:
    """(rank, pack in golden form), the ranks in turn as a trainer would have it."""
    readers = [sidecar.reader(rank, world_size) for rank in range(world_size)]
    try:
        for step in range(max(counts)):
            for rank, reader in enumerate(readers):
                if step < counts[rank]:
                    yield rank, json.loads(json.dumps(describe(next(reader))))
    finally:
        for reader in readers:
            reader.close()


@pytest.mark.slow
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_a_recorded_stream_comes_through_the_sidecar_over_a_restart(recording: Path, tmp_path: Path) -> None:
    recorded = json.loads(recording.read_text())
    config = recorded["config"]
    data = GOLDEN / ("odd" if "odd" in recording.stem else "data")
    dataset = resource_of(config, data, tmp_path / "snapshots")
    ranks = [recorded["ranks"][str(rank)] for rank in range(config["world_size"])]
    begun = [0] * len(ranks)
    for counts in ([len(packs) // 2 for packs in ranks], [len(packs) - len(packs) // 2 for packs in ranks]):
        sidecar = Sidecar(tmp_path, dataset, stream_factory=DEFAULT_STREAM_FACTORY, local_ranks=len(ranks))
        try:
            sidecar.wait_serving()
            steps = [itertools.count(start) for start in begun]
            for rank, pack in take(sidecar, len(ranks), counts):
                step = next(steps[rank])
                assert not differences(pack, ranks[rank][step], f"rank {rank}, pack {step}"), sidecar.tail()
            begun = [start + count for start, count in zip(begun, counts, strict=True)]
            assert sidecar.terminate() == 0, sidecar.tail()
        finally:
            sidecar.kill()
    assert begun == [len(packs) for packs in ranks]


def test_a_sidecar_plans_from_an_index_beside_its_snapshots_and_says_so(tmp_path: Path) -> None:
    """Bad images that the index tells of are durable beside the snapshots, as if they had been met."""
    recorded = json.loads((GOLDEN / "stream_odd_default.json").read_text())
    dataset = resource_of(recorded["config"], GOLDEN / "odd", tmp_path / "snapshots")
    report = make_index(dataset, verify=True)
    assert report.undecodable_images
    sidecar = Sidecar(tmp_path, dataset, stream_factory=DEFAULT_STREAM_FACTORY, local_ranks=2)
    try:
        sidecar.wait_serving()
        for number, (rank, pack) in zip(range(24), take(sidecar, 2, [12, 12]), strict=True):
            expected = recorded["ranks"][str(rank)][number // 2]
            assert not differences(pack, expected, f"rank {rank}, pack {number // 2}"), sidecar.tail()
        assert sidecar.terminate() == 0, sidecar.tail()
    finally:
        sidecar.kill()
    log = sidecar.log.read_text()
    assert "17 of 17 objects are planned from the index" in log, sidecar.tail()
    assert "opens but does not decode" not in log
    store = open_snapshot_store(dataset)
    assert store is not None
    assert store.load_known_bad()
    assert make_index(dataset).written == 0, "nothing of the snapshots touches an index"


def test_the_sidecar_goes_on_from_a_checkpoint_of_automodel(tmp_path: Path) -> None:
    """One with a sample in its buffer."""
    recorded = json.loads((GOLDEN / "stream_e_tight.json").read_text())
    dataset = resource_of(recorded["config"], GOLDEN / "data", tmp_path / "snapshots")
    store = open_snapshot_store(dataset)
    assert store is not None
    step, states = states_of_ranks(dataset, [PEER / "state_e_tight_rank0_after2.pt"])
    write_snapshot(store, dataset, step, states)
    sidecar = Sidecar(tmp_path, dataset, stream_factory=DEFAULT_STREAM_FACTORY, local_ranks=1)
    try:
        sidecar.wait_serving()
        for number, (_, pack) in zip(range(step, step + 8), take(sidecar, 1, [8]), strict=True):
            assert not differences(pack, recorded["ranks"]["0"][number], f"pack {number}"), sidecar.tail()
        assert sidecar.terminate() == 0, sidecar.tail()
    finally:
        sidecar.kill()
