"""The group data sets of a `PackedDataset`: ours over stored rows, and users' own that yield finished samples."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from bagelplane.distributed_iterable import DistributedIterableDataset
from bagelplane.engine.planner import Group
from bagelplane.engine.raw_samples import sample_from_mapping
from bagelplane.engine.rng import StreamRandom
from bagelplane.engine.samples import ImageLedger, PlanContext, Sample
from bagelplane.errors import DataError
from bagelplane.settings import plan_context
from bagelplane.sources.config import GroupConfig
from bagelplane.sources.group import StoredGroup
from bagelplane.sources.registry import STORED_TYPES
from bagelplane.storage import Storage

DEFAULT_NUM_WORKERS = 8


class StoredGroupDataset(DistributedIterableDataset):
    """One of our group types behind the documented base class. `data_paths` are its units."""

    def __init__(
        self, config: GroupConfig, storage: Storage, *, local_rank: int, world_size: int, num_workers: int
    ) -> None:
        super().__init__(config.name, local_rank, world_size, num_workers)
        self.config, self._storage = config, storage
        self.data_paths = self.get_data_paths()
        self.set_epoch()

    def get_data_paths(self, *args: Any, **kwargs: Any) -> list[Any]:
        units = STORED_TYPES[self.config.type].list_units(self.config, self._storage, self.rng, None)
        # `data_paths` is public in practice: files, or pairs.
        return [unit if isinstance(unit, str) else unit[:2] for unit in units]

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            f"group {self.dataset_name} is read through PackedDataset, which plans before it decodes"
        )

    def open(self, context: PlanContext) -> Group:
        """This worker's rows, from the position that `data_status` gives."""
        found = self.get_data_paths_per_worker()
        assert found is not None
        units, worker_id = found
        config = self.config
        group = StoredGroup(
            name=config.name,
            type_name=config.type,
            weight=config.weight,
            mandatory=config.mandatory,
            units=units,
            reader=STORED_TYPES[config.type].open_reader(config, self._storage, None),
            context=context,
            worker_id=worker_id,
        )
        status = self._get_worker_data_status(worker_id)
        if status is None:
            return group
        position = position_after(status)
        if position[0] >= len(units):
            # As the peer has it: the first unit, but the row that the status names. A whole state, by contrast,
            # is refused: it belongs to other data.
            logging.getLogger(__name__).warning(
                "group %s: data_status %r lies outside of this worker's %d units; it starts over",
                config.name, status, len(units),
            )  # fmt: skip
            position = [0, 0, 0] if config.type == "vlm_sft" else [0, *position[1:]]
        group.restore(position)
        return group


def position_after(status: Any) -> list[int]:
    """Our position [unit, block, row] of the row after the one that the documented `data_status` names.

    That is [file, row group, row] for text-to-image, [unit, row] for editing, the row for conversations.
    """
    if isinstance(status, int):
        return [status, 0, 1]
    numbers = [int(number) for number in status]
    if len(numbers) == 2:
        numbers.insert(1, 0)
    if len(numbers) != 3:
        raise ValueError(f"a position is {status!r}, expected a row, [unit, row] or [file, row group, row]")
    return [numbers[0], numbers[1], numbers[2] + 1]


def status_of(config: GroupConfig, position: list[int]) -> Any:
    """The documented `data_status` of a worker that reads at `position` next; None before its first row."""
    unit, block, row = position
    if position == [0, 0, 0]:
        return None
    return {"t2i_pretrain": [unit, block, row - 1], "unified_edit": [unit, row - 1]}.get(config.type, unit)


class SampleDataset(Protocol):
    """A user's group data set: a DistributedIterableDataset in all that is used of it here."""

    def __iter__(self) -> Iterator[Any]: ...

    def set_data_status(self, data_status: list[Any] | None) -> None: ...

    def _get_worker_data_status(self, worker_id: int) -> Any: ...

    def _set_worker_resume_data_status(self, worker_id: int, status: Any) -> None: ...


class CustomGroup:
    """The engine's Group over a user's data set that yields finished samples."""

    def __init__(self, config: GroupConfig, dataset: SampleDataset, worker_id: int) -> None:
        self.name, self.weight, self.mandatory = config.name, config.weight, config.mandatory
        self._dataset, self._worker_id = dataset, worker_id
        self._status = dataset._get_worker_data_status(worker_id)
        self._iterator: Iterator[Any] | None = None

    def draw(self, rng: StreamRandom) -> Sample:
        with lent_generators(rng):
            if self._iterator is None:
                self._iterator = iter(self._dataset)
            mapping = next(self._iterator, None)
        if mapping is None:
            raise DataError(
                f"group {self.name} ended", expected="samples for ever", fix="let __iter__ begin again"
            )
        sample = sample_from_mapping(mapping, self.name)
        entry = sample.entry
        self._status = copy.deepcopy(
            entry["data_indexes"] if entry and "data_indexes" in entry else sample.data_indexes
        )
        self._dataset._set_worker_resume_data_status(self._worker_id, self._status)
        return sample

    def mark(self) -> Any:
        return copy.deepcopy(self._status)

    def restore(self, mark: Any) -> None:
        if mark == self._status:
            return
        self._dataset.set_data_status([None] * self._worker_id + [mark])
        self._status, self._iterator = copy.deepcopy(mark), None

    def from_reference(self, reference: Any) -> Sample:
        raise ValueError(f"group {self.name} brings its samples' pixels; a reference to a row means nothing")


@contextlib.contextmanager
def lent_generators(rng: StreamRandom) -> Iterator[None]:
    """Let the global generators be the stream's for a while: a user's group draws from them, as at the peer."""
    python, numpy = random.getstate(), np.random.get_state(legacy=True)
    lent = rng.mark()
    random.setstate(lent[0])
    np.random.set_state(lent[1])
    try:
        yield
    finally:
        rng.restore((random.getstate(), np.random.get_state(legacy=True)))
        random.setstate(python)
        np.random.set_state(numpy)


def open_group(dataset: Any, config: GroupConfig, encode: Any, images: ImageLedger, worker_id: int) -> Group:
    """The engine's view of a group data set in this worker."""
    if isinstance(dataset, StoredGroupDataset):
        return dataset.open(plan_context(config, encode, images))
    return CustomGroup(config, dataset, worker_id)
