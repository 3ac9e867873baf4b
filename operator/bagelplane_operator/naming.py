"""The names that operator, webhook, chart and tests share, and how names of made objects are built.

Pure: it knows no client and reads nothing. Hashes come in as text; `bagelplane.spec` computes them.
"""

from __future__ import annotations

import hashlib

GROUP = "bagelplane.io"
VERSION = "v1alpha1"
PLURAL = "bageldatasets"

# What a pod says. The label asks for injection, so nothing that we make ourselves may carry it.
DATASET_LABEL = "bagelplane.io/dataset"
INJECT_ANNOTATION = "bagelplane.io/inject"
TRAINER_CONTAINER_ANNOTATION = "bagelplane.io/trainer-container"
RESUME_STEP_ANNOTATION = "bagelplane.io/resume-step"
DATA_PARALLEL_RANKS_ANNOTATION = "bagelplane.io/data-parallel-ranks"
RUN_ID_ANNOTATION = "bagelplane.io/run-id"
JOBSET_LABELS = ("jobset.sigs.k8s.io/jobset-uid", "jobset.sigs.k8s.io/jobset-name")
"""Its pods are of several Jobs; in this order, the uid is there in later releases only."""

# What the webhook writes back.
INJECTED_ANNOTATION = "bagelplane.io/injected"
SPEC_HASH_ANNOTATION = "bagelplane.io/spec-hash"

# A namespace with this label and value is left alone, and so are kube-* and the release's own.
INJECTION_LABEL = "bagelplane.io/injection"
INJECTION_DISABLED = "disabled"

# What the operator writes on objects that it makes.
OWNER_LABEL = "bagelplane.io/owner"
CONFIG_HASH_LABEL = "bagelplane.io/config-hash"
ROLE_LABEL = "bagelplane.io/role"
ROLE_CONFIG = "config"
ROLE_CHECK = "check"
ATTEMPT_ANNOTATION = "bagelplane.io/attempt"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGER = "bagelplane-operator"

SIDECAR_CONTAINER = "bagelplane"
CHECK_CONTAINER = "check"
TRAINER_CONTAINERS = ("pytorch", "node")
"""Tried in this order when the annotation names none."""

RING_VOLUME = "bagelplane-ring"
DATASET_VOLUME = "bagelplane-dataset"
CREDENTIALS_VOLUME = "bagelplane-credentials"
SCRATCH_VOLUME = "bagelplane-scratch"
NO_TOKEN_VOLUME = "bagelplane-no-token"
"""Empty; keeps the service account's token out of the sidecar."""

RUN_DIR = "/run/bagelplane"
DATASET_DIR = "/etc/bagelplane/dataset"
DATASET_FILE = "dataset.yaml"
"""Also the key in the ConfigMap."""
DATASET_PATH = f"{DATASET_DIR}/{DATASET_FILE}"
CREDENTIALS_DIR = "/etc/bagelplane/credentials"
SCRATCH_DIR = "/tmp"
TOKEN_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"
REPORT_PATH = "/dev/termination-log"

STATUS_PORT = 9780
STATUS_PORT_NAME = "bagelplane"
STATUS_PATH = "/v1/status"
READY_PATH = "/readyz"

RUN_DIR_ENV = "BAGELPLANE_DIR"
CREDENTIALS_DIR_ENV = "BAGELPLANE_CREDENTIALS_DIR"
GENERATION_ENV = "BAGELPLANE_GENERATION"
RUN_ID_ENV = "BAGELPLANE_RUN_ID"
LOG_FORMAT_ENV = "BAGELPLANE_LOG_FORMAT"
NODES_ENV = "PET_NNODES"
RANKS_ENV = "PET_NPROC_PER_NODE"
GPU_RESOURCE = "nvidia.com/gpu"

# Settings of operator and webhook.
IMAGE_ENV = "BAGELPLANE_DATAPLANE_IMAGE"
PULL_POLICY_ENV = "BAGELPLANE_DATAPLANE_IMAGE_PULL_POLICY"
NAMESPACES_ENV = "BAGELPLANE_NAMESPACES"
SIDECAR_LOG_FORMAT_ENV = "BAGELPLANE_SIDECAR_LOG_FORMAT"

USER_ID = 65532
"""Of our containers: the user that small images call nonroot."""

_JOB_NAME_CHARACTERS = 63  # a Job's name becomes a label of its pods
_SHORT_HASH_DIGITS = 12


def short_hash(config_hash: str) -> str:
    """The part of a configuration's hash that stands in names and in the `injected` annotation."""
    return config_hash[:_SHORT_HASH_DIGITS]


def config_map_name(dataset: str, config_hash: str) -> str:
    return f"bagelplane-{dataset}-{short_hash(config_hash)}"


def check_job_name(dataset: str, uid: str, config_hash: str, attempt: int) -> str:
    """Each attempt has a name of its own, so that a new one never waits for the end of the one before it.

    The resource's uid keeps a new resource of an old name apart from what its forerunner left.
    """
    digits = hashlib.sha256(f"{uid}/{config_hash}/{attempt}".encode()).hexdigest()[:8]
    tail = f"-check-{digits}"
    return dataset[: _JOB_NAME_CHARACTERS - len(tail)].rstrip("-") + tail
