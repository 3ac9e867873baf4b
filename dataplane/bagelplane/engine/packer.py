"""Put samples into an open pack: conditioning draws, token places, rope positions (STREAM, Putting in).

A sample becomes a list of segments, one for each item that conditioning left in. Segments are numbers only;
`layout` turns them into arrays. So planning stays cheap, and a pack that is only previewed costs no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bagelplane.engine.rng import PackDraws
from bagelplane.engine.samples import ItemKind, PlanItem, PlannedImage, Sample


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    bos: int
    eos: int
    start_of_image: int
    end_of_image: int


@dataclass(frozen=True, slots=True)
class PackingConfig:
    """Budgets in tokens, probabilities of conditioning dropout, grids in pixels or patches. Defaults: the peer's."""

    expected_tokens: int = 32768
    max_tokens: int = 36864
    max_tokens_per_sample: int = 16384
    prefer_buffer_before: int = 16384
    max_buffer_size: int = 50
    interpolate_positions: bool = False
    use_flex: bool = False
    text_dropout: float = 0.1
    vit_dropout: float = 0.4
    vae_dropout: float = 0.1
    vae_downsample: int = 16
    max_latent_size: int = 32
    vit_patch_size: int = 14
    max_patches_per_side: int = 70

    def dropout(self, kind: ItemKind) -> float:
        if kind == "text":
            return self.text_dropout
        return self.vit_dropout if kind == "vit_image" else self.vae_dropout

    def grid(self, kind: ItemKind, image: PlannedImage) -> tuple[int, int]:
        """(rows, columns) of an image's tokens."""
        side = self.vit_patch_size if kind == "vit_image" else self.vae_downsample
        return image.height // side, image.width // side


@dataclass(frozen=True, slots=True)
class Segment:
    """One item as it lies in the pack: tokens `start .. start + length - 1`, start and end token included.

    The rope positions it appends are `position_count` many, rising from `rope` for text, all `rope` for images.
    (In a split of several items that is the whole split so far, as the peer has it.)
    """

    item: PlanItem
    start: int
    length: int
    rope: int
    position_count: int
    ids: Sequence[int] = ()
    image: PlannedImage | None = None
    timestep: float = -math.inf

    def holds(self, ids: Sequence[int] | None, image: PlannedImage | None) -> bool:
        """Whether it is that very text, or that very image."""
        return self.image is image if image is not None else self.image is None and self.ids is ids


@dataclass(slots=True)
class PlacedSample:
    """A sample in a pack. `segments` lacks what conditioning dropped; `dropped` lists those items."""

    sample: Sample
    start: int
    end: int = 0
    segments: list[Segment] = field(default_factory=list)
    split_lens: list[int] = field(default_factory=list)
    attn_modes: list[str] = field(default_factory=list)
    dropped: list[PlanItem] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of the recorded splits, the peer's `sample_lens` entry."""
        return sum(self.split_lens)

    def parts(self) -> Iterator[Part]:
        """All items of the sample in order, those that conditioning left out too."""
        texts, images = iter(self.sample.texts), iter(self.sample.images)
        segments = iter([*self.segments, None])
        segment = next(segments)
        for item in self.sample.items:
            ids = next(texts) if item.kind == "text" else None
            image = next(images) if item.kind != "text" else None
            # What conditioning left out has no segment: the next one belongs to a later item.
            present = segment is not None and segment.holds(ids, image)
            yield Part(item, segment if present else None, ids, image)
            if present:
                segment = next(segments)


@dataclass(frozen=True, slots=True)
class Part:
    """One item of a sample with what it is made of: ids of a text, or an image. `segment` None: left out."""

    item: PlanItem
    segment: Segment | None
    ids: Sequence[int] | None
    image: PlannedImage | None


def place_sample(sample: Sample, *, start: int, config: PackingConfig, rng: PackDraws) -> PlacedSample:
    """Lay `sample` from token `start` on, drawing its conditioning dropout and timesteps."""
    placed = PlacedSample(sample, start)
    texts, images = iter(sample.texts), iter(sample.images)
    current, rope, split_length = start, 0, 0
    timestep = -math.inf
    for item in sample.items:
        if item.split_start:
            split_length = 0
        is_text = item.kind == "text"
        ids: Sequence[int] = next(texts) if is_text else ()
        image = None if is_text else next(images)
        if item.enable_cfg == 1 and rng.python.random() < config.dropout(item.kind):
            placed.dropped.append(item)
            rope += 0 if is_text else 1
            continue
        if item.kind == "vae_image":
            if item.loss != 1:
                timestep = -math.inf
            elif item.split_start:
                timestep = float(rng.numpy.randn())
        length = 2 + (len(ids) if image is None else math.prod(config.grid(item.kind, image)))
        split_length += length
        # A VAE image appends positions for itself alone, text and ViT images for the split so far.
        positions = length if item.kind == "vae_image" else split_length
        placed.segments.append(
            Segment(item, current, length, rope, positions, ids=ids, image=image, timestep=timestep)
        )
        _record_mode(placed, item)
        current += length
        rope = _advance_rope(rope, item, split_length)
        if item.split_end:
            placed.split_lens.append(split_length)
    placed.end = current
    return placed


def _record_mode(placed: PlacedSample, item: PlanItem) -> None:
    """Each text and each ViT image has a mode; VAE images of one split (frames) share that of the first."""
    if item.kind == "text":
        placed.attn_modes.append("causal")
    elif item.kind == "vit_image":
        placed.attn_modes.append("full")
    elif item.split_start:
        placed.attn_modes.append("noise" if item.loss == 1 and item.frame_delta is None else "full")


def _advance_rope(rope: int, item: PlanItem, split_length: int) -> int:
    if item.kind == "text":
        return rope + split_length
    if item.kind == "vit_image":
        return rope + 1
    if item.frame_delta is not None:
        return rope + item.frame_delta
    return rope if item.loss else rope + 1


@dataclass(slots=True)
class OpenPack:
    """The pack being filled."""

    placed: list[PlacedSample] = field(default_factory=list)
    length: int = 0
    is_stand_in: bool = False
    """Whether it holds no sample, but what stands in for those that all left it (profile Strict)."""

    def put(self, sample: Sample, config: PackingConfig, rng: PackDraws) -> None:
        placed = place_sample(sample, start=self.length, config=config, rng=rng)
        self.placed.append(placed)
        self.length = placed.end

    def data_indexes(self) -> list[dict[str, Any]]:
        """The yielded `batch_data_indexes`."""
        if self.is_stand_in:
            return []
        return [
            dict(sample.entry)
            if sample.entry is not None
            else {
                "data_indexes": sample.data_indexes,
                "worker_id": sample.worker_id,
                "dataset_name": sample.group,
            }
            for sample in (placed.sample for placed in self.placed)
        ]
