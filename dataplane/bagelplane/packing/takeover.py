"""A run of Automodel continued here: the state of each rank of ours out of its checkpoint files.

The states of its `PackedDataset` say the generators, the position in each group, and the buffered samples with their
pixels. The resource says the rest, and has to be that run's: what can be checked of it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from bagelplane.engine.pixels import normalised_chw
from bagelplane.engine.raw_samples import sample_from_json
from bagelplane.engine.rng import StreamRandom, follows, mark_from_json, mark_to_json
from bagelplane.engine.samples import PlannedImage, Sample
from bagelplane.errors import SnapshotError, SpecError
from bagelplane.images import ImageError, resize_into
from bagelplane.packing.checkpoint import RankCheckpoint, read_checkpoint
from bagelplane.packing.groups import position_after
from bagelplane.packing.state import StateError, parse_state, planner_state
from bagelplane.settings import StreamSettings, open_group
from bagelplane.sidecar.snapshot_format import MAX_OBJECT_BYTES, StreamTopology
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.sources.group import StoredGroup
from bagelplane.spec import BagelDataset
from bagelplane.stream import STATE_VERSION, open_rank_stream
from bagelplane.topology import Topology

_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)")
_STATUS_NUMBERS = {"t2i_pretrain": 3, "unified_edit": 2, "vlm_sft": 1}
_BEGINNING = [0, 0, 0]
_MOST_BLOCKS = 1_000_000
"""Of 624 numbers, that a generator may have made; a pack takes a few hundred numbers."""
_MOST_DRAWS = 5_000
"""Of a buffered row: ways to draw it that are tried before its pixels are kept instead."""


def states_of_ranks(
    dataset: BagelDataset, paths: Sequence[Path], *, check_seeds: bool = True
) -> tuple[int, list[dict[str, Any]]]:
    """The step at which all ranks stand, and the state of each, from one file a rank.

    Ranks are told from the names of the files where all have a number behind `rank`, else from their order. Raises
    SpecError where the resource is of another kind of run, SnapshotError where a file does not fit it.
    """
    _check_resource(dataset)
    files = _in_order(paths)
    settings = StreamSettings.from_resource(dataset)
    states = []
    for rank, path in enumerate(files):
        topology = Topology(rank, len(files), dataset.spec.sharding.workers_per_rank)
        states.append(_RankReader(dataset, settings, topology, check_seeds).state(read_checkpoint(path)))
    steps = [int(state["step"]) for state in states]
    if len(set(steps)) > 1:
        raise SpecError(
            "the files are of different steps",
            got=", ".join(f"{path.name}: {step}" for path, step in zip(files, steps, strict=True)),
            expected="one checkpoint of all ranks",
            fix="give the files of one and the same checkpoint",
        )
    return steps[0], states


def write_snapshot(
    store: SnapshotStore, dataset: BagelDataset, step: int, states: Sequence[Mapping[str, Any]]
) -> str:
    """Write the states of all ranks as a snapshot; its URI. SnapshotError unless the store is empty."""
    check_empty(store)
    for rank, state in enumerate(states):
        size = len(json.dumps(state))
        if size > MAX_OBJECT_BYTES:
            raise SnapshotError(
                f"the state of rank {rank} is too large for a snapshot",
                got=f"{size / 1e6:,.0f} MB, nearly all of it pixels of buffered samples",
                expected=f"at most {MAX_OBJECT_BYTES / 1e6:,.0f} MB",
                fix="check that data and resource are that run's, so that buffered rows can be found again; or use "
                "a checkpoint with fewer buffered samples",
            )
    topology = StreamTopology(len(states), dataset.spec.sharding.workers_per_rank)
    for rank, state in enumerate(states):
        store.write_rank(step, rank, topology, state)
    written = store.load(step, topology)
    assert written is not None
    return written.uri


def check_empty(store: SnapshotStore) -> None:
    """SnapshotError where a snapshot of what was taken over would not be all of the history."""
    found = store.entries()
    if found:
        raise SnapshotError(
            f"there are snapshots already below {store.uri}",
            got=f"{len(found)}, the newest at {found[-1].uri}",
            expected="an empty place: they would be another history than the one taken over",
            fix="give the resource a snapshots.uri of its own",
        )
    register = store.runs.look()
    register.check_newest()
    if (run := register.newest) is not None:
        raise SnapshotError(
            f"a run has begun below {store.uri} already",
            got=str(run),
            expected="an empty place: that run would not go on from here",
            fix="give the resource a snapshots.uri of its own, and import before the first sidecar starts",
        )


def _check_resource(dataset: BagelDataset) -> None:
    spec = dataset.spec
    if spec.profile != "Automodel" or spec.sharding.mode != "Bagel":
        raise SpecError(
            "this resource does not continue a run of Automodel",
            got=f"profile {spec.profile}, sharding {spec.sharding.mode}",
            expected="profile Automodel, sharding Bagel",
            fix="write the resource of that very run; another profile or sharding is another stream of packs",
        )
    types = [group.type for group in spec.groups]
    if len(set(types)) < len(types):
        raise SpecError(
            "this resource has two groups of one type, which no run of Automodel has",
            got=", ".join(types),
            fix="write the resource of that very run",
        )


def _in_order(paths: Sequence[Path]) -> list[Path]:
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise SpecError(
            "a checkpoint file is missing",
            got=f"no file {missing[0]}",
            fix="give the data loader's file of each rank, and the resource last",
        )
    numbers = [match and int(match[1]) for match in (_RANK_IN_NAME.search(path.name) for path in paths)]
    if None in numbers:
        return list(paths)
    by_rank = dict(zip(numbers, paths, strict=True))
    if set(by_rank) != set(range(len(paths))):
        raise SpecError(
            "the files are not one of each rank",
            got=f"rank {', '.join(map(str, numbers))}",
            expected=f"one file each of ranks 0 to {len(paths) - 1}",
            fix="give the files of all ranks of one checkpoint",
        )
    return [by_rank[rank] for rank in range(len(paths))]


class _RankReader:
    """Makes one rank's state of its checkpoint."""

    def __init__(
        self, dataset: BagelDataset, settings: StreamSettings, topology: Topology, check_seeds: bool
    ) -> None:
        self._dataset, self._settings, self._topology = dataset, settings, topology
        self._check_seeds = check_seeds
        self._types = [group.type for group in dataset.spec.groups]
        self._names = [group.name for group in dataset.spec.groups]

    def state(self, found: RankCheckpoint) -> dict[str, Any]:
        topology = self._topology
        if found.num_workers != topology.num_workers:
            raise SnapshotError(
                f"{found.path} is of another number of workers",
                got=f"{found.num_workers} workers",
                expected=f"{topology.num_workers} (sharding.workersPerRank)",
                fix=f"set sharding.workersPerRank to {found.num_workers}",
            )
        workers = [self._worker(state, number, found.path) for number, state in enumerate(found.workers)]
        packs = [int(worker["packs"]) for worker in workers]
        step = sum(packs)
        if packs != [len(range(number, step, len(packs))) for number in range(len(packs))] or (
            step % len(packs) != found.next_worker
        ):
            raise SnapshotError(
                f"the workers of {found.path} did not take turns from the first one on",
                got=f"{', '.join(map(str, packs))} packs, worker {found.next_worker} is next",
                expected="packs taken in turn, worker 0 first",
                fix="use a checkpoint of a loader that was not restarted without its own state",
            )
        state = {
            "version": STATE_VERSION,
            "step": step,
            "topology": {
                "rank": topology.rank,
                "world_size": topology.world_size,
                "num_workers": topology.num_workers,
            },
            "workers": workers,
            "known_bad": {},
            "drops": {},
        }
        with closing(open_rank_stream(self._dataset, topology, state=state, decode_threads=1)) as stream:
            stream.skip_to(step + found.steps_since)
            return stream.state()

    def _worker(self, state: Mapping[str, Any], number: int, path: Path) -> dict[str, Any]:
        resume = parse_state(state, self._types)
        if resume.rng is None:
            raise SnapshotError(
                f"the state in {path} has no generators",
                expected="a state taken after a pack",
                fix="use a later checkpoint; a run that has not begun needs none",
            )
        if self._check_seeds:
            self._check_generators(resume.rng, resume.yielded_batches, number, path)
        positions = [
            self._position(place, group, number, path)
            for place, group in zip(self._types, resume.groups, strict=False)
        ]
        if len(resume.groups) != len(self._types):
            raise SnapshotError(
                f"the state in {path} is of other groups",
                got=f"{len(resume.groups)} groups",
                expected=", ".join(self._types),
                fix="list the groups in the resource as that run's configuration does",
            )
        planned = planner_state(resume, self._names, positions, resume.rng)
        return {**planned, "buffer": [self._buffered(entry, number) for entry in resume.buffer]}

    def _position(self, kind: str, group: Mapping[str, Any] | None, worker: int, path: Path) -> Any:
        """Of the group's row to come."""
        group = group or {}
        if group.get("position") is not None:
            return group["position"]
        statuses = group.get("data_status") or []
        status = statuses[worker] if worker < len(statuses) else None
        if status is None:
            return _BEGINNING
        if _STATUS_NUMBERS.get(kind) != (1 if isinstance(status, int) else len(status)):
            raise SnapshotError(
                f"the state in {path} has its groups in another order",
                got=f"the position {status} where a group of type {kind} is",
                expected=f"{_STATUS_NUMBERS.get(kind)} numbers",
                fix="list the groups in the resource as that run's configuration does",
            )
        return position_after(status)

    def _check_generators(self, rng: dict[str, Any], packs: int, worker: int, path: Path) -> None:
        """The generators have to be what this rank's and worker's seed leads to."""
        seed = self._settings.seed(self._topology, worker)
        (_, python, _), numpy = StreamRandom(seed).mark()
        (_, found_python, _), found_numpy = mark_from_json(mark_to_json(mark_from_json(rng)))
        pairs = ((python[:-1], found_python[:-1]), (numpy[1], found_numpy[1]))
        limit = min(_MOST_BLOCKS, 1_000 + 20 * packs)
        if all(follows(begin, np.array(words, dtype=np.uint32), limit) for begin, words in pairs):
            return
        place = f"rank {self._topology.rank} of {self._topology.world_size}, worker {worker}"
        raise SnapshotError(
            f"the generators in {path} are not those of {place}",
            got="numbers that the seed does not lead to",
            expected=f"the seed {seed}, of globalSeed, dataSeed, world size, rank and workers",
            fix="give one file of each rank, in the order of the ranks, and that run's seeds and workersPerRank; "
            "--no-seed-check if the run was seeded otherwise",
        )

    def _buffered(self, entry: dict[str, Any], worker: int) -> dict[str, Any]:
        """A buffered sample as a row to be read again, where that gives the same to the bit; else as it is."""
        if "sample" not in entry:
            return entry
        wanted, number = sample_from_json(entry["sample"]), int(entry["group"])
        config = self._settings.groups[number]
        group = open_group(self._settings, config, self._topology, worker, self._settings.open_ledger())
        assert isinstance(group, StoredGroup)
        status = (wanted.entry or {}).get("data_indexes")
        *begin, after = position_after(status)
        try:
            for sample in group.samples_of([*begin, after - 1], _MOST_DRAWS):
                if _is_same(sample, wanted):
                    return {"group": number, "row": sample.reference}
        except ValueError as error:
            raise StateError(
                "a buffered sample is of a row that this resource has not",
                got=str(error),
                fix="use the data and the resource of that very run",
            ) from None
        return entry


def _is_same(sample: Sample, wanted: Sample) -> bool:
    """Whether two samples are packed alike, to the bit."""
    if (sample.items, sample.num_tokens) != (wanted.items, wanted.num_tokens):
        return False
    if [list(ids) for ids in sample.texts] != [list(ids) for ids in wanted.texts]:
        return False
    pairs = list(zip(sample.images, wanted.images, strict=False))
    if len(sample.images) != len(wanted.images) or any(_size(one) != _size(other) for one, other in pairs):
        return False
    return all(np.array_equal(found, other.source.pixels) for found, other in _pixels(pairs))


def _size(image: PlannedImage) -> tuple[int, int]:
    return image.height, image.width


def _pixels(pairs: Iterable[tuple[PlannedImage, PlannedImage]]) -> Iterator[tuple[np.ndarray, PlannedImage]]:
    """Each first image's floats as the model gets them; nothing equal to any for one that does not decode."""
    for image, other in pairs:
        pixels = np.empty((image.height, image.width, 3), np.uint8)
        floats = np.empty((3, image.height, image.width), np.float32)
        try:
            resize_into(image.source.decode(), pixels)
        except ImageError:
            floats[...] = np.nan
        else:
            normalised_chw(floats, pixels, image.mean, image.std)
        yield floats, other
