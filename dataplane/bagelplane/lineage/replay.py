"""Packs planned again: from the nearest snapshot, or from the start of their stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bagelplane.elastic import ElasticStream
from bagelplane.engine.elastic import (
    SHARDING,
    STATE_VERSION,
    ElasticPlace,
    check_world_size,
    newest_states,
    packs_behind,
    packs_known,
)
from bagelplane.engine.planner import PackPlan
from bagelplane.engine.samples import Sample
from bagelplane.errors import SnapshotError, SpecError
from bagelplane.sidecar.elastic import stored_states
from bagelplane.sidecar.snapshots import SnapshotStore, StreamTopology
from bagelplane.sources.index import describe
from bagelplane.spec import BagelDataset
from bagelplane.stream import RankStream, open_rank_stream
from bagelplane.topology import Topology

OnProgress = Callable[[int], None]
"""Is told how many packs more have been planned."""


@dataclass(frozen=True, slots=True)
class PackAddress:
    """Which pack: as a rank of a world counts its steps; with elastic sharding also as the run counts its packs."""

    rank: int
    world_size: int
    step: int
    streams: int = 0
    """Elastic sharding; 0 is Bagel, where a rank's packs have no other number."""

    @property
    def number(self) -> int:
        """Of the pack: of all ranks together with elastic sharding, else of its rank."""
        return self.step * self.world_size + self.rank if self.streams else self.step

    @property
    def reader(self) -> Reader:
        """Who packs it."""
        if self.streams:
            return Reader(self.number % self.streams, self.streams, elastic=True)
        return Reader(self.rank, self.world_size)

    @property
    def own_number(self) -> int:
        """Of the pack among its reader's."""
        return self.number // self.streams if self.streams else self.step

    def as_json(self) -> dict[str, int]:
        """Names and numbers, for a document."""
        elastic = {"pack": self.number, "stream": self.number % self.streams} if self.streams else {}
        return {"step": self.step, "rank": self.rank, "world_size": self.world_size, **elastic}

    def __str__(self) -> str:
        text = f"step {self.step} of rank {self.rank} of {self.world_size}"
        if not self.streams:
            return text
        return f"{text} (pack {self.number} of the run, of stream {self.number % self.streams})"


@dataclass(frozen=True, slots=True)
class Reader:
    """What packs for itself: a rank of a world; with elastic sharding a stream, here as the one stream of a rank."""

    number: int
    count: int
    elastic: bool = False

    def topology(self, dataset: BagelDataset) -> Topology:
        """As `open_rank_stream` takes it."""
        return Topology(
            self.number, self.count, 0 if self.elastic else dataset.spec.sharding.workers_per_rank
        )

    def packs_behind(self, snapshot: int) -> int:
        """How many of its packs lie behind a snapshot of that step or position."""
        return packs_behind(snapshot, self.number, self.count) if self.elastic else snapshot

    def own_number(self, number: int) -> int | None:
        """Of a pack (`PackAddress.number`) among the reader's; None for one of another's."""
        if not self.elastic:
            return number
        return number // self.count if number % self.count == self.number else None

    def address(self, own_number: int, world_size: int) -> PackAddress:
        """Of one of its packs, in a world of that many ranks."""
        if not self.elastic:
            return PackAddress(self.number, self.count, own_number)
        number = own_number * self.count + self.number
        return PackAddress(number % world_size, world_size, number // world_size, self.count)


def address_of(
    dataset: BagelDataset, *, rank: int, world_size: int, step: int | None = None, position: int | None = None
) -> PackAddress:
    """The pack that a step of a rank, or a position of the run, names. Raises SpecError."""
    sharding = dataset.spec.sharding
    streams = sharding.streams if sharding.mode == "Elastic" else 0
    if (step is None) == (position is None):
        raise SpecError(
            "one pack has to be named",
            expected="a step and a rank, or a position",
            fix="give just one of them",
        )
    if streams:
        check_world_size(streams, world_size)
    if position is not None:
        if not streams:
            raise SpecError(
                "a position names no pack under Bagel sharding: each rank counts its own packs",
                fix="give a step and a rank",
            )
        return PackAddress(position % world_size, world_size, position // world_size, streams)
    assert step is not None
    if not 0 <= rank < world_size:
        raise SpecError(
            "the rank is outside its world",
            got=f"rank {rank} of {world_size}",
            expected=f"a rank from 0 to {world_size - 1}",
            fix="ranks count from 0; give the world size of the run",
        )
    return PackAddress(rank, world_size, step, streams)


def stored_world_size(store: SnapshotStore | None) -> int | None:
    """How many ranks wrote the newest snapshot; None where there is none."""
    with other_way_out():
        manifest = None if store is None else store.nearest(None)
    return None if manifest is None else manifest.topology.world_size


class Replay:
    """One reader's packs, planned one after the other. To be closed.

    Begins at the newest state of `store` that lies at or before the reader's pack number `target`; without one at
    the reader's first pack. With `verify` images are decoded on the way.

    In the Automodel profile an image that opens and does not decode moves what follows. A run writes such images
    down before it hands out a pack planned without them, so what lies before its newest snapshot is planned for
    sure (`is_sure`) without decoding anything. So is all, where an index knows them.
    """

    def __init__(
        self, dataset: BagelDataset, reader: Reader, target: int, *, store: SnapshotStore | None,
        verify: bool = False, decode_threads: int = 1,
    ) -> None:  # fmt: skip
        self._is_pure = dataset.spec.profile == "Strict"
        self._verify = verify and not self._is_pure
        state, known_bad, self._known_until = None, dict[str, str](), 0
        if store is not None:
            with other_way_out():
                topology = _stream_topology(dataset, reader)
                newest = store.nearest(None, topology)
                self._known_until = 0 if newest is None else reader.packs_behind(newest.step)
                known_bad = {} if self._is_pure else store.load_known_bad()
                state = _stored_state(store, topology, reader, target)
        self._stream: RankStream | ElasticStream = open_rank_stream(
            dataset,
            reader.topology(dataset),
            state=state,
            known_bad=known_bad,
            decode_threads=decode_threads if verify or self._is_pure else 0,
        )
        self.began = self._stream.step
        """The reader's pack number that planning began with."""

    @property
    def number(self) -> int:
        """Of the pack that is planned next, among the reader's."""
        return self._stream.step

    @property
    def known_from(self) -> str:
        """Where rows are known from, in words."""
        return "with every image decoded" if self._verify else describe(self._stream.index)

    def is_sure(self, number: int) -> bool:
        """Whether what is planned up to and with that pack is for sure what a run gives, but for departures."""
        index = self._stream.index
        knows_pixels = index is not None and index.coverage.knows_pixels
        return self._is_pure or self._verify or knows_pixels or number < self._known_until

    def skip_to(self, number: int, on_progress: OnProgress) -> None:
        """Plan forward until that pack is next."""
        while self.number < number:
            self.plan()
            on_progress(1)

    def plan(self, *, whole: bool = False) -> PackPlan:
        """The next pack. `whole`: in profile Strict without the samples whose images do not decode."""
        return self._stream.plan_pack(verify=self._verify or (whole and self._is_pure))

    def waiting(self) -> list[tuple[Sample, ...]]:
        """What waits in the buffer of each worker, before the pack that is planned next."""
        return [(*mark.buffer, *filter(None, [mark.carried])) for mark in self._stream.marks()]

    def close(self) -> None:
        self._stream.close()


@contextmanager
def other_way_out() -> Iterator[None]:
    """Whoever looks at the past can do without snapshots that cannot be used, unlike whoever resumes."""
    try:
        yield
    except SnapshotError as error:
        fix = "give the resource and the world size of that run; or --from-start, to plan without snapshots"
        raise SnapshotError(error.what, got=error.got, expected=error.expected, fix=fix) from error


def _stream_topology(dataset: BagelDataset, reader: Reader) -> StreamTopology:
    if reader.elastic:
        return StreamTopology(reader.count, 0, reader.count)
    return StreamTopology(reader.count, dataset.spec.sharding.workers_per_rank)


def _stored_state(
    store: SnapshotStore, topology: StreamTopology, reader: Reader, target: int
) -> Mapping[str, Any] | None:
    """The reader's newest stored state at or before its pack number `target`."""
    manifest = store.nearest(target * reader.count + reader.number if reader.elastic else target, topology)
    if manifest is None:
        return None
    if not reader.elastic:
        return store.load_state(manifest, reader.number)
    # In a world of as many ranks as streams rank s serves stream s alone.
    place = ElasticPlace(reader.number, reader.count, reader.count)
    stored, known_bad = stored_states(store, manifest, place)
    states = newest_states(stored, manifest.step, reader.count, place.served())
    step = packs_known(states, reader.number)
    return {
        "version": STATE_VERSION,
        "sharding": SHARDING,
        "streams": reader.count,
        "position": place.position(step),
        "step": step,
        "states": states,
        "known_bad": known_bad,
    }
