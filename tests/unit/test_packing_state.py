"""States of `PackedDataset`: positions that it starts from, what its private members do, and states it refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bagelplane.errors import SnapshotError
from bagelplane.packing import PackedDataset
from tests.golden.hashing import describe
from tests.golden.recordings import Recording, load_recording, packed_dataset

RECORDING = load_recording("a_default")


def single_rank(scratch: Path, **options: Any) -> PackedDataset:
    config = copy.deepcopy(RECORDING.config)
    config["world_size"] = 1
    groups = options.pop("groups", {})
    for name, changes in groups.items():
        config["grouped_datasets"][name] |= changes
    dataset: PackedDataset = packed_dataset(
        Recording("one", config, RECORDING.data, []), 0, scratch, **options
    )
    return dataset


def indexes_of(pack: dict[str, Any], name: str) -> list[Any]:
    return [entry["data_indexes"] for entry in pack["batch_data_indexes"] if entry["dataset_name"] == name]


def firsts(dataset: PackedDataset) -> list[Any]:
    """Of text-to-image, editing and conversations: the first row in the first pack."""
    pack = next(iter(dataset))
    return [indexes_of(pack, name)[0] for name in ("t2i_pretrain", "unified_edit", "vlm_sft")]


# What the peer does with each: the next row, the next row group, over the end, or the beginning.
POSITIONS = {
    "in-the-middle": ([[3, 1, 0]], [[5, 0]], [10], [[3, 1, 1], [5, 1], 11]),
    "a-row-past-its-group": ([[7, 0, 99]], [[23, 99]], [94], [[7, 1, 0], [0, 0], 95]),
    "the-very-last-row": ([[7, 2, 3]], [[23, 3]], [95], [[0, 0, 1], [0, 0], 0]),
    "past-all-units": ([[99, 0, 0]], [[99, 0]], [400], [[0, 0, 1], [0, 1], 0]),
    "none-for-the-worker": ([None], [None], [None], [[0, 0, 1], [0, 0], 0]),
    "nothing": (None, None, None, [[0, 0, 1], [0, 0], 0]),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_a_group_continues_after_the_row_of_its_data_status(name: str, tmp_path: Path) -> None:
    *statuses, expected = POSITIONS[name]
    dataset = single_rank(tmp_path)
    for group, status in zip(dataset.grouped_datasets, statuses, strict=True):
        group.set_data_status(status)
    assert firsts(dataset) == expected


def test_data_status_of_the_constructor_leaves_out_groups_that_do_not_resume(tmp_path: Path) -> None:
    dataset = single_rank(
        tmp_path,
        data_status={"t2i_pretrain": [[3, 1, 0]], "vlm_sft": [10]},
        groups={"vlm_sft": {"resume_data_status": False}},
    )
    assert firsts(dataset) == [[3, 1, 1], [0, 0], 0]


def test_the_state_has_the_documented_keys_and_the_last_rows(tmp_path: Path) -> None:
    dataset = packed_dataset(RECORDING, 0, tmp_path)
    packs = iter(dataset)
    for _ in range(3):
        pack = next(packs)
    state = dataset.state_dict()
    assert {
        "version",
        "yielded_batches",
        "buffer",
        "sequence_status",
        "rng",
        "grouped_dataset_states",
    } <= set(state)
    assert state["yielded_batches"] == 3
    assert state["sequence_status"] == dataset.set_sequence_status()
    last_t2i = indexes_of(pack, "t2i_pretrain")[-1]
    [status] = state["grouped_dataset_states"][0]["data_status"]
    assert status >= last_t2i, "the last row given, or a dropped one after it"


def test_before_the_first_pack_a_state_is_of_nothing(tmp_path: Path) -> None:
    state = packed_dataset(RECORDING, 0, tmp_path).state_dict()
    assert (state["yielded_batches"], state["buffer"]) == (0, [])
    assert [group["data_status"] for group in state["grouped_dataset_states"]] == [None] * 3


def test_loading_none_changes_nothing(tmp_path: Path) -> None:
    dataset = packed_dataset(RECORDING, 0, tmp_path)
    dataset.load_state_dict(None)
    dataset._load_rng_state_dict(None)
    dataset._load_rng_state_dict({})
    dataset._load_grouped_dataset_state_dicts(None)
    dataset._load_grouped_dataset_state_dicts([])
    RECORDING.check(0, 0, next(iter(dataset)))


def test_a_resume_point_is_what_the_state_reports_until_the_next_pack(tmp_path: Path) -> None:
    dataset = packed_dataset(RECORDING, 0, tmp_path)
    packs = iter(dataset)
    next(packs)
    dataset._set_resume_point([], 17)
    assert dataset.state_dict()["yielded_batches"] == 17
    next(packs)
    assert dataset.state_dict()["yielded_batches"] == 2


def test_generators_are_saved_and_loaded_alone(tmp_path: Path) -> None:
    first = packed_dataset(RECORDING, 0, tmp_path)
    packs = iter(first)
    next(packs)
    rng = json.loads(json.dumps(first._rng_state_dict()))
    positions = first._grouped_dataset_state_dicts()
    assert first.state_dict()["rng"] == rng
    buffer = first.state_dict()["buffer"]
    second = packed_dataset(RECORDING, 0, tmp_path)
    second.load_state_dict({"version": 1, "yielded_batches": 1, "buffer": buffer})
    second._load_rng_state_dict(rng)
    second.load_state_dict({**second.state_dict(), "grouped_dataset_states": positions})
    RECORDING.check(0, 1, next(iter(second)))


def test_positions_alone_can_be_loaded(tmp_path: Path) -> None:
    dataset = single_rank(tmp_path)
    dataset._load_grouped_dataset_state_dicts(
        [{"data_status": [[3, 1, 0]]}, {"data_status": None}, {"data_status": [10]}]
    )
    assert firsts(dataset) == [[3, 1, 1], [0, 0], 11]


def saved(scratch: Path, packs: int = 2) -> dict[str, Any]:
    dataset = packed_dataset(RECORDING, 0, scratch)
    iterator = iter(dataset)
    for _ in range(packs):
        next(iterator)
    state: dict[str, Any] = json.loads(json.dumps(dataset.state_dict()))
    return state


def changed(state: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    target: Any = state
    for key in parents:
        target = target[int(key) if key.isdecimal() else key]
    target[last] = value
    return state


DAMAGE = {
    "another-version": ("version", 99, "version 99"),
    "another-group": ("grouped_dataset_states.0.name", "t2v", "t2v"),
    "a-text-for-the-buffer": ("buffer", "full", "state"),
    "an-unknown-buffered-sample": ("buffer", [{"nothing": 1}], "group"),
    "a-buffered-group-out-of-range": ("buffer", [{"group": 99, "row": {"row": [0, 0, 0], "draws": []}}], "index"),
    "a-buffered-row-out-of-range": (
        "buffer", [{"group": 0, "row": {"row": [0, 0, 9999], "draws": []}}], r"9999",
    ),
    "generators-cut-short": ("rng.python.words", "AAAA", "generator"),
    "no-generators-for-numpy": ("rng.numpy", None, "generator|numpy"),
    "a-position-outside": ("grouped_dataset_states.0.position", [9999, 0, 0], "9999"),
    "a-position-of-words": ("grouped_dataset_states.0.position", ["a", "b", "c"], "state"),
    "another-rank": ("worker.rank", 1, "rank"),
    "another-world": ("worker.world_size", 4, "world_size"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_state_that_does_not_fit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path, value, named = DAMAGE[name]
    state = changed(saved(tmp_path), path, value)
    dataset = packed_dataset(RECORDING, 0, tmp_path)
    with pytest.raises(ValueError, match=named) as caught:  # noqa: PT012 (loading or the first pack refuses)
        dataset.load_state_dict(state)
        next(iter(dataset))
    assert isinstance(caught.value, SnapshotError)


@pytest.mark.parametrize("state", ["text", 7, [1], b"bytes"])
def test_what_is_no_state_is_refused(state: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="state"):
        packed_dataset(RECORDING, 0, tmp_path).load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"version": 1}, {"step": 3}])
def test_a_state_that_says_nothing_does_not_begin_anew_in_silence(
    state: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(SnapshotError, match=r"says nothing of where to continue.* Fix: "):
        packed_dataset(RECORDING, 0, tmp_path).load_state_dict(state)


def test_a_refused_state_leaves_the_dataset_as_it_was(tmp_path: Path) -> None:
    dataset = packed_dataset(RECORDING, 0, tmp_path)
    with pytest.raises(ValueError, match="version"):
        dataset.load_state_dict({"version": 99})
    RECORDING.check(0, 0, next(iter(dataset)))


def test_many_undecodable_images_keep_the_state_small(tmp_path: Path) -> None:
    state = saved(tmp_path)
    state["known_bad"] = {
        f"s3://bucket/a/long/folder/part-{n:05d}.parquet#0/{n}": "cause " * 25 for n in range(5000)
    }
    dataset = packed_dataset(RECORDING, 0, tmp_path)
    dataset.load_state_dict(state)
    packs = iter(dataset)
    RECORDING.check(0, 2, next(packs))
    assert len(json.dumps(dataset.state_dict())) <= 64 * 1024
    RECORDING.check(0, 3, next(packs))


def test_taking_a_state_does_not_disturb_the_stream(tmp_path: Path) -> None:
    dataset = packed_dataset(RECORDING, 0, tmp_path)
    packs = iter(dataset)
    for step in range(6):
        first, second = describe(dataset.state_dict()), describe(dataset.state_dict())
        assert first == second
        RECORDING.check(0, step, next(packs))
