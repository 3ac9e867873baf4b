"""Reading a check: what its Job, the Job's pod and the report of that pod say, and when to make the next one.

Pure. A report comes out of a container and is believed in its form alone: anything else is "no report".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bagelplane.errors import BagelplaneError
from bagelplane_operator import naming
from bagelplane_operator.conditions import Finding, Reason, cut
from bagelplane_operator.manifests import CHECK_DEADLINE_SECONDS

FIRST_PAUSE_SECONDS = 30.0
LONGEST_PAUSE_SECONDS = 300.0

PATIENCE_SECONDS = 10.0
"""What keeps a pod from starting is no news in its first seconds: much of it passes."""

CHECKING_MESSAGE = "the sources are being looked at"

_MAX_ATTEMPT = 1_000_000
_MAX_PROBLEMS = 20
_MAX_PART_CHARACTERS = 1000

# Reasons of a waiting container that belong to a pod on its way; all others keep it from starting.
_ON_ITS_WAY = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True, slots=True)
class Report:
    """What `bagelplane check` wrote: problems in the words of the command line, at best none."""

    ok: bool
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where a check stands. `finished` is None while it runs."""

    finding: Finding
    finished: datetime | None
    timed_out: bool = False

    @property
    def failed(self) -> bool:
        return self.finished is not None and self.finding.reason is not Reason.REACHABLE


def pause_seconds(failures: int) -> float:
    """How long to wait after that many failures in a row: 30 s, doubled each time, at most 5 min."""
    return min(FIRST_PAUSE_SECONDS * 2.0 ** min(max(failures, 1) - 1, 10), LONGEST_PAUSE_SECONDS)


def attempt_of(job: Mapping[str, Any]) -> int:
    """Which attempt a Job is; the count lives here, so that it survives a restart of the operator."""
    text = str(_metadata(job).get("annotations", {}).get(naming.ATTEMPT_ANNOTATION, ""))
    return min(int(text), _MAX_ATTEMPT) if text.isascii() and text.isdecimal() else 0


def read_outcome(
    job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]], warnings: Mapping[str, str], now: datetime
) -> Outcome:
    """Where the check of `job` stands. `pods` are those of all checks; `warnings` go by uid."""
    uid = _metadata(job).get("uid", "")
    pod = next((pod for pod in pods if uid and _owner_uid(pod) == uid), None)
    ended = {
        condition.get("type"): condition
        for condition in _status(job).get("conditions") or []
        if condition.get("status") == "True"
    }
    report = _report(pod)
    if "Complete" in ended and (report is None or report.ok):
        finding = Finding(Reason.REACHABLE, "the check reached all that the spec names")
        return Outcome(finding, _time(ended["Complete"], now))
    if report is not None and not report.ok:
        # Seldom without an end of the Job: its controller is a moment behind the pod.
        last = ended.get("Failed") or ended.get("Complete")
        text = "\n".join(report.problems) or "the check failed and named no problem"
        return Outcome(Finding(Reason.SOURCES_UNREACHABLE, text), _time(last, now) if last else None)
    if "Failed" in ended:
        timed_out = ended["Failed"].get("reason") == "DeadlineExceeded"
        return Outcome(_unreported(pod, timed_out), _time(ended["Failed"], now), timed_out)
    return Outcome(_unfinished(job, pod, warnings, now), None)


def needs_explanation(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> str:
    """Uid of the Job or pod whose Events would say why nothing runs; empty where the objects say enough."""
    uid = _metadata(job).get("uid", "")
    if any(condition.get("status") == "True" for condition in _status(job).get("conditions") or []):
        return ""
    for pod in pods:
        if _owner_uid(pod) == uid:
            pending = _status(pod).get("phase") == "Pending" and not _obstacle(pod)
            return str(_metadata(pod).get("uid", "")) if pending else ""
    return str(uid)


def parse_report(text: object) -> Report | None:
    """The report in a terminated container's message, or None for anything that is none."""
    if not isinstance(text, str):
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not isinstance(data.get("ok"), bool):
        return None
    problems = data.get("problems", [])
    if not isinstance(problems, list):
        return None
    texts = [_problem_text(problem) for problem in problems[:_MAX_PROBLEMS]]
    return Report(data["ok"], tuple(text for text in texts if text))


def _problem_text(problem: object) -> str:
    if not isinstance(problem, dict):
        return ""
    parts = {name: _one_line(problem.get(name)) for name in ("what", "got", "expected", "fix")}
    what = parts.pop("what")
    return str(BagelplaneError(what, **parts)) if what else ""


def _one_line(value: object) -> str:
    return cut(" ".join(value.split()), _MAX_PART_CHARACTERS) if isinstance(value, str) else ""


def _report(pod: Mapping[str, Any] | None) -> Report | None:
    return parse_report(_terminated(pod).get("message"))


def _terminated(pod: Mapping[str, Any] | None) -> Mapping[str, Any]:
    for container in _status(pod).get("containerStatuses") or []:
        if container.get("name") == naming.CHECK_CONTAINER:
            return (container.get("state") or {}).get("terminated") or {}
    return {}


def _unreported(pod: Mapping[str, Any] | None, timed_out: bool) -> Finding:
    if timed_out:
        text = f"the check did not end within {CHECK_DEADLINE_SECONDS} s"
        return Finding(Reason.CHECK_FAILED, f"{text}. Fix: see whether the endpoint answers from the cluster")
    ended = _terminated(pod)
    how = f"exit code {ended.get('exitCode')}" if ended else "its pod is gone"
    if ended.get("reason") not in (None, "Error", "Completed"):
        how = f"{how}, {_one_line(ended.get('reason'))}"
    last = _one_line(ended.get("message"))
    text = f"the check ended without a report ({how})" + (f": {last}" if last else "")
    return Finding(Reason.CHECK_FAILED, f"{text}. Fix: see the log of its pod")


def _unfinished(
    job: Mapping[str, Any], pod: Mapping[str, Any] | None, warnings: Mapping[str, str], now: datetime
) -> Finding:
    slow = pod or job  # without a pod, the Job's own warnings say why there is none
    obstacle = ""
    if pod is None or _status(pod).get("phase") == "Pending":
        obstacle = _obstacle(slow) or warnings.get(str(_metadata(slow).get("uid", "")), "")
    if obstacle and age_seconds(slow, now) >= PATIENCE_SECONDS:
        return Finding(Reason.CHECK_NOT_STARTING, f"the check's pod cannot start: {_one_line(obstacle)}")
    return Finding(Reason.CHECKING, CHECKING_MESSAGE)


def _obstacle(pod: Mapping[str, Any]) -> str:
    """What the pod's own status names as the reason for not running."""
    for container in _status(pod).get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _ON_ITS_WAY:
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    for condition in _status(pod).get("conditions") or []:
        unscheduled = condition.get("type") == "PodScheduled" and condition.get("status") == "False"
        if unscheduled and condition.get("message"):
            return str(condition["message"])
    return ""


def newest_attempt(jobs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return max(jobs, key=attempt_of, default=None)


def _time(condition: Mapping[str, Any], otherwise: datetime) -> datetime:
    try:
        return parse_time(str(condition.get("lastTransitionTime")))
    except ValueError:
        return otherwise


def parse_time(text: str) -> datetime:
    """A time as Kubernetes writes it. Raises ValueError, also for one without a zone."""
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"no zone in {text!r}")
    return time


def age_seconds(manifest: Mapping[str, Any], now: datetime) -> float:
    """How long an object has been there; 0 for one that does not say."""
    try:
        made = parse_time(str(_metadata(manifest).get("creationTimestamp")))
    except ValueError:
        return 0.0
    return (now - made).total_seconds()


def _owner_uid(pod: Mapping[str, Any]) -> str:
    references = _metadata(pod).get("ownerReferences") or []
    return next(
        (str(reference.get("uid", "")) for reference in references if reference.get("controller")), ""
    )


def _metadata(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    return manifest.get("metadata") or {}


def _status(manifest: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return (manifest or {}).get("status") or {}
