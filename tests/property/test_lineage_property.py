"""The log of rows against a plain dictionary: whatever happens to runs, writers and worlds, a pack is told by what its
history last wrote of it, a future that was left is never told, and what was not written is not known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagelplane.engine.pack_rows import PackRows, TrainedRow
from bagelplane.engine.rows import RowPlace
from bagelplane.lineage.log import RowLog
from bagelplane.lineage.replay import PackAddress
from bagelplane.sidecar import lineage_format, lineage_log
from bagelplane.sidecar.lineage_log import LineageLog
from bagelplane.sidecar.runs import Lineage, Origin, Run, lineage_of
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.storage import StorageSettings, open_storage

STREAMS = 6
_places = itertools.count()


@dataclass
class Lease:
    """A sidecar's place in a run; a stale one does not notice, as one that was paused before its write."""

    run: Run
    lineage: Lineage

    def verify(self, rank: int) -> None:
        pass


@dataclass
class Writer:
    """A sidecar's log, and what it would have written by now."""

    number: int
    log: LineageLog
    unwritten: dict[tuple[int, int, int], dict[tuple[int, int], int]] = field(default_factory=dict)
    """By world size, rank and first step in the parts' names: (rank, number of the pack) to its tokens."""
    owners: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """Who writes those: a rank that goes on in mid-round takes over another one's."""


def content(tokens: int, rank: int, number: int) -> PackRows:
    """A pack of one row; its tokens tell which future it is of."""
    place = RowPlace(f"rank-{rank}.parquet", 0, number)
    return PackRows((TrainedRow("t2i", place, str(number), 0, tokens),), ())


class History:
    """Runs, one after the other, and what a reader should be told: the model."""

    def __init__(self, elastic: bool) -> None:
        self.uri, self.elastic = f"memory://lineage-{next(_places)}/snapshots", elastic
        self.streams = STREAMS if elastic else 0
        self.runs: list[Run] = []
        self.writers: list[Writer] = []
        self.told: dict[tuple[int, int], int] = {}
        """(rank, number) of packs to their tokens; elastic ones have rank 0."""
        self.world_size, self.furthest, self.trained = 2, 0, 0
        self.begin(0)

    @property
    def writer(self) -> Writer:
        return self.writers[-1]

    def store(self, run: Run) -> SnapshotStore:
        store = SnapshotStore(
            open_storage(StorageSettings()), self.uri, "a" * 64, dataset="demo", streams=self.streams
        )
        store.lease = Lease(run, lineage_of(run, self.runs))  # type: ignore[assignment]
        return store

    def begin(self, back: int) -> None:
        """A run that goes on so many packs before the furthest; what was told past them is another future's."""
        origin = max(0, self.furthest - back)
        before = self.runs[-1] if self.runs else None
        number = len(self.runs) + 1
        continued = Origin(before.id, origin) if before is not None else None
        self.runs.append(Run(number, f"{number:08x}", "demo", "a" * 64, origin=continued))
        self.writers.append(Writer(number, LineageLog(self.store(self.runs[-1]))))
        self.told = {pack: tokens for pack, tokens in self.told.items() if pack[1] < origin}
        self.position = self.furthest = origin

    def train(self, steps: int, *flushed: int) -> None:
        """Each time another content, though a run's packs do not change: what is written last has to stand. (With
        elastic sharding worlds of one run may have a pack in two parts, and those have to be the same.)
        """
        self.trained += 1
        tokens = self.writer.number * 1000 + (0 if self.elastic else self.trained)
        for _ in range(steps):
            for rank in range(self.world_size):
                number = self.position + (rank if self.elastic else 0)
                pack = (0 if self.elastic else rank, number)
                self.writer.log.add(rank, self.world_size, number, content(tokens, *pack))
                step, class_of = divmod(number, self.world_size) if self.elastic else (number, rank)
                place = (self.world_size, class_of, lineage_format.first_step_of(step))
                self.writer.unwritten.setdefault(place, {})[pack] = tokens
                self.writer.owners[place] = rank
            self.position += self.world_size if self.elastic else 1
        self.furthest = max(self.furthest, self.position)
        for rank in flushed:
            self.flush(rank)

    def flush(self, rank: int, which: int = -1) -> None:
        """One rank of the present writer, or of one whose place was taken."""
        writer = self.writers[which % len(self.writers)]
        writer.log.write(rank)
        later = [run.origin.step for run in self.runs[writer.number :] if run.origin is not None]
        for place in [place for place, owner in writer.owners.items() if owner == rank]:
            for pack, tokens in writer.unwritten.pop(place, {}).items():
                if pack[1] < min(later, default=pack[1] + 1):
                    self.told[pack] = tokens

    def crash(self) -> None:
        """What was not written is lost; another sidecar takes the place in the run."""
        self.writers[-1] = Writer(self.writer.number, LineageLog(self.store(self.runs[-1])))

    def go_back(self, packs: int) -> None:
        origin = self.runs[-1].origin
        self.position = max(self.position - packs, origin.step if origin is not None else 0)

    def reshape(self, world_size: int) -> None:
        if self.elastic:
            self.world_size = world_size

    def check(self) -> None:
        row_log, end = RowLog(self.store(self.runs[-1])), self.furthest + 3
        for pack in [(rank, number) for rank in range(1 if self.elastic else 2) for number in range(end)]:
            rank, number = pack
            for address in self._addresses(rank, number):
                logged = row_log.pack(address)
                wanted = content(self.told[pack], *pack) if pack in self.told else None
                assert (logged and logged.rows) == wanted, (address, self.told.get(pack))
        for rank in range(1 if self.elastic else 2):
            known = [number for of, number in self.told if of == rank]
            if known:
                self._check_fates(row_log, rank, max(known))

    def _check_fates(self, row_log: RowLog, rank: int, number: int) -> None:
        """Of one row: found in its pack alone, and the other packs of the reader known to be without."""
        reader = next(self._addresses(rank, number)).reader
        own = reader.own_number(number)
        assert own is not None
        fates = row_log.fates(RowPlace(f"rank-{rank}.parquet", 0, number), reader, own + 1)
        told = {each: [fate.tokens for fate in found] for each, found in fates.items()}
        wanted: dict[int | None, list[int]] = {
            reader.own_number(each): [tokens] * (each == number)
            for (of, each), tokens in self.told.items()
            if of == rank and each <= number and reader.own_number(each) is not None
        }
        assert told == wanted

    def _addresses(self, rank: int, number: int) -> Iterator[PackAddress]:
        """The pack as worlds name it that may ask."""
        for size in (1, 2, 3, 6)[number % 2 :: 2] if self.elastic else ():
            yield PackAddress(number % size, size, number // size, STREAMS)
        if not self.elastic:
            yield PackAddress(rank, 2, number)


TRAINED = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 5)),
    st.tuples(st.just("train"), st.integers(1, 5), st.just(0), st.just(1)),
)
EVENTS = st.one_of(
    TRAINED,
    TRAINED,
    st.tuples(st.just("flush"), st.integers(0, 2)),
    st.tuples(st.just("flush"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("crash")),
    st.tuples(st.just("go_back"), st.integers(1, 9)),
    st.tuples(st.just("begin"), st.integers(0, 9)),
    st.tuples(st.just("reshape"), st.sampled_from([1, 2, 3, 6])),
)


@pytest.fixture(autouse=True, scope="module")
def short_parts() -> Iterator[None]:
    """Of four steps: so that histories of a few steps have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lineage_format, "PART_STEPS", 4)
        patch.setattr(lineage_log, "PART_STEPS", 4)
        yield


@settings(max_examples=100)
@given(st.booleans(), st.lists(EVENTS, min_size=3, max_size=14))
def test_a_pack_is_told_by_its_history_alone(elastic: bool, events: list[tuple[Any, ...]]) -> None:
    history = History(elastic)
    for name, *arguments in events:
        getattr(history, name)(*arguments)
    history.check()


def test_a_part_that_another_rank_goes_on_from_in_mid_round_stays_the_one_of_who_began_it() -> None:
    history = History(elastic=True)
    history.train(7)
    history.reshape(3)
    history.train(3)
    history.go_back(1)
    history.train(1, 0, 1)
    history.check()
