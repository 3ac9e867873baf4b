"""Counts of planned packs: how full they are, what they are made of, what was dropped, what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from bagelplane.engine.packer import PackingConfig, PlacedSample, Segment
from bagelplane.engine.planner import PackPlan

ConditionKind = Literal["text", "vit_image", "vae_image"]
CONDITION_KINDS: tuple[ConditionKind, ...] = ("text", "vit_image", "vae_image")
_PERCENTILES = {"p05": 5, "median": 50, "p95": 95}


@dataclass(frozen=True, slots=True)
class GroupShare:
    """A group as the resource has it. `units` are the files, row groups or lines of one reader of the rank."""

    name: str
    type: str
    weight: float
    mandatory: bool
    units: int


@dataclass(slots=True)
class GroupTally:
    """What one group gave. Tokens are those in the pack: start and end tokens in, dropped conditions out."""

    samples: int = 0
    tokens: int = 0
    text_loss_tokens: int = 0
    image_loss_tokens: int = 0
    images: int = 0
    texts: int = 0
    drops: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Position:
    """How far one reader of one group has come: whole passes, and where it is in the present one."""

    passes: int = 0
    at: tuple[int, ...] = (0, 0, 0)

    def move(self, at: Sequence[int]) -> None:
        here = tuple(at)
        self.passes += here < self.at
        self.at = here

    def share(self, units: int) -> float:
        return self.passes + self.at[0] / max(1, units)


class PlanTally:
    """Adds up plans of one rank. `readers` is the number of its logical workers; plans come from them in turn.

    Plans that are pure rest on no image (profile Strict): only those that a pack emits are decoded.
    """

    def __init__(
        self,
        config: PackingConfig,
        groups: Sequence[GroupShare],
        readers: int = 1,
        *,
        is_pure: bool = False,
    ) -> None:
        self.config, self.group_shares, self._is_pure = config, list(groups), is_pure
        self.groups = [GroupTally() for _ in groups]
        self.lengths: list[int] = []
        self.samples_a_pack: list[int] = []
        self.vae_images: list[int] = []
        self.vit_images: list[int] = []
        self.pixel_bytes: list[int] = []
        self.decoded_pixels = 0
        self.buffered: list[int] = []
        self.offered: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self._positions = [[_Position() for _ in groups] for _ in range(readers)]
        self._numbers = {share.name: number for number, share in enumerate(groups)}

    @property
    def packs(self) -> int:
        return len(self.lengths)

    def add(self, plan: PackPlan) -> None:
        """Count one plan, the next of the rank."""
        reader = self.packs % len(self._positions)
        images: Counter[str] = Counter()
        pixels: dict[tuple[str, int, int], int] = {}
        decoded = {} if self._is_pure else dict(plan.opened)
        for placed in [] if plan.pack.is_stand_in else plan.pack.placed:
            self._add_sample(placed)
            for segment in placed.segments:
                if segment.image is not None:
                    image = segment.image
                    images[segment.item.kind] += 1
                    decoded[image.source.key] = image.source
                    key = (image.source.key, image.height, image.width)
                    pixels[key] = 3 * image.height * image.width
        self.lengths.append(plan.pack.length)
        self.samples_a_pack.append(len(plan.pack.data_indexes()))
        self.vae_images.append(images["vae_image"])
        self.vit_images.append(images["vit_image"])
        self.pixel_bytes.append(sum(pixels.values()))
        for source in decoded.values():
            width, height = source.size()
            self.decoded_pixels += width * height
        self.buffered.append(len(plan.after.buffer))
        for drop in plan.drops:
            self.groups[self._numbers[drop.group]].drops[drop.reason] += 1
        for position, at in zip(self._positions[reader], plan.after.groups, strict=True):
            position.move(at)

    def _add_sample(self, placed: PlacedSample) -> None:
        group = self.groups[placed.sample.group_index]
        group.samples += 1
        group.tokens += placed.end - placed.start
        for segment in placed.segments:
            text_loss, image_loss = loss_tokens(segment)
            group.text_loss_tokens += text_loss
            group.image_loss_tokens += image_loss
            group.images += segment.image is not None
            group.texts += segment.image is None
        self.offered.update(item.kind for item in placed.sample.items if item.enable_cfg == 1)
        self.left_out.update(item.kind for item in placed.dropped)

    def drops(self) -> dict[str, dict[str, int]]:
        """`{group: {reason: count}}` of groups that dropped anything, most frequent reason first."""
        return {
            share.name: dict(tally.drops.most_common())
            for share, tally in zip(self.group_shares, self.groups, strict=True)
            if tally.drops
        }

    def packs_a_pass(self, number: int) -> float | None:
        """Packs of this rank until a group's data have been read once; None when it is too early to tell."""
        units = self.group_shares[number].units
        done = [positions[number].share(units) for positions in self._positions]
        mean = sum(done) / len(done)
        return self.packs / mean if mean > 0 else None

    def as_json(self) -> dict[str, Any]:
        """All of it in JSON types. Lengths and budgets in tokens, shares from 0 to 1, sizes in bytes."""
        config = self.config
        mean_length = sum(self.lengths) / max(1, self.packs)
        return {
            "packs": self.packs,
            "budgets": {"expected_tokens": config.expected_tokens, "max_tokens": config.max_tokens},
            "sequence_length": _spread(self.lengths),
            "fill": mean_length / config.max_tokens,
            "reached_expected": _share(sum(n >= config.expected_tokens for n in self.lengths), self.packs),
            "samples_a_pack": _spread(self.samples_a_pack),
            "vae_images_a_pack": _spread(self.vae_images),
            "vit_images_a_pack": _spread(self.vit_images),
            "pixel_bytes_a_pack": _spread(self.pixel_bytes),
            "decoded_megapixels_a_pack": self.decoded_pixels / 1e6 / max(1, self.packs),
            "buffered_samples": _spread(self.buffered),
            "groups": [self._group_json(number) for number in range(len(self.groups))],
            "conditioning": {
                kind: {
                    "offered": self.offered[kind],
                    "left_out": self.left_out[kind],
                    "share": _share(self.left_out[kind], self.offered[kind]),
                    "dropout": config.dropout(kind),
                }
                for kind in CONDITION_KINDS
            },
            "drops": self.drops(),
        }

    def _group_json(self, number: int) -> dict[str, Any]:
        share, tally = self.group_shares[number], self.groups[number]
        samples = sum(group.samples for group in self.groups)
        tokens = sum(group.tokens for group in self.groups)
        packs_a_pass = self.packs_a_pass(number)
        return {
            "name": share.name,
            "type": share.type,
            "mandatory": share.mandatory,
            "weight_share": _share(share.weight, sum(item.weight for item in self.group_shares)),
            "samples": tally.samples,
            "sample_share": _share(tally.samples, samples),
            "tokens": tally.tokens,
            "token_share": _share(tally.tokens, tokens),
            "text_loss_tokens": tally.text_loss_tokens,
            "image_loss_tokens": tally.image_loss_tokens,
            "images": tally.images,
            "texts": tally.texts,
            "dropped_rows": tally.drops.total(),
            "packs_a_pass": None if packs_a_pass is None else round(packs_a_pass, 1),
        }


def loss_tokens(segment: Segment) -> tuple[int, int]:
    """(text, image) positions of a segment that carry loss."""
    special = int(segment.item.special_token_loss == 1)
    if segment.item.loss != 1:
        return special, 0
    if segment.image is None:
        return segment.length - 1 + special, 0
    return special, segment.length - 2


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _spread(values: Sequence[int]) -> Mapping[str, float]:
    """Mean, smallest, largest and percentiles; all 0 for no values."""
    array = np.asarray(values or [0])
    spread = {"mean": float(array.mean()), "min": int(array.min()), "max": int(array.max())}
    return spread | {name: float(np.percentile(array, percent)) for name, percent in _PERCENTILES.items()}
