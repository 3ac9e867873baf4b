"""`pack_sequence` and `to_tensor` give for custom samples what Automodel gives, and modify nothing but the status."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bagelplane.packing import PackedDataset
from tests.golden.hashing import describe, differences
from tests.golden.recordings import Recording, load_recording, packed_dataset

FIXTURE = json.loads((Path(__file__).parents[1] / "fixtures/peer/pack_sequence.json").read_text())
CASES: dict[str, Any] = FIXTURE["cases"]
# An empty list becomes float32 at the peer, which no trainer can index with. Ours are int64, as STREAM says.
EMPTY_INDEXES = ("packed_text_ids", "packed_text_indexes", "packed_position_ids", "mse_loss_indexes")


def dataset_for(case: dict[str, Any], scratch: Path) -> PackedDataset:
    recording = load_recording("a_default")
    config = copy.deepcopy(recording.config)
    knobs = config["packing"]
    knobs |= {
        "use_flex": case.get("use_flex", True),
        "interpolate_pos": case.get("interpolate_pos", False),
        **{
            f"{kind}_cond_dropout_prob": case.get("dropout", {}).get(kind, 0.0)
            for kind in ("text", "vit", "vae")
        },
    }
    dataset: PackedDataset = packed_dataset(Recording("case", config, recording.data, []), 0, scratch)
    return dataset


def pixels(height: int, width: int, seed: int) -> torch.Tensor:
    return torch.from_numpy((np.random.RandomState(seed).rand(3, height, width) * 2 - 1).astype(np.float32))


def sample_of(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "image_tensor_list": [pixels(*shape) for shape in case.get("images", [])],
        "text_ids_list": copy.deepcopy(case.get("texts", [])),
        "sequence_plan": copy.deepcopy(case["plan"]),
        "num_tokens": 8,
        "data_indexes": {"data_indexes": [0], "worker_id": 0, "dataset_name": "custom"},
    }


def expected_tensors(recorded: dict[str, Any]) -> dict[str, Any]:
    """What the peer yields, but empty indexes in the type of the others."""
    expected = copy.deepcopy(recorded)
    for name in EMPTY_INDEXES:
        if expected.get(name, {}).get("shape") == [0]:
            expected[name]["dtype"] = "int64"
    return expected


@pytest.fixture
def packed_twice(tmp_path: Path) -> Any:
    def pack(case: dict[str, Any]) -> tuple[PackedDataset, dict[str, Any]]:
        dataset = dataset_for(case, tmp_path)
        random.seed(1)
        np.random.seed(1)
        status = dataset.pack_sequence(sample_of(case), dataset.set_sequence_status())
        return dataset, dataset.pack_sequence(sample_of(case), status)

    return pack


@pytest.mark.parametrize("name", CASES)
def test_the_open_pack_is_automodels(name: str, packed_twice: Any) -> None:
    _, status = packed_twice(CASES[name])
    assert not differences(describe(status), CASES[name]["status"], name)


@pytest.mark.parametrize("name", CASES)
def test_the_tensors_are_automodels(name: str, packed_twice: Any) -> None:
    dataset, status = packed_twice(CASES[name])
    assert not differences(
        describe(dataset.to_tensor(status)), expected_tensors(CASES[name]["yielded"]), name
    )


@pytest.mark.parametrize("name", CASES)
def test_the_status_is_not_modified_by_to_tensor(name: str, packed_twice: Any) -> None:
    dataset, status = packed_twice(CASES[name])
    before = describe(status)
    first = describe(dataset.to_tensor(status))
    assert describe(status) == before
    assert describe(dataset.to_tensor(status)) == first


@pytest.mark.parametrize("name", CASES)
def test_the_sample_is_not_modified(name: str, tmp_path: Path) -> None:
    dataset, sample = dataset_for(CASES[name], tmp_path), sample_of(CASES[name])
    before = describe(sample)
    status = dataset.set_sequence_status()
    assert dataset.pack_sequence(sample, status) is status, (
        "the status that is given is the one that comes back"
    )
    assert describe(sample) == before


def test_the_tensors_do_not_share_memory_with_the_sample(tmp_path: Path) -> None:
    case = CASES["interpolated_positions"]
    dataset, sample = dataset_for(case, tmp_path), sample_of(case)
    status = dataset.pack_sequence(sample, dataset.set_sequence_status())
    batch = describe(dataset.to_tensor(status))
    for image in sample["image_tensor_list"]:
        image.zero_()
    assert describe(dataset.to_tensor(status)) == batch


def test_a_fresh_status_is_automodels(tmp_path: Path) -> None:
    dataset = dataset_for({}, tmp_path)
    assert not differences(describe(dataset.set_sequence_status()), FIXTURE["fresh_status"])
    assert dataset.set_sequence_status() is not dataset.set_sequence_status()


def test_an_empty_pack_has_automodels_keys(tmp_path: Path) -> None:
    dataset = dataset_for({}, tmp_path)
    batch = describe(dataset.to_tensor(dataset.set_sequence_status()))
    assert not differences(batch, expected_tensors(FIXTURE["empty_pack"]))


def one_image(kind: str, *shape: int) -> dict[str, Any]:
    return {"sequence_plan": [{"type": kind}], "text_ids_list": [], "image_tensor_list": [torch.zeros(shape)]}


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        ({}, "sequence_plan"),
        ({"sequence_plan": [], "text_ids_list": []}, "image_tensor_list"),
        ({"sequence_plan": [{"type": "audio"}], "text_ids_list": [], "image_tensor_list": []}, "audio"),
        ({"sequence_plan": [{"type": "text"}], "text_ids_list": [], "image_tensor_list": []}, "1 texts"),
        (one_image("vit_image", 3, 15, 14), "15x14"),
        (one_image("vae_image", 16, 16, 3), r"\(16, 16, 3\)"),
    ],
    ids=["nothing", "no-images", "unknown-type", "too-few-texts", "no-whole-patches", "channels-last"],
)
def test_a_sample_that_does_not_fit_is_a_value_error_that_says_why(
    sample: dict[str, Any], named: str, tmp_path: Path
) -> None:
    dataset = dataset_for({}, tmp_path)
    status = dataset.set_sequence_status()
    with pytest.raises(ValueError, match=named):
        dataset.pack_sequence(sample, status)
    assert status == dataset.set_sequence_status(), "a refused sample leaves nothing behind"


def test_plan_fields_have_the_documented_defaults(tmp_path: Path) -> None:
    dataset = dataset_for({}, tmp_path)
    short = {
        "sequence_plan": [{"type": "text", "loss": 1}],
        "text_ids_list": [[5, 6]],
        "image_tensor_list": [],
        "num_tokens": 2,
    }
    item = {"type": "text", "enable_cfg": 0, "loss": 1, "special_token_loss": 0, "special_token_label": None}
    full = {**short, "sequence_plan": [{**item, "split_start": True, "split_end": True}]}
    statuses = [dataset.pack_sequence(sample, dataset.set_sequence_status()) for sample in (short, full)]
    assert statuses[0] == statuses[1]
