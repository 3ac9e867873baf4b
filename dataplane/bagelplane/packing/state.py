"""States of a `PackedDataset`: ours, and those that Automodel itself saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from bagelplane.engine import planner
from bagelplane.engine.raw_samples import sample_from_mapping, sample_to_json
from bagelplane.engine.rng import mark_from_json, mark_to_json
from bagelplane.errors import SnapshotError

STATE_VERSION = 1
_PARTS = {"buffer", "grouped_dataset_states", "rng", "yielded_batches"}


class StateError(SnapshotError, ValueError):
    """A state that cannot be continued from. A ValueError too, as the documented classes raise."""

    @classmethod
    def of(cls, error: SnapshotError) -> Self:
        """The same message as a StateError."""
        return cls(error.what, got=error.got, expected=error.expected, fix=error.fix)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a state says, in the planner's terms. `rng` None: seed anew. `groups` is None a group: its beginning."""

    yielded_batches: int
    rng: dict[str, Any] | None
    buffer: list[dict[str, Any]]
    groups: list[dict[str, Any] | None]
    known_bad: dict[str, str] = field(default_factory=dict)
    worker: dict[str, int] | None = None


def parse_state(state: Any, group_names: Sequence[str]) -> ResumePoint:
    """Read a state of ours or of Automodel's. Raises StateError that says which part does not fit."""
    if not isinstance(state, Mapping):
        raise StateError("a state is no mapping", got=type(state).__name__, fix="pass what state_dict() gave")
    if not state.keys() & _PARTS:
        raise StateError(
            "a state says nothing of where to continue",
            got=f"keys {', '.join(map(repr, state))}" if state else "an empty mapping",
            expected=f"what state_dict() gave, with {', '.join(sorted(_PARTS))}",
            fix="pass the whole state; None, or no call, begins anew",
        )
    try:
        version = state.get("version", STATE_VERSION)
        if version != STATE_VERSION:
            raise StateError(
                "a state of another format", got=f"version {version}", expected=f"version {STATE_VERSION}"
            )
        groups = list(state.get("grouped_dataset_states") or [])
        found = [group.get("name") for group in groups if group and group.get("name") is not None]
        if found and found != list(group_names):
            raise StateError("a state of other groups", got=", ".join(found), expected=", ".join(group_names))
        return ResumePoint(
            yielded_batches=int(state.get("yielded_batches", 0)),
            rng=rng_to_json(state.get("rng")),
            buffer=[_buffer_entry(entry, group_names) for entry in state.get("buffer") or []],
            groups=groups + [None] * (len(group_names) - len(groups)),
            known_bad=dict(state.get("known_bad") or {}),
            worker=state.get("worker"),
        )
    except StateError:
        raise
    except SnapshotError as error:
        raise StateError.of(error) from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise StateError(
            "a state cannot be read",
            got=f"{type(error).__name__}: {error}",
            expected="what state_dict() of this class or of Automodel's gave",
            fix="use another checkpoint",
        ) from error


def planner_state(
    resume: ResumePoint, names: Sequence[str], positions: Sequence[Any], rng: Mapping[str, Any]
) -> dict[str, Any]:
    """The same as `PackPlanner` takes it, with the position of each group."""
    return {
        "version": planner.STATE_VERSION,
        "packs": resume.yielded_batches,
        "rng": rng,
        "buffer": resume.buffer,
        "groups": [
            {"name": name, "position": position} for name, position in zip(names, positions, strict=True)
        ],
    }


def rng_to_json(rng: Any) -> dict[str, Any] | None:
    """The generators' part in our form. Automodel's holds `random.getstate()` and `numpy.random.get_state()`."""
    if not rng:
        return None
    python, numpy = rng["python"], rng["numpy"]
    if isinstance(python, Mapping):
        checked = mark_from_json(rng)
        return mark_to_json(checked)
    if isinstance(numpy, Mapping):
        numpy = ("MT19937", numpy["state"]["key"], numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"])
    return mark_to_json(((python[0], tuple(python[1]), python[2]), tuple(numpy)))


def _buffer_entry(entry: Mapping[str, Any], group_names: Sequence[str]) -> dict[str, Any]:
    if "sequence_plan" not in entry:
        return {"group": int(entry["group"])} | {key: entry[key] for key in ("row", "sample") if key in entry}
    group = entry["data_indexes"]["dataset_name"]
    if group not in group_names:
        raise StateError(
            "a buffered sample of another group", got=str(group), expected=", ".join(group_names)
        )
    return {
        "group": list(group_names).index(group),
        "sample": sample_to_json(sample_from_mapping(entry, group)),
    }
