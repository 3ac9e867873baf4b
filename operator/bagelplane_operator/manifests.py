"""What the operator makes: the ConfigMap that sidecars mount, and the Job that looks at the sources.

Pure constructors of plain manifests. All are owned by the resource, so that they go when it goes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from bagelplane.spec import API_VERSION, KIND, BagelDataset, config_hash
from bagelplane_operator import naming

Manifest = dict[str, Any]

CHECK_DEADLINE_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Image:
    """The dataplane's image, for resources that name none of their own."""

    name: str
    pull_policy: str = "IfNotPresent"


@dataclass(frozen=True, slots=True)
class Owner:
    """The resource as its children name it."""

    name: str
    namespace: str
    uid: str

    @property
    def reference(self) -> dict[str, Any]:
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            # True would ask for a right on finalizers, and hold up deletions in the foreground.
            "blockOwnerDeletion": False,
        }

    def owns(self, manifest: Mapping[str, Any]) -> bool:
        references = manifest.get("metadata", {}).get("ownerReferences") or []
        return any(reference.get("uid") == self.uid for reference in references)


def child_labels(owner: Owner, role: str, revision: str) -> dict[str, str]:
    """Never the data set's label: that one asks for a sidecar."""
    return {
        naming.MANAGED_BY_LABEL: naming.MANAGER,
        naming.OWNER_LABEL: owner.name,
        naming.ROLE_LABEL: role,
        naming.CONFIG_HASH_LABEL: naming.short_hash(revision),
    }


def build_config_map(dataset: BagelDataset, owner: Owner) -> Manifest:
    """The resource as its pods read it. A function of the spec alone: labels of the resource are left out."""
    revision = config_hash(dataset)
    document = dataset.to_mapping()
    document["metadata"] = {"name": owner.name, "namespace": owner.namespace}
    text = _yaml_text(json.dumps(document))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": naming.config_map_name(owner.name, revision),
            "namespace": owner.namespace,
            "labels": child_labels(owner, naming.ROLE_CONFIG, revision),
            "ownerReferences": [owner.reference],
        },
        "immutable": True,
        "data": {naming.DATASET_FILE: text},
    }


@lru_cache(maxsize=1024)
def _yaml_text(json_text: str) -> str:
    """Kept, because writing YAML takes 10 ms and every look at a resource asks for it."""
    return yaml.safe_dump(json.loads(json_text), sort_keys=False, allow_unicode=True)


def build_check_job(dataset: BagelDataset, owner: Owner, default_image: Image, attempt: int) -> Manifest:
    """`bagelplane check` beside the data: in the resource's namespace, with the credentials of its pods."""
    revision = config_hash(dataset)
    labels = child_labels(owner, naming.ROLE_CHECK, revision)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": naming.check_job_name(owner.name, owner.uid, revision, attempt),
            "namespace": owner.namespace,
            "labels": labels,
            "annotations": {naming.ATTEMPT_ANNOTATION: str(attempt)},
            "ownerReferences": [owner.reference],
        },
        "spec": {
            # The operator makes the next attempt itself: a Job's own retries come too fast for a wrong bucket.
            "backoffLimit": 0,
            "activeDeadlineSeconds": CHECK_DEADLINE_SECONDS,
            "template": {
                # Injectors of other systems would keep the Job from ending.
                "metadata": {"labels": {**labels, "sidecar.istio.io/inject": "false"}},
                "spec": _check_pod(dataset, owner, default_image),
            },
        },
    }


def _check_pod(dataset: BagelDataset, owner: Owner, default_image: Image) -> Manifest:
    revision = config_hash(dataset)
    volumes: list[Manifest] = [
        {
            "name": naming.DATASET_VOLUME,
            "configMap": {"name": naming.config_map_name(owner.name, revision)},
        },
        {"name": naming.SCRATCH_VOLUME, "emptyDir": {"sizeLimit": "64Mi"}},
    ]
    mounts: list[Manifest] = [
        {"name": naming.DATASET_VOLUME, "mountPath": naming.DATASET_DIR, "readOnly": True},
        {"name": naming.SCRATCH_VOLUME, "mountPath": naming.SCRATCH_DIR},
    ]
    environment = [{"name": "HOME", "value": naming.SCRATCH_DIR}]
    secret = dataset.spec.storage.secret_ref
    if secret is not None:
        volumes.append({"name": naming.CREDENTIALS_VOLUME, "secret": {"secretName": secret.name}})
        mounts.append(
            {"name": naming.CREDENTIALS_VOLUME, "mountPath": naming.CREDENTIALS_DIR, "readOnly": True}
        )
        environment.append({"name": naming.CREDENTIALS_DIR_ENV, "value": naming.CREDENTIALS_DIR})
    container = {
        "name": naming.CHECK_CONTAINER,
        "image": dataset.spec.dataplane.image or default_image.name,
        "imagePullPolicy": default_image.pull_policy,
        "args": ["check", naming.DATASET_PATH, "--report", naming.REPORT_PATH],
        "env": environment,
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"cpu": "1", "memory": "1Gi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePath": naming.REPORT_PATH,
        "terminationMessagePolicy": "File",
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": naming.USER_ID,
            "runAsGroup": naming.USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
