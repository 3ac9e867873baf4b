"""A control plane without a node: each of its four parts does its work, and nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane, control_plane
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.cluster.processes import ClusterError, Component

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

LOOPBACK = "127.0.0.1"
KEEP_UP = """
import sys, time
from pathlib import Path
from tests.cluster.control_plane import control_plane
with control_plane(Path(sys.argv[1]), advertise_address="127.0.0.1") as plane:
    print(*(process.pid for process in plane.components), flush=True)
    time.sleep(300)
"""
DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers: [{name: web, image: "localhost/none:test"}]
"""
NODE = """
apiVersion: v1
kind: Node
metadata: {name: made-up}
"""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane"), advertise_address=LOOPBACK) as running:
        yield running


@pytest.fixture
def kubectl(plane: ControlPlane) -> Kubectl:
    return Kubectl(plane.kubeconfig)


def test_an_administrator_is_answered_and_a_stranger_is_not(plane: ControlPlane, kubectl: Kubectl) -> None:
    version = json.loads(kubectl.run("version", "--output=json"))
    assert version["serverVersion"]["gitVersion"].startswith("v1.34.")
    stranger = Kubectl(plane.kubeconfig_for("stranger", "a-stranger"))
    with pytest.raises(KubectlError, match='User "a-stranger" cannot list resource "pods"'):
        stranger.run("get", "pods")


def test_a_namespace_that_enforces_restricted_refuses_a_privileged_pod(kubectl: Kubectl) -> None:
    kubectl.run("create", "namespace", "strict")
    kubectl.run("label", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
    kubectl.wait_for(
        "the namespace to have its service account",
        lambda: kubectl.get_json("serviceaccount", "default", namespace="strict"),
        60,
    )
    with pytest.raises(KubectlError, match='violates PodSecurity "restricted'):
        kubectl.run("run", "bad", "--namespace=strict", "--image=localhost/none:test", "--privileged")


def test_a_deployment_gets_pods_that_wait_for_a_node_and_then_get_one(kubectl: Kubectl) -> None:
    kubectl.apply(DEPLOYMENT)

    def pods() -> list[dict[str, dict[str, object]]]:
        found: list[dict[str, dict[str, object]]] = kubectl.get_json("pods", selector="app=web")["items"]
        return found

    def state() -> str:
        return kubectl.describe("pods")

    pending = kubectl.wait_for(
        "two pods that no node takes",
        lambda: [pod for pod in pods() if "no nodes available" in json.dumps(pod["status"])],
        60,
        last_seen=state,
    )
    assert {pod["status"]["phase"] for pod in pending} == {"Pending"}
    kubectl.apply(NODE)
    # Such a node has no room and is not ready until its kubelet, or we, say otherwise.
    ready = {"type": "Ready", "status": "True", "reason": "Said", "message": ""}
    room = {"pods": "10", "cpu": "1", "memory": "1Gi"}
    status = {"status": {"conditions": [ready], "capacity": room, "allocatable": room}}
    kubectl.run("patch", "node", "made-up", "--subresource=status", "--patch", json.dumps(status))
    kubectl.wait_for(
        "both pods to have the node",
        lambda: len([pod for pod in pods() if pod["spec"].get("nodeName") == "made-up"]) == 2,
        60,
        last_seen=state,
    )


def test_a_wait_that_fails_tells_what_was_seen_last(kubectl: Kubectl) -> None:
    with pytest.raises(AssertionError, match=r"(?s)waited 0 s for a pod; last seen: the machine.*NotFound"):
        kubectl.wait_for("a pod", lambda: kubectl.get_json("pod", "none"), 0, last_seen=lambda: "the machine")


def test_a_killed_run_takes_its_processes_along_and_the_next_one_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KEEP_UP, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        pids = [int(word) for word in run.stdout.readline().split()]
        assert len(pids) == 4
        assert all(is_running(pid) for pid in pids)
        run.send_signal(signal.SIGKILL)
    wait_until_gone(pids)
    assert (tmp_path / "etcd").exists(), "the killed run could not clear up"
    with control_plane(tmp_path, advertise_address=LOOPBACK) as plane:
        status, _ = plane.get("/api/v1/namespaces/strict")
        assert status == 404
        pids = [process.pid for process in plane.components]
    wait_until_gone(pids)
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_a_component_that_ends_is_quoted(tmp_path: Path) -> None:
    script = "import sys; print('the last words'); sys.exit(3)"
    process = Component("teller", [sys.executable, "-c", script], tmp_path / "teller.log")
    with pytest.raises(ClusterError, match=r"(?s)teller: ended with status 3.*teller\.log.*the last words"):
        process.wait_until("it answers", lambda: "nothing", 60)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.05)
