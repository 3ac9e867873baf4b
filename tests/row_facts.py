"""Every answer that planning gets about the rows of a resource, so that two sources of them can be compared."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bagelplane.engine.planner import PackPlan
from bagelplane.engine.rng import each_outcome
from bagelplane.engine.samples import RowDropped, Sample
from bagelplane.indexing import Indexer, IndexReport
from bagelplane.settings import StreamSettings, index_uri, plan_context, stored_type
from bagelplane.sources.config import GroupConfig
from bagelplane.sources.index import DatasetIndex
from bagelplane.spec import BagelDataset
from tests.golden.recordings import HERE

OUTCOMES = 24
GROUPS: dict[str, dict[str, Any]] = {
    "t2i_pretrain": {"imageTransform": {"stride": 16, "maxSize": 96, "minSize": 16}},
    "unified_edit": {
        "imageTransform": {"stride": 16, "maxSize": 96, "minSize": 16},
        "vitImageTransform": {"stride": 14, "maxSize": 56, "minSize": 14},
    },
    "vlm_sft": {"imageTransform": {"stride": 14, "maxSize": 56, "minSize": 14}},
}


def one_group(kind: str, info: dict[str, Any], profile: str, snapshots: Path) -> BagelDataset:
    """A resource of one group over data as `dataset_info` of the drop-in classes has them."""
    data: dict[str, Any] = {"name": "d", "uri": info["data_dir"]}
    if "jsonl_path" in info:
        data |= {"jsonl": info["jsonl_path"], "images": info["data_dir"]}
    group = {"name": "odd", "type": kind, "datasets": [data], **GROUPS[kind]}
    spec = {
        "profile": profile,
        "tokenizer": {"uri": str(HERE / "data/tokenizer.json")},
        "groups": [group],
        "budgets": {
            "expectedTokens": 200,
            "maxTokens": 320,
            "maxTokensPerSample": 300,
            "preferBufferBefore": 60,
        },
        "sharding": {"mode": "Bagel", "workersPerRank": 0},
        "snapshots": {"uri": str(snapshots)},
    }
    head = {"apiVersion": "bagelplane.io/v1alpha1", "kind": "BagelDataset", "metadata": {"name": "odd"}}
    return BagelDataset.from_mapping({**head, "spec": spec})


def make_index(
    dataset: BagelDataset, uri: str | None = None, shard: tuple[int, int] = (0, 1), **options: Any
) -> IndexReport:
    """The index beside the resource's snapshots, or at `uri`."""
    settings = StreamSettings.from_resource(dataset)
    where = uri or index_uri(dataset)
    assert where is not None
    return Indexer(settings, where, **options).run(shard)


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
