"""`PackedDataset`: the documented iterable of packs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from bagelplane.distributed_iterable import log_drop
from bagelplane.engine.drops import Drop, DropLog
from bagelplane.engine.layout import assemble
from bagelplane.engine.pack import Pack
from bagelplane.engine.packer import SpecialTokens
from bagelplane.engine.planner import PackPlanner
from bagelplane.engine.profile import AUTOMODEL
from bagelplane.engine.rng import StreamRandom, mark_from_json, mark_to_json, stream_seed
from bagelplane.engine.samples import ImageLedger, newest_bad_images
from bagelplane.errors import SnapshotError, SpecError
from bagelplane.images import configure_pillow
from bagelplane.packing.config import (
    DataConfig,
    check_mapping,
    check_place,
    group_config,
    packing_config,
)
from bagelplane.packing.groups import StoredGroupDataset, open_group, position_after, status_of
from bagelplane.packing.sequence_status import append_sample, fresh_status, status_to_tensors
from bagelplane.packing.state import (
    STATE_VERSION,
    ResumePoint,
    StateError,
    parse_state,
    planner_state,
    rng_to_json,
)
from bagelplane.sources.config import GroupConfig
from bagelplane.sources.registry import STORED_TYPES, custom_type
from bagelplane.sources.tokenizer import TextEncoder
from bagelplane.storage import open_storage
from bagelplane.stream import WorkerStream, decode_into

MAX_CONSECUTIVE_DROPS = 10_000
"""Rows of one group dropped in a row before iterating fails; the peer would spin for ever."""

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "start_of_image", "end_of_image")


@dataclass(slots=True)
class _Iteration:
    """One running iterator: its stream, and which worker it is."""

    stream: WorkerStream
    planner: PackPlanner
    rng: StreamRandom
    worker_id: int
    known_bad: dict[str, str]


class PackedDataset(IterableDataset[dict[str, Any]]):
    """Packs of one rank for ever, bit-identical to Automodel's class of this name (API.md, STREAM.md).

    Works bare, under `torch.utils.data.DataLoader` and torchdata's `StatefulDataLoader` (`batch_size=None`),
    in workers started by fork or spawn. Generators are private to each iterator; the global ones are neither
    seeded nor used, except that group types of the user's own draw from them while they are asked for a sample
    (with the stream's own state lent to them), and `pack_sequence`, when called directly, draws from them.

    Raises ValueError when constructed with weights that sum to 0, unknown group types, missing keys, or a rank,
    number of workers or budget that cannot be.
    """

    def __init__(
        self,
        data_config: DataConfig,
        tokenizer: Any,
        special_tokens: Mapping[str, int],
        local_rank: int,
        world_size: int,
        num_workers: int,
        expected_num_tokens: int = 32768,
        max_num_tokens_per_sample: int = 16384,
        max_num_tokens: int = 36864,
        prefer_buffer_before: int = 16384,
        max_buffer_size: int = 50,
        interpolate_pos: bool = False,
        use_flex: bool = False,
        data_status: Mapping[str, list[Any]] | None = None,
        dataset_info: Mapping[str, Any] | None = None,
        global_seed: int | None = None,
    ) -> None:
        if dataset_info is None:
            raise ValueError(
                "dataset_info is None; pass the mapping of group type and data set name to paths"
            )
        check_mapping("dataset_info", dataset_info, "the mapping of group type and data set name to paths")
        check_mapping("special_tokens", special_tokens, "the mapping of the four tokens' names to ids")
        check_place(local_rank, world_size, num_workers)
        missing = [name for name in _SPECIAL_TOKENS if name not in special_tokens]
        if missing:
            raise ValueError(f"special_tokens lacks {', '.join(missing)}")
        self.data_config, self.tokenizer = data_config, tokenizer
        self.local_rank, self.world_size, self.num_workers = local_rank, world_size, num_workers
        self.interpolate_pos, self.use_flex = interpolate_pos, use_flex
        for name, token in special_tokens.items():
            setattr(self, name, token)
        self._tokens = SpecialTokens(*(int(special_tokens[name]) for name in _SPECIAL_TOKENS))
        self._packing = packing_config(
            data_config,
            expected_num_tokens=expected_num_tokens,
            max_num_tokens_per_sample=max_num_tokens_per_sample,
            max_num_tokens=max_num_tokens,
            prefer_buffer_before=prefer_buffer_before,
            max_buffer_size=max_buffer_size,
            interpolate_pos=interpolate_pos,
            use_flex=use_flex,
        )
        self._global_seed = global_seed
        self._data_seed: int | None = None
        self._dataset_info = dataset_info
        self._drop_counters: Counter[str] = Counter()
        self._iteration: _Iteration | None = None
        self._resume: ResumePoint | None = None
        self._loaded_state: dict[str, Any] | None = None
        self._reported: tuple[list[Any], int] | None = None
        self._configs: list[GroupConfig] = []
        self.grouped_datasets, self.is_mandatory, self.grouped_weights = self.build_datasets(
            data_config.grouped_datasets, data_status
        )
        if sum(self.grouped_weights) <= 0:
            raise ValueError(f"the weights of {', '.join(data_config.grouped_datasets)} sum to 0")

    def build_datasets(
        self, datasets_metainfo: Mapping[str, Mapping[str, Any]], data_status: Mapping[str, list[Any]] | None
    ) -> tuple[list[Any], list[bool], list[float]]:
        """`(datasets, is_mandatory, weights)` in the mapping's order; the mapping is not modified."""
        storage, configs, datasets = open_storage(), [], []
        for name, options in datasets_metainfo.items():
            config = group_config(name, options, self._dataset_info, storage)
            place = {
                "local_rank": self.local_rank,
                "world_size": self.world_size,
                "num_workers": self.num_workers,
            }
            dataset: Any
            if name in STORED_TYPES:
                dataset = StoredGroupDataset(config, storage, **place)
            else:
                dataset = self._custom_dataset(name, config, place)
            if data_status is not None and options.get("resume_data_status", True):
                dataset.set_data_status(data_status.get(name))
            configs.append(config)
            datasets.append(dataset)
        self._configs = configs
        return datasets, [config.mandatory for config in configs], [config.weight for config in configs]

    def _custom_dataset(self, name: str, config: GroupConfig, place: dict[str, int]) -> Any:
        try:
            group_class = custom_type(name)
        except SpecError as error:
            raise ValueError(str(error)) from None
        return group_class(name, tokenizer=self.tokenizer, **place, **config.options)

    def set_epoch(self, seed: int) -> None:
        """Remember `seed` as data seed, reshuffle and reshard every group."""
        self._data_seed = seed
        for dataset in self.grouped_datasets:
            dataset.set_epoch(seed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Packs for ever: from the beginning, or once from the state that was loaded."""
        resume, self._resume = self._resume, None
        return self._packs(resume)

    def _packs(self, resume: ResumePoint | None) -> Iterator[dict[str, Any]]:
        iteration = self._open_iteration(resume)
        while True:
            pack, pixels = iteration.stream.next_pack(_allocate)
            self._iteration, self._reported, self._loaded_state = iteration, None, None
            yield _to_torch(assemble(pack, pixels))

    def _open_iteration(self, resume: ResumePoint | None) -> _Iteration:
        configure_pillow()
        worker = get_worker_info()
        worker_id = 0 if worker is None else int(worker.id)
        known_bad = dict(resume.known_bad) if resume else {}
        has_custom = any(not isinstance(dataset, StoredGroupDataset) for dataset in self.grouped_datasets)
        ledger = ImageLedger(known_bad, check=decode_into if has_custom else None)
        rng = StreamRandom(
            stream_seed(
                global_seed=self._global_seed,
                data_seed=self._data_seed,
                world_size=self.world_size,
                rank=self.local_rank,
                num_workers=self.num_workers,
                worker_id=worker_id,
            )
        )
        encode = TextEncoder(self.tokenizer)
        groups = [
            open_group(dataset, config, encode, ledger, worker_id)
            for dataset, config in zip(self.grouped_datasets, self._configs, strict=True)
        ]
        planner = PackPlanner(
            config=self._packing,
            groups=groups,
            rng=rng,
            images=ledger,
            profile=AUTOMODEL,
            max_consecutive_drops=MAX_CONSECUTIVE_DROPS,
        )
        stream = WorkerStream(planner=planner, ledger=ledger, tokens=self._tokens, drops=_DropCounter(self))
        iteration = _Iteration(stream, planner, rng, worker_id, known_bad)
        if resume is not None:
            self._continue(iteration, resume)
        return iteration

    def _continue(self, iteration: _Iteration, resume: ResumePoint) -> None:
        expected = self._worker_json(iteration.worker_id)
        if resume.worker is not None and resume.worker != expected:
            raise StateError(
                "a state of another place among ranks and workers",
                got=str(dict(resume.worker)),
                expected=str(expected),
                fix="resume on the same ranks and workers",
            )
        start = iteration.planner.mark()
        positions = [
            position if state is None else self._position(number, state, iteration.worker_id, position)
            for number, (state, position) in enumerate(zip(resume.groups, start.groups, strict=True))
        ]
        rng = resume.rng or mark_to_json(start.rng)
        state = planner_state(resume, [config.name for config in self._configs], positions, rng)
        try:
            iteration.stream.load_state(state)
        except SnapshotError as error:
            raise StateError.of(error) from error

    def _position(self, number: int, state: Mapping[str, Any], worker_id: int, default: Any) -> Any:
        if state.get("position") is not None:
            return state["position"]
        statuses = state.get("data_status") or []
        status = statuses[worker_id] if worker_id < len(statuses) else None
        if status is None:
            return default
        return position_after(status) if self._is_stored(number) else status

    def state_dict(self) -> dict[str, Any]:
        """All that the pack after the last yielded one needs, in JSON types, a few KB.

        Only samples whose pixels cannot be read again (of users' own group types, or taken over from a state of
        Automodel's) are kept whole while they are buffered.
        """
        if self._iteration is None:
            state = self._loaded_state or self._initial_state()
        else:
            state = self._running_state(self._iteration)
        if self._reported is not None:
            state = {**state, "buffer": self._reported[0], "yielded_batches": self._reported[1]}
        return state

    def _initial_state(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "yielded_batches": 0,
            "buffer": [],
            "sequence_status": fresh_status(),
            "rng": {},
            "grouped_dataset_states": self._grouped_dataset_state_dicts(),
        }

    def _running_state(self, iteration: _Iteration) -> dict[str, Any]:
        planned = iteration.stream.state()
        return {
            "version": STATE_VERSION,
            "yielded_batches": planned["packs"],
            "buffer": planned["buffer"],
            "sequence_status": fresh_status(),
            "rng": planned["rng"],
            "grouped_dataset_states": [
                {"name": group["name"], "position": group["position"]}
                | {"data_status": [None] * iteration.worker_id + [self._status(number, group["position"])]}
                for number, group in enumerate(planned["groups"])
            ],
            "known_bad": newest_bad_images(iteration.known_bad),
            "worker": self._worker_json(iteration.worker_id),
        }

    def _status(self, number: int, position: Any) -> Any:
        return status_of(self._configs[number], position) if self._is_stored(number) else position

    def _is_stored(self, number: int) -> bool:
        # By the data set at hand: users also put one of their own in the place of one of ours.
        return isinstance(self.grouped_datasets[number], StoredGroupDataset)

    def _worker_json(self, worker_id: int) -> dict[str, int]:
        place = {"rank": self.local_rank, "world_size": self.world_size, "num_workers": self.num_workers}
        return {**place, "worker_id": worker_id}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state` at the next `__iter__`; None changes nothing. Raises ValueError.

        Reads states of this class and of Automodel's, as saved by `torch.save` or by way of JSON.
        """
        if state is None:
            return
        self._resume = parse_state(state, [config.name for config in self._configs])
        self._loaded_state, self._iteration, self._reported = dict(state), None, None

    def _rng_state_dict(self) -> dict[str, Any]:
        """The generators of the running iterator; {} before the first pack."""
        return {} if self._iteration is None else mark_to_json(self._iteration.rng.mark())

    def _load_rng_state_dict(self, state: Mapping[str, Any] | None) -> None:
        rng = rng_to_json(state)
        if rng is None:
            return
        if self._iteration is not None:
            self._iteration.rng.restore(mark_from_json(rng))
            return
        self.load_state_dict({**self.state_dict(), "rng": rng})

    def _grouped_dataset_state_dicts(self) -> list[dict[str, Any]]:
        if self._iteration is not None:
            states: list[dict[str, Any]] = self._running_state(self._iteration)["grouped_dataset_states"]
            return states
        return [dataset.state_dict() for dataset in self.grouped_datasets]

    def _load_grouped_dataset_state_dicts(self, states: Sequence[Mapping[str, Any]] | None) -> None:
        """Positions for the next `__iter__`; None changes nothing."""
        for dataset, state in zip(self.grouped_datasets, states or [], strict=False):
            dataset.load_state_dict(state)

    def _set_resume_point(self, buffer: list[Any], yielded_batches: int) -> None:
        """What `state_dict` reports from then on, until the next pack."""
        self._reported = (list(buffer), yielded_batches)

    def set_sequence_status(self) -> dict[str, Any]:
        """A fresh open pack: `curr` 0 and the documented empty lists."""
        return fresh_status()

    def pack_sequence(self, sample: Mapping[str, Any], sequence_status: dict[str, Any]) -> dict[str, Any]:
        """Add one sample (float tensors [3, H, W]) to an open pack and return it; `sample` is not modified.

        Conditioning and timesteps are drawn from the process's global generators. Raises ValueError.
        """
        return append_sample(sample, sequence_status, self._packing, self._tokens)

    def to_tensor(self, sequence_status: dict[str, Any]) -> dict[str, Any]:
        """The yielded mapping without `batch_data_indexes`; the status is not modified."""
        return status_to_tensors(sequence_status, self._packing)

    def _log_drop(self, reason: str, message: str, *args: Any, every: int = 100) -> None:
        log_drop(self, self._drop_counters, type(self).__name__, reason, message, args, every)

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes started by spawn get no open files: what was reached goes along as a state.
        state = dict(self.__dict__)
        if self._iteration is not None:
            state["_loaded_state"], state["_iteration"] = self.state_dict(), None
        return state


class _DropCounter(DropLog):
    """Counts drops where the documented classes do: rows at their group, packing's own at the dataset."""

    def __init__(self, dataset: PackedDataset) -> None:
        super().__init__(logging.getLogger(__name__))
        self._dataset = dataset

    def record(self, drop: Drop) -> None:
        self.counts[drop.group, drop.reason] += 1
        owners = {
            config.name: group
            for config, group in zip(self._dataset._configs, self._dataset.grouped_datasets, strict=True)
        }
        packing = drop.reason.startswith("overlength") or drop.reason == "buffer_full"
        (self._dataset if packing else owners[drop.group])._log_drop(drop.reason, "%s", drop.message)


def _allocate(pack: Pack) -> list[np.ndarray]:
    return [np.empty((height, width, 3), np.uint8) for height, width in pack.image_shapes]


def _to_torch(batch: dict[str, Any]) -> dict[str, Any]:
    def convert(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value)
        return value

    return {
        name: [convert(mask) for mask in value] if name == "nested_attention_masks" else convert(value)
        for name, value in batch.items()
    }
