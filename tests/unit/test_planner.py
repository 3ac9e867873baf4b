"""The planner with groups that are made of numbers: drops are counted under the group's own name."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from bagelplane.engine.drops import DropLog
from bagelplane.engine.packer import PackingConfig
from bagelplane.engine.planner import PackPlanner
from bagelplane.engine.profile import AUTOMODEL
from bagelplane.engine.rng import StreamRandom
from bagelplane.engine.samples import LEARNT_TEXT, ImageLedger, RowDropped, Sample
from bagelplane.errors import DataError

CONFIG = PackingConfig(
    expected_tokens=40, max_tokens=60, max_tokens_per_sample=30, prefer_buffer_before=20, max_buffer_size=0
)


class Rows:
    """A group that goes through `lengths` for ever; 0 is a row that is dropped."""

    mandatory = False
    weight = 1.0

    def __init__(self, name: str, lengths: list[int]) -> None:
        self.name, self._lengths, self._next = name, lengths, 0

    def draw(self, rng: StreamRandom) -> Sample:
        index, self._next = self._next, self._next + 1
        length = self._lengths[index % len(self._lengths)]
        if length == 0:
            raise RowDropped("unreadable", f"row {index}")
        sample = Sample(group="a_type", data_indexes=index, reference={"row": index})
        sample.add_text(LEARNT_TEXT, [7] * length)
        return sample

    def mark(self) -> int:
        return self._next

    def restore(self, mark: Any) -> None:
        self._next = mark

    def from_reference(self, reference: Any) -> Sample:
        index, self._next = self._next, reference["row"]
        sample = self.draw(StreamRandom(0))
        self._next = index
        return sample


def planner(*groups: Rows, max_consecutive: int = 5) -> PackPlanner:
    return PackPlanner(
        config=CONFIG,
        groups=groups,
        rng=StreamRandom(1),
        images=ImageLedger(),
        profile=AUTOMODEL,
        max_consecutive_drops=max_consecutive,
    )


def forty_packs(plan: PackPlanner) -> None:
    for _ in range(40):
        plan.plan()


def test_drops_of_rows_and_of_packing_name_the_group_not_its_type() -> None:
    plan = planner(Rows("captions", [10, 0, 35, 25, 28, 29]))
    drops = [drop for _ in range(6) for drop in plan.plan().drops]
    assert {drop.group for drop in drops} == {"captions"}
    assert {drop.reason for drop in drops} == {"unreadable", "overlength_sample", "buffer_full"}


def test_good_rows_between_bad_ones_are_no_endless_run_of_drops() -> None:
    plan = planner(Rows("captions", [10, 0, 0, 12]), max_consecutive=3)
    forty_packs(plan)


def test_a_group_of_bad_rows_alone_fails_after_the_bound_and_names_reason_and_row() -> None:
    plan = planner(Rows("good", [10]), Rows("bad", [0]), max_consecutive=4)
    with pytest.raises(
        DataError, match=r"group bad .* 4 rows in a row dropped, the last as unreadable: row 3"
    ):
        forty_packs(plan)


def test_a_plan_that_failed_leaves_the_planner_where_it_was() -> None:
    plan = planner(Rows("bad", [0]), max_consecutive=4)
    before = plan.state_to_json(plan.mark())
    with pytest.raises(DataError):
        plan.plan()
    assert plan.state_to_json(plan.mark()) == before


def test_counts_of_drops_survive_a_state(caplog: pytest.LogCaptureFixture) -> None:
    log = DropLog(logging.getLogger("drops"))
    plan = planner(Rows("captions", [10, 0, 12]))
    for _ in range(8):
        for drop in plan.plan().drops:
            log.record(drop)
    again = DropLog(logging.getLogger("drops"))
    again.load_json(log.as_json())
    assert again.as_json() == log.as_json()
    assert sum(again.counts.values()) > 3
    assert len(caplog.records) == 3
