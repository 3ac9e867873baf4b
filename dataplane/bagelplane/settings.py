"""What a stream is made of, whichever face described it: the resource, or the documented classes.

`StreamSettings` is the one form that both are turned into; `open_group` gives one worker its part of a group.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bagelplane.engine.packer import PackingConfig, SpecialTokens
from bagelplane.engine.planner import Group
from bagelplane.engine.profile import PROFILES, Profile
from bagelplane.engine.resizing import ResizeRule
from bagelplane.engine.rng import stream_seed
from bagelplane.engine.samples import FrameSampler, ImageLedger, ImageTransform, PlanContext
from bagelplane.engine.sharding import order_units, shard_to_rank, shard_to_worker, share_of_stream
from bagelplane.errors import SpecError, StorageError, TransientStorageError
from bagelplane.sources.config import DatasetConfig, GroupConfig
from bagelplane.sources.edit import read_row_group_counts
from bagelplane.sources.group import StoredGroup
from bagelplane.sources.index import DatasetIndex
from bagelplane.sources.index_format import Looking
from bagelplane.sources.registry import STORED_TYPES, StoredType
from bagelplane.sources.tokenizer import load_tokenizer
from bagelplane.spec import BagelDataset
from bagelplane.spec import Dataset as ResourceDataset
from bagelplane.spec import Group as ResourceGroup
from bagelplane.spec import ImageTransform as ResourceTransform
from bagelplane.storage import Storage, StorageSettings, open_storage
from bagelplane.storage.settings import MAX_CONNECTIONS
from bagelplane.topology import Topology

CREDENTIALS_VARIABLE = "BAGELPLANE_CREDENTIALS_DIR"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """All that determines a stream, beside its topology. Seeds as STREAM, Randomness, names them."""

    groups: tuple[GroupConfig, ...]
    packing: PackingConfig
    tokens: SpecialTokens
    encode: Callable[[str], Sequence[int]]
    storage: Storage
    data_seed: int
    global_seed: int | None
    max_consecutive_drops: int
    profile: Profile
    max_pixels: int
    looking: Looking
    """How an index has to have looked at rows to be of use here."""
    index: DatasetIndex | None = None
    """What is known of the data already."""
    ordered_units: dict[str, list[Any]] | None = None
    """By group, for elastic sharding: listed and ordered once for all streams of a rank."""

    @staticmethod
    def from_resource(
        dataset: BagelDataset, *, producers: int = 1, on_wait: Callable[[str], None] | None = None
    ) -> StreamSettings:
        """Read the tokenizer and the small files that the resource names. Raises SpecError or StorageError.

        `producers` share what may be read ahead; with `on_wait` a store that is away is waited for (`Storage`).
        """
        spec = dataset.spec
        storage = open_storage(storage_settings(dataset, producers))
        storage.on_wait = on_wait
        encode, tokens = load_tokenizer(storage, spec.tokenizer)
        profile = PROFILES[spec.profile]
        looking = Looking.here(profile, encode.digest)
        return StreamSettings(
            groups=tuple(_group_config(group, storage, profile) for group in spec.groups),
            packing=_packing_config(dataset),
            tokens=tokens,
            encode=encode,
            storage=storage,
            data_seed=spec.sharding.data_seed,
            global_seed=spec.sharding.global_seed,
            max_consecutive_drops=spec.drops.max_consecutive,
            profile=profile,
            max_pixels=spec.images.max_pixels,
            looking=looking,
            index=open_index(index_uri(dataset), storage, looking),
        )

    def open_ledger(self, known_bad: dict[str, str] | None = None) -> ImageLedger:
        """What is to be known of images while a stream is planned."""
        return ImageLedger(known_bad, max_pixels=self.max_pixels if self.profile.limits_pixels else None)

    def seed(self, topology: Topology, worker_id: int) -> int:
        return stream_seed(
            global_seed=self.global_seed,
            data_seed=self.data_seed,
            world_size=topology.world_size,
            rank=topology.rank,
            num_workers=topology.num_workers,
            worker_id=worker_id,
        )

    def for_streams(self) -> StreamSettings:
        """The same for elastic sharding: a rank of `Topology` is a stream then."""
        return replace(self, ordered_units={})

    def list_units(self, config: GroupConfig) -> list[Any]:
        """All units of a group, before sharding. Raises SpecError for a type that is no stored one."""
        return stored_type(config).list_units(config, self.storage, random.Random(), self.index)


def index_uri(dataset: BagelDataset) -> str | None:
    """Where the index of a resource lies: beside its snapshots. None where it keeps none."""
    uri = dataset.spec.snapshots.uri
    return None if uri is None else f"{uri.rstrip('/')}/index"


def open_index(uri: str | None, storage: Storage, looking: Looking) -> DatasetIndex | None:
    """The index at `uri`; None where there is none, or the store does not say so."""
    if uri is None:
        return None
    try:
        index = DatasetIndex(storage, uri, looking)
    except (StorageError, TransientStorageError) as error:
        log.warning("planning without an index: %s", error)
        return None
    return None if index.is_empty else index


def stored_type(group: GroupConfig | ResourceGroup) -> StoredType:
    """The source of a group. Raises SpecError for a type that a sidecar does not serve."""
    if group.type not in STORED_TYPES:
        raise SpecError(
            f"group {group.name} has the type {group.type}, which a sidecar does not serve yet",
            expected=f"one of {', '.join(sorted(STORED_TYPES))}",
            fix="use bagelplane.packing.PackedDataset for registered types",
        )
    return STORED_TYPES[group.type]


def open_group(
    settings: StreamSettings, config: GroupConfig, topology: Topology, worker_id: int, images: ImageLedger
) -> Group:
    """One worker's part of a group. Raises DataError when there are fewer units than consumers."""
    units, unread = units_of(settings, config, topology, worker_id)
    if unread:
        log.warning("group %s: %d units of rank %d are read by no worker", config.name, unread, topology.rank)
    stored = STORED_TYPES[config.type]
    return StoredGroup(
        name=config.name,
        type_name=config.type,
        weight=config.weight,
        mandatory=config.mandatory,
        units=units,
        reader=stored.open_reader(config, settings.storage, settings.index),
        context=plan_context(config, settings.encode, images),
        worker_id=worker_id,
    )


def units_of(
    settings: StreamSettings, config: GroupConfig, topology: Topology, worker_id: int
) -> tuple[list[Any], int]:
    """One worker's units of a group in order, and how many of its rank's no worker reads."""
    block = _block(settings, config, topology)
    return shard_to_worker(block, num_workers=topology.num_workers, worker_id=worker_id, group=config.name)


def _block(settings: StreamSettings, config: GroupConfig, topology: Topology) -> list[Any]:
    """The units of a rank, or of a stream."""
    ordered = settings.ordered_units
    if ordered is None:
        block, _ = shard_to_rank(
            settings.list_units(config),
            rng=random.Random(),
            epoch_seed=settings.data_seed,
            rank=topology.rank,
            world_size=topology.world_size,
            group=config.name,
        )
        return block
    if config.name not in ordered:
        units = settings.list_units(config)
        ordered[config.name] = order_units(units, rng=random.Random(), epoch_seed=settings.data_seed)
    return share_of_stream(ordered[config.name], topology.rank, topology.world_size, config.name)


def storage_settings(dataset: BagelDataset, producers: int = 1) -> StorageSettings:
    """How the resource's object store is reached, by one of so many producers.

    BAGELPLANE_CREDENTIALS_DIR is where this container has the Secret of `secretRef`: it goes before the
    resource's own `credentialsDir`, which is of another machine then.
    """
    storage = dataset.spec.storage
    ahead = storage.read_ahead
    return StorageSettings(
        endpoint_url=storage.endpoint_url,
        region=storage.region,
        credentials_dir=os.environ.get(CREDENTIALS_VARIABLE) or storage.credentials_dir,
        read_ahead_bytes=ahead.size // producers,
        read_ahead_requests=min(MAX_CONNECTIONS, -(-ahead.requests // producers)),
    )


def plan_context(
    config: GroupConfig, encode: Callable[[str], Sequence[int]], images: ImageLedger
) -> PlanContext:
    """What planning a group's rows needs. Conversations know one kind of image: their transform is the ViT's."""
    vit = config.image_transform if config.type == "vlm_sft" else config.vit_image_transform
    return PlanContext(
        encode, images, vae=config.image_transform, vit=vit, frames=config.frames, profile=config.profile
    )


def dataset_config(dataset: ResourceDataset, storage: Storage, profile: Profile) -> DatasetConfig:
    """One data set; its parquet info is read. Raises SpecError or StorageError."""
    info_uri = dataset.parquet_info_uri
    row_groups = read_row_group_counts(storage, info_uri, dataset.uri) if info_uri else None
    return DatasetConfig(
        name=dataset.name,
        uri=dataset.uri,
        jsonl_uri=dataset.jsonl_uri or "",
        images_uri=dataset.images_uri or dataset.uri,
        row_groups=None if profile.reads_other_shapes else row_groups,  # the files know better
        num_used=dataset.num_used_data,
        profile=profile,
    )


def _group_config(group: ResourceGroup, storage: Storage, profile: Profile) -> GroupConfig:
    datasets = tuple(dataset_config(dataset, storage, profile) for dataset in group.datasets)
    return GroupConfig(
        name=group.name,
        type=group.type,
        weight=group.weight,
        mandatory=group.mandatory,
        datasets=datasets,
        image_transform=_transform(group.image_transform),
        vit_image_transform=_transform(group.vit_image_transform),
        frames=FrameSampler(group.frame_sampler.min_frames, group.frame_sampler.max_frames),
        shuffle_lines=group.shuffle_lines,
        shuffle_seed=group.shuffle_seed,
        profile=profile,
    )


def _transform(transform: ResourceTransform | None) -> ImageTransform | None:
    if transform is None:
        return None
    rule = ResizeRule(transform.stride, transform.max_size, transform.min_size, transform.max_pixels)
    return ImageTransform(rule)


def _packing_config(dataset: BagelDataset) -> PackingConfig:
    spec = dataset.spec
    budgets, conditioning, model = spec.budgets, spec.conditioning, spec.model
    return PackingConfig(
        expected_tokens=budgets.expected_tokens,
        max_tokens=budgets.max_tokens,
        max_tokens_per_sample=budgets.max_tokens_per_sample,
        prefer_buffer_before=budgets.prefer_buffer_before,
        max_buffer_size=budgets.max_buffer_size,
        interpolate_positions=model.interpolate_positions,
        use_flex=budgets.use_flex,
        text_dropout=conditioning.text_dropout,
        vit_dropout=conditioning.vit_dropout,
        vae_dropout=conditioning.vae_dropout,
        vae_downsample=model.vae_image_downsample,
        max_latent_size=model.max_latent_size,
        vit_patch_size=model.vit_patch_size,
        max_patches_per_side=model.max_patches_per_side,
    )
