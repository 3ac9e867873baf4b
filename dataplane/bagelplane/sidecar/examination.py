"""A look at everything that a resource names, before a trainer waits for it: all that is wrong, not the first alone.

`bagelplane run` looks before it serves, `bagelplane check` looks and reports.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from bagelplane.errors import BagelplaneError, SnapshotError, StorageError
from bagelplane.settings import storage_settings
from bagelplane.sidecar.fingerprint import take_fingerprint
from bagelplane.sidecar.producer import DEFAULT_STREAM_FACTORY, load_factory
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.sidecar.store import open_snapshot_store
from bagelplane.spec import BagelDataset
from bagelplane.storage import Storage, StorageSettings, open_storage
from bagelplane.stream import Look

_BUCKET = re.compile(r"[a-z0-9]+://[^/\s]+")
_ALSO = "; the same at"
PATIENCE_SECONDS = 10.0
"""Time for looks that fail, all together. A store that does not answer is not asked again for each data set."""


@dataclass(slots=True)
class Examination:
    """What was found."""

    problems: list[BagelplaneError] = field(default_factory=list)
    """In the order of the resource; each message begins with the place in it."""
    store: SnapshotStore | None = None
    known_bad: dict[str, str] = field(default_factory=dict)
    _first_of: dict[tuple[str, ...], BagelplaneError] = field(default_factory=dict)

    def add(self, error: BagelplaneError, place: str) -> None:
        """A wrong key is wrong for every data set: what the store refuses for one reason is said once."""
        cause = error.what.rpartition(": ")[2]
        bucket = _BUCKET.search(error.what)
        key = (error.got, error.fix, cause, bucket.group() if bucket else error.what)
        first = self._first_of.setdefault(key, error)
        if first is error:
            self.problems.append(error)
        else:
            first.what += f"{',' if _ALSO in first.what else _ALSO} {place}"


def examine(
    dataset: BagelDataset,
    *,
    world_size: int = 1,
    resume: Literal["latest", "none"] | int = "latest",
    stream_factory: str = DEFAULT_STREAM_FACTORY,
    settings: StorageSettings | None = None,
    found: Examination | None = None,
) -> Examination:
    """Looks at tokenizer, data sets and snapshots. Raises nothing of what is wrong with them: that is in
    `problems`, which grows in `found` while it looks.

    `settings` say how the store is reached (default: as the resource does).
    """
    found = Examination() if found is None else found
    storage = open_storage(settings or storage_settings(dataset))
    module, _ = load_factory(stream_factory)
    found.store = open_snapshot_store(dataset, storage)
    source_looks: Iterator[Look] = module.source_looks(dataset, world_size, storage)
    data_looks = _data_looks(found, dataset, storage) if stream_factory == DEFAULT_STREAM_FACTORY else ()
    failing_seconds, refused_place = 0.0, ""
    for place, look in itertools.chain(source_looks, data_looks, _snapshot_looks(found, resume)):
        if place == refused_place:
            continue  # the same store would say the same once more
        begun = time.monotonic()
        try:
            look()
        except BagelplaneError as error:
            if not error.what.startswith(place):
                error.what = f"{place}: {error.what}"
            found.add(error, place)
            if isinstance(error, StorageError) and not isinstance(error, SnapshotError):
                refused_place = place
            failing_seconds += time.monotonic() - begun
            if failing_seconds >= PATIENCE_SECONDS:
                found.problems.append(
                    StorageError(
                        f"what comes after {place} was not looked at",
                        got=f"{failing_seconds:.0f} s spent on what failed",
                        fix="correct what is named above, then look again",
                    )
                )
                break
    return found


def _data_looks(found: Examination, dataset: BagelDataset, storage: Storage) -> Iterator[Look]:
    """What the data are, to be compared with what a snapshot was taken of; not where they cannot be read."""
    store = found.store
    if store is None or found.problems:
        return

    def look() -> None:
        store.data = take_fingerprint(dataset, storage)

    yield "spec.groups", look


def _snapshot_looks(found: Examination, resume: Literal["latest", "none"] | int) -> Iterator[Look]:
    place, store = "spec.snapshots.uri", found.store
    if store is None:
        return
    yield place, store.check_owner
    if isinstance(resume, int):
        yield place, partial(store.nearest, resume)
    yield place, store.check_writable
    yield place, lambda: found.known_bad.update(store.load_known_bad())
