"""The documented base class of group data sets: shuffle and shard paths, remember positions, count drops.

A drop-in replacement of `nemo_automodel.components.datasets.multimodal.distributed_iterable`: same name,
parameters, order and defaults (API.md). People subclass it for groups of their own.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from bagelplane.engine.sharding import DEFAULT_EPOCH_SEED, shard_to_rank, shard_to_worker


def log_drop(
    owner: object, counters: Counter[str], name: str, reason: str, message: str, args: tuple[Any, ...], every: int,
    exc_info: bool = False,
) -> None:  # fmt: skip
    """Count a drop; log the first three and every `every`-th through the logger of the owner's module."""
    counters[reason] += 1
    count = counters[reason]
    if count <= 3 or count % every == 0:
        logger = logging.getLogger(type(owner).__module__)
        text = message % args if args else message
        logger.warning("%s drop[%s]=%d: %s", name, reason, count, text, exc_info=exc_info)


class DistributedIterableDataset(IterableDataset[Any]):
    """Paths of one group, sharded to ranks and workers. `rng` is private and only shuffles paths.

    Public in practice: `data_paths` (all, None until a subclass sets them), `data_paths_per_rank`,
    `num_files_per_rank`, `data_status` (a position a worker, or None), `rng`.
    """

    def __init__(
        self, dataset_name: str, local_rank: int = 0, world_size: int = 1, num_workers: int = 8
    ) -> None:
        self.dataset_name = dataset_name
        self.local_rank, self.world_size, self.num_workers = local_rank, world_size, num_workers
        self.rng = random.Random()
        self.data_paths: list[Any] | None = None
        self.data_paths_per_rank: list[Any] = []
        self.num_files_per_rank = 0
        self.data_status: list[Any] | None = None
        self._resume_data_status: list[Any] | None = None
        self._drop_counters: Counter[str] = Counter()

    def get_data_paths(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The group's paths (or other units). For subclasses."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Samples for ever, as `PackedDataset.pack_sequence` takes them. For subclasses."""
        raise NotImplementedError

    def set_epoch(self, seed: int = DEFAULT_EPOCH_SEED) -> None:
        """Sort, shuffle with `seed`, take this rank's contiguous block; nothing while `data_paths` is None.

        Raises ValueError when there are no paths, or fewer than ranks.
        """
        if self.data_paths is None:
            return
        block, unread = shard_to_rank(
            self.data_paths,
            rng=self.rng,
            epoch_seed=seed,
            rank=self.local_rank,
            world_size=self.world_size,
            group=self.dataset_name,
        )
        self._warn_of_tail(unread, f"{self.world_size} ranks")
        self.data_paths_per_rank, self.num_files_per_rank = block, len(block)

    def get_data_paths_per_worker(self) -> tuple[list[Any], int] | None:
        """This DataLoader worker's paths, reversed, and its id; in the process itself the rank's, in order, and 0.

        None while `data_paths` is None. Raises ValueError when there are fewer paths than workers.
        """
        if self.data_paths is None:
            return None
        worker = get_worker_info()
        if worker is None:
            return self.data_paths_per_rank, 0
        paths, unread = shard_to_worker(
            self.data_paths_per_rank,
            num_workers=worker.num_workers,
            worker_id=worker.id,
            group=self.dataset_name,
        )
        self._warn_of_tail(unread, f"{worker.num_workers} workers of rank {self.local_rank}")
        return paths, int(worker.id)

    def _warn_of_tail(self, unread: int, consumers: str) -> None:
        if unread:
            logging.getLogger(type(self).__module__).warning(
                "group %s: %d paths are left over after an even split over %s and are not read",
                self.dataset_name, unread, consumers,
            )  # fmt: skip

    def set_data_status(self, data_status: list[Any] | None) -> None:
        """Start from these positions, one entry a worker; None starts from the beginning. Copied."""
        self.data_status = copy.deepcopy(data_status)
        self._resume_data_status = copy.deepcopy(data_status)

    def state_dict(self) -> dict[str, Any]:
        return {"data_status": copy.deepcopy(self._resume_data_status)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Start from the positions of `state`; None or an empty one clears them."""
        self.set_data_status(state.get("data_status") if state else None)

    def _get_worker_data_status(self, worker_id: int) -> Any:
        """Position that a worker starts after; None: from the beginning."""
        if self.data_status is None or worker_id >= len(self.data_status):
            return None
        return self.data_status[worker_id]

    def _set_worker_resume_data_status(self, worker_id: int, status: Any) -> None:
        """Position that `state_dict` reports for a worker. The list grows to its id."""
        if self._resume_data_status is None:
            self._resume_data_status = []
        while len(self._resume_data_status) <= worker_id:
            self._resume_data_status.append(None)
        self._resume_data_status[worker_id] = copy.deepcopy(status)

    def _log_drop(
        self, reason: str, message: str, *args: Any, every: int = 100, exc_info: bool = False
    ) -> None:
        exc_info = exc_info and sys.exc_info()[0] is not None
        log_drop(self, self._drop_counters, self.dataset_name, reason, message, args, every, exc_info)
