"""What differs between two snapshots, or between a snapshot and the run that would go on from it; and what may.

Where a run is stored and how it is served may change freely, and is not in a snapshot at all. What decides the packs
may change where `spec.resume.allowSpecChange` names it. Some changes leave a state without a meaning: they never may.
Pure.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bagelplane.sidecar.fingerprint import Fingerprint
from bagelplane.sidecar.snapshot_format import Manifest
from bagelplane.spec_parts import CHANGEABLE

DATA = "data"
_SHOWN_CHARACTERS = 60
_SHOWN_CHANGES = 5
_NO_VALUE = "the default"

Verdict = Literal["free", "allowed", "refused"]


@dataclass(frozen=True, slots=True)
class Change:
    """One difference."""

    kind: Literal["spec", "data", "topology", "step", "versions", "run", "dataset"]
    name: str
    """A field of the resource (`groups[t2i].weight`), an object's URI, or what else differs."""
    before: str
    after: str
    verdict: Verdict = "free"
    """Whether a run may resume across it; allowed: because the resource names it."""

    def __str__(self) -> str:
        return f"{self.name}: {self.before} became {self.after}"

    @property
    def part(self) -> str:
        """The part of the spec that it is in."""
        return self.name.partition(".")[0].partition("[")[0] if self.kind == "spec" else self.kind


def describe(changes: Sequence[Change]) -> str:
    """A few of them in words."""
    shown = [str(change) for change in changes[:_SHOWN_CHANGES]]
    more = len(changes) - len(shown)
    return "; ".join([*shown, *([f"and {more} more"] if more else [])])


def spec_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], allowed: Collection[str] = ()
) -> list[Change]:
    """Of the determining part of two resources (`bagelplane.spec.stream_spec`)."""
    old, new = dict(_flat(before)), dict(_flat(after))
    found = []
    for name in [*old, *(name for name in new if name not in old)]:
        if old.get(name) != new.get(name):
            change = Change("spec", name, old.get(name, _NO_VALUE), new.get(name, _NO_VALUE))
            may = change.part in allowed and change.part in CHANGEABLE
            found.append(replace(change, verdict="allowed" if may else "refused"))
    return found


def data_changes(before: Fingerprint, after: Fingerprint, allowed: Collection[str] = ()) -> list[Change]:
    """Objects that were replaced, removed or added, in this order."""
    verdict: Verdict = "allowed" if DATA in allowed else "refused"
    old, new = before.objects, after.objects
    replaced = [uri for uri in old if uri in new and old[uri] != new[uri]]
    removed, added = [uri for uri in old if uri not in new], [uri for uri in new if uri not in old]
    return [
        *(Change("data", uri, _object(old[uri]), _object(new[uri]), verdict) for uri in replaced),
        *(Change("data", uri, _object(old[uri]), "removed", verdict) for uri in removed),
        *(Change("data", uri, "not there", _object(new[uri]), verdict) for uri in added),
    ]


def manifest_changes(before: Manifest, after: Manifest) -> Iterator[Change]:
    """Differences of two snapshots beside spec and data; of the topology with a verdict."""
    pairs = (
        ("dataset", "name of the dataset", before.dataset, after.dataset),
        ("run", "run", before.run or "none", after.run or "none"),
        ("step", before.topology.unit, before.step, after.step),
    )
    for kind, name, old, new in pairs:
        if old != new:
            yield Change(kind, name, str(old), str(new))  # type: ignore[arg-type]  # the kinds are those above
    if before.topology != after.topology:
        fits = after.topology.can_continue(before.topology)
        yield Change(
            "topology", "topology", str(before.topology), str(after.topology), "free" if fits else "refused"
        )
    for name in sorted({*before.versions, *after.versions}):
        old, new = before.versions.get(name, "unknown"), after.versions.get(name, "unknown")
        if old != new:
            yield Change("versions", name, old, new)


def _flat(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """(path, value as JSON) of all leaves; what has a name is told by it, not by its number in the list."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and value:
        for number, part in enumerate(value):
            label = part.get("name", number) if isinstance(part, Mapping) else number
            yield from _flat(part, f"{name}[{label}]")
    else:
        text = json.dumps(value, ensure_ascii=False)
        yield name, text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def _object(entry: tuple[int, str]) -> str:
    return f"{entry[0]} bytes, version {entry[1]}"
