"""`PackedDataset` and `DataConfig`: defaults, what they leave alone, and what they refuse by name."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from bagelplane.errors import BagelplaneError
from bagelplane.packing import DataConfig, PackedDataset
from tests.golden.hashing import describe
from tests.golden.recordings import (
    Recording,
    dataset_info,
    load_recording,
    packed_dataset,
    special_tokens_of,
    tokenizer_of,
)

RECORDING = load_recording("a_default")


def made(scratch: Path, change: Any = None, **options: Any) -> PackedDataset:
    """The dataset of `a_default` after `change(config)`, with `options` of the constructor."""
    config = copy.deepcopy(RECORDING.config)
    if change is not None:
        change(config)
    dataset: PackedDataset = packed_dataset(
        Recording("made", config, RECORDING.data, []), 0, scratch, **options
    )
    return dataset


def test_parameters_and_defaults_are_the_documented_ones() -> None:
    parameters = inspect.signature(PackedDataset.__init__).parameters
    assert {name: value.default for name, value in list(parameters.items())[7:]} == {
        "expected_num_tokens": 32768,
        "max_num_tokens_per_sample": 16384,
        "max_num_tokens": 36864,
        "prefer_buffer_before": 16384,
        "max_buffer_size": 50,
        "interpolate_pos": False,
        "use_flex": False,
        "data_status": None,
        "dataset_info": None,
        "global_seed": None,
    }
    assert list(parameters)[1:7] == [
        "data_config", "tokenizer", "special_tokens", "local_rank", "world_size", "num_workers",
    ]  # fmt: skip
    assert {field.name: field.default for field in dataclasses.fields(DataConfig)[1:]} == {
        "text_cond_dropout_prob": 0.1,
        "vit_cond_dropout_prob": 0.4,
        "vae_cond_dropout_prob": 0.1,
        "vae_image_downsample": 16,
        "max_latent_size": 32,
        "vit_patch_size": 14,
        "max_num_patch_per_side": 70,
    }
    assert issubclass(PackedDataset, IterableDataset)


def test_special_tokens_become_attributes(tmp_path: Path) -> None:
    dataset = made(tmp_path)
    tokens = special_tokens_of(tokenizer_of(RECORDING.data))
    assert {name: getattr(dataset, name) for name in tokens} == tokens


def test_the_callers_mappings_are_left_as_they_are(tmp_path: Path) -> None:
    groups = copy.deepcopy(RECORDING.config["grouped_datasets"])
    info = dataset_info(RECORDING.data, tmp_path)
    before = copy.deepcopy((groups, info))
    tokenizer = tokenizer_of(RECORDING.data)
    tokens = special_tokens_of(tokenizer)
    PackedDataset(DataConfig(groups), tokenizer, tokens, 0, 1, 1, dataset_info=info)
    assert (groups, info) == before
    assert tokens == special_tokens_of(tokenizer)


def test_build_datasets_gives_three_lists_in_the_mappings_order(tmp_path: Path) -> None:
    dataset = made(tmp_path)
    groups = RECORDING.config["grouped_datasets"]
    datasets, mandatory, weights = dataset.build_datasets(groups, None)
    assert [group.dataset_name for group in datasets] == list(groups)
    assert mandatory == [True, False, True]
    assert weights == [1, 1, 1]


def test_a_tokenizer_may_give_lists_or_encodings(tmp_path: Path) -> None:
    class Lists:
        def encode(self, text: str) -> list[int]:
            return list(tokenizer_of(RECORDING.data).encode(text).ids)

    RECORDING.check(0, 0, next(iter(made(tmp_path, tokenizer=Lists()))))
    RECORDING.check(0, 0, next(iter(made(tmp_path))))


def test_a_dataset_can_be_pickled_before_and_while_it_is_iterated(tmp_path: Path) -> None:
    dataset = made(tmp_path)
    RECORDING.check(0, 0, next(iter(pickle.loads(pickle.dumps(dataset)))))
    packs = iter(dataset)
    for step in range(2):
        RECORDING.check(0, step, next(packs))
    assert pickle.loads(pickle.dumps(dataset)).state_dict() == dataset.state_dict()


def set_group(name: str, **options: Any) -> Any:
    def change(config: dict[str, Any]) -> None:
        group = config["grouped_datasets"][name]
        group |= options
        for option in [option for option, value in options.items() if value is None]:
            del group[option]

    return change


def all_weights_zero(config: dict[str, Any]) -> None:
    for group in config["grouped_datasets"].values():
        group["weight"] = 0


def unknown_group(config: dict[str, Any]) -> None:
    config["grouped_datasets"]["t2v"] = config["grouped_datasets"].pop("t2i_pretrain")


REFUSED = {
    "weights-of-zero": (all_weights_zero, "sum to 0"),
    "unknown-group": (unknown_group, "t2v"),
    "no-data-set-names": (set_group("t2i_pretrain", dataset_names=None), "t2i_pretrain.*dataset_names"),
    "empty-names": (set_group("t2i_pretrain", dataset_names=[]), "t2i_pretrain.*dataset_names"),
    "no-transform": (set_group("t2i_pretrain", image_transform_args=None), "image_transform_args"),
    "no-vit-transform": (
        set_group("unified_edit", vit_image_transform_args=None),
        "vit_image_transform_args",
    ),
    "no-numbers-used": (set_group("vlm_sft", num_used_data=None), "num_used_data"),
    "too-few-numbers": (set_group("vlm_sft", num_used_data=[]), "num_used_data"),
    "unknown-option": (set_group("vlm_sft", shufle_lines=True), "shufle_lines"),
    "unknown-data-set": (set_group("vlm_sft", dataset_names=["vim"]), "vim"),
    "negative-weight": (set_group("vlm_sft", weight=-1), "vlm_sft.*-1"),
    "transform-lacks-stride": (
        set_group("vlm_sft", image_transform_args={"max_image_size": 64, "min_image_size": 32}),
        "vlm_sft.*image_stride",
    ),
    "unknown-transform-option": (
        set_group(
            "vlm_sft",
            image_transform_args={"image_stride": 14, "max_image_size": 64, "min_image_size": 32, "crop": 1},
        ),
        "crop",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_when_constructed_with_its_name(name: str, tmp_path: Path) -> None:
    change, named = REFUSED[name]
    with pytest.raises(ValueError, match=named):
        made(tmp_path, change)


@pytest.mark.parametrize("key", ["data_dir", "parquet_info_path"])
def test_a_missing_path_is_a_value_error_with_its_key(key: str, tmp_path: Path) -> None:
    info = dataset_info(RECORDING.data, tmp_path)
    del info["unified_edit"]["edit"][key]
    with pytest.raises(ValueError, match=key):
        made(tmp_path, dataset_info=info)


def test_no_dataset_info_is_a_value_error_that_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dataset_info is None; pass"):
        made(tmp_path, dataset_info=None)


def test_a_missing_special_token_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="start_of_image"):
        made(tmp_path, special_tokens={"bos_token_id": 1, "eos_token_id": 2, "end_of_image": 4})


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"world_size": 0}, ["world_size", "got 0", "at least 1"]),
        ({"world_size": "2"}, ["world_size", "got '2'", "at least 1"]),
        ({"local_rank": 2, "world_size": 2}, ["local_rank 2, world_size 2", "from 0 to 1"]),
        ({"local_rank": -1}, ["local_rank", "got -1", "at least 0"]),
        ({"num_workers": -1}, ["num_workers", "got -1", "at least 0"]),
        ({"expected_num_tokens": 0}, ["expected_num_tokens", "got 0", "at least 1"]),
        ({"max_num_tokens": 1.5}, ["max_num_tokens", "got 1.5", "at least 1"]),
        ({"max_buffer_size": -1}, ["max_buffer_size", "got -1", "at least 0"]),
        ({"dataset_info": "info.yaml"}, ["dataset_info is no mapping", "got str"]),
        ({"special_tokens": [1, 2, 3, 4]}, ["special_tokens is no mapping", "got list"]),
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_is_refused_with_all_four_parts(
    arguments: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"; expected .* Fix: ") as caught:
        made(tmp_path, **arguments)
    assert isinstance(caught.value, BagelplaneError)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_fewer_files_than_ranks_is_a_value_error_with_all_three(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"t2i_pretrain.*8.*16"):
        made(tmp_path, world_size=16)


@pytest.mark.parametrize("name", ["text_cond_dropout_prob", "vit_cond_dropout_prob", "vae_cond_dropout_prob"])
def test_a_probability_above_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        DataConfig({}, **{name: 1.5})


def test_drops_are_logged_three_times_and_then_every_nth(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = made(tmp_path)
    with caplog.at_level(logging.WARNING):
        for number in range(8):
            dataset._log_drop("made_up", "row %d", number, every=4)
    assert [record.getMessage() for record in caplog.records] == [
        f"PackedDataset drop[made_up]={count}: row {count - 1}" for count in (1, 2, 3, 4, 8)
    ]
    assert dataset._drop_counters["made_up"] == 8


def test_set_epoch_reshuffles_and_moves_the_seed(tmp_path: Path) -> None:
    def unseeded(config: dict[str, Any]) -> None:
        config["global_seed"] = None

    first, second = made(tmp_path, unseeded), made(tmp_path, unseeded)
    first.set_epoch(1)
    second.set_epoch(2)
    second.set_epoch(1)
    third = made(tmp_path, unseeded)
    third.set_epoch(3)
    packs = [describe(next(iter(dataset))) for dataset in (first, second, third)]
    assert packs[0] == packs[1], "only the last call counts"
    assert packs[0] != packs[2]
