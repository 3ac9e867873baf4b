"""Writing the log of rows: what was acknowledged is kept by part, and a part is put as a whole, again and again.

A part grows while its steps are trained: each put holds all of it that is known, and an object store or a rename
replaces the one before in one step, so there is never half of one. Parts of an earlier life of the same run are read
before they are replaced, and a step that was trained again is replaced in them.

`add` is called by the supervisor's loop, `write` in a thread, one call at a time; a lock lies between them.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

import pyarrow as pa

from bagelplane.engine.pack_rows import PackRows
from bagelplane.errors import SnapshotError
from bagelplane.sidecar.lineage_format import (
    PART_STEPS,
    PartKey,
    build_table,
    decode_part,
    encode_part,
    first_step_of,
    merge,
    steps_in,
)
from bagelplane.sidecar.runs import read_object
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.storage import ObjectMissingError

MAX_UNWRITTEN_PARTS = 8
"""Of a rank, while the store fails. One more, and the oldest is given up."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Part:
    """What is known of a part that is not whole in the store, or was not last looked at."""

    table: pa.Table = field(default_factory=lambda: build_table(PartKey("", 0, 1, 0), {}))
    fresh: dict[int, PackRows] = field(default_factory=dict)
    """Packs by step that are not in `table` yet."""
    was_read: bool = False
    """Whether what the store had of it is in `table`."""
    unwritten: set[int] = field(default_factory=set)
    """Steps that the store does not have."""


class LineageLog:
    """The log that one sidecar writes, of all its ranks."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._parts: dict[PartKey, _Part] = {}
        self._ranks: dict[PartKey, int] = {}
        self._lock = threading.Lock()
        self.lost_packs = 0
        """Packs that were given up."""

    def add(self, rank: int, world_size: int, number: int, rows: PackRows) -> None:
        """A pack that rank `rank` took. `number` as in `PartKey.number`."""
        assert self._store.lease is not None
        elastic = bool(self._store.streams)
        step, class_of = divmod(number, world_size) if elastic else (number, rank)
        run = self._store.lease.run.id
        key = PartKey(run, class_of, world_size, first_step_of(step), self._store.streams)
        with self._lock:
            part = self._parts[key] = self._parts.pop(key, _Part())  # the one in use is the last
            self._ranks[key] = rank
            part.fresh[step] = rows
            part.unwritten.add(step)
            self._give_up_oldest(rank)

    def unwritten_packs(self) -> dict[int, int]:
        """By rank, packs that are not in the store; ranks without any are left out."""
        counts: dict[int, int] = {}
        with self._lock:
            for key, part in self._parts.items():
                if part.unwritten:
                    rank = self._ranks[key]
                    counts[rank] = counts.get(rank, 0) + len(part.unwritten)
        return counts

    def write(self, rank: int) -> int:
        """Puts all parts of a rank that the store lacks something of. How many packs that was.

        SnapshotError when another run or sidecar has taken over, StorageError; what was not put stays for later.
        """
        with self._lock:
            keys = self._unwritten(rank)
        assert self._store.lease is not None
        if keys:
            self._store.lease.verify(rank)
        return sum(self._write(key) for key in keys)

    # -- inside

    def _unwritten(self, rank: int) -> list[PartKey]:
        return [key for key, part in self._parts.items() if part.unwritten and self._ranks[key] == rank]

    def _write(self, key: PartKey) -> int:
        with self._lock:
            part = self._parts.get(key)
            if part is None:
                return 0  # given up meanwhile
            fresh, part.fresh = part.fresh, {}
            writing = set(part.unwritten)
        part.table = merge(part.table, build_table(key, fresh))
        if not part.was_read:
            stored = self._stored(key)
            part.table = part.table if stored is None else merge(stored, part.table)
            part.was_read = True
        about = {"dataset": self._store.dataset, "spec_hash": self._store.spec_hash}
        self._store.storage.write_bytes(key.uri(self._store.uri), encode_part(key, part.table, about))
        with self._lock:
            part.unwritten -= writing - part.fresh.keys()
            self._forget()
        return len(writing)

    def _stored(self, key: PartKey) -> pa.Table | None:
        uri = key.uri(self._store.uri)
        try:
            return decode_part(read_object(self._store.storage, uri), key, uri)
        except ObjectMissingError:
            return None
        except SnapshotError as error:
            log.warning("%s; it is replaced", error)
            return None

    def _forget(self) -> None:
        """Parts that are whole, or that their rank has left, are read again if they are needed again."""
        newest = {(key.rank, key.world_size): key for key in self._parts}  # of several the last one
        for key, part in list(self._parts.items()):
            is_whole = len(steps_in(part.table)) == PART_STEPS
            if not part.unwritten and (is_whole or newest[key.rank, key.world_size] != key):
                del self._parts[key], self._ranks[key]

    def _give_up_oldest(self, rank: int) -> None:
        for key in self._unwritten(rank)[:-MAX_UNWRITTEN_PARTS]:
            count = len(self._parts[key].unwritten)
            log.warning("rank %d: the log of rows lacks %d packs, since the store is behind", rank, count)
            self.lost_packs += count
            del self._parts[key], self._ranks[key]
