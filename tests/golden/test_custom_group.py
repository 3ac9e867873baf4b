"""A group of the user's own in `PackedDataset`: the packs that Automodel yields with it, and the same after a resume.

Its samples bring their pixels and draw from the global generators; the other groups of the mix drop rows and
meet images that open but do not decode.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagelplane.distributed_iterable import DistributedIterableDataset
from bagelplane.packing import PackedDataset
from bagelplane.sources import registry
from tests.golden.custom_group import FIXTURE, custom_class, recorded_config, replace_first_group
from tests.golden.hashing import describe
from tests.golden.recordings import HERE, Recording, packed_dataset

PEER = Recording("custom_group", recorded_config(), HERE / "odd", json.loads(FIXTURE.read_text())["ranks"])
RANKS = pytest.mark.parametrize("rank", [0, 1])


def with_custom_group(rank: int, scratch: Path) -> PackedDataset:
    dataset: PackedDataset = packed_dataset(PEER, rank, scratch)
    replace_first_group(dataset, DistributedIterableDataset, rank)
    return dataset


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> type:
    group_class = custom_class(DistributedIterableDataset)
    monkeypatch.setattr(registry, "_registered", {})
    registry.register_group_type("made", group_class)
    return group_class


def registered_mix(scratch: Path, **options: Any) -> PackedDataset:
    """The registered type between groups of ours."""
    config = copy.deepcopy(PEER.config)
    groups = config["grouped_datasets"]
    made = {"dataset_names": ["anything"], "weight": 2.0, "is_mandatory": False, **options}
    config["grouped_datasets"] = {
        "unified_edit": groups["unified_edit"],
        "made": made,
        "vlm_sft": groups["vlm_sft"],
    }
    dataset: PackedDataset = packed_dataset(Recording("mix", config, PEER.data, []), 0, scratch)
    return dataset


@RANKS
def test_a_custom_group_gives_what_automodel_gives(rank: int, scratch: Path) -> None:
    for step, pack in zip(range(len(PEER.ranks[rank])), with_custom_group(rank, scratch), strict=False):
        PEER.check(rank, step, pack)


@RANKS
def test_user_code_between_packs_changes_nothing_and_is_not_disturbed(rank: int, scratch: Path) -> None:
    packs = iter(with_custom_group(rank, scratch))
    for step in range(len(PEER.ranks[rank])):
        random.seed(step)
        np.random.seed(step)
        before = random.getstate(), np.random.get_state(legacy=True)[1].tobytes()
        PEER.check(rank, step, next(packs))
        assert (random.getstate(), np.random.get_state(legacy=True)[1].tobytes()) == before


@RANKS
def test_a_stream_with_a_custom_group_continues_after_every_pack(rank: int, scratch: Path) -> None:
    dataset = with_custom_group(rank, scratch)
    count = len(PEER.ranks[rank])
    states = [dataset.state_dict()]
    for _, _pack in zip(range(count), dataset, strict=False):
        states.append(dataset.state_dict())
    buffered = 0
    for taken in range(count):
        state = json.loads(json.dumps(states[taken]))
        buffered += any("sample" in entry for entry in state["buffer"])
        resumed = with_custom_group(rank, scratch)
        resumed.load_state_dict(state)
        for step, pack in zip(range(taken, min(taken + 3, count)), resumed, strict=False):
            PEER.check(rank, step, pack)
    assert buffered, "none of the states holds a buffered sample with its pixels"


@pytest.mark.usefixtures("registered")
def test_a_registered_type_is_used_by_its_name_with_its_options(scratch: Path) -> None:
    dataset = registered_mix(scratch, colour="blue")
    group = dataset.grouped_datasets[1]
    assert group.dataset_name == "made"
    assert group.options == {"colour": "blue"}
    packs = [describe(pack) for _, pack in zip(range(8), dataset, strict=False)]
    names = {entry["dataset_name"] for pack in packs for entry in pack["batch_data_indexes"]}
    assert names == {"unified_edit", "made", "vlm_sft"}


@pytest.mark.usefixtures("registered")
def test_a_mix_with_a_registered_type_continues_after_every_pack(scratch: Path) -> None:
    dataset = registered_mix(scratch)
    states, packs = [dataset.state_dict()], []
    for _, pack in zip(range(16), dataset, strict=False):
        packs.append(describe(pack))
        states.append(dataset.state_dict())
    for taken in range(len(packs)):
        resumed = registered_mix(scratch)
        resumed.load_state_dict(json.loads(json.dumps(states[taken])))
        suffix = [describe(pack) for _, pack in zip(packs[taken : taken + 3], resumed, strict=False)]
        assert suffix == packs[taken : taken + 3]


@pytest.mark.usefixtures("registered")
def test_a_custom_group_starts_where_data_status_says(scratch: Path) -> None:
    dataset = registered_mix(scratch)
    dataset.grouped_datasets[1].set_data_status([[3]])
    entries = [
        entry
        for _, pack in zip(range(8), dataset, strict=False)
        for entry in pack["batch_data_indexes"]
        if entry["dataset_name"] == "made"
    ]
    assert entries[0]["data_indexes"] == [0], "after the last of this rank's four paths"


def test_a_type_that_nobody_registered_is_a_value_error_with_its_name(scratch: Path) -> None:
    with pytest.raises(ValueError, match="made"):
        registered_mix(scratch)
