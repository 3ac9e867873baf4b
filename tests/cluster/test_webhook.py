"""The webhook before a real API server: who is refused and in which words, what becomes of pods, who is left alone."""

from __future__ import annotations

import base64
import http.server
import json
import os
import ssl
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from bagelplane.cli.demo_server import free_port
from bagelplane.spec import BagelDataset, config_hash
from bagelplane.spec_schema import CRD_NAME
from bagelplane_operator.injection import dataset_asked_for, is_injected
from tests.cluster.certificates import Authority, KeyPair
from tests.cluster.control_plane import ControlPlane, control_plane
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.cluster.processes import Component, component
from tests.restricted import violations

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
DATASET = ROOT / "docs" / "examples" / "kubernetes" / "dataset.yaml"
START_SECONDS = 60.0
MESH = "mesh"  # another system's webhook, called after ours
RIGHTS = """
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: webhook}
rules:
- {apiGroups: [bagelplane.io], resources: [bageldatasets], verbs: [get, list]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: webhook}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: webhook}
subjects:
- {apiGroup: rbac.authorization.k8s.io, kind: User, name: webhook}
---
apiVersion: v1
kind: Namespace
metadata:
  name: training
  labels: {pod-security.kubernetes.io/enforce: restricted}
"""

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    kubectl: Kubectl
    webhook: Component
    authority: Authority
    server: KeyPair

    def refusal(self, resource: Object, *arguments: str) -> str:
        with pytest.raises(KubectlError) as caught:
            self.kubectl.apply(json.dumps(resource), *arguments)
        return caught.value.text

    def create(self, pod: Object) -> Object:
        """The pod as it would be stored, after all admission."""
        options = ("--filename=-", "--output=json", "--dry-run=server")
        made = self.kubectl.run("create", *options, input=json.dumps(pod))
        stored: Object = json.loads(made)
        return stored


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane"), advertise_address="127.0.0.1") as running:
        yield running


@pytest.fixture(scope="module")
def setting(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    kubectl = Kubectl(plane.kubeconfig)
    kubectl.apply(ROOT / "crds" / f"{CRD_NAME}.yaml")
    kubectl.wait_established(CRD_NAME)
    kubectl.apply(RIGHTS)
    wait = "the namespace's service account"
    kubectl.wait_for(wait, lambda: kubectl.get_json("serviceaccount", "default", namespace="training"), 60)
    # Stored by a release that ran it, or at a time without a webhook.
    kubectl.apply(json.dumps(dataset("old", storage={"cache": {"sizeLimit": "1Gi"}})))
    folder = tmp_path_factory.mktemp("webhook")
    authority = Authority(folder / "authority", "webhook")
    pair = authority.issue("server", "webhook", hosts=["127.0.0.1"])
    (folder / "tls.crt").symlink_to(pair.certificate)
    (folder / "tls.key").symlink_to(pair.key)
    port = free_port()
    kubeconfig = plane.kubeconfig_for("webhook", "webhook")
    image = {"BAGELPLANE_DATAPLANE_IMAGE": "localhost/bagelplane/dataplane:test"}
    environment = {**os.environ, **image, "KUBECONFIG": str(kubeconfig)}
    command = [
        sys.executable,
        "-m",
        "bagelplane_operator",
        "webhook",
        "--cert-dir",
        folder,
        "--port",
        str(port),
    ]
    with component("webhook", command, folder / "webhook.log", environment) as process:
        url = f"https://127.0.0.1:{port}"
        process.wait_until("ready", lambda: fault_of(f"{url}/readyz", authority), START_SECONDS)
        kubectl.apply(json.dumps(configuration(url, authority)))
        wrong = json.dumps(dataset("wrong", storage={"cache": {"sizeLimit": "1Gi"}}))
        wait = "the API server to ask the webhook"
        kubectl.wait_for(wait, lambda: refuses(kubectl, wrong), 60)
        kubectl.apply(json.dumps(dataset("bagel-sft")))
        yield Setting(kubectl, process, authority, pair)


def refuses(kubectl: Kubectl, resource: str) -> bool:
    try:
        kubectl.apply(resource, "--dry-run=server")
    except KubectlError:
        return True
    return False


def fault_of(url: str, authority: Authority) -> str:
    try:
        context = ssl.create_default_context(cafile=str(authority.certificate))
        with urllib.request.urlopen(url, timeout=5, context=context):
            return ""
    except OSError as error:
        return str(error)


def configuration(url: str, authority: Authority) -> Object:
    """As the chart's, but by address and without a Service."""

    def webhook(name: str, path: str, rule: Object, **more: object) -> Object:
        rule |= {"apiVersions": ["*"], "scope": "Namespaced"}
        return {
            "name": f"{name}.bagelplane.io",
            "clientConfig": {"url": url + path, "caBundle": encoded(authority)},
            "rules": [rule],
            "failurePolicy": "Fail",
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
            "reinvocationPolicy": "IfNeeded",
            "timeoutSeconds": 5,
            **more,
        }

    pods = {"apiGroups": [""], "resources": ["pods"], "operations": ["CREATE"]}
    datasets = {
        "apiGroups": ["bagelplane.io"],
        "resources": ["bageldatasets"],
        "operations": ["CREATE", "UPDATE"],
    }
    labelled = {"matchExpressions": [{"key": "bagelplane.io/dataset", "operator": "Exists"}]}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "bagelplane"},
        "webhooks": [
            webhook("inject-pods", "/inject-pods", pods, objectSelector=labelled),
            webhook("check-datasets", "/check-datasets", datasets),
        ],
    }


def encoded(authority: Authority) -> str:
    return base64.b64encode(authority.certificate.read_bytes()).decode()


def dataset(name: str, **changes: object) -> Object:
    resource: Object = yaml.safe_load(DATASET.read_text())
    resource["metadata"] = {"name": name, "namespace": "training"}
    resource["spec"] |= changes
    return resource


def pod(name: str | None, **spec: object) -> Object:
    """One that a restricted namespace takes; `name`: of the dataset that it asks for."""
    container = {
        "name": "pytorch",
        "image": "localhost/trainer:test",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "env": [{"name": "PET_NPROC_PER_NODE", "value": "2"}],
    }
    context = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    labels = {"bagelplane.io/dataset": name} if name else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "train-", "namespace": "training", "labels": labels},
        "spec": {"containers": [container], "securityContext": context, **spec},
    }


@contextmanager
def second_webhook(setting: Setting, change: Callable[[Object], list[Object]]) -> Iterator[None]:
    """Another system's webhook, after ours: `change` gives the patch for a pod."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
            asked.append(request["uid"])
            patch = base64.b64encode(json.dumps(change(request["object"])).encode()).decode()
            response = {"uid": request["uid"], "allowed": True, "patchType": "JSONPatch", "patch": patch}
            body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(setting.server.certificate, setting.server.key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        config = configuration(f"https://127.0.0.1:{server.server_port}", setting.authority)
        config["metadata"]["name"] = MESH
        config["webhooks"] = [config["webhooks"][0] | {"reinvocationPolicy": "Never"}]
        try:
            setting.kubectl.apply(json.dumps(config))
            wait = "the API server to ask the second webhook"
            setting.kubectl.wait_for(wait, lambda: setting.create(pod("bagel-sft")) and asked, 60)
            yield
        finally:
            setting.kubectl("delete", "mutatingwebhookconfiguration", MESH)
            server.shutdown()
            thread.join()


# --- datasets -------------------------------------------------------------------------------------


def test_a_wrong_field_is_refused_at_apply_in_the_words_of_the_command_line(setting: Setting) -> None:
    # Also of the kinds that the schema would refuse, in words of its own.
    wrong = dataset("wrong", conditioning={"textDropout": 2}, budgets={"maxTokens": "many"})
    text = setting.refusal(wrong)
    assert 'admission webhook "check-datasets.bagelplane.io" denied the request: BagelDataset wrong: ' in text
    assert "spec.conditioning.textDropout: must be at most 1 (got 2). Fix: write for example" in text
    assert "spec.budgets.maxTokens: must be a whole number (got 'many'). Fix: write for example" in text
    across = dataset("wrong", budgets={"expectedTokens": 4096, "maxTokens": 1024})
    assert "spec.budgets.expectedTokens: must be at most maxTokens, 1024 (got 4096)" in setting.refusal(
        across
    )
    assert "spec.storage.cache: is set, this release keeps no cache yet" in setting.refusal(
        dataset("wrong", storage={"cache": {"sizeLimit": "1Gi"}})
    )


def test_what_was_stored_before_can_be_labelled_and_deleted_but_not_changed(setting: Setting) -> None:
    setting.kubectl("label", "bgds", "old", "--namespace=training", "team=a")
    assert "is set, this release" in setting.refusal(
        dataset("old", storage={"cache": {"sizeLimit": "1Gi"}}, snapshots={"everySteps": 7})
    )
    setting.kubectl("delete", "bgds", "old", "--namespace=training", "--dry-run=server")


# --- pods -----------------------------------------------------------------------------------------


def test_a_pod_that_names_a_missing_dataset_is_refused_with_those_that_are_there(setting: Setting) -> None:
    with pytest.raises(KubectlError) as caught:
        setting.create(pod("bagel-stf"))
    assert (
        "there is no BagelDataset bagel-stf in namespace training; expected one of bagel-sft, old. Fix:"
        in (caught.value.text)
    )


def test_the_namespace_is_the_requests(setting: Setting) -> None:
    elsewhere = pod("bagel-sft")
    elsewhere["metadata"]["namespace"] = "default"
    with pytest.raises(KubectlError, match="there is no BagelDataset bagel-sft in namespace default"):
        setting.create(elsewhere)


def test_without_the_label_nothing_is_touched(setting: Setting) -> None:
    assert "bagelplane" not in json.dumps(setting.create(pod(None)))


def test_an_injected_pod_passes_where_restricted_is_enforced(setting: Setting) -> None:
    stored = setting.create(pod("bagel-sft"))
    assert is_injected(stored)
    assert violations(stored) == []
    sidecar = stored["spec"]["initContainers"][0]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("bagelplane", "Always")
    resource = setting.kubectl.get_json("bgds", "bagel-sft", namespace="training")
    revision = config_hash(BagelDataset.from_mapping(resource))[:12]
    assert stored["metadata"]["annotations"]["bagelplane.io/injected"] == revision
    generation = {"name": "BAGELPLANE_GENERATION", "value": str(resource["metadata"]["generation"])}
    assert generation in sidecar["env"]
    assert generation in stored["spec"]["containers"][0]["env"]


def test_the_service_accounts_token_is_the_trainers_alone(setting: Setting) -> None:
    spec = setting.create(pod("bagel-sft"))["spec"]
    assert "kube-api-access" in json.dumps(spec["containers"])
    assert "kube-api-access" not in json.dumps(spec["initContainers"])


def test_a_stored_pod_is_left_alone_when_it_comes_again(setting: Setting) -> None:
    first = setting.create(pod("bagel-sft"))
    again = setting.create({key: first[key] for key in ("apiVersion", "kind", "metadata", "spec")})
    assert again["spec"] == first["spec"]
    assert dataset_asked_for(again) == "bagel-sft"


def test_a_webhook_that_comes_after_ours_changes_nothing_of_the_sidecar(setting: Setting) -> None:
    def join(asked: Object) -> list[Object]:
        proxy = asked["spec"]["containers"][0] | {"name": "mesh-proxy"}
        first = asked["spec"]["initContainers"][0] | {"name": "mesh-init", "startupProbe": None}
        return [
            {"op": "add", "path": "/spec/containers/0", "value": proxy},
            {"op": "add", "path": "/spec/initContainers/0", "value": first},
        ]

    alone = setting.create(pod("bagel-sft"))["spec"]
    with second_webhook(setting, join):
        before = setting.webhook.log.read_text().count("left alone")
        spec = setting.create(pod("bagel-sft"))["spec"]
        assert setting.webhook.log.read_text().count("left alone") == before + 1, "ours was asked again"
    assert [container["name"] for container in spec["initContainers"]] == ["mesh-init", "bagelplane"]
    assert [container["name"] for container in spec["containers"]] == ["mesh-proxy", "pytorch"]
    assert without_token(spec["initContainers"][1]) == without_token(alone["initContainers"][0])
    assert without_token(spec["containers"][1]) == without_token(alone["containers"][0])


def test_a_restart_policy_that_another_webhook_drops_is_given_back(setting: Setting) -> None:
    def strip(_: Object) -> list[Object]:
        return [{"op": "remove", "path": "/spec/initContainers/0/restartPolicy"}]

    with second_webhook(setting, strip):
        spec = setting.create(pod("bagel-sft"))["spec"]
    assert spec["initContainers"][0]["restartPolicy"] == "Always"


def without_token(container: Object) -> Object:
    """Less the mount whose name is drawn for each pod."""
    mounts = [mount for mount in container["volumeMounts"] if not mount["name"].startswith("kube-api-access")]
    return container | {"volumeMounts": mounts}
