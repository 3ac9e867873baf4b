"""What the webhook answers: AdmissionReviews in, verdicts out.

No server and no client here: datasets come through the `Datasets` protocol. What a request holds is hostile until
it is read; nothing of a pod but its name, its containers' names and our own annotations gets into a message.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from bagelplane.errors import BagelplaneError, SpecError
from bagelplane.spec import BUILT_IN_TYPES, KIND, BagelDataset, refuse_unsupported
from bagelplane.spec_advice import give_advice
from bagelplane_operator import naming
from bagelplane_operator.injection import (
    InjectionDefaults,
    Object,
    build_patch,
    dataset_asked_for,
    inject,
    is_injected,
    mend,
)

_API_VERSION = "admission.k8s.io/v1"
_SHOWN_NAMES = 20
_SHOWN_LINES = 25

# Not 422: kubectl words a refusal of that code itself, and loses ours.
FORBIDDEN = 403
UNAVAILABLE = 503


class Datasets(Protocol):
    """Where BagelDatasets are looked up. Both raise BagelplaneError when there is no answer."""

    async def find(self, namespace: str, name: str) -> Mapping[str, Any] | None: ...

    async def names(self, namespace: str) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class Review:
    """One question of the API server."""

    uid: str
    kind: str
    operation: str
    namespace: str
    object: Object
    """Empty where there is none, as for deletions."""
    old_object: Object

    @property
    def name(self) -> str:
        """The object's name for the log; of a name that is yet to be generated, its beginning."""
        metadata = self.object.get("metadata")
        known = metadata if isinstance(metadata, dict) else {}
        return f"{self.namespace}/{known.get('name') or known.get('generateName') or ''}"[:200]


@dataclass(frozen=True, slots=True)
class Verdict:
    allowed: bool
    message: str = ""
    code: int = FORBIDDEN
    patch: tuple[Object, ...] = ()
    warnings: tuple[str, ...] = ()


ALLOWED = Verdict(True)


def parse_review(body: bytes, kind: str) -> Review:
    """The question in a request's body, about an object of that kind. Raises SpecError for anything else."""
    try:
        document = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise SpecError(
            "the body is no JSON document", expected=f"an AdmissionReview of {_API_VERSION}"
        ) from None
    if not isinstance(document, dict):
        document = {}
    got = f"{document.get('apiVersion')!r:.60}, {document.get('kind')!r:.60}"
    if document.get("apiVersion") != _API_VERSION or document.get("kind") != "AdmissionReview":
        raise SpecError(
            "the body is no AdmissionReview", got=got, expected=f"kind AdmissionReview of {_API_VERSION}"
        )
    request = _mapping(document, "request")
    asked = _mapping(request, "kind").get("kind")
    if asked != kind:
        raise SpecError("the review is about another kind", got=f"{asked!r:.60}", expected=kind)
    return Review(
        uid=_text(request, "uid"),
        kind=kind,
        operation=_text(request, "operation"),
        namespace=_text(request, "namespace"),
        object=_mapping(request, "object", optional=True),
        old_object=_mapping(request, "oldObject", optional=True),
    )


def build_answer(uid: str, verdict: Verdict) -> Object:
    response: Object = {"uid": uid, "allowed": verdict.allowed}
    if not verdict.allowed:
        reason = "ServiceUnavailable" if verdict.code == UNAVAILABLE else "Forbidden"
        response["status"] = {"code": verdict.code, "reason": reason, "message": verdict.message}
    if verdict.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(verdict.patch).encode()).decode()
    if verdict.warnings:
        response["warnings"] = list(verdict.warnings)
    return {"apiVersion": _API_VERSION, "kind": "AdmissionReview", "response": response}


# --- datasets -------------------------------------------------------------------------------------


def admit_dataset(review: Review) -> Verdict:
    """Whether a BagelDataset may be stored, in the words of `bagelplane validate`. Changes nothing."""
    new, old = review.object, review.old_object
    metadata = new.get("metadata")
    leaving = isinstance(metadata, dict) and metadata.get("deletionTimestamp") is not None
    # An object that was stored before its rules were made must stay deletable and relabelable.
    if review.operation not in ("CREATE", "UPDATE") or leaving:
        return ALLOWED
    if review.operation == "UPDATE" and new.get("spec") == old.get("spec"):
        return ALLOWED
    try:
        dataset = read_dataset(new)
    except SpecError as error:
        return Verdict(False, _cut(str(error)))
    return Verdict(True, warnings=tuple(str(advice) for advice in give_advice(dataset)))


def read_dataset(resource: Mapping[str, Any]) -> BagelDataset:
    """A resource of the API server's, checked, as one that this release runs. Raises SpecError."""
    metadata = resource.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    source = f"{KIND} {name}" if isinstance(name, str) else KIND
    dataset = BagelDataset.from_mapping(resource, source)
    # A sidecar serves the built-in types alone.
    refuse_unsupported(dataset, source, BUILT_IN_TYPES)
    return dataset


# --- pods -----------------------------------------------------------------------------------------


async def admit_pod(review: Review, datasets: Datasets, defaults: InjectionDefaults) -> Verdict:
    """The patch that gives a pod its sidecar, or why it cannot have one."""
    pod = review.object
    if review.operation != "CREATE":
        return ALLOWED  # what a pod is made of is settled by then
    try:
        name = dataset_asked_for(pod)
        if name is None:
            return ALLOWED
        if is_injected(pod):
            return Verdict(True, patch=tuple(build_patch(pod, mend(pod))))
        resource = await datasets.find(review.namespace, name)
        if resource is None:
            raise await _missing(review.namespace, name, datasets)
        generation = _mapping(resource, "metadata").get("generation")
        injected = inject(
            pod, read_dataset(resource), defaults, generation if isinstance(generation, int) else 0
        )
    except SpecError as error:
        return Verdict(False, _cut(str(error)))
    except BagelplaneError as error:
        what = f"BagelDataset {name} could not be looked up in namespace {review.namespace}: {error}"
        return Verdict(False, what, UNAVAILABLE)
    return Verdict(True, patch=tuple(build_patch(pod, injected)))


async def _missing(namespace: str, name: str, datasets: Datasets) -> SpecError:
    try:
        names = sorted(await datasets.names(namespace))
    except BagelplaneError:
        names = []
    shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
    return SpecError(
        f"there is no BagelDataset {name:.100} in namespace {namespace}",
        expected=f"one of {shown}" if shown else "",
        fix=f"apply it there, or correct the pod's label {naming.DATASET_LABEL}",
    )


def _cut(message: str) -> str:
    """A message that a terminal, a log and an Event can hold."""
    lines = message.splitlines()
    if len(lines) <= _SHOWN_LINES:
        return message
    rest = f"  and {len(lines) - _SHOWN_LINES} more, which bagelplane validate shows"
    return "\n".join([*lines[:_SHOWN_LINES], rest])


# --- reading --------------------------------------------------------------------------------------


def _mapping(parent: Mapping[str, Any], key: str, *, optional: bool = False) -> Object:
    value = parent.get(key)
    if value is None and optional:
        return {}
    if not isinstance(value, dict):
        raise SpecError(f"{key} of the review is not what it must be", expected="a mapping")
    return value


def _text(parent: Mapping[str, Any], key: str) -> str:
    value = parent.get(key)
    if not isinstance(value, str) or not value:
        raise SpecError(f"{key} of the review is not what it must be", expected="text")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
