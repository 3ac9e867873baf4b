"""The conditions of a BagelDataset: their types, their reasons, and when one counts as changed.

Pure. docs/reference/conditions.md is written from the enumerations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Self

State = Literal["True", "False", "Unknown"]

MAX_MESSAGE_CHARACTERS = 4000  # far below the 32,768 that Kubernetes takes; a status is read by people


class ConditionType(StrEnum):
    """What a condition speaks of."""

    description: str

    def __new__(cls, value: str, description: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.description = description
        return member

    READY = "Ready", "Pods that carry the label can train: spec in order, ConfigMap made, sources reachable."
    SOURCES_REACHABLE = (
        "SourcesReachable",
        "Every address of the spec was looked at from the data set's namespace, with its credentials.",
    )


class Reason(StrEnum):
    """Why a condition is as it is. A failed Ready has the reason of what it waits for."""

    state: State
    description: str

    def __new__(cls, value: str, state: State, description: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.state = state
        member.description = description
        return member

    READY = "Ready", "True", "All is in place."
    REACHABLE = "Reachable", "True", "The check reached all that the spec names."
    CHECKING = "Checking", "Unknown", "The check Job is at work."
    NOT_CHECKED = "NotChecked", "Unknown", "The spec is refused, so nothing was looked at."
    CHECK_NOT_STARTING = (
        "CheckNotStarting",
        "False",
        "The check Job's pod cannot start; the message is Kubernetes' own: Secret, image, room, quota.",
    )
    SOURCES_UNREACHABLE = (
        "SourcesUnreachable",
        "False",
        "The check found what cannot be read; the message names it, its endpoint and what to do.",
    )
    CHECK_FAILED = (
        "CheckFailed",
        "False",
        "The check ended without a report, or not in time.",
    )
    INVALID_SPEC = (
        "InvalidSpec",
        "False",
        "The stored spec is not in order; the message is that of `bagelplane validate`.",
    )
    UNSUPPORTED = "Unsupported", "False", "The spec asks for what this release does not run yet."


@dataclass(frozen=True, slots=True)
class Finding:
    """What planning found out about one condition; becomes an entry of `status.conditions`."""

    reason: Reason
    message: str

    @property
    def state(self) -> State:
        return self.reason.state


def build_condition(
    kind: ConditionType, finding: Finding, generation: int, now: str, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The entry for `finding`. The time of transition stays as long as the status does, as Kubernetes has it."""
    same = before is not None and before.get("status") == finding.state
    since = before.get("lastTransitionTime") if before is not None and same else None
    return {
        "type": str(kind),
        "status": finding.state,
        "reason": str(finding.reason),
        "message": cut(finding.message, MAX_MESSAGE_CHARACTERS),
        "observedGeneration": generation,
        "lastTransitionTime": since if isinstance(since, str) else now,
    }


def find_condition(status: Mapping[str, Any], kind: ConditionType) -> Mapping[str, Any] | None:
    """The entry of that type in a status that anybody may have written."""
    entries = status.get("conditions")
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        return None
    for entry in entries:
        if isinstance(entry, Mapping) and entry.get("type") == str(kind):
            return entry
    return None


def is_transition(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> bool:
    """Whether people are to be told. Work in progress is no news; a new message under one reason is none."""
    if after["status"] == "Unknown":
        return False
    return before is None or (before.get("status"), before.get("reason")) != (
        after["status"],
        after["reason"],
    )


def cut(text: str, characters: int) -> str:
    """At most so long, and such that the API server keeps it as it is: half a surrogate pair is no text."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= characters else text[: characters - 1] + "…"
