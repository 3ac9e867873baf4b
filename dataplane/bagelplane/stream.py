"""One rank's stream of packs: its logical workers' planners, and the pixels of what they planned.

A `WorkerStream` plans ahead in the calling thread while decode threads fill the pack before. What an image does
that opens but does not decode is settled here, before a pack is handed over: in the `Automodel` profile every
image opened for the plan is decoded; when one fails the planner goes back to where the pack began, with that
image known as bad, and plans again. In profile `Strict` the images that a pack emits are decoded; when one fails,
its sample leaves the pack, and the plan stands (STREAM, Plan first).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from bagelplane.costs import Costs
from bagelplane.elastic import ElasticStream
from bagelplane.engine.departures import DepartureCount, NameOf, without_bad_images
from bagelplane.engine.drops import Drop, DropLog, DropReason
from bagelplane.engine.elastic import ElasticPlace, check_world_size
from bagelplane.engine.layout import build_pack
from bagelplane.engine.pack import Pack
from bagelplane.engine.packer import SpecialTokens
from bagelplane.engine.planner import Mark, PackPlan, PackPlanner
from bagelplane.engine.profile import PROFILES, Profile
from bagelplane.engine.raw_samples import RawPixels
from bagelplane.engine.rng import StreamRandom
from bagelplane.engine.samples import ImageLedger, PlannedImage, known_bad_part
from bagelplane.engine.sharding import shard_to_rank, shard_to_worker, share_of_stream
from bagelplane.errors import BagelplaneError, SnapshotError
from bagelplane.images import ImageError, TruncatedImageError, configure_pillow, resize_into
from bagelplane.settings import StreamSettings, dataset_config, open_group, stored_type
from bagelplane.sources.index import DatasetIndex
from bagelplane.sources.indexed import IndexedImage
from bagelplane.sources.registry import STORED_TYPES
from bagelplane.sources.tokenizer import load_tokenizer
from bagelplane.spec import BagelDataset, Dataset
from bagelplane.spec_memory import check_ring
from bagelplane.storage import Storage
from bagelplane.topology import Topology

log = logging.getLogger(__name__)

Allocate = Callable[[Pack], Sequence[np.ndarray]]
OnBadImages = Callable[[Mapping[str, str]], None]

STATE_VERSION = 1


@dataclass(slots=True)
class _Prepared:
    plan: PackPlan
    pack: Pack
    images: list[PlannedImage]

    @property
    def emitted(self) -> dict[str, Any]:
        """The images in the pack, by key."""
        return {image.source.key: image.source for image in self.images}


class WorkerStream:
    """Packs of one logical worker. Owned by one thread; `pool` may be shared with other workers of the rank."""

    def __init__(
        self,
        *,
        planner: PackPlanner,
        ledger: ImageLedger,
        tokens: SpecialTokens,
        drops: DropLog,
        pool: ThreadPoolExecutor | None = None,
        on_bad_images: OnBadImages | None = None,
        costs: Costs | None = None,
    ) -> None:
        self._costs = costs or Costs()
        self._planner, self._ledger, self._tokens = planner, ledger, tokens
        self._drops, self._pool, self._on_bad_images = drops, pool, on_bad_images
        self._ahead: _Prepared | None = None
        self._mark: Mark = planner.mark()
        self._pending: PackPlan | None = None
        self.is_pure = planner.profile.plan_is_pure
        self._departures = DepartureCount(planner.max_consecutive_drops)

    def next_pack(
        self, allocate: Allocate, *, plan_ahead: Callable[[], None] | None = None
    ) -> tuple[Pack, list[np.ndarray]]:
        """The next pack and its pixels: the arrays that `allocate` gave for its `image_shapes`, filled.

        (Samples that bring pixels have them in the list instead, float32 [3, h, w].)

        `allocate` is called once more for each time that a bad image voids the plan, or changes the pack. Raises
        DataError when a group gives nothing but drops. `pack.step` counts this worker's packs; `pack.state` is
        left empty. `plan_ahead` is what this thread does while others decode (default: `self.plan_ahead`).
        """
        verified: set[str] = set()
        while True:
            prepared = self._ahead or self._lay_out(self._planner.plan())
            self._ahead = None
            self._pending = prepared.plan
            told = self._ledger.take_told()
            if told and self._on_bad_images is not None:
                self._on_bad_images(told)  # an index may be gone when somebody plans this again
            pixels = list(allocate(prepared.pack))
            bad = self._decode(prepared, pixels, verified, plan_ahead or self.plan_ahead)
            if bad and self.is_pure:
                prepared, pixels = self._without_bad(prepared, pixels, bad, allocate)
            elif bad:
                self._note_bad(bad)
                self._ahead = None
                self._planner.restore(prepared.plan.before)
                continue
            self._departures.count(prepared.plan, self._planner.name_of)
            self._mark = prepared.plan.after
            for drop in prepared.plan.drops:
                self._drops.record(drop)
            return prepared.pack, pixels

    def plan_pack(self, *, verify: bool) -> PackPlan:
        """Plan one pack without making it, and go past it. `verify` decodes the images it rests on.

        (In profile Strict it rests on none; those in it are decoded, and the plan told is what is left of it.)
        """
        verified: set[str] = set()
        while True:
            plan = self._ahead.plan if self._ahead else self._planner.plan()
            self._ahead = None
            sources = self._lay_out(plan).emitted if verify and self.is_pure else plan.opened
            targets: dict[str, list[np.ndarray]] = (
                {key: [] for key in sources if key not in verified} if verify else {}
            )
            bad = self._run(targets, sources, verified)
            if bad and not self.is_pure:
                self._note_bad(bad)
                self._planner.restore(plan.before)
                continue
            if bad:
                plan = self._left_of(plan, bad)
            self._mark = plan.after
            for drop in plan.drops:
                self._drops.count(drop)
            return plan

    def skip_pack(self, *, verify: bool) -> None:
        """Go past one pack that nobody asks for: a plan that rests on no image needs none."""
        self.plan_pack(verify=verify and not self.is_pure)

    def state(self) -> dict[str, Any]:
        """JSON-able state after the last pack handed over."""
        return self._planner.state_to_json(self._mark)

    @property
    def mark(self) -> Mark:
        """All that determines the packs after the last one handed over."""
        return self._mark

    def planned(self) -> tuple[dict[str, Any], list[Drop]]:
        """Of the pack that `next_pack` is making: the JSON-able state after it, and what it drops."""
        assert self._pending is not None
        return self._planner.state_to_json(self._pending.after), self._pending.drops

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue after the pack that `state` was taken after. Raises SnapshotError."""
        self._ahead = None
        self._planner.state_from_json(state)
        self._mark = self._planner.mark()

    def _lay_out(self, plan: PackPlan) -> _Prepared:
        pack, images = build_pack(
            plan.pack.placed,
            step=plan.before.packs,
            length=plan.pack.length,
            data_indexes=plan.pack.data_indexes(),
            config=self._planner.config,
            tokens=self._tokens,
            all_keys=self._planner.profile.always_all_keys,
        )
        pack.plan = plan
        prepared = _Prepared(plan, pack, images)
        rests_on = {} if self.is_pure else plan.opened
        for source in {**rests_on, **prepared.emitted}.values():
            if isinstance(source, IndexedImage) and source.comes_with_rows:
                source.fetch()  # by this thread, while others decode the pack before
        return prepared

    def _decode(
        self,
        prepared: _Prepared,
        pixels: list[np.ndarray],
        verified: set[str],
        plan_ahead: Callable[[], None],
    ) -> dict[str, ImageError]:
        """Fill `pixels`, decode what else the plan rests on, plan the next pack meanwhile; failures by key."""
        targets: dict[str, list[np.ndarray]] = {}
        rests_on = {} if self.is_pure else prepared.plan.opened
        sources = {**rests_on, **prepared.emitted}
        for number, image in enumerate(prepared.images):
            if isinstance(image.source, RawPixels):
                pixels[number] = image.source.pixels
                continue
            targets.setdefault(image.source.key, []).append(pixels[number])
        for key in rests_on:
            if key not in verified:
                targets.setdefault(key, [])
        return self._run(targets, sources, verified, plan_ahead)

    def _without_bad(
        self,
        prepared: _Prepared,
        pixels: list[np.ndarray],
        bad: Mapping[str, ImageError],
        allocate: Allocate,
    ) -> tuple[_Prepared, list[np.ndarray]]:
        """The pack without the samples of bad images, and the pixels of the others in their new places."""
        # Copies: the new places may lie where the old ones do.
        decoded = {
            _pixel_key(image): array.copy() for image, array in zip(prepared.images, pixels, strict=True)
        }
        left = self._lay_out(self._left_of(prepared.plan, bad))
        self._pending = left.plan
        places = list(allocate(left.pack))
        for number, image in enumerate(left.images):
            if isinstance(image.source, RawPixels):
                places[number] = image.source.pixels
            else:
                places[number][...] = decoded[_pixel_key(image)]
        return left, places

    def _left_of(self, plan: PackPlan, bad: Mapping[str, ImageError]) -> PackPlan:
        return without_bad_images(plan, {key: _reason_of(bad[key]) for key in bad}, self._planner.name_of)

    def _run(
        self,
        targets: Mapping[str, list[np.ndarray]],
        sources: Mapping[str, Any],
        verified: set[str],
        plan_ahead: Callable[[], None] | None = None,
    ) -> dict[str, ImageError]:
        bad: dict[str, ImageError] = {}

        def settle(key: str, failure: ImageError | None) -> None:
            if failure is None:
                verified.add(key)
            else:
                bad[key] = failure

        if self._pool is None:
            for key, arrays in targets.items():
                settle(key, self._decode_one(sources[key], arrays))
            return bad
        futures: dict[str, Future[ImageError | None]] = {
            key: self._pool.submit(self._decode_one, sources[key], arrays) for key, arrays in targets.items()
        }
        if plan_ahead is not None:
            plan_ahead()
        for key, future in futures.items():
            settle(key, future.result())
        return bad

    def _decode_one(self, source: Any, targets: Sequence[np.ndarray]) -> ImageError | None:
        begun = perf_counter()
        try:
            return decode_failure(source, targets)
        finally:
            self._costs.decoded(perf_counter() - begun)

    def plan_ahead(self) -> None:
        """Plan the next pack now, unless that is done already."""
        if self._ahead is not None:
            return
        try:
            self._ahead = self._lay_out(self._planner.plan())
        except BagelplaneError:
            # The pack at hand is good. Planning again with the next call raises this where it belongs.
            self._ahead = None

    def _note_bad(self, bad: Mapping[str, ImageError]) -> None:
        causes = {key: cause_of(failure) for key, failure in bad.items()}
        for key, cause in causes.items():
            log.warning(
                "image %s opens but does not decode (%s); planning this pack again without it", key, cause
            )
        self._ledger.known_bad.update(causes)
        if self._on_bad_images is not None:
            self._on_bad_images(causes)


def _reason_of(failure: ImageError) -> tuple[DropReason, str]:
    is_short = isinstance(failure, TruncatedImageError)
    return DropReason.IMAGE_TRUNCATED if is_short else DropReason.IMAGE_UNDECODABLE, cause_of(failure)


def cause_of(failure: ImageError) -> str:
    """A short text, never empty."""
    return str(failure) or type(failure).__name__


def _pixel_key(image: PlannedImage) -> tuple[str, int, int]:
    return image.source.key, image.height, image.width


def decode_failure(source: Any, targets: Sequence[np.ndarray] = ()) -> ImageError | None:
    """Decode once, resize to each target; the error when it does not decode."""
    try:
        image = source.decode()
        for target in targets:
            resize_into(image, target)
    except ImageError as error:
        return error
    return None


def without_undecodable(plan: PackPlan, name_of: NameOf) -> PackPlan:
    """What is left of a plan in profile Strict. Decodes the images of the pack, in the thread of the caller."""
    images = [segment.image for placed in plan.pack.placed for segment in placed.segments if segment.image]
    failures = {image.source.key: decode_failure(image.source) for image in images}
    bad = {key: _reason_of(failure) for key, failure in failures.items() if failure is not None}
    return without_bad_images(plan, bad, name_of) if bad else plan


def decode_into(source: Any, targets: Sequence[np.ndarray] = ()) -> str | None:
    """The same with the cause alone, as states keep it."""
    failure = decode_failure(source, targets)
    return None if failure is None else cause_of(failure)


class RankStream:
    """A rank's packs: its logical workers' streams in turn, worker 0 first. Owned by one thread."""

    index: DatasetIndex | None = None
    """What planning knows the data from, beside themselves."""

    def __init__(
        self, workers: Sequence[WorkerStream], topology: Topology, drops: DropLog,
        known_bad: dict[str, str] | None, pool: ThreadPoolExecutor | None = None,
        costs: Costs | None = None, storage: Storage | None = None,
    ) -> None:  # fmt: skip
        self.costs = costs or Costs()
        self._workers, self._topology, self._drops = list(workers), topology, drops
        self._known_bad, self._pool, self._storage = known_bad, pool, storage
        self._worker_states = [worker.state() for worker in self._workers]
        self.step = 0

    def next_pack(self, allocate: Allocate) -> Pack:
        """The rank's next pack with its state, pixels in place (see `WorkerStream.next_pack`)."""
        self._read_ahead(is_wanted=True)
        step, number = self.step, self.step % len(self._workers)

        def allocate_numbered(pack: Pack) -> Sequence[np.ndarray]:
            pack.step = step
            # The states of a pack to be are known before its pixels: a record's size depends on them.
            self._worker_states[number], drops = self._workers[number].planned()
            pack.state = self._state(step + 1, drops)
            return allocate(pack)

        pack, _ = self._workers[number].next_pack(allocate_numbered)
        self.step += 1
        return pack

    def skip_to(
        self, step: int, *, verify: bool = True, on_progress: Callable[[int], None] | None = None
    ) -> None:
        """Plan forward until `step` packs lie behind, without making them.

        `verify` decodes (and does not resize) the images that the plans rest on, as the Automodel profile needs
        where bad images are not known yet; in profile Strict they rest on none, and nothing is decoded. Raises
        SnapshotError when `step` lies behind already.
        """
        if step < self.step:
            raise SnapshotError(
                "a stream cannot go back",
                got=f"step {step}",
                expected=f"at least {self.step}",
                fix="use an older state",
            )
        self._read_ahead(is_wanted=verify)
        while self.step < step:
            self._workers[self.step % len(self._workers)].skip_pack(verify=verify)
            self.step += 1
            if on_progress is not None:
                on_progress(self.step)
        self._worker_states = [worker.state() for worker in self._workers]

    def plan_pack(self, *, verify: bool = False) -> PackPlan:
        """Plan the rank's next pack from headers and text, and go past it: a forecast, no pixels are made.

        In the Automodel profile an image that opens and does not decode moves the stream. So the plan is sure
        to be what `next_pack` gives only with `verify`, which decodes the images that it rests on. In profile
        Strict such an image takes its sample out of its pack and moves nothing; `verify` finds those samples.
        """
        self._read_ahead(is_wanted=verify)
        number = self.step % len(self._workers)
        plan = self._workers[number].plan_pack(verify=verify)
        self._worker_states[number] = self._workers[number].state()
        self.step += 1
        return plan

    def _read_ahead(self, *, is_wanted: bool) -> None:
        """Whether pixels are wanted: where an index has all the rest, planning reads nothing of the data."""
        if self._storage is not None:
            self._storage.ahead.is_paused = self.index is not None and not is_wanted

    def marks(self) -> list[Mark]:
        """By worker, what determines the packs after `step`."""
        return [worker.mark for worker in self._workers]

    def state(self) -> dict[str, Any]:
        """JSON-able state after `step` packs."""
        return self._state(self.step)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises SnapshotError, naming both sides where they differ."""
        expected = _topology_json(self._topology)
        if state.get("version") != STATE_VERSION or state.get("topology") != expected:
            raise SnapshotError(
                "a state of another topology or format",
                got=f"version {state.get('version')}, {state.get('topology')}",
                expected=f"version {STATE_VERSION}, {expected}",
                fix="resume on the same ranks and workers (sharding.mode Bagel is bound to them)",
            )
        try:
            if self._known_bad is not None:
                self._known_bad.update(state.get("known_bad", {}))
            for worker, part in zip(self._workers, state["workers"], strict=True):
                worker.load_state(part)
            self._drops.load_json(state.get("drops", {}))
            self.step = int(state["step"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise SnapshotError(
                "a state is damaged",
                got=f"{type(error).__name__}: {error}",
                expected="what a stream of this data set gave as its state",
                fix="resume from another snapshot or checkpoint",
            ) from error
        self._worker_states = [worker.state() for worker in self._workers]

    def close(self) -> None:
        """End the decode threads, and reading ahead."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._storage is not None:
            self._storage.close()

    def _state(self, step: int, drops: Iterable[Drop] = ()) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "step": step,
            "topology": _topology_json(self._topology),
            "workers": list(self._worker_states),
            **known_bad_part(self._known_bad),
            "drops": self._drops.as_json(drops),
        }


def _topology_json(topology: Topology) -> dict[str, int]:
    return {"rank": topology.rank, "world_size": topology.world_size, "num_workers": topology.num_workers}


def open_rank_stream(
    dataset: BagelDataset,
    topology: Topology,
    *,
    state: Mapping[str, Any] | None = None,
    decode_threads: int = 1,
    known_bad: Mapping[str, str] | None = None,
    on_bad_images: OnBadImages | None = None,
    producers: int = 1,
    on_wait: Callable[[str], None] | None = None,
) -> RankStream | ElasticStream:
    """The stream that `dataset` declares for one rank, at its beginning or where `state` was taken.

    `known_bad` are images found undecodable before (key to cause); `on_bad_images` is called with new ones
    before a pack planned without them is handed over, so that it can make them durable. In profile Strict
    both are without meaning.
    Of `producers` in a pod this is one: they share what may be read ahead. With `on_wait` a store that is away is
    waited for, for as long as it takes; it is called, by any thread, with what is waited for, and with "" when that
    is over.
    Raises SpecError, StorageError, DataError or SnapshotError.
    """
    settings = StreamSettings.from_resource(dataset, producers=producers, on_wait=on_wait)
    bad = None if settings.profile.plan_is_pure else dict(known_bad or {})
    pool = ThreadPoolExecutor(decode_threads, thread_name_prefix="decode") if decode_threads else None
    drops = DropLog(log)
    costs = settings.storage.costs
    open_worker = partial(
        open_worker_stream, known_bad=bad, pool=pool, on_bad_images=on_bad_images, costs=costs
    )
    stream: RankStream | ElasticStream
    if dataset.spec.sharding.mode == "Elastic":
        stream = _elastic_stream(dataset, settings, topology, open_worker, drops, bad, pool)
    else:
        workers = [
            open_worker(settings, topology, worker_id, drops=drops)
            for worker_id in range(max(1, topology.num_workers))
        ]
        stream = RankStream(workers, topology, drops, bad, pool, costs, settings.storage)
    stream.index = settings.index
    if state is not None:
        stream.load_state(state)
    return stream


def _elastic_stream(
    dataset: BagelDataset, settings: StreamSettings, topology: Topology,
    open_worker: Callable[..., WorkerStream], drops: DropLog,
    known_bad: dict[str, str] | None, pool: ThreadPoolExecutor | None,
) -> ElasticStream:  # fmt: skip
    """Stream s of S is what rank s of S, read in the process, would be under Bagel sharding, seed included."""
    streams = dataset.spec.sharding.streams
    check_world_size(streams, topology.world_size)
    settings = settings.for_streams()

    def open_stream(number: int, stream_drops: DropLog) -> WorkerStream:
        return open_worker(settings, Topology(number, streams, 0), 0, drops=stream_drops)

    place = ElasticPlace(topology.rank, topology.world_size, streams)
    return ElasticStream(place, open_stream, drops, known_bad, pool, settings.storage.costs, settings.storage)


def open_worker_stream(
    settings: StreamSettings,
    topology: Topology,
    worker_id: int,
    *,
    known_bad: dict[str, str] | None,
    drops: DropLog,
    pool: ThreadPoolExecutor | None = None,
    on_bad_images: OnBadImages | None = None,
    costs: Costs | None = None,
) -> WorkerStream:
    """One logical worker's stream from its own part of the data."""
    configure_pillow()
    ledger = settings.open_ledger(known_bad)
    planner = PackPlanner(
        config=settings.packing,
        groups=[open_group(settings, config, topology, worker_id, ledger) for config in settings.groups],
        rng=StreamRandom(settings.seed(topology, worker_id)),
        images=ledger,
        profile=settings.profile,
        max_consecutive_drops=settings.max_consecutive_drops,
    )
    if settings.index is not None:
        settings.index.tell()
    return WorkerStream(
        planner=planner,
        ledger=ledger,
        tokens=settings.tokens,
        drops=drops,
        pool=pool,
        on_bad_images=on_bad_images,
        costs=costs,
    )


def check_sources(
    dataset: BagelDataset, world_size: int = 1, settings: StreamSettings | None = None
) -> dict[str, int]:
    """Units by group, all counted. Raises what `open_rank_stream` would. `settings` are the resource's."""
    settings = settings or StreamSettings.from_resource(dataset)
    sharding = dataset.spec.sharding
    topology = Topology(0, world_size, sharding.workers_per_rank)
    if sharding.mode == "Elastic":
        check_world_size(sharding.streams, world_size)
        settings, topology = settings.for_streams(), Topology(0, sharding.streams, 0)
    for config in settings.groups:
        open_group(settings, config, topology, 0, settings.open_ledger())
    return {config.name: len(settings.list_units(config)) for config in settings.groups}


Look = tuple[str, Callable[[], object]]
"""A place in the resource, and what looks at what it names: raises what is wrong there."""


def source_looks(dataset: BagelDataset, world_size: int, storage: Storage) -> Iterator[Look]:
    """A look at each thing that a rank opens at its start, to be taken in turn; none depends on an earlier one.

    Of a data set the first file alone is opened, however many there are. What raises there would be refused by
    `open_rank_stream`, or have every row dropped.
    """
    spec = dataset.spec
    yield "spec.dataplane.ring.size", partial(check_ring, dataset)
    yield "spec.tokenizer", partial(load_tokenizer, storage, spec.tokenizer)
    elastic = spec.sharding.mode == "Elastic"
    if elastic:
        yield "spec.sharding.streams", partial(check_world_size, spec.sharding.streams, world_size)
    num_workers = 0 if elastic else spec.sharding.workers_per_rank
    enough = spec.sharding.streams if elastic else world_size * max(1, num_workers)
    for number, group in enumerate(spec.groups):
        place = f"spec.groups[{number}]"
        if group.type not in STORED_TYPES:
            yield place, partial(stored_type, group)
            continue
        counts: list[int] = []
        for position, data in enumerate(group.datasets):
            yield (
                f"{place}.datasets[{position}]",
                partial(_look_at, group.type, data, storage, PROFILES[spec.profile], enough, counts),
            )
        if len(counts) == len(group.datasets):
            units = [str(number) for number in range(sum(counts))]
            if elastic:
                yield place, partial(share_of_stream, units, 0, spec.sharding.streams, group.name)
            else:
                yield place, partial(_share_out, units, world_size, num_workers, group.name)


def _look_at(
    kind: str, data: Dataset, storage: Storage, profile: Profile, enough: int, counts: list[int]
) -> None:
    counts.append(STORED_TYPES[kind].look(dataset_config(data, storage, profile), storage, enough))


def _share_out(units: Sequence[str], world_size: int, num_workers: int, group: str) -> None:
    """DataError when not every consumer gets a unit."""
    part, _ = shard_to_rank(
        units, rng=random.Random(), epoch_seed=0, rank=0, world_size=world_size, group=group
    )
    shard_to_worker(part, num_workers=num_workers, worker_id=0, group=group)
