"""The operator as a process against a real API server, with the rights of the chart and no others.

There is no kubelet: what one would write into the status of pods, these tests write.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from bagelplane.cli.demo_server import free_port
from bagelplane.spec import BagelDataset, config_hash
from bagelplane.spec_schema import CRD_NAME
from bagelplane_operator import naming
from tests.cluster.control_plane import ControlPlane, control_plane
from tests.cluster.kubectl import Kubectl
from tests.cluster.processes import Component
from tests.tools.programs import find_program

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
CRD = ROOT / "crds" / f"{CRD_NAME}.yaml"
CHART = ROOT / "charts" / "bagelplane"
OPERATOR_USER = "system:serviceaccount:bagelplane-system:bagelplane-operator"
SECONDS = 60.0

DATASET = """
apiVersion: bagelplane.io/v1alpha1
kind: BagelDataset
metadata: {name: bagel-sft}
spec:
  profile: Automodel
  storage: {endpointURL: "http://s3:9000", secretRef: {name: bagel-s3}}
  tokenizer: {uri: s3://bucket/tokenizer.json}
  groups:
  - name: t2i
    type: t2i_pretrain
    datasets: [{name: t2i, uri: s3://bucket/t2i/}]
    imageTransform: {stride: 16, maxSize: 512, minSize: 256}
  sharding: {mode: Bagel}
"""
GOOD_REPORT = {"ok": True, "problems": [], "groups": 1}
BAD_REPORT = {
    "ok": False,
    "problems": [
        {
            "what": "there is no bucket `wrong`",
            "got": "http://s3:9000",
            "expected": "",
            "fix": "correct the uri",
        }
    ],
    "groups": 1,
}


class Namespace:
    """One namespace of the cluster with a resource in it, as a person and a kubelet see it."""

    def __init__(self, kubectl: Kubectl, name: str) -> None:
        self.kubectl, self.name = kubectl, name
        kubectl.run("create", "namespace", name)
        # The check's pods have to get through where it is strictest.
        kubectl.run("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        kubectl.wait_for("its service account", lambda: self.get("serviceaccount", "default"), SECONDS)

    def run(self, *arguments: str, text: str | None = None) -> str:
        return self.kubectl.run(*arguments, f"--namespace={self.name}", input=text)

    def get(self, *what: str, selector: str | None = None) -> dict[str, Any]:
        return self.kubectl.get_json(*what, namespace=self.name, selector=selector)

    def items(self, kind: str, selector: str | None = None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get(kind, selector=selector)["items"]
        return found

    def apply(self, **changes: Any) -> None:
        resource = yaml.safe_load(DATASET)
        resource["spec"] |= changes
        self.run("apply", "--filename=-", text=json.dumps(resource))

    def wait_for(self, claim: str, seen: Any, seconds: float = SECONDS) -> Any:
        return self.kubectl.wait_for(claim, seen, seconds, last_seen=self.describe)

    def describe(self) -> str:
        what = "bgds,configmaps,jobs,pods,events"
        return self.kubectl.try_run("get", what, f"--namespace={self.name}", "--output=wide") + str(
            self.status()
        )

    # -- the resource

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("bgds", "bagel-sft").get("status", {})
        return found

    def ready(self) -> tuple[str, str]:
        conditions = {each["type"]: each for each in self.status().get("conditions", [])}
        return (conditions["Ready"]["status"], conditions["Ready"]["reason"]) if conditions else ("", "")

    def wait_for_ready(self, status: str, reason: str, seconds: float = SECONDS) -> None:
        self.wait_for(f"Ready to be {status}: {reason}", lambda: self.ready() == (status, reason), seconds)

    def config_maps(self) -> list[str]:
        found = self.items("configmaps", f"{naming.ROLE_LABEL}={naming.ROLE_CONFIG}")
        return sorted(each["metadata"]["name"] for each in found)

    def told(self) -> list[str]:
        """Reasons of our Events about the resource, oldest first."""
        events = [
            each
            for each in self.items("events")
            if each.get("reportingComponent") == "bagelplane.io/operator"
        ]
        return [each["reason"] for each in sorted(events, key=lambda each: str(each["eventTime"]))]

    # -- what a kubelet would do

    def check_pods(self) -> list[dict[str, Any]]:
        return self.items("pods", f"{naming.ROLE_LABEL}={naming.ROLE_CHECK}")

    def end_check(self, report: Mapping[str, Any]) -> None:
        """The pod of the check that has not ended yet ends with this report."""

        def waiting() -> list[str]:
            pods = [each for each in self.check_pods() if each["status"].get("phase") == "Pending"]
            return [each["metadata"]["name"] for each in pods]

        (pod,) = self.wait_for("one check pod to run", waiting)
        exit_code = 0 if report["ok"] else 3
        terminated = {"exitCode": exit_code, "message": json.dumps(report)}
        self.patch_pod(
            pod,
            "Failed" if exit_code else "Succeeded",
            {"containerStatuses": [_container("check", terminated=terminated)]},
        )

    def patch_pod(self, name: str, phase: str, status: Mapping[str, Any]) -> None:
        patch = json.dumps({"status": {"phase": phase, **status}})
        self.run("patch", "pod", name, "--subresource=status", f"--patch={patch}")


def _container(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "state": state, "image": "x", "imageID": "", "ready": True, "restartCount": 0}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane"), advertise_address="127.0.0.1") as running:
        kubectl = Kubectl(running.kubeconfig)
        kubectl.apply(CRD)
        kubectl.wait_established(CRD_NAME)
        kubectl.run("create", "namespace", "bagelplane-system")
        kubectl.apply(render_rights())
        yield running


def render_rights(*options: str) -> str:
    """What the chart gives the operator; helm would ask the cluster for its version."""
    command = [find_program("helm"), "template", "bagelplane", CHART, "--namespace=bagelplane-system"]
    command += ["--kube-version=1.34.0", "--show-only=templates/operator-rights.yaml", *options]
    finished = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@contextmanager
def running_operator(plane: ControlPlane, log: Path, **environment: str) -> Iterator[Component]:
    kubeconfig = plane.kubeconfig_for("operator", OPERATOR_USER)
    port = free_port()
    command = [sys.executable, "-m", "bagelplane_operator", "operator", f"--health-port={port}"]
    variables = {"KUBECONFIG": str(kubeconfig), naming.IMAGE_ENV: "example/dataplane:1", **environment}
    variables["TMPDIR"] = str(log.parent)  # the client puts certificates there, and a kill leaves them
    process = Component("operator", command, log, variables)
    try:
        yield process
        process.check()
    finally:
        process.stop()


@pytest.fixture(scope="module")
def operator(plane: ControlPlane) -> Iterator[Component]:
    with running_operator(plane, plane.logs_dir / "operator.log") as process:
        yield process
    log = process.log.read_text()
    assert "Traceback" not in log, log
    assert log.rstrip().endswith("INFO ended"), log


@pytest.fixture
def namespace(plane: ControlPlane, operator: Component, request: pytest.FixtureRequest) -> Namespace:
    operator.check()
    name = request.node.name.removeprefix("test_").replace("_", "-")[:60].rstrip("-")
    return Namespace(Kubectl(plane.kubeconfig), name)


def test_a_resource_becomes_ready_when_its_check_passes(namespace: Namespace, operator: Component) -> None:
    namespace.apply()
    dataset = BagelDataset.from_yaml(DATASET)
    namespace.wait_for_ready("Unknown", "Checking")
    (name,) = namespace.config_maps()
    assert name == naming.config_map_name("bagel-sft", config_hash(dataset))
    config_map = namespace.get("configmap", name)
    resource = namespace.get("bgds", "bagel-sft")
    (owner,) = config_map["metadata"]["ownerReferences"]
    assert owner["uid"] == resource["metadata"]["uid"]
    assert config_map["immutable"] is True
    read_back = BagelDataset.from_yaml(config_map["data"]["dataset.yaml"])
    assert config_hash(read_back) == config_hash(dataset)
    namespace.end_check(GOOD_REPORT)
    namespace.wait_for_ready("True", "Ready")
    status = namespace.status()
    assert (status["configMap"], status["groups"], status["observedGeneration"]) == (name, 1, 1)
    assert namespace.told() == ["Ready"]
    assert "True" in namespace.run("get", "bgds", "bagel-sft")
    assert "WARNING" not in operator.log.read_text(), "the chart's rights are enough"


def test_nothing_of_the_operator_is_left_in_the_metadata(namespace: Namespace) -> None:
    namespace.apply()
    namespace.wait_for_ready("Unknown", "Checking")
    metadata = namespace.get("bgds", "bagel-sft")["metadata"]
    assert "finalizers" not in metadata
    assert set(metadata["annotations"]) == {"kubectl.kubernetes.io/last-applied-configuration"}


def test_a_wrong_bucket_is_named_and_told_once(namespace: Namespace) -> None:
    namespace.apply()
    namespace.end_check(BAD_REPORT)
    namespace.wait_for_ready("False", "SourcesUnreachable")
    sources = next(each for each in namespace.status()["conditions"] if each["type"] == "SourcesReachable")
    assert sources["message"] == "there is no bucket `wrong`; got http://s3:9000. Fix: correct the uri"
    assert namespace.told() == ["SourcesUnreachable"]
    namespace.end_check(GOOD_REPORT)  # of the next attempt, half a minute later
    namespace.wait_for_ready("True", "Ready")
    assert namespace.told() == ["SourcesUnreachable", "Ready"]
    (job,) = namespace.items("jobs")
    assert job["metadata"]["annotations"][naming.ATTEMPT_ANNOTATION] == "2"


def test_a_check_without_a_node_says_what_the_scheduler_says(namespace: Namespace) -> None:
    namespace.apply()
    namespace.wait_for_ready("False", "CheckNotStarting")
    assert "no nodes available" in str(namespace.status()["conditions"])


def test_what_keeps_the_check_from_being_made_is_named_from_the_events_of_its_job(
    namespace: Namespace,
) -> None:
    namespace.run("create", "quota", "none", "--hard=pods=0")
    namespace.apply()
    namespace.wait_for_ready("False", "CheckNotStarting")
    assert "exceeded quota: none" in str(namespace.status()["conditions"])


def test_an_edit_makes_a_new_config_map_and_the_old_one_goes(namespace: Namespace) -> None:
    namespace.apply()
    namespace.end_check(GOOD_REPORT)
    namespace.wait_for_ready("True", "Ready")
    (old,) = namespace.config_maps()
    namespace.apply(budgets={"maxBufferSize": 40})
    namespace.wait_for("a second ConfigMap", lambda: len(namespace.config_maps()) == 2)
    namespace.end_check(GOOD_REPORT)
    namespace.wait_for_ready("True", "Ready")
    assert namespace.status()["observedGeneration"] == 2
    new = namespace.status()["configMap"]
    assert new != old
    namespace.wait_for("the old ConfigMap to go", lambda: namespace.config_maps() == [new])


def test_a_spec_that_is_stored_and_refused_says_why(namespace: Namespace) -> None:
    namespace.apply(storage={"cache": {"sizeLimit": "1Gi"}})
    namespace.wait_for_ready("False", "Unsupported")
    namespace.apply(tokenizer={"uri": "s3://b/x"})
    namespace.wait_for_ready("False", "InvalidSpec")
    assert "spec.tokenizer.uri: must name a bucket" in str(namespace.status()["conditions"])
    assert namespace.told() == ["Unsupported", "InvalidSpec"]


def test_with_the_resource_all_goes_that_was_made_for_it(namespace: Namespace) -> None:
    namespace.apply()
    namespace.end_check(GOOD_REPORT)
    namespace.wait_for_ready("True", "Ready")
    namespace.run("delete", "bgds", "bagel-sft", "--timeout=30s")
    namespace.wait_for(
        "its children to be collected",
        lambda: not (namespace.config_maps() or namespace.items("jobs") or namespace.check_pods()),
    )


def test_a_resource_that_is_made_again_at_once_starts_afresh(namespace: Namespace) -> None:
    namespace.apply()
    namespace.end_check(GOOD_REPORT)
    namespace.wait_for_ready("True", "Ready")
    namespace.run("delete", "bgds", "bagel-sft", "--wait=false")
    namespace.apply()
    uid = namespace.get("bgds", "bagel-sft")["metadata"]["uid"]
    namespace.wait_for_ready("Unknown", "Checking")

    def owners() -> set[str]:
        children = [*namespace.items("configmaps", naming.OWNER_LABEL), *namespace.items("jobs")]
        return {each["metadata"]["ownerReferences"][0]["uid"] for each in children}

    namespace.wait_for("its own children alone", lambda: owners() == {uid})
    namespace.end_check(GOOD_REPORT)
    namespace.wait_for_ready("True", "Ready")


def test_a_killed_operator_goes_on_where_it_was(namespace: Namespace, operator: Component) -> None:
    namespace.apply()
    namespace.end_check(GOOD_REPORT)
    namespace.wait_for_ready("True", "Ready")
    before = everything(namespace)
    operator.stop(first=signal.SIGKILL)
    operator.restart()
    other = Namespace(namespace.kubectl, f"{namespace.name}-other")
    other.apply()
    other.wait_for_ready("Unknown", "Checking")
    assert everything(namespace) == before, "nothing was made, written or told twice"
    operator.stop(first=signal.SIGKILL)
    namespace.apply(budgets={"maxBufferSize": 40})
    other.run("delete", "bgds", "bagel-sft")
    operator.restart()
    namespace.end_check(GOOD_REPORT)
    namespace.wait_for("the edit to be seen", lambda: namespace.status()["observedGeneration"] == 2)
    namespace.wait_for_ready("True", "Ready")


def everything(namespace: Namespace) -> list[tuple[str, str]]:
    """Name and version of each object that the operator makes or writes."""
    kinds = ("bgds", "configmaps", "jobs", "events")
    found = [each["metadata"] for kind in kinds for each in namespace.items(kind)]
    return sorted((metadata["name"], metadata["resourceVersion"]) for metadata in found)


def test_an_api_server_that_goes_and_comes_back_is_taken_up_again(
    namespace: Namespace, operator: Component, plane: ControlPlane
) -> None:
    namespace.apply()
    namespace.wait_for_ready("Unknown", "Checking")
    (server,) = [each for each in plane.components if each.name == "kube-apiserver"]
    server.stop(first=signal.SIGKILL)
    namespace.kubectl.wait_for(
        "the operator to notice", lambda: "did not answer" in operator.log.read_text(), SECONDS
    )
    server.restart()
    server.wait_until(
        "/readyz answers 200", lambda: "" if plane.get("/readyz")[0] == 200 else "not yet", SECONDS
    )
    operator.check()
    namespace.end_check(GOOD_REPORT)
    namespace.wait_for_ready("True", "Ready")
    # A server may take longer to come back than a check is given to start.
    assert [event for event in namespace.told() if event != "CheckNotStarting"] == ["Ready"]
    complaints = [line for line in operator.log.read_text().splitlines() if "did not answer" in line]
    assert len(complaints) == 1, complaints


# --- attachments ----------------------------------------------------------------------------------


class Sidecar:
    """Answers for /v1/status at an address of its own, as a sidecar's pod would."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answer: dict[str, Any] = {
            "version": 1,
            "dataset": "bagel-sft",
            "started_unix_seconds": 1000.5,
            "world_size": 1,
            "ready": True,
            "ranks": [],
            "snapshots": {"last_step": None, "problem": ""},
        }
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(outer.answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer((address, naming.STATUS_PORT), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def serve(self, *, acknowledged: int, attached: bool = True) -> None:
        rank = {
            "rank": 0,
            "attached": attached,
            "next_step": acknowledged,
            "packs_acknowledged": acknowledged,
        }
        self.answer["ranks"] = [{**rank, "packs_published": acknowledged, "fill": 0.93, "problem": ""}]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture
def sidecar() -> Iterator[Sidecar]:
    running = Sidecar("127.9.7.80")
    yield running
    running.stop()


TRAINER = f"""
apiVersion: v1
kind: Pod
metadata:
  name: sft-master-0
  labels: {{bagelplane.io/dataset: bagel-sft, training.kubeflow.org/job-name: sft}}
  annotations: {{bagelplane.io/injected: "0123456789ab"}}
spec:
  securityContext: {{runAsNonRoot: true, seccompProfile: {{type: RuntimeDefault}}}}
  initContainers:
  - name: {naming.SIDECAR_CONTAINER}
    image: x
    restartPolicy: Always
    securityContext: &least {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
  containers:
  - {{name: pytorch, image: x, securityContext: *least}}
"""


def start_trainer(namespace: Namespace, address: str) -> None:
    namespace.run("apply", "--filename=-", text=TRAINER)
    running = {"running": {"startedAt": "2026-11-30T12:00:00Z"}}
    status = {
        "podIP": address,
        "podIPs": [{"ip": address}],
        "initContainerStatuses": [_container(naming.SIDECAR_CONTAINER, **running)],
        "containerStatuses": [_container("pytorch", **running)],
    }
    namespace.patch_pod("sft-master-0", "Running", status)


def test_attached_pods_show_and_their_step_stays_when_they_leave(
    namespace: Namespace, sidecar: Sidecar
) -> None:
    sidecar.serve(acknowledged=10)
    namespace.apply()
    start_trainer(namespace, sidecar.address)
    namespace.wait_for("a rank to be attached", lambda: namespace.status().get("attached") == 1)
    sidecar.serve(acknowledged=50)
    namespace.wait_for("a rate", lambda: namespace.status().get("packsPerSecond"))
    status = namespace.status()
    (entry,) = status["attachments"]
    assert (status["step"], status["fillRatio"]) == (50, 0.93)
    assert (entry["pod"], entry["job"], entry["ready"], entry["attachedRanks"]) == (
        "sft-master-0",
        "sft",
        True,
        1,
    )
    printed = namespace.run("get", "bgds", "bagel-sft").split()
    assert "50" in printed
    assert "0.93" in printed
    namespace.run("delete", "pod", "sft-master-0", "--now")
    namespace.wait_for("no rank to be attached", lambda: namespace.status()["attached"] == 0)
    assert namespace.status()["step"] == 50
    assert namespace.status()["attachments"] == []


def test_a_sidecar_that_stands_still_costs_no_writes_and_one_that_falls_silent_is_named(
    namespace: Namespace, sidecar: Sidecar
) -> None:
    sidecar.serve(acknowledged=10)
    namespace.apply()
    namespace.end_check(GOOD_REPORT)
    namespace.wait_for_ready("True", "Ready")
    start_trainer(namespace, sidecar.address)
    namespace.wait_for("a rate of none", lambda: namespace.status().get("packsPerSecond") == 0)
    version = namespace.get("bgds", "bagel-sft")["metadata"]["resourceVersion"]
    asked = threading.Event()
    polls = []

    class Counted(dict[str, Any]):
        """Notices each time that it is written out."""

        def items(self) -> Any:
            polls.append(1)
            if len(polls) >= 3:
                asked.set()
            return super().items()

    sidecar.answer = Counted(sidecar.answer)
    assert asked.wait(SECONDS), "the sidecar was not asked again"
    assert namespace.get("bgds", "bagel-sft")["metadata"]["resourceVersion"] == version
    sidecar.stop()
    namespace.wait_for(
        "the silence to be named",
        lambda: "no answer from the sidecar since" in str(namespace.status()["attachments"]),
    )
    assert namespace.ready() == ("True", "Ready")


# --- served namespaces ----------------------------------------------------------------------------


def test_with_rights_in_one_namespace_that_one_is_served_and_no_other(
    plane: ControlPlane, operator: Component, tmp_path: Path
) -> None:
    kubectl = Kubectl(plane.kubeconfig)
    ours, other = Namespace(kubectl, "ours"), Namespace(kubectl, "not-ours")
    operator.stop()
    everywhere = render_rights()
    try:
        kubectl.run("delete", "--filename=-", input=everywhere)
        kubectl.apply(render_rights("--set=watch.namespaces={ours}"))
        with running_operator(plane, tmp_path / "operator.log", BAGELPLANE_NAMESPACES="ours") as alone:
            other.apply()
            ours.apply()
            ours.wait_for_ready("Unknown", "Checking")
            ours.end_check(GOOD_REPORT)
            ours.wait_for_ready("True", "Ready")
            assert other.status() == {}
            assert "WARNING" not in alone.log.read_text()
    finally:
        kubectl.apply(everywhere)
        operator.restart()
    other.wait_for_ready("Unknown", "Checking")
