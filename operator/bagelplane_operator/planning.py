"""What to do about one BagelDataset: from the resource and what is there to actions, a status and events.

Pure, and idempotent: when the actions are done and the status is written, planning again gives nothing to do. So it
may be called at any moment, after a crash too, and needs no memory of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from bagelplane.errors import SpecError
from bagelplane.spec import API_VERSION, KIND, BagelDataset, config_hash, refuse_unsupported, spec_hash
from bagelplane_operator import naming
from bagelplane_operator.attachments import Attachments, TrainerPod
from bagelplane_operator.checks import (
    CHECKING_MESSAGE,
    Outcome,
    age_seconds,
    attempt_of,
    newest_attempt,
    pause_seconds,
    read_outcome,
)
from bagelplane_operator.conditions import (
    ConditionType,
    Finding,
    Reason,
    build_condition,
    find_condition,
    is_transition,
)
from bagelplane_operator.manifests import Image, Manifest, Owner, build_check_job, build_config_map

SUPERSEDED_KEPT_SECONDS = 20.0
"""An unused ConfigMap stays that long after its successor: a pod may just be on its way through admission."""

CHECK_POLL_SECONDS = 2.0
SIDECAR_POLL_SECONDS = 5.0
IDLE_SECONDS = 30.0

_MAX_NOTE_BYTES = 1024  # of an Event, set by the API server


@dataclass(frozen=True, slots=True)
class Observed:
    """What belongs to one resource in its namespace at one moment."""

    config_maps: Sequence[Manifest] = ()
    check_jobs: Sequence[Manifest] = ()
    check_pods: Sequence[Manifest] = ()
    warnings: Mapping[str, str] = field(default_factory=dict)
    """Newest warning of a Job or pod that does not get on, by uid."""
    pods: Sequence[TrainerPod] = ()
    attachments: Attachments = field(default_factory=Attachments)


@dataclass(frozen=True, slots=True)
class Create:
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Delete:
    kind: str
    name: str
    namespace: str
    uid: str
    """Only this very object; a new one of the name is left alone."""


@dataclass(frozen=True, slots=True)
class Event:
    type: str
    """Normal or Warning."""
    reason: str
    message: str
    moment: str
    """When the transition was seen, in microseconds; with it, the same event made twice is one."""


@dataclass(frozen=True, slots=True)
class Plan:
    actions: tuple[Create | Delete, ...]
    status: dict[str, Any]
    events: tuple[Event, ...]
    again_seconds: float
    """When to look again though nothing was heard."""


def plan(resource: Mapping[str, Any], observed: Observed, default_image: Image, now: datetime) -> Plan:
    """What to do about the resource as the API server gives it."""
    metadata = resource["metadata"]
    owner = Owner(metadata["name"], metadata["namespace"], metadata["uid"])
    before = resource.get("status")
    before = before if isinstance(before, Mapping) else {}
    generation = int(metadata.get("generation", 0))
    dataset, refusal = _parse(resource)
    facts: dict[str, Any] = {}
    actions: list[Create | Delete] = []
    waits = [SIDECAR_POLL_SECONDS] if any(pod.active for pod in observed.pods) else []
    if dataset is None:
        ready = refusal
        sources = Finding(Reason.NOT_CHECKED, "the spec is refused, so nothing was looked at")
    else:
        step = _Step(dataset, owner, observed, default_image, now)
        config_actions, config_wait = step.plan_config_maps()
        check_actions, sources, check_wait = step.plan_check(_settled(before, generation))
        actions = [*config_actions, *check_actions]
        waits += [wait for wait in (config_wait, check_wait) if wait is not None]
        ready = _ready(owner, dataset, sources)
        facts = {
            "specHash": spec_hash(dataset),
            "configMap": naming.config_map_name(owner.name, config_hash(dataset)),
            "groups": len(dataset.spec.groups),
        }
    moment = format_time(now)
    conditions = [
        build_condition(kind, finding, generation, moment, find_condition(before, kind))
        for kind, finding in ((ConditionType.READY, ready), (ConditionType.SOURCES_REACHABLE, sources))
    ]
    status = {
        "observedGeneration": generation,
        **facts,
        **_figures(observed.attachments, before),
        "conditions": conditions,
    }
    return Plan(tuple(actions), status, _events(before, conditions, now), min(waits, default=IDLE_SECONDS))


def build_status_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any] | None:
    """The merge patch from one status to the other, or None where they are the same."""
    changed: dict[str, Any] = {key: value for key, value in after.items() if before.get(key) != value}
    changed |= {key: None for key in before if key not in after}
    return changed or None


def format_time(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def build_event(resource: Mapping[str, Any], event: Event, instance: str) -> Manifest:
    """The Event as an object; its name is made of its content, so that no event is there twice."""
    metadata = resource["metadata"]
    content = "/".join((metadata["uid"], event.type, event.reason, event.moment))
    note = event.message.encode()[:_MAX_NOTE_BYTES].decode(errors="ignore")
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name']}.{hashlib.sha256(content.encode()).hexdigest()[:16]}",
            "namespace": metadata["namespace"],
        },
        "eventTime": event.moment,
        "reportingController": f"{naming.GROUP}/operator",
        "reportingInstance": instance,
        "action": "Reconcile",
        "type": event.type,
        "reason": event.reason,
        "note": note,
        "regarding": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
    }


def _parse(resource: Mapping[str, Any]) -> tuple[BagelDataset | None, Finding]:
    """The resource as the models have it, or what is wrong with it, in the words of the command line."""
    name = str(resource["metadata"]["name"])
    try:
        dataset = BagelDataset.from_mapping(resource, name)
    except SpecError as error:
        return None, Finding(Reason.INVALID_SPEC, str(error))
    try:
        refuse_unsupported(dataset, name)
    except SpecError as error:
        return None, Finding(Reason.UNSUPPORTED, str(error))
    return dataset, Finding(Reason.CHECKING, "")


@dataclass(frozen=True, slots=True)
class _Step:
    """One look at a resource that is in order."""

    dataset: BagelDataset
    owner: Owner
    observed: Observed
    default_image: Image
    now: datetime

    def plan_config_maps(self) -> tuple[list[Create | Delete], float | None]:
        """The current one is made, or replaced where it is not ours; others go when no pod needs them."""
        wanted = build_config_map(self.dataset, self.owner)
        name = wanted["metadata"]["name"]
        found = [manifest for manifest in self.observed.config_maps if not _is_going(manifest)]
        current = next((manifest for manifest in found if manifest["metadata"]["name"] == name), None)
        if current is None:
            return [Create(wanted)], None
        if not self._is_as_wanted(current, wanted):
            return [_delete("ConfigMap", current), Create(wanted)], None
        others = [manifest for manifest in found if manifest is not current]
        in_use = {pod.revision for pod in self.observed.pods if pod.holds_config and pod.revision}
        unused = [other for other in others if _revision(other) not in in_use]
        rest = SUPERSEDED_KEPT_SECONDS - age_seconds(current, self.now)
        if unused and rest > 0:
            return [], rest
        return [_delete("ConfigMap", other) for other in unused], None

    def _is_as_wanted(self, current: Manifest, wanted: Manifest) -> bool:
        same = current.get("immutable") is True and current.get("data") == wanted["data"]
        return same and self.owner.owns(current)

    def plan_check(self, settled: Finding | None) -> tuple[list[Create | Delete], Finding, float | None]:
        """The newest attempt counts; those before it and those of other specs go."""
        revision = naming.short_hash(config_hash(self.dataset))
        jobs = [manifest for manifest in self.observed.check_jobs if not _is_going(manifest)]
        ours = [job for job in jobs if self.owner.owns(job) and _revision(job) == revision]
        newest = newest_attempt(ours)
        actions: list[Create | Delete] = [_delete("Job", job) for job in jobs if job is not newest]
        if newest is None:
            actions.insert(0, self._create_check(1))
            return actions, Finding(Reason.CHECKING, CHECKING_MESSAGE), CHECK_POLL_SECONDS
        outcome = read_outcome(newest, self.observed.check_pods, self.observed.warnings, self.now)
        attempt = attempt_of(newest)
        finding = _hold(outcome, attempt, settled)
        if outcome.finished is None:
            return actions, finding, CHECK_POLL_SECONDS
        if not outcome.failed:
            return actions, finding, None
        due = outcome.finished + timedelta(seconds=pause_seconds(attempt))
        if self.now < due:
            return actions, finding, (due - self.now).total_seconds()
        # Made before the one before is deleted: the count is never lost between the two.
        return (
            [self._create_check(attempt + 1), *actions, _delete("Job", newest)],
            finding,
            CHECK_POLL_SECONDS,
        )

    def _create_check(self, attempt: int) -> Create:
        return Create(build_check_job(self.dataset, self.owner, self.default_image, attempt))


def _settled(before: Mapping[str, Any], generation: int) -> Finding | None:
    """The last word about the sources, where it was about this generation and a failure."""
    condition = find_condition(before, ConditionType.SOURCES_REACHABLE)
    if condition is None or condition.get("observedGeneration") != generation:
        return None
    failures = (reason for reason in Reason if reason.state == "False" and reason == condition.get("reason"))
    return next((Finding(reason, str(condition.get("message", ""))) for reason in failures), None)


def _hold(outcome: Outcome, attempt: int, settled: Finding | None) -> Finding:
    """A new attempt is no news until it ends, and running out of time none when the pod could not start."""
    if settled is None:
        return outcome.finding
    if outcome.finding.reason is Reason.CHECKING and attempt > 1:
        return settled
    if outcome.timed_out and settled.reason is Reason.CHECK_NOT_STARTING:
        return settled
    return outcome.finding


def _ready(owner: Owner, dataset: BagelDataset, sources: Finding) -> Finding:
    if sources.reason is not Reason.REACHABLE:
        return sources
    name = naming.config_map_name(owner.name, config_hash(dataset))
    text = f"ConfigMap {name} is there and the sources can be read"
    return Finding(Reason.READY, f"{text}; label pods {naming.DATASET_LABEL}: {owner.name}")


def _figures(attachments: Attachments, before: Mapping[str, Any]) -> dict[str, Any]:
    """The step stays when the ranks leave: it tells where the last run stood."""
    step = before.get("step") if attachments.step is None else attachments.step
    figures = {
        "attached": attachments.attached,
        "step": step,
        "packsPerSecond": attachments.packs_per_second,
        "fillRatio": attachments.fill_ratio,
        "attachments": list(attachments.entries),
    }
    return {key: value for key, value in figures.items() if value is not None}


def _events(
    before: Mapping[str, Any], conditions: Sequence[Mapping[str, Any]], now: datetime
) -> tuple[Event, ...]:
    """Of Ready alone: when the sources fail it has their reason and message."""
    ready = conditions[0]
    if not is_transition(find_condition(before, ConditionType.READY), ready):
        return ()
    kind = "Normal" if ready["status"] == "True" else "Warning"
    moment = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return (Event(kind, ready["reason"], ready["message"], moment),)


def _revision(manifest: Mapping[str, Any]) -> str:
    return str((manifest["metadata"].get("labels") or {}).get(naming.CONFIG_HASH_LABEL, ""))


def _is_going(manifest: Mapping[str, Any]) -> bool:
    return bool(manifest["metadata"].get("deletionTimestamp"))


def _delete(kind: str, manifest: Mapping[str, Any]) -> Delete:
    metadata = manifest["metadata"]
    return Delete(kind, metadata["name"], metadata["namespace"], metadata["uid"])
