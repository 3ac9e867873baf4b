"""Kubeflow's training operator in the test cluster, from the manifests in its own Go module."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.cluster.images import image_tag
from tests.cluster.kubectl import Kubectl
from tests.tools.go_build import source_folder

IMAGES = ("training-operator", "lookup")  # to be loaded before
_MODULE = "github.com/kubeflow/training-operator"
_NAMESPACE = "kubeflow"
_NAME = "training-operator"
_TEMPLATE_DIR = "/etc/pytorch-init-container"
_TEMPLATE_FILE = "init-container.yaml"
_AVAILABLE_SECONDS = 120.0

# Workers wait here for their master's name. Without a template of ours this container has no security context, and
# a namespace that enforces `restricted` refuses the worker.
_INIT_CONTAINER = """\
- name: init-pytorch
  image: {{.InitContainerImage}}
  imagePullPolicy: IfNotPresent
  command: [sh, -c, "for i in $(seq {{.MaxTries}}); do nslookup {{.MasterAddr}} && exit 0; sleep 1; done; exit 1"]
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
    seccompProfile: {type: RuntimeDefault}
"""


def deploy_training_operator(kubectl: Kubectl, work_dir: Path) -> None:
    """Applies it for PyTorchJobs, and waits until it takes jobs. Raises KubectlError, AssertionError, ToolError."""
    overlay = source_folder("training-operator", _MODULE) / "manifests" / "overlays" / "standalone"
    _write_kustomization(work_dir, overlay)
    kubectl.run("apply", "--server-side", "--kustomize", work_dir)
    kubectl.wait_for(
        "the training operator to be available",
        lambda: _is_available(kubectl.get_json("deployment", _NAME, namespace=_NAMESPACE)),
        _AVAILABLE_SECONDS,
        last_seen=lambda: kubectl.describe("pods", namespace=_NAMESPACE),
    )


def _is_available(deployment: dict[str, Any]) -> bool:
    conditions = deployment.get("status", {}).get("conditions", [])
    return any(c["type"] == "Available" and c["status"] == "True" for c in conditions)


def _write_kustomization(folder: Path, overlay: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _TEMPLATE_FILE).write_text(_INIT_CONTAINER)
    container = {
        "name": _NAME,
        "image": image_tag("training-operator"),
        "imagePullPolicy": "IfNotPresent",
        "args": [
            "--enable-scheme=pytorchjob",
            f"--pytorch-init-container-image={image_tag('lookup')}",
            f"--pytorch-init-container-template-file={_TEMPLATE_DIR}/{_TEMPLATE_FILE}",
        ],
        "volumeMounts": [{"name": "init-container", "mountPath": _TEMPLATE_DIR, "readOnly": True}],
        "readinessProbe": {"initialDelaySeconds": 1, "periodSeconds": 1},
    }
    pod = {
        "containers": [container],
        "volumes": [{"name": "init-container", "configMap": {"name": "pytorch-init-container"}}],
    }
    patch = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": _NAME},
        "spec": {"template": {"spec": pod}},
    }
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": _NAMESPACE,
        "resources": [
            os.path.relpath(overlay.resolve(), folder.resolve())
        ],  # kustomize takes no absolute path
        "configMapGenerator": [{"name": "pytorch-init-container", "files": [_TEMPLATE_FILE]}],
        "patches": [{"patch": json.dumps(patch)}],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization, indent=1))  # JSON is YAML
