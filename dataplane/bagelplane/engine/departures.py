"""Samples that leave their pack because an image of theirs does not decode (profile Strict).

The plan stands: no draw moves, and every other sample keeps its texts, images, conditioning and timesteps. Those
behind the gap move up in the pack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from bagelplane.engine.drops import Drop, DropReason
from bagelplane.engine.packer import OpenPack, PlacedSample, Segment
from bagelplane.engine.planner import PackPlan
from bagelplane.engine.samples import PLAIN_TEXT, Sample
from bagelplane.errors import DataError

STAND_IN_TOKENS = 2
"""Of a pack that all samples left."""
DEPARTURE_REASONS = frozenset({DropReason.IMAGE_TRUNCATED, DropReason.IMAGE_UNDECODABLE})

NameOf = Callable[[Sample], str]


def without_bad_images(
    plan: PackPlan, bad: Mapping[str, tuple[DropReason, str]], name_of: NameOf
) -> PackPlan:
    """The plan without the samples that emit one of the `bad` images (key to reason and cause), each a drop.

    A pack that loses all its samples is one text of nothing, start and end token, without loss.
    """
    left, drops = OpenPack(), list(plan.drops)
    for placed in plan.pack.placed:
        key = next((key for key in _emitted_keys(placed) if key in bad), None)
        if key is None:
            moved = _moved(placed, left.length - placed.start)
            left.placed.append(moved)
            left.length = moved.end
            continue
        reason, cause = bad[key]
        sample = placed.sample
        message = f"{sample.data_indexes}: {key}: {cause}"
        drops.append(Drop(name_of(sample), reason, message, sample.place))
    if not left.placed:
        left.placed.append(_empty_text())
        left.length = left.placed[0].end
        left.is_stand_in = True
    return replace(plan, pack=left, drops=drops)


def _emitted_keys(placed: PlacedSample) -> list[str]:
    return [segment.image.source.key for segment in placed.segments if segment.image is not None]


def _moved(placed: PlacedSample, by: int) -> PlacedSample:
    if by == 0:
        return placed
    segments = [replace(segment, start=segment.start + by) for segment in placed.segments]
    return replace(placed, start=placed.start + by, end=placed.end + by, segments=segments)


def _empty_text() -> PlacedSample:
    sample = Sample()
    sample.add_text(PLAIN_TEXT, ())
    size = STAND_IN_TOKENS
    segment = Segment(PLAIN_TEXT, start=0, length=size, rope=0, position_count=size)
    return PlacedSample(sample, 0, size, [segment], split_lens=[size], attn_modes=["causal"])


class DepartureCount:
    """Notices a group of which nothing is left: packs of it alone would be made for ever."""

    def __init__(self, max_consecutive: int) -> None:
        self._max_consecutive = max_consecutive
        self._in_a_row: Counter[str] = Counter()

    def count(self, plan: PackPlan, name_of: NameOf) -> None:
        """Count one pack as it is handed over. Raises DataError, naming the reason and the last sample."""
        if not plan.pack.is_stand_in:
            for placed in plan.pack.placed:
                self._in_a_row[name_of(placed.sample)] = 0
        for drop in plan.drops:
            if drop.reason not in DEPARTURE_REASONS:
                continue
            self._in_a_row[drop.group] += 1
            if self._in_a_row[drop.group] >= self._max_consecutive:
                raise DataError(
                    f"group {drop.group} gives no sample that can be packed",
                    got=f"{self._in_a_row[drop.group]} in a row left their packs, the last as {drop.reason}: "
                    f"{drop.message}",
                    expected=f"a sample that decodes within {self._max_consecutive} (drops.maxConsecutive)",
                    fix="mend the data of this group, or raise drops.maxConsecutive",
                )
