"""From what sidecars answer to `status.attachments` and the figures beside it.

Pure: `polling` asks, this folds. Answers come out of other people's pods, so nothing in them is believed beyond
its type and bounds: whatever a pod says, the status stays one that the API server takes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bagelplane.spec_status import MAX_ATTACHMENTS
from bagelplane.spec_values import MAX_INT64
from bagelplane_operator import naming
from bagelplane_operator.conditions import cut

MAX_RANKS_PER_POD = 1024
MIN_RATE_SECONDS = 4.0
"""Packs are counted over no less: notices make polls come at any moment."""

_MAX_PROBLEM_CHARACTERS = 300
_JOB_LABELS = (
    "training.kubeflow.org/job-name",
    "jobset.sigs.k8s.io/jobset-name",
    "batch.kubernetes.io/job-name",
    "job-name",
)


@dataclass(frozen=True, slots=True)
class TrainerPod:
    """Of a pod that carries the label, what matters here."""

    name: str
    namespace: str
    uid: str
    dataset: str
    address: str
    """IP to ask; empty where there is none, or no sidecar running."""
    job: str
    revision: str
    """The short hash of the configuration that it was injected with; empty when it was not."""
    spec_hash: str
    """Of the spec that it was injected with: what its stream is made of."""
    obstacle: str
    """Why its sidecar cannot be asked; empty for one that is only starting."""
    active: bool
    """Whether it may still run: neither ended nor being deleted."""
    holds_config: bool
    """Whether it may still need its ConfigMap: not ended."""


def read_pod(pod: Mapping[str, Any]) -> TrainerPod:
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    ended = status.get("phase") in ("Succeeded", "Failed")
    opted_out = annotations.get(naming.INJECT_ANNOTATION) == "false"
    running, obstacle = _sidecar_state(pod)
    return TrainerPod(
        name=str(metadata.get("name", "")),
        namespace=str(metadata.get("namespace", "")),
        uid=str(metadata.get("uid", "")),
        dataset=str(labels.get(naming.DATASET_LABEL, "")),
        address=str(status.get("podIP", "")) if running else "",
        job=next((str(labels[label]) for label in _JOB_LABELS if labels.get(label)), ""),
        revision=str(annotations.get(naming.INJECTED_ANNOTATION, "")),
        spec_hash=str(annotations.get(naming.SPEC_HASH_ANNOTATION, "")),
        obstacle=obstacle,
        active=not ended and not metadata.get("deletionTimestamp") and not opted_out,
        holds_config=not ended,
    )


def _sidecar_state(pod: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether the sidecar runs, and if not, what keeps it (empty while it is on its way)."""
    spec = pod.get("spec") or {}
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    if not any(container.get("name") == naming.SIDECAR_CONTAINER for container in containers):
        fix = "create it again while the webhook runs, in a namespace that does not opt out"
        return False, f"the pod carries the label and has no sidecar. Fix: {fix}"
    status = pod.get("status") or {}
    for container in [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]:
        if container.get("name") != naming.SIDECAR_CONTAINER:
            continue
        state = container.get("state") or {}
        waiting = state.get("waiting") or {}
        if state.get("running") is not None:
            return True, ""
        end = _end(state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {})
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            words = " ".join(f"{waiting['reason']} {waiting.get('message') or ''}".split())
            return False, f"the sidecar {end}; {words}" if end else f"the sidecar does not run: {words}"
        return False, f"the sidecar {end}" if end else ""
    return False, ""


def _end(terminated: Mapping[str, Any]) -> str:
    """How a container ended; with its last words, which say more than the pause until its restart."""
    if not terminated:
        return ""
    reason = terminated.get("reason")
    cause = f" ({reason})" if reason not in (None, "Error", "Completed") else ""
    words = str(terminated.get("message") or "").split("\n")
    last = next((" ".join(line.split()) for line in reversed(words) if line.strip()), "")
    return f"ended with exit code {terminated.get('exitCode')}{cause}{f': {last}' if last else ''}"


# --- what a sidecar says --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankStatus:
    attached: bool
    next_step: int
    acknowledged: int
    published: int
    fill_ratio: float | None
    problem: str


@dataclass(frozen=True, slots=True)
class SidecarStatus:
    """The parts of /v1/status that are folded."""

    dataset: str
    started_unix_seconds: float
    world_size: int | None
    ready: bool
    ranks: tuple[RankStatus, ...]
    last_snapshot_step: int | None
    problem: str
    """What trainers cannot attach for."""
    snapshot_problem: str


def parse_status(body: bytes) -> SidecarStatus:
    """Raises ValueError, with a message for people, for what is no status of a sidecar."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("its answer is no JSON") from None
    if not isinstance(data, dict) or data.get("version") != 1:
        raise ValueError("its answer is not the status of a sidecar of this release")
    ranks = data.get("ranks")
    if not isinstance(ranks, list) or len(ranks) > MAX_RANKS_PER_POD:
        raise ValueError("its answer has no list of ranks")
    snapshots = data.get("snapshots")
    snapshots = snapshots if isinstance(snapshots, dict) else {}
    return SidecarStatus(
        dataset=_text(data.get("dataset")),
        started_unix_seconds=_number(data.get("started_unix_seconds")) or 0.0,
        world_size=_count(data.get("world_size")) or None,
        ready=data.get("ready") is True,
        ranks=tuple(_parse_rank(rank) for rank in ranks if isinstance(rank, dict)),
        last_snapshot_step=_count(snapshots.get("last_step")),
        problem=_text(data.get("problem")),
        snapshot_problem=_text(snapshots.get("problem")),
    )


def _parse_rank(rank: Mapping[str, Any]) -> RankStatus:
    return RankStatus(
        attached=rank.get("attached") is True,
        next_step=_count(rank.get("next_step")) or 0,
        acknowledged=_count(rank.get("packs_acknowledged")) or 0,
        published=_count(rank.get("packs_published")) or 0,
        fill_ratio=_number(rank.get("fill")),
        problem=_text(rank.get("problem")),
    )


def _count(value: object) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and isinstance(value, int) and 0 <= value <= MAX_INT64 else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= MAX_INT64 and math.isfinite(value) else None


def _text(value: object) -> str:
    return cut(" ".join(value.split()), _MAX_PROBLEM_CHARACTERS) if isinstance(value, str) else ""


# --- folding --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Poll:
    """What came of asking one pod: a status, or what went wrong."""

    status: SidecarStatus | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered of a pod from one poll to the next. Lost with the operator, and soon there again."""

    started_unix_seconds: float = 0.0
    acknowledged: int = 0
    at_seconds: float | None = None
    """Monotonic clock of the answer that the counts are from."""
    packs_per_second: float | None = None
    silent_since: str = ""
    """As it stands in a status; empty while the sidecar answers."""


@dataclass(frozen=True, slots=True)
class Attachments:
    """The part of a status that sidecars determine. Figures are None where nobody gives any."""

    entries: tuple[dict[str, Any], ...] = ()
    attached: int = 0
    step: int | None = None
    packs_per_second: float | None = None
    fill_ratio: float | None = None
    memory: Mapping[str, Memory] = field(default_factory=dict)
    """By uid of the pod."""


def fold(
    pods: Iterable[TrainerPod],
    polls: Mapping[str, Poll],
    memory: Mapping[str, Memory],
    at_seconds: float,
    now: str,
) -> Attachments:
    """Status entries of the active `pods`, with `polls` by uid, and what to remember for the next time.

    `at_seconds` is the monotonic clock, `now` the same moment as it stands in a status.
    """
    entries: list[dict[str, Any]] = []
    remembered: dict[str, Memory] = {}
    ranks: list[RankStatus] = []
    rates: list[float] = []
    active = sorted((pod for pod in pods if pod.active), key=lambda pod: pod.name)
    mixed = _mixed_jobs(active)
    for pod in active:
        poll, before = polls.get(pod.uid, Poll(None)), memory.get(pod.uid, Memory())
        status = poll.status
        if status is None:
            silent = (before.silent_since or now) if poll.problem else ""
            remembered[pod.uid] = Memory(silent_since=silent)
            since = f"no answer from the sidecar since {silent}: {poll.problem}" if silent else ""
            entries.append(_entry(pod, None, None, pod.obstacle or since))
            continue
        after = remembered[pod.uid] = _remember(before, status, at_seconds)
        problem = _mixture(pod) if pod.job in mixed else _problem(pod, status)
        entries.append(_entry(pod, status, after.packs_per_second, problem))
        ranks += status.ranks
        rates += [] if after.packs_per_second is None else [after.packs_per_second]
    attached = [rank for rank in ranks if rank.attached]
    # Those with problems come first where not all have room.
    entries = sorted(entries, key=lambda entry: "problem" not in entry)[:MAX_ATTACHMENTS]
    return Attachments(
        entries=tuple(sorted(entries, key=lambda entry: str(entry["pod"]))),
        attached=len(attached),
        step=min((rank.next_step for rank in attached), default=None),
        packs_per_second=_rounded(math.fsum(rates)) if rates else None,
        fill_ratio=_fill_ratio(ranks),
        memory=remembered,
    )


def _entry(pod: TrainerPod, status: SidecarStatus | None, rate: float | None, problem: str) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "pod": pod.name,
        "job": pod.job or None,
        "ready": status is not None and status.ready,
        "attachedRanks": 0,
        "problem": cut(problem, _MAX_PROBLEM_CHARACTERS) or None,
    }
    if status is not None:
        attached = [rank for rank in status.ranks if rank.attached]
        entry |= {
            "worldSize": status.world_size,
            "step": min((rank.next_step for rank in attached or status.ranks), default=None),
            "attachedRanks": len(attached),
            "packsPerSecond": None if rate is None else _rounded(rate),
            "fillRatio": _fill_ratio(status.ranks),
            "lastSnapshotStep": status.last_snapshot_step,
        }
    return {key: value for key, value in entry.items() if value is not None}


def _mixed_jobs(pods: Iterable[TrainerPod]) -> set[str]:
    """Jobs whose ranks take packs of different streams: the spec was changed, and then a pod was replaced."""
    hashes: dict[str, set[str]] = {}
    for pod in pods:
        if pod.job and pod.spec_hash:
            hashes.setdefault(pod.job, set()).add(pod.spec_hash)
    return {job for job, of_job in hashes.items() if len(of_job) > 1}


def _mixture(pod: TrainerPod) -> str:
    what = f"pods of the job {pod.job} were made from different specs, this one from {pod.spec_hash[:12]}"
    return f"{what}. Fix: start the job anew, and all its ranks take one stream"


def _problem(pod: TrainerPod, status: SidecarStatus) -> str:
    if status.dataset != pod.dataset:
        return f"the sidecar serves the data set {status.dataset!r}, the label says {pod.dataset!r}"
    found = (status.problem, *(rank.problem for rank in status.ranks), status.snapshot_problem)
    return next(filter(None, found), "")


def _remember(before: Memory, status: SidecarStatus, at_seconds: float) -> Memory:
    """The rate is that since the answer before, unless the sidecar was restarted or that is no while ago."""
    acknowledged = sum(rank.acknowledged for rank in status.ranks)
    rate = None
    if before.at_seconds is not None and before.started_unix_seconds == status.started_unix_seconds:
        packs, seconds = acknowledged - before.acknowledged, at_seconds - before.at_seconds
        if packs >= 0 and seconds < MIN_RATE_SECONDS:
            return before
        rate = packs / seconds if packs >= 0 else None
    return Memory(status.started_unix_seconds, acknowledged, at_seconds, rate)


def _fill_ratio(ranks: Iterable[RankStatus]) -> float | None:
    """The mean over all packs, in hundredths."""
    known = [
        (rank.fill_ratio, rank.published) for rank in ranks if rank.fill_ratio is not None and rank.published
    ]
    packs = sum(published for _, published in known)
    return round(math.fsum(fill * published for fill, published in known) / packs, 2) if packs else None


def _rounded(rate: float) -> float:
    """Two digits: more would change with every poll, and every change is a write."""
    return float(f"{rate:.2g}")
