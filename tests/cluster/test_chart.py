"""The chart by real helm: what it renders, what it refuses, and what an API server makes of it (without a node)."""

from __future__ import annotations

import json
import subprocess
from base64 import b64decode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from bagelplane.cli.reference_chart import CRD_FILES
from bagelplane.spec_schema import CRD_NAME
from bagelplane_operator import naming
from tests.cluster.control_plane import control_plane
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.tools.programs import find_program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "bagelplane"
NAMESPACE = "bagelplane-system"
Manifest = dict[str, Any]

OPERATOR_RIGHTS = {
    "bageldatasets.bagelplane.io": {"list", "watch"},
    "bageldatasets/status.bagelplane.io": {"patch"},
    "configmaps": {"create", "delete", "list"},
    "jobs.batch": {"create", "delete", "list", "watch"},
    "pods": {"list", "watch"},
    "events": {"list"},
    "events.events.k8s.io": {"create"},
}
WEBHOOK_RIGHTS = {"bageldatasets.bagelplane.io": {"list"}}

# Every value, and another one than its default.
CHANGED = """
image:
  operator: {repository: mirror.example/op, tag: t1, pullPolicy: Always}
  dataplane: {repository: mirror.example/dp, tag: t2, pullPolicy: Never}
  pullSecrets: [pull-me]
crds: {install: false}
watch: {namespaces: [team-a, team-b]}
operator:
  resources: {requests: {cpu: 123m}, limits: {memory: 234Mi}}
  nodeSelector: {pool: operator-pool}
  tolerations: [{key: operator-taint, operator: Exists}]
  affinity: {nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [
    {weight: 7, preference: {matchExpressions: [{key: operator-affinity, operator: Exists}]}}]}}
  priorityClassName: operator-priority
webhook:
  replicas: 3
  minAvailable: 0
  timeoutSeconds: 9
  excludedNamespaces: [spared]
  certificate:
    validDays: 5
    certManager: {enabled: true, issuer: {kind: ClusterIssuer, name: our-issuer}}
  resources: {requests: {cpu: 321m}, limits: {memory: 432Mi}}
  nodeSelector: {pool: webhook-pool}
  tolerations: [{key: webhook-taint, operator: Exists}]
  affinity: {podAntiAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [
    {weight: 8, podAffinityTerm: {topologyKey: webhook-affinity}}]}}
  priorityClassName: webhook-priority
networkPolicy: {enabled: true}
sidecars: {logFormat: json}
podMonitor: {enabled: true, labels: {release: prometheus}}
dashboards: {enabled: true}
labels: {our-label: ours}
podAnnotations: {our-annotation: noted}
fullnameOverride: renamed
"""


class HelmError(Exception):
    """helm ended with another status than 0."""


def helm(*arguments: str | Path, values: str = "") -> str:
    command = [str(find_program("helm")), *map(str, arguments)]
    result = subprocess.run(command, input=values, capture_output=True, text=True, timeout=120, check=False)
    if result.returncode:
        raise HelmError(result.stderr)
    return result.stdout


def render(values: str = "", *arguments: str) -> list[Manifest]:
    options = ("--namespace", NAMESPACE, "--kube-version", "1.29.0", "--values", "-", *arguments)
    text = helm("template", "bagelplane", CHART, *options, values=values)
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def rights(manifest: Manifest) -> dict[str, set[str]]:
    return {
        ".".join(part for part in (resource, group) if part): set(rule["verbs"])
        for rule in manifest["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


# --- rendered -------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", ["", CHANGED], ids=["defaults", "changed"])
def test_helm_has_nothing_against_the_chart(values: str) -> None:
    helm("lint", "--strict", CHART, "--kube-version", "1.29.0", "--values", "-", values=values)


def leaves(schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, part in schema["properties"].items():
        if "default" in part:
            yield (name,)
        elif "properties" in part:
            yield from ((name, *below) for below in leaves(part))


def test_every_value_shows_in_what_is_made() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    changed, defaults = yaml.safe_load(CHANGED), yaml.safe_load((CHART / "values.yaml").read_text())
    unchanged = render("webhook: {certificate: {certManager: {enabled: true}}}")
    for path in leaves(schema):
        value, default, below = changed, defaults, {}
        for name in path:
            value, default = value[name], default[name]
        assert value != default, path
        for name in reversed(path):
            below = {name: below or value}
        below.setdefault("webhook", {}).setdefault("certificate", {}).setdefault(
            "certManager", {}
        ).setdefault("enabled", True)
        if path[:-1] == ("podMonitor",):
            below["podMonitor"]["enabled"] = True  # the labels of what is not made show nowhere
        if path[-1] not in ("validDays", "enabled"):  # of the chart's own certificate; and the switch itself
            assert render(yaml.safe_dump(below)) != unchanged, path
    assert of_kind(render("networkPolicy: {enabled: true}"), "NetworkPolicy")


def test_grafana_gets_the_dashboard_as_it_stands_in_the_chart_where_it_is_wanted() -> None:
    assert not of_kind(render(), "ConfigMap")
    (config_map,) = of_kind(render("dashboards: {enabled: true}"), "ConfigMap")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    stored = (CHART / "dashboards" / "bagelplane.json").read_text()
    assert json.loads(config_map["data"]["bagelplane.json"]) == json.loads(stored)


@pytest.mark.parametrize("values", ["", CHANGED], ids=["defaults", "changed"])
def test_pods_satisfy_the_restricted_level(values: str) -> None:
    deployments = of_kind(render(values), "Deployment")
    assert len(deployments) == 2
    for deployment in deployments:
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == naming.USER_ID
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert all("secret" in volume for volume in pod.get("volumes", []))
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)


@pytest.mark.parametrize("values", ["", "watch: {namespaces: [team-a, team-b]}"], ids=["all", "some"])
def test_rights_are_those_that_are_used(values: str) -> None:
    manifests = render(values)
    roles = of_kind(manifests, "Role", "ClusterRole")
    places = ["team-a", "team-b"] if values else [None]
    for name, expected in (("bagelplane-operator", OPERATOR_RIGHTS), ("bagelplane-webhook", WEBHOOK_RIGHTS)):
        held = [role for role in roles if role["metadata"]["name"] == name]
        assert [role["metadata"].get("namespace") for role in held] == places
        assert all(rights(role) == expected for role in held)
    assert len(roles) == 2 * len(places)
    for binding in of_kind(manifests, "RoleBinding", "ClusterRoleBinding"):
        (subject,) = binding["subjects"]
        assert subject["name"] == binding["roleRef"]["name"] == binding["metadata"]["name"]
        assert subject["namespace"] == NAMESPACE


def test_the_crd_is_that_of_the_repository() -> None:
    (rendered,) = of_kind(render(), "CustomResourceDefinition")
    stored = yaml.safe_load((ROOT / CRD_FILES[0]).read_text())
    assert rendered["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert rendered["spec"] == stored["spec"]
    assert not of_kind(render("crds: {install: false}"), "CustomResourceDefinition")


def test_containers_are_told_what_the_program_reads() -> None:
    for deployment in of_kind(render(CHANGED), "Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        environment = {variable["name"]: variable["value"] for variable in container["env"]}
        assert environment == {
            naming.IMAGE_ENV: "mirror.example/dp:t2",
            naming.PULL_POLICY_ENV: "Never",
            naming.SIDECAR_LOG_FORMAT_ENV: "json",
            naming.NAMESPACES_ENV: "team-a,team-b",
        }
        assert container["image"] == "mirror.example/op:t1"
    for deployment in of_kind(render(), "Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
        assert container["image"] == f"bagelplane/operator:{version}"


@pytest.mark.parametrize(
    ("values", "selected"),
    [("", {"any": True}), ("watch: {namespaces: [team-a, team-b]}", {"matchNames": ["team-a", "team-b"]})],
    ids=["all", "some"],
)
def test_the_pod_monitor_finds_the_sidecars_of_the_served_namespaces(
    values: str, selected: dict[str, Any]
) -> None:
    (monitor,) = of_kind(render(f"podMonitor: {{enabled: true}}\n{values}"), "PodMonitor")
    assert monitor["spec"] == {
        "namespaceSelector": selected,
        "selector": {"matchExpressions": [{"key": naming.DATASET_LABEL, "operator": "Exists"}]},
        "podMetricsEndpoints": [{"port": naming.STATUS_PORT_NAME}],
    }
    assert not of_kind(render(values), "PodMonitor")


REFUSED = [
    ("webhook: {replicas: 0}", "at '/webhook/replicas': minimum: got 0, want 1"),
    ("webhook: {replicaz: 3}", "at '/webhook': additional properties 'replicaz' not allowed"),
    ("watch: {namespaces: training}", "at '/watch/namespaces': got string, want array"),
    ("image: {operator: {pullPolicy: Sometimes}}", "must be one of 'Always', 'IfNotPresent', 'Never'"),
    ("labels: {app.kubernetes.io/name: mine}", "invalid propertyName 'app.kubernetes.io/name'"),
    ("labels: {answer: 42}", "at '/labels/answer': got number, want string"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[case[0] for case in REFUSED])
def test_a_wrong_value_is_refused_by_name(values: str, message: str) -> None:
    with pytest.raises(HelmError) as caught:
        render(values)
    assert message in str(caught.value)


def test_a_disruption_budget_never_holds_a_node_for_good() -> None:
    def least(values: str) -> list[int]:
        budgets = of_kind(render(f"webhook: {{{values}}}"), "PodDisruptionBudget")
        return [budget["spec"]["minAvailable"] for budget in budgets]

    assert least("replicas: 2") == [1]
    assert least("replicas: 3, minAvailable: 2") == [2]
    assert least("replicas: 3, minAvailable: 9") == [2]
    assert least("replicas: 1") == []


# --- installed ------------------------------------------------------------------------------------

LABELLED_POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "trainer", "labels": {naming.DATASET_LABEL: "bagel"}},
    "spec": {"containers": [{"name": "pytorch", "image": "none"}]},
}
GROUP = {"name": "t2i", "type": "registered", "datasets": [{"name": "t2i", "uri": "s3://bucket/t2i/"}]}
DATASET = {
    "apiVersion": "bagelplane.io/v1alpha1",
    "kind": "BagelDataset",
    "metadata": {"name": "bagel"},
    "spec": {"tokenizer": {"uri": "s3://bucket/tokenizer.json"}, "groups": [GROUP]},
}
IS_ASKED = "failed calling webhook"  # there is no node, so nobody answers


class Release:
    """The chart in a control plane, in a namespace that enforces `restricted`."""

    def __init__(self, kubectl: Kubectl) -> None:
        self.kubectl = kubectl
        for name, labels in (
            (NAMESPACE, {"pod-security.kubernetes.io/enforce": "restricted"}),
            ("team-a", {}),
            ("team-b", {}),
            ("opted-out", {naming.INJECTION_LABEL: naming.INJECTION_DISABLED}),
        ):
            metadata = {"name": name, "labels": labels}
            kubectl.apply(json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}))

    def helm(self, *arguments: str | Path, values: str = "") -> str:
        place = ("--kubeconfig", self.kubectl.kubeconfig, "--namespace", NAMESPACE)
        return helm(*arguments, *place, values=values)

    def install(self, values: str = "") -> str:
        return self.helm("upgrade", "--install", "bagelplane", CHART, "--values", "-", values=values)

    def certificate(self) -> dict[str, str]:
        secret = self.kubectl.get_json("secret", "bagelplane-webhook-certificate", namespace=NAMESPACE)
        data: dict[str, str] = secret["data"]
        return data

    def authorities(self) -> set[str]:
        configuration = self.kubectl.get_json("mutatingwebhookconfiguration", "bagelplane-webhook")
        return {webhook["clientConfig"]["caBundle"] for webhook in configuration["webhooks"]}

    def allows(self, account: str, verb: str, resource: str, namespace: str = "team-a") -> bool:
        user = f"system:serviceaccount:{NAMESPACE}:bagelplane-{account}"
        options = (f"--namespace={namespace}", f"--as={user}")
        if "/" in resource:
            resource = resource.replace("/status", "")
            options += ("--subresource=status",)
        try:
            return self.kubectl("auth", "can-i", verb, resource, *options).strip() == "yes"
        except KubectlError as error:
            if error.text != "no":  # no answer, but for example that there is no such resource
                raise
            return False

    def try_to_make(self, manifest: Mapping[str, Any], namespace: str) -> str:
        """What kubectl says, in a dry run; "" when nothing stands against it."""
        try:
            self.kubectl.apply(json.dumps(manifest), "--dry-run=server", f"--namespace={namespace}")
        except KubectlError as error:
            return error.text
        return ""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    with control_plane(tmp_path_factory.mktemp("plane"), advertise_address="127.0.0.1") as running:
        yield Kubectl(running.kubeconfig)


@pytest.fixture(scope="module")
def release(plane: Kubectl) -> Release:
    made = Release(plane)
    made.install()
    return made


def test_pods_are_let_into_a_namespace_that_enforces_restricted(release: Release) -> None:
    def pods() -> list[str]:
        return [
            pod["metadata"]["name"] for pod in release.kubectl.get_json("pods", namespace=NAMESPACE)["items"]
        ]

    release.kubectl.wait_for(
        "one pod of the operator and two of the webhook",
        lambda: len(pods()) == 3,
        60,
        last_seen=lambda: release.kubectl.describe("replicasets", namespace=NAMESPACE),
    )


def test_the_webhook_is_asked_about_labelled_pods_and_datasets_alone(release: Release) -> None:
    plain = {**LABELLED_POD, "metadata": {"name": "other"}}
    assert IS_ASKED in release.try_to_make(LABELLED_POD, "team-a")
    assert IS_ASKED in release.try_to_make(DATASET, "team-a")
    assert release.try_to_make(plain, "team-a") == ""
    for namespace in ("opted-out", "kube-system", "kube-public", "kube-node-lease"):
        assert release.try_to_make(LABELLED_POD, namespace) == ""
    assert IS_ASKED not in release.try_to_make(LABELLED_POD, NAMESPACE)


def test_the_certificate_fits_its_service_and_stays_over_upgrades(release: Release, tmp_path: Path) -> None:
    made = release.certificate()
    assert release.authorities() == {made["ca.crt"]}
    release.install("webhook: {timeoutSeconds: 7}")
    assert release.certificate() == made
    assert release.authorities() == {made["ca.crt"]}
    for name, text in made.items():
        (tmp_path / name).write_bytes(b64decode(text))
    host = f"bagelplane-webhook.{NAMESPACE}.svc"
    command = [
        "openssl",
        "verify",
        "-CAfile",
        tmp_path / "ca.crt",
        "-verify_hostname",
        host,
        tmp_path / "tls.crt",
    ]
    subprocess.run(command, check=True, timeout=30, capture_output=True)


def test_a_deleted_certificate_is_made_anew(release: Release, tmp_path: Path) -> None:
    before = release.certificate()
    release.kubectl("delete", "secret", "bagelplane-webhook-certificate", "--namespace", NAMESPACE)
    release.install("webhook: {certificate: {validDays: 5}}")
    after = release.certificate()
    assert after != before
    assert release.authorities() == {after["ca.crt"]}
    (tmp_path / "tls.crt").write_bytes(b64decode(after["tls.crt"]))

    def is_valid_after(days: int) -> bool:
        command = ["openssl", "x509", "-noout", "-in", tmp_path / "tls.crt", "-checkend", str(days * 86_400)]
        return subprocess.run(command, check=False, timeout=30, capture_output=True).returncode == 0

    assert is_valid_after(4)
    assert not is_valid_after(5)


def test_accounts_may_do_what_is_listed_and_read_no_secrets(release: Release) -> None:
    for account, expected in (("operator", OPERATOR_RIGHTS), ("webhook", WEBHOOK_RIGHTS)):
        for resource, verbs in expected.items():
            for verb in sorted(verbs):
                assert release.allows(account, verb, resource), (account, verb, resource)
        for verb, resource in (
            ("get", "secrets"),
            ("list", "secrets"),
            ("create", "pods"),
            ("delete", "pods"),
        ):
            assert not release.allows(account, verb, resource), (account, verb, resource)


def test_only_listed_namespaces_are_served(release: Release) -> None:
    release.install("watch: {namespaces: [team-a]}")
    try:
        assert IS_ASKED in release.try_to_make(LABELLED_POD, "team-a")
        assert IS_ASKED in release.try_to_make(DATASET, "team-a")
        assert release.try_to_make(LABELLED_POD, "team-b") == ""
        assert release.try_to_make(DATASET, "team-b") == ""
        for account in ("operator", "webhook"):
            assert release.allows(account, "list", "bageldatasets.bagelplane.io", "team-a")
            assert not release.allows(account, "list", "bageldatasets.bagelplane.io", "team-b")
    finally:
        release.install()


def test_the_crd_and_the_resources_outlive_the_release(release: Release) -> None:
    release.install("watch: {namespaces: [team-a]}")  # so that a resource can be made while nobody answers
    release.kubectl.apply(json.dumps(DATASET), "--namespace=team-b")
    release.helm("uninstall", "bagelplane")
    kinds = "all,secrets,serviceaccounts,poddisruptionbudgets,clusterroles,mutatingwebhookconfigurations"
    question = ("get", kinds, "--namespace", NAMESPACE, "--selector=app.kubernetes.io/name=bagelplane")
    release.kubectl.wait_for(
        "all else to be gone",
        lambda: not release.kubectl(*question, "--output=name").strip(),
        60,
        last_seen=lambda: release.kubectl.try_run(*question),
    )
    assert release.try_to_make(LABELLED_POD, "team-a") == ""
    release.install()
    assert release.kubectl.get_json("crd", CRD_NAME)
    assert release.kubectl.get_json("bgds", "bagel", namespace="team-b")
