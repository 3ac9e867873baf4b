"""A namespace to train in, and the example job as it runs without a registry and without an image of torch.

The job's image is the tests' base image; torch and the client come from a folder of the node, by a volume claim
(`restricted` forbids host paths in a pod).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.kubectl import Kubectl
from tests.services.s3 import S3Server

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "kubernetes"
SECRET = "bagel-s3"
_CLAIM = "trainer-environment"
_ENVIRONMENT_DIR = "/opt/trainer"
_BASE_IMAGE = "localhost/bagelplane/base:test"
_CLAIMED = {"persistentVolumeClaim": {"claimName": _CLAIM, "readOnly": True}}


def create_namespace(
    kubectl: Kubectl, namespace: str, *, trainer_environment: Path, server: S3Server
) -> None:
    """A namespace that enforces `restricted`, with the credentials' Secret and a claim on the environment."""
    volume = f"{namespace}-{_CLAIM}"
    keys = {"access_key_id": server.access_key_id, "secret_access_key": server.secret_access_key}
    claim = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    items = [
        _object("v1", "Namespace", namespace, labels={"pod-security.kubernetes.io/enforce": "restricted"}),
        _object("v1", "Secret", SECRET, namespace, stringData=keys),
        _object(
            "v1",
            "PersistentVolume",
            volume,
            spec={
                "accessModes": ["ReadOnlyMany"],
                "capacity": {"storage": "1Gi"},
                "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"name": _CLAIM, "namespace": namespace},
                "hostPath": {"path": str(trainer_environment), "type": "Directory"},
            },
        ),
        _object("v1", "PersistentVolumeClaim", _CLAIM, namespace, spec=claim | {"volumeName": volume}),
    ]
    kubectl.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))


def remove_namespace(kubectl: Kubectl, namespace: str) -> None:
    """The namespace, and the volume that belongs to it and lies outside."""
    kubectl.run("delete", "namespace", namespace, "--timeout=120s")
    kubectl.run("delete", "persistentvolume", f"{namespace}-{_CLAIM}", "--timeout=60s")


def localise(job: Mapping[str, Any], *, volume: Mapping[str, Any] = _CLAIMED) -> dict[str, Any]:
    """The example's PyTorchJob with the image and the torch of the tests."""
    # The example writes both templates once, by a YAML alias. JSON knows none: they are two mappings after this.
    local: dict[str, Any] = json.loads(json.dumps(job))
    for replica in local["spec"]["pytorchReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        container["image"] = _BASE_IMAGE
        container["command"] = ["python3", "-m", "torch.distributed.run", *container["command"][1:]]
        container["env"] = [{"name": "PYTHONPATH", "value": _ENVIRONMENT_DIR}]
        container["volumeMounts"].append({"name": _CLAIM, "mountPath": _ENVIRONMENT_DIR, "readOnly": True})
        pod["volumes"].append({"name": _CLAIM, **volume})
    return local


def example(name: str) -> dict[str, Any]:
    """One of the files that the README names."""
    loaded = yaml.safe_load((EXAMPLES / name).read_text())
    assert isinstance(loaded, dict)
    return loaded


def _object(
    api_version: str, kind: str, name: str, namespace: str = "", labels: Any = None, **rest: Any
) -> dict[str, Any]:
    metadata = {"name": name, **({"namespace": namespace} if namespace else {}), "labels": labels or {}}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **rest}
