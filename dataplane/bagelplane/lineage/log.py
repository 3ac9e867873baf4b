"""The log of rows as a run wrote it: which part is true for a pack, and what it says.

A pack's number in a run names one pack only, whoever trains on it and however often, so a run's parts never disagree:
a name leads to what was written last. Of several runs those count that are the history of the newest one, each up
to where it was left (`runs.Lineage`), and of two that have a pack the younger one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bagelplane.engine.pack_rows import PackRows, RowFate
from bagelplane.engine.rows import RowPlace
from bagelplane.errors import SnapshotError
from bagelplane.lineage.replay import PackAddress, Reader, other_way_out
from bagelplane.sidecar.lineage_format import (
    PartKey,
    decode_part,
    fates_at,
    first_step_of,
    pack_at,
    parse_part_name,
    parse_rank_folder,
    rank_uri,
    run_uri,
    steps_in,
)
from bagelplane.sidecar.runs import Lineage, read_object
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.storage import ObjectMissingError

_READERS = 8
"""Parts that are read at once: each is small, and waits for its request."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoggedPack:
    """A pack as the log has it."""

    run: str
    rows: PackRows


class RowLog:
    """What the log below one URI says, for the history of the newest run there. Reads alone.

    A part that is damaged is said so in a warning, and counts as none.
    """

    def __init__(self, store: SnapshotStore) -> None:
        self._storage, self._base = store.storage, store.uri
        with other_way_out():
            self._history: Lineage = store.lineage()
        self._ranks: dict[str, list[tuple[int, int]]] = {}

    def pack(self, address: PackAddress) -> LoggedPack | None:
        """None where the log has no such pack."""
        for run in self._runs(address.number):
            for rank, world_size in self._ranks_of(run, address.reader):
                step = address.number // world_size if address.streams else address.step
                key = PartKey(run, rank, world_size, first_step_of(step), address.streams)
                table = self._read(key)
                try:
                    rows = None if table is None else pack_at(table, step)
                except (ValueError, RecursionError) as error:
                    log.warning("step %d in %s is none of ours: %s", step, key.uri(self._base), error)
                    continue
                if rows is not None:
                    return LoggedPack(run, rows)
        return None

    def fates(self, place: RowPlace, reader: Reader, count: int) -> dict[int, list[RowFate]]:
        """What became of a row in each pack of a reader below its number `count` that the log has.

        By the reader's numbers; empty lists for packs that it has nothing to do with.
        """
        found: dict[int, list[RowFate]] = {}
        with ThreadPoolExecutor(_READERS, "log of rows") as pool:
            for run in self._runs():
                keys = list(self._parts(run, reader, count))
                for key, table in zip(keys, pool.map(self._read, keys), strict=True):
                    if table is None:
                        continue
                    fates = fates_at(table, place)
                    for step in steps_in(table):
                        number = key.number(step)
                        own = reader.own_number(number)
                        if own is not None and own < count and self._history.holds(run, number + 1):
                            found.setdefault(own, fates.get(step, []))
        return found

    # -- inside

    def _runs(self, number: int = 0) -> Iterator[str]:
        """Those whose pack of that number counts, the newest first."""
        for run in self._history.reach:
            if run and self._history.holds(run, number + 1):  # before there were runs there was no log
                yield run

    def _ranks_of(self, run: str, reader: Reader) -> Iterator[tuple[int, int]]:
        """(rank, world size) of those parts that may have packs of a reader."""
        if not reader.elastic:
            yield reader.number, reader.count
            return
        if run not in self._ranks:
            folders = self._storage.list_folders(run_uri(self._base, run), missing_ok=True)
            self._ranks[run] = [place for place in map(parse_rank_folder, folders) if place is not None]
        for rank, world_size in self._ranks[run]:
            if world_size and reader.count % world_size == 0 and reader.number % world_size == rank:
                yield rank, world_size

    def _parts(self, run: str, reader: Reader, count: int) -> Iterator[PartKey]:
        streams = reader.count if reader.elastic else 0
        for rank, world_size in self._ranks_of(run, reader):
            folder = rank_uri(self._base, run, rank, world_size)
            for item in self._storage.list_files(folder, ".parquet", missing_ok=True):
                first = parse_part_name(item.uri)
                if first is None:
                    continue
                key = PartKey(run, rank, world_size, first, streams)
                begins, ends = key.number(first), count * reader.count if streams else count
                if begins < ends and self._history.holds(run, begins + 1):
                    yield key

    def _read(self, key: PartKey) -> Any:
        uri = key.uri(self._base)
        try:
            return decode_part(read_object(self._storage, uri), key, uri)
        except ObjectMissingError:
            return None
        except SnapshotError as error:
            log.warning("%s", error)
            return None
