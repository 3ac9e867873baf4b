"""A namespace made of lists, for claims about the operator's planning: it applies plans as an API server would."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml

from bagelplane_operator import naming
from bagelplane_operator.attachments import Attachments, TrainerPod, read_pod
from bagelplane_operator.manifests import Image, Manifest
from bagelplane_operator.planning import (
    Create,
    Event,
    Observed,
    Plan,
    build_status_patch,
    format_time,
    plan,
)

IMAGE = Image("example/dataplane:1")
START = datetime(2026, 11, 30, 12, tzinfo=UTC)
GOOD_REPORT = json.dumps({"ok": True, "problems": [], "groups": 1})
BAD_REPORT = json.dumps(
    {
        "ok": False,
        "problems": [
            {
                "what": "the bucket wrong does not exist",
                "got": "404 from http://s3:9000",
                "expected": "",
                "fix": "correct the uri",
            }
        ],
        "groups": 1,
    }
)

SPEC = """
profile: Automodel
tokenizer: {uri: s3://bucket/tokenizer.json}
storage: {endpointURL: "http://s3:9000", secretRef: {name: bagel-s3}}
groups:
- name: t2i
  type: t2i_pretrain
  datasets: [{name: t2i, uri: s3://bucket/t2i/}]
  imageTransform: {stride: 16, maxSize: 512, minSize: 256}
sharding: {mode: Bagel}
"""


def build_resource(spec: str = SPEC, **changes: Any) -> Manifest:
    return {
        "apiVersion": "bagelplane.io/v1alpha1",
        "kind": "BagelDataset",
        "metadata": {
            "name": "bagel-sft",
            "namespace": "training",
            "uid": "uid-of-the-resource",
            "generation": 1,
            "resourceVersion": "1",
            "creationTimestamp": format_time(START),
        },
        "spec": {**yaml.safe_load(spec), **changes},
    }


@dataclass
class World:
    """One resource and what is there for it. `look` plans and applies; `events` are those that were told."""

    resource: Manifest = field(default_factory=build_resource)
    now: datetime = START
    config_maps: list[Manifest] = field(default_factory=list)
    jobs: list[Manifest] = field(default_factory=list)
    check_pods: list[Manifest] = field(default_factory=list)
    pods: list[TrainerPod] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)
    attachments: Attachments = field(default_factory=Attachments)
    events: list[Event] = field(default_factory=list)
    made: int = 0

    def plan(self) -> Plan:
        observed = Observed(
            self.config_maps, self.jobs, self.check_pods, self.warnings, self.pods, self.attachments
        )
        before = copy.deepcopy((self.resource, observed))
        planned = plan(self.resource, observed, IMAGE, self.now)
        assert (self.resource, observed) == before, "planning changed what it was given"
        return planned

    def look(self, after_seconds: float = 0.0) -> Plan:
        self.pass_time(after_seconds)
        planned = self.plan()
        for action in planned.actions:
            if isinstance(action, Create):
                self.create(copy.deepcopy(action.manifest))
            else:
                kept = self.config_maps if action.kind == "ConfigMap" else self.jobs
                kept[:] = [each for each in kept if each["metadata"]["uid"] != action.uid]
        self.events += planned.events
        self.resource["status"] = copy.deepcopy(planned.status)
        return planned

    def create(self, manifest: Manifest) -> Manifest:
        objects = self.config_maps if manifest["kind"] == "ConfigMap" else self.jobs
        names = [each["metadata"]["name"] for each in objects]
        assert manifest["metadata"]["name"] not in names, f"two of one name: {names}"
        self.made += 1
        manifest["metadata"] |= {"uid": f"uid-{self.made}", "creationTimestamp": format_time(self.now)}
        objects.append(manifest)
        return manifest

    def pass_time(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def edit(self, **changes: Any) -> None:
        self.resource["spec"] |= changes
        self.resource["metadata"]["generation"] += 1

    def is_settled(self) -> bool:
        """Whether planning again at this moment gives nothing to do, to write or to tell."""
        planned = self.plan()
        patch = build_status_patch(self.resource["status"], planned.status)
        return not planned.actions and not planned.events and patch is None

    def condition(self, kind: str) -> dict[str, Any]:
        (found,) = (each for each in self.resource["status"]["conditions"] if each["type"] == kind)
        return dict(found)

    def reasons(self) -> tuple[str, str]:
        return self.condition("Ready")["reason"], self.condition("SourcesReachable")["reason"]

    # -- what kubelet and Job controller would do

    def end_check(
        self, report: str | None, *, exit_code: int = 0, reason: str = "BackoffLimitExceeded"
    ) -> None:
        job = self.jobs[-1]
        terminated = {"exitCode": exit_code, "reason": "Completed" if exit_code == 0 else "Error"}
        if report is not None:
            terminated["message"] = report
        if reason != "DeadlineExceeded":
            self.check_pods.append(build_check_pod(job, "Succeeded", {"terminated": terminated}))
        else:
            self.check_pods.clear()
        condition = {"type": "Complete" if exit_code == 0 else "Failed", "status": "True"}
        condition |= {"reason": reason, "lastTransitionTime": format_time(self.now)}
        job["status"] = {"conditions": [condition]}

    def ready(self) -> World:
        """The same world a moment later, its check passed."""
        self.look()
        self.pass_time(1)
        self.end_check(GOOD_REPORT)
        self.look()
        return self


def build_check_pod(job: Manifest, phase: str, state: dict[str, Any] | None) -> Manifest:
    statuses = [{"name": naming.CHECK_CONTAINER, "state": state}] if state is not None else []
    return {
        "metadata": {
            "name": "check",
            "uid": f"pod-of-{job['metadata']['uid']}",
            "creationTimestamp": job["metadata"]["creationTimestamp"],
            "ownerReferences": [{"uid": job["metadata"]["uid"], "controller": True}],
        },
        "status": {"phase": phase, "containerStatuses": statuses},
    }


def build_trainer_pod(name: str = "trainer-0", **changes: Any) -> Manifest:
    """A running, injected pod; `changes` go into its status."""
    return {
        "metadata": {
            "name": name,
            "namespace": "training",
            "uid": f"uid-of-{name}",
            "labels": {naming.DATASET_LABEL: "bagel-sft", "training.kubeflow.org/job-name": "sft"},
            "annotations": {naming.INJECTED_ANNOTATION: "0123456789ab"},
        },
        "spec": {"initContainers": [{"name": naming.SIDECAR_CONTAINER}], "containers": [{"name": "pytorch"}]},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.9",
            "initContainerStatuses": [{"name": naming.SIDECAR_CONTAINER, "state": {"running": {}}}],
            **changes,
        },
    }


def trainer_pod(
    name: str = "trainer-0",
    revision: str = "0123456789ab",
    spec_hash: str = "ee64fc869117b831",
    **changes: Any,
) -> TrainerPod:
    pod = build_trainer_pod(name, **changes)
    pod["metadata"]["annotations"][naming.INJECTED_ANNOTATION] = revision
    pod["metadata"]["annotations"][naming.SPEC_HASH_ANNOTATION] = spec_hash
    return read_pod(pod)
