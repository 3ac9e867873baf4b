"""Every answer that planning gets about the rows of a resource, so that two sources of them can be compared."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from bagelplane.engine.planner import PackPlan
from bagelplane.engine.rng import each_outcome
from bagelplane.engine.samples import RowDropped, Sample
from bagelplane.indexing import Indexer, IndexReport, make_looking
from bagelplane.settings import StreamSettings, index_uri, plan_context, stored_type
from bagelplane.sources.config import GroupConfig
from bagelplane.sources.index import DatasetIndex
from bagelplane.spec import BagelDataset

OUTCOMES = 24


def make_index(
    dataset: BagelDataset, uri: str | None = None, shard: tuple[int, int] = (0, 1), **options: Any
) -> IndexReport:
    """The index beside the resource's snapshots, or at `uri`."""
    settings = StreamSettings.from_resource(dataset)
    where = uri or index_uri(dataset)
    assert where is not None
    looking = make_looking(settings.profile, settings)
    return Indexer(settings, where, looking, **options).run(shard)


def answers(settings: StreamSettings, config: GroupConfig, index: DatasetIndex | None) -> Iterator[Any]:
    """For each row of a group and each outcome of its draws (the first of them) the sample, or why it is dropped."""
    stored = stored_type(config)
    units = stored.list_units(config, settings.storage, random.Random(), index)
    reader = stored.open_reader(config, settings.storage, index)
    context = plan_context(config, settings.encode, settings.open_ledger())
    for unit in units:
        for number in itertools.count():
            block = reader.read_block(unit, number)
            if block is None:
                break
            for row in range(len(block)):
                for draws in itertools.islice(each_outcome(), OUTCOMES):
                    try:
                        answer = told(block.plan(row, context, draws))
                    except RowDropped as dropped:
                        answer = (str(dropped.reason), dropped.message)
                    yield unit, number, row, list(draws.outcomes), answer


def told(sample: Sample) -> tuple[Any, ...]:
    images = [(image.source.key, image.width, image.height, image.mean) for image in sample.images]
    return sample.items, [list(ids) for ids in sample.texts], images, sample.num_tokens


def told_plan(plan: PackPlan) -> tuple[Any, ...]:
    """All that a plan decides."""
    samples = [
        (
            placed.sample.data_indexes,
            placed.sample.place,
            placed.start,
            placed.end,
            placed.split_lens,
            told(placed.sample),
        )
        for placed in plan.pack.placed
    ]
    return samples, plan.drops, len(plan.after.buffer), sorted(plan.opened)
