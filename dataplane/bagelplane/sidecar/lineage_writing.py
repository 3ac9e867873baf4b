"""The log of rows in the background: a slow or failing store never holds training up, it shows.

Belongs to the supervisor's loop; the calls to the store run in threads of their own, one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagelplane.engine.pack_rows import PackRows
from bagelplane.errors import BagelplaneError, SnapshotError, TransientStorageError
from bagelplane.sidecar.lineage_log import LineageLog
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.sidecar.snapshotting import in_thread

WRITE_PACKS = 100
"""A rank's packs are written when there are so many more, and before each snapshot of it."""
_RETRY_SECONDS = 0.5

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LineageHealth:
    """What status and metrics say of the log."""

    written_packs: int = 0
    failed: int = 0
    """Attempts to write."""
    problem: str = ""
    """What the last attempt failed with; empty while all is well."""


class LineageWriter:
    """Takes the rows of acknowledged packs, and writes them in time."""

    def __init__(self, store: SnapshotStore) -> None:
        self._log = LineageLog(store)
        self._since: Counter[int] = Counter()  # packs by rank since a write was last begun for it
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[BagelplaneError | None]] = set()
        self.health = LineageHealth()

    @property
    def waiting_packs(self) -> int:
        """Packs that the store does not have yet."""
        return sum(self._log.unwritten_packs().values())

    @property
    def lost_packs(self) -> int:
        """Packs that the log lacks for good."""
        return self._log.lost_packs

    def add(self, rank: int, world_size: int, number: int, rows: Mapping[str, Any]) -> None:
        """A pack that all readers of a rank have taken; `rows` as the producer told them."""
        self._log.add(rank, world_size, number, PackRows.from_json(rows))
        self._since[rank] += 1
        if self._since[rank] >= WRITE_PACKS:
            self._since[rank] = 0
            task = asyncio.create_task(self.write(rank), name="log of rows")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def write(self, rank: int) -> BagelplaneError | None:
        """Writes what the store lacks of a rank. Never raises: the error, if it failed."""
        async with self._lock:
            self._since[rank] = 0
            try:
                written = await in_thread(lambda: self._log.write(rank))
            except BagelplaneError as error:
                return self._failed(rank, error)
            except Exception as error:
                log.exception("the log of rows failed")
                return self._failed(rank, SnapshotError(f"the log of rows failed: {error}"))
            if written:
                self.health.written_packs += written
                self.health.problem = ""
            return None

    async def drain(self, timeout_seconds: float) -> bool:
        """Writes all there is, and tries again what may pass; whether it was in time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                again = True
                while again:
                    errors = [await self.write(rank) for rank in self._log.unwritten_packs()]
                    again = any(isinstance(error, TransientStorageError) for error in errors)
                    await asyncio.sleep(_RETRY_SECONDS if again else 0)
        except TimeoutError:
            return False
        return not self._log.unwritten_packs()

    def _failed(self, rank: int, error: BagelplaneError) -> BagelplaneError:
        self.health.failed += 1
        if str(error) != self.health.problem:
            log.error("rank %d: the log of rows could not be written: %s", rank, error)
        self.health.problem = str(error)
        return error
