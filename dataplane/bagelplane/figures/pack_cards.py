"""A planned pack as cards: one for each item of each sample, in order, with what the model gets of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from PIL import Image

from bagelplane.engine.packer import PackingConfig, PlacedSample
from bagelplane.engine.planner import PackPlan
from bagelplane.engine.samples import PlanItem, PlannedImage
from bagelplane.figures.tally import loss_tokens

Pixels = Callable[[PlannedImage], np.ndarray]
"""The pixels of a planned image at its planned size: uint8 [height, width, 3]."""


class Role(Enum):
    """What an item is to the model. The value is its caption on a card."""

    LEARNT_IMAGE = "picture to denoise"
    LEARNT_TEXT = "text to predict"
    VAE = "VAE picture"
    VIT = "ViT picture"
    TEXT = "text"

    @staticmethod
    def of(item: PlanItem) -> Role:
        if item.kind == "text":
            return Role.LEARNT_TEXT if item.loss == 1 else Role.TEXT
        if item.kind == "vit_image":
            return Role.VIT
        return Role.LEARNT_IMAGE if item.loss == 1 else Role.VAE


@dataclass(frozen=True, slots=True)
class Card:
    """One item. `tokens` are those in the pack, 0 for an item that conditioning left out."""

    role: Role
    tokens: int
    left_out: bool
    text: str = ""
    image: Image.Image | None = None


@dataclass(frozen=True, slots=True)
class SampleCards:
    """One sample: `start` and `end` are its tokens in the pack."""

    group: str
    row: str
    start: int
    end: int
    cards: tuple[Card, ...]


@dataclass(frozen=True, slots=True)
class PackCards:
    """One pack. `drops` are (group, reason, count) of rows met and not trained on while it was filled."""

    number: int
    length: int
    expected_tokens: int
    max_tokens: int
    loss_tokens: int
    samples: tuple[SampleCards, ...]
    drops: tuple[tuple[str, str, int], ...]

    def count(self, *roles: Role) -> int:
        """Items of these roles in the pack."""
        return sum(
            card.role in roles and not card.left_out for sample in self.samples for card in sample.cards
        )

    @property
    def left_out(self) -> int:
        return sum(card.left_out for sample in self.samples for card in sample.cards)


def cards_of_pack(
    plan: PackPlan,
    number: int,
    *,
    config: PackingConfig,
    groups: Sequence[str],
    pixels: Pixels,
    decode_text: Callable[[Sequence[int]], str],
) -> PackCards:
    """The cards of one plan. `groups` are the names of the resource's groups, in its order."""
    drops = Counter((drop.group, str(drop.reason)) for drop in plan.drops)
    shown = [] if plan.pack.is_stand_in else plan.pack.placed
    samples = tuple(_cards_of_sample(placed, groups, pixels, decode_text) for placed in shown)
    segments = [segment for placed in plan.pack.placed for segment in placed.segments]
    return PackCards(
        number=number,
        length=plan.pack.length,
        expected_tokens=config.expected_tokens,
        max_tokens=config.max_tokens,
        loss_tokens=sum(sum(loss_tokens(segment)) for segment in segments),
        samples=samples,
        drops=tuple((group, reason, count) for (group, reason), count in drops.most_common()),
    )


def _cards_of_sample(
    placed: PlacedSample, groups: Sequence[str], pixels: Pixels, decode_text: Callable[[Sequence[int]], str]
) -> SampleCards:
    cards = [
        Card(
            role=Role.of(part.item),
            tokens=0 if part.segment is None else part.segment.length,
            left_out=part.segment is None,
            text="" if part.ids is None else decode_text(part.ids),
            image=None if part.image is None else Image.fromarray(pixels(part.image)),
        )
        for part in placed.parts()
    ]
    sample = placed.sample
    row = "/".join(str(part) for part in _flat(sample.data_indexes))
    return SampleCards(groups[sample.group_index], row, placed.start, placed.end, tuple(cards))


def _flat(indexes: object) -> list[object]:
    return list(indexes) if isinstance(indexes, (list, tuple)) else [indexes]
