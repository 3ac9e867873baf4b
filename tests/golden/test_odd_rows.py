"""The drop-in class meets a row as Automodel does, whatever it holds; where Automodel breaks down it drops the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagelplane import packing
from bagelplane.engine.drops import DropReason
from tests.golden.hashing import describe, differences
from tests.golden.odd_rows import FIXTURE, PACKS, cases, dataset_of
from tests.golden.recordings import HERE, tokenizer_of

PEER: dict[str, Any] = json.loads(FIXTURE.read_text())
CASES = cases()


def made_here(name: str, folder: Path) -> tuple[list[Any], dict[str, int]]:
    kind, write = CASES[name]
    dataset = dataset_of(packing, kind, write(folder), tokenizer_of(HERE / "data"))
    packs = [describe(pack) for _, pack in zip(range(PACKS), dataset, strict=False)]
    return packs, dict(dataset.grouped_datasets[0]._drop_counters)


def test_the_peer_was_asked_about_every_case() -> None:
    assert list(PEER) == list(CASES)


@pytest.mark.parametrize("name", [name for name, recorded in PEER.items() if recorded])
def test_a_row_that_automodel_survives_is_met_the_same_way(name: str, tmp_path: Path) -> None:
    packs, drops = made_here(name, tmp_path)
    assert not differences(packs, PEER[name]["packs"], name)
    # A caption that is missing is counted by the peer though the row is used.
    expected = {reason: count for reason, count in PEER[name]["drops"].items() if reason != "t2i_no_caption"}
    assert drops == expected


@pytest.mark.parametrize("name", [name for name, recorded in PEER.items() if not recorded])
def test_a_row_that_automodel_breaks_down_on_is_dropped(name: str, tmp_path: Path) -> None:
    packs, drops = made_here(name, tmp_path)
    assert len(packs) == PACKS
    [reason] = drops
    assert reason in set(DropReason)
    assert drops[reason] > 0
