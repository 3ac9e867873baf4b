"""Why a sample is not trained on: the closed list of reasons, and the log that counts them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from bagelplane.engine.rows import RowPlace


class DropReason(StrEnum):
    """A reason under which a drawn row is counted instead of packed. `description` is shown to users."""

    description: str

    def __new__(cls, value: str, description: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.description = description
        return member

    T2I_IMAGE_PARSE = "t2i_image_parse", "The image of a text-to-image row is missing or does not decode."
    T2I_CAPTION_PARSE = "t2i_caption_parse", "The captions of a text-to-image row are null or no JSON."
    CAPTION_NOT_OBJECT = (
        "caption_not_object",
        "The captions of a text-to-image row are JSON, but no object whose values are texts.",
    )
    CAPTION_NOT_TEXT = "caption_not_text", "A caption of a text-to-image row is a number, a list or null."
    PARQUET_ROW_PARSE = (
        "parquet_row_parse",
        "An image of an editing row does not decode, or its lists of images and instructions do not fit together.",
    )
    JSONL_PARSE = (
        "jsonl_parse",
        "A line is no JSON (blank lines too), or one of its images or frames is missing or does not decode.",
    )
    CONVERSATIONS_MISSING = (
        "conversations_missing",
        "A line has no `conversations`, or they are no list of turns with `from` and a text `value`.",
    )
    IMAGE_SURPLUS = "image_surplus", "The turns of a line place more images than the line has."
    IMAGE_UNREFERENCED = (
        "image_unreferenced",
        "Strict: a line has images that its turns do not place. (Automodel takes the first ones.)",
    )
    IMAGE_TOO_LARGE = "image_too_large", "Strict: an image has more pixels than `images.maxPixels`."
    IMAGE_TRUNCATED = (
        "image_truncated",
        "Strict: an image of the sample ends before its last pixel, so the sample left its pack.",
    )
    IMAGE_UNDECODABLE = (
        "image_undecodable",
        "Strict: an image of the sample opens but does not decode, so the sample left its pack.",
    )
    NO_LOSS_LABELS = (
        "no_loss_labels",
        "No turn of a line is trained on: it has no answer, or only empty ones.",
    )
    OVERLENGTH_SAMPLE = "overlength_sample", "The sample is larger than `budgets.maxTokensPerSample`."
    OVERLENGTH_MANDATORY_SAMPLE = (
        "overlength_mandatory_sample",
        "A sample of a mandatory group is larger than `budgets.maxTokensPerSample` (Automodel: not smaller).",
    )
    BUFFER_FULL = (
        "buffer_full",
        "Automodel: the sample did not fit into the open pack, and the buffer was full (or it came from there).",
    )


@dataclass(frozen=True, slots=True)
class Drop:
    """One row that is not trained on. `reason` is a DropReason, or a text of a group type of the user's own."""

    group: str
    reason: str
    message: str
    place: RowPlace | None = None


@dataclass(slots=True)
class DropLog:
    """Counts drops by group and reason, and logs the first three and every `every`-th of each reason."""

    logger: logging.Logger
    every: int = 100
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _by_reason: Counter[str] = field(default_factory=Counter)

    def count(self, drop: Drop) -> None:
        self.counts[drop.group, drop.reason] += 1
        self._by_reason[drop.reason] += 1

    def record(self, drop: Drop) -> None:
        """Count, and log."""
        self.count(drop)
        count = self._by_reason[drop.reason]
        if count <= 3 or count % self.every == 0:
            self.logger.warning(
                "group %s: dropped (%s, %d so far): %s", drop.group, drop.reason, count, drop.message
            )

    def as_json(self, pending: Iterable[Drop] = ()) -> dict[str, dict[str, int]]:
        """`{group: {reason: count}}`, sorted, as it is once `pending` are recorded."""
        counts = self.counts + Counter((drop.group, drop.reason) for drop in pending)
        table: dict[str, dict[str, int]] = {}
        for (group, reason), count in sorted(counts.items()):
            table.setdefault(group, {})[reason] = count
        return table

    def load_json(self, table: Mapping[str, Mapping[str, int]]) -> None:
        """Continue the counts of an earlier run."""
        for (_, reason), count in self.counts.items():
            self._by_reason[reason] -= count
        self.counts = Counter()
        self.add_json(table)

    def add_json(self, table: Mapping[str, Mapping[str, int]]) -> None:
        """Add counts made elsewhere."""
        for group, row in table.items():
            for reason, count in row.items():
                self.counts[group, reason] += count
                self._by_reason[reason] += count

    def sibling(self) -> DropLog:
        """One that counts for itself, and with this one decides what is logged."""
        return DropLog(self.logger, self.every, _by_reason=self._by_reason)
