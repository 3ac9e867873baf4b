"""What there is to say of one planned pack: whose rows are in it, what of them, and what was dropped for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bagelplane.engine.departures import STAND_IN_TOKENS
from bagelplane.engine.drops import Drop, DropReason
from bagelplane.engine.pack_rows import PackRows
from bagelplane.engine.packer import Part, PlacedSample
from bagelplane.engine.planner import PackPlan
from bagelplane.engine.rows import RowPlace
from bagelplane.spec import BagelDataset
from bagelplane.storage import same_object


@dataclass(frozen=True, slots=True)
class ItemTold:
    """One item of a sample. `tokens` are those in the pack: 0 where conditioning left it out."""

    kind: str
    """text, vit_image or vae_image."""
    tokens: int
    left_out: bool
    has_loss: bool
    size: tuple[int, int] | None
    """(width, height) in pixels as the model gets it."""
    image: str | None
    """Where the image is stored."""


@dataclass(frozen=True, slots=True)
class SampleTold:
    """One sample of a pack. It lies at the tokens `start` to below `end`."""

    group: str
    dataset: str | None
    """Name of the data set in the resource; None where its place is not known."""
    place: RowPlace | None
    data_indexes: Any
    """As the trainer gets them in `batch_data_indexes`."""
    worker: int
    start: int
    end: int
    splits: tuple[tuple[int, str], ...] | None = None
    """(tokens, attention mode) of each; None where they are not known: the log of rows has none."""
    items: tuple[ItemTold, ...] | None = None
    """None as well there."""

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PackTold:
    """One pack: its samples in order, and the rows that were met and not trained on since the pack before it."""

    tokens: int
    samples: tuple[SampleTold, ...]
    drops: tuple[Drop, ...]
    buffered: int | None = None
    """Samples that wait for a later pack; None where it is not known."""

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "samples": [_sample_as_json(sample) for sample in self.samples],
            "drops": [drop_as_json(drop) for drop in self.drops],
            "buffered_samples": self.buffered,
        }


def tell_pack(plan: PackPlan, dataset: BagelDataset) -> PackTold:
    """All that a plan says of its pack, in the resource's own names."""
    groups = [group.name for group in dataset.spec.groups]
    names = DatasetNames(dataset)
    shown = [] if plan.pack.is_stand_in else plan.pack.placed
    return PackTold(
        tokens=plan.pack.length,
        samples=tuple(_tell_sample(placed, groups, names) for placed in shown),
        drops=tuple(plan.drops),
        buffered=len(plan.after.buffer) + (plan.after.carried is not None),
    )


def tell_logged(rows: PackRows, dataset: BagelDataset) -> PackTold:
    """What the log of rows says of a pack: its rows, without splits and pictures."""
    names = DatasetNames(dataset)
    samples, start = [], 0
    for row in rows.trained:
        samples.append(
            SampleTold(
                group=row.group,
                dataset=names.name(row.group, row.place),
                place=row.place,
                data_indexes=json.loads(row.data_indexes),
                worker=row.worker,
                start=start,
                end=start + row.tokens,
            )
        )
        start += row.tokens
    return PackTold(tokens=start or STAND_IN_TOKENS, samples=tuple(samples), drops=rows.dropped)


class DatasetNames:
    """Which data set of the resource a row belongs to."""

    def __init__(self, dataset: BagelDataset) -> None:
        self._files: dict[str, list[tuple[str, str]]] = {}
        self._folders: dict[str, list[tuple[str, str]]] = {}
        for group in dataset.spec.groups:
            self._files[group.name] = [(data.jsonl_uri or "", data.name) for data in group.datasets]
            self._folders[group.name] = [(data.uri, data.name) for data in group.datasets]

    def name(self, group: str, place: RowPlace | None) -> str | None:
        """The first data set of the group that holds the row; None where none does, or its place is not known."""
        if place is None:
            return None
        is_line = place.row_group is None
        where = place.object if is_line else place.object.rpartition("/")[0]
        known = (self._files if is_line else self._folders).get(group, [])
        return next((name for uri, name in known if uri and same_object(uri, where)), None)


def drop_as_json(drop: Drop) -> dict[str, Any]:
    """A row that is not trained on."""
    return {
        "group": drop.group,
        "reason": str(drop.reason),
        "description": describe_reason(drop.reason),
        "message": drop.message,
        **place_as_json(drop.place),
    }


def describe_reason(reason: str) -> str:
    """The documented sentence; empty for a reason of a group type of the user's own."""
    return reason.description if isinstance(reason, DropReason) else ""


def place_as_json(place: RowPlace | None) -> Mapping[str, Any]:
    """Object, row group and row; all null where the place is not known."""
    if place is None:
        return {"object": None, "row_group": None, "row": None}
    return {"object": place.object, "row_group": place.row_group, "row": place.row}


def _tell_sample(placed: PlacedSample, groups: Sequence[str], names: DatasetNames) -> SampleTold:
    sample = placed.sample
    group, entry = groups[sample.group_index], sample.entry or {}
    return SampleTold(
        group=group,
        dataset=names.name(group, sample.place),
        place=sample.place,
        data_indexes=entry.get("data_indexes", sample.data_indexes),
        worker=entry.get("worker_id", sample.worker_id),
        start=placed.start,
        end=placed.end,
        splits=tuple(zip(placed.split_lens, placed.attn_modes, strict=False)),
        items=tuple(_tell_item(part) for part in placed.parts()),
    )


def _tell_item(part: Part) -> ItemTold:
    image = part.image
    return ItemTold(
        kind=part.item.kind,
        tokens=0 if part.segment is None else part.segment.length,
        left_out=part.segment is None,
        has_loss=part.item.loss == 1,
        size=None if image is None else (image.width, image.height),
        image=None if image is None else image.source.key,
    )


def _sample_as_json(sample: SampleTold) -> dict[str, Any]:
    return {
        "group": sample.group,
        "dataset": sample.dataset,
        **place_as_json(sample.place),
        "data_indexes": sample.data_indexes,
        "worker_id": sample.worker,
        "start": sample.start,
        "tokens": sample.tokens,
        "splits": None
        if sample.splits is None
        else [{"tokens": tokens, "mode": mode} for tokens, mode in sample.splits],
        "items": None if sample.items is None else [_item_as_json(item) for item in sample.items],
    }


def _item_as_json(item: ItemTold) -> dict[str, Any]:
    return {
        "kind": item.kind,
        "tokens": item.tokens,
        "left_out": item.left_out,
        "loss": item.has_loss,
        "width": None if item.size is None else item.size[0],
        "height": None if item.size is None else item.size[1],
        "image": item.image,
    }
