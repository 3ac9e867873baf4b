"""The node of the tests' cluster: pods run on it as on any, and nothing of it stays, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import cgroups
from tests.cluster.fixtures import Cluster
from tests.cluster.node import node
from tests.cluster.processes import ClusterError
from tests.tools.programs import find_program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NAMESPACE = "node-test"
POD_SECONDS = 60.0
# The parts of a pod that `restricted` asks for.
POD_SECURITY = (
    "{runAsNonRoot: true, runAsUser: 1000, runAsGroup: 1000, seccompProfile: {type: RuntimeDefault}}"
)
CONTAINER_SECURITY = (
    "{allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}, readOnlyRootFilesystem: true}"
)
WEB = f"""
apiVersion: v1
kind: Namespace
metadata: {{name: {NAMESPACE}, labels: {{pod-security.kubernetes.io/enforce: restricted}}}}
---
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: {NAMESPACE}}}
spec: {{selector: {{app: web}}, ports: [{{port: 80, targetPort: 8000}}]}}
---
apiVersion: v1
kind: Pod
metadata: {{name: web, namespace: {NAMESPACE}, labels: {{app: web}}}}
spec:
  securityContext: {POD_SECURITY}
  terminationGracePeriodSeconds: 0
  containers:
    - name: web
      image: localhost/bagelplane/base:test
      command: [python3, -m, http.server, "8000", --directory, /etc/ssl]
      readinessProbe: {{tcpSocket: {{port: 8000}}, periodSeconds: 1}}
      securityContext: {CONTAINER_SECURITY}
"""
# Shaped as a training pod of ours: the trainer starts when the sidecar is ready, and reads from their shared memory.
TRAINING = f"""
apiVersion: v1
kind: Pod
metadata: {{name: training, namespace: {NAMESPACE}}}
spec:
  restartPolicy: Never
  securityContext: {POD_SECURITY}
  terminationGracePeriodSeconds: 1
  volumes:
    - {{name: ring, emptyDir: {{medium: Memory, sizeLimit: 8Mi}}}}
  initContainers:
    - name: sidecar
      restartPolicy: Always
      image: localhost/bagelplane/base:test
      command: [sh, -c, "sleep 1; echo full > /ring/pack; exec sleep 600"]
      startupProbe: {{exec: {{command: [test, -e, /ring/pack]}}, periodSeconds: 1, failureThreshold: 60}}
      securityContext: {CONTAINER_SECURITY}
      volumeMounts: [{{name: ring, mountPath: /ring}}]
  containers:
    - name: trainer
      image: localhost/bagelplane/base:test
      command:
        - sh
        - -ec
        - |
          echo ring: $(cat /ring/pack) $(df --output=fstype,size /ring | tail -1)
          echo "user: $(id -u)"
          touch /probe 2>/dev/null || echo "root: read-only"
          python3 - <<'END'
          import socket, urllib.request
          print("web:", urllib.request.urlopen("http://web.{NAMESPACE}.svc.cluster.local/", timeout=5).status)
          print("short:", urllib.request.urlopen("http://web/", timeout=5).status)
          try:
              socket.getaddrinfo("nowhere.example", 80)
          except socket.gaierror as error:
              print("nowhere:", error.errno == socket.EAI_NONAME)
          END
      securityContext: {CONTAINER_SECURITY}
      volumeMounts: [{{name: ring, mountPath: /ring}}]
"""


@pytest.fixture(scope="module")
def web(cluster: Cluster) -> Iterator[Cluster]:
    """A namespace that enforces `restricted`, and in it a web server behind a service."""
    cluster.load_images("base")
    kubectl = cluster.kubectl
    kubectl.apply(WEB)
    kubectl.wait_for(
        "the web server to be ready",
        lambda: '"ready":true' in kubectl("get", "pod", "web", "-n", NAMESPACE, "-o", "jsonpath={.status}"),
        POD_SECONDS,
        last_seen=lambda: kubectl.describe("pod", "web", namespace=NAMESPACE),
    )
    yield cluster
    kubectl.run("delete", "namespace", NAMESPACE, "--now", "--wait=false")


def test_pod_with_sidecar_and_shared_memory_runs_to_its_end_under_restricted_and_finds_services_by_name(
    web: Cluster,
) -> None:
    kubectl = web.kubectl
    kubectl.apply(TRAINING)
    kubectl.wait_for(
        "the pod to succeed",
        lambda: kubectl.get_json("pod", "training", namespace=NAMESPACE)["status"]["phase"] == "Succeeded",
        POD_SECONDS,
        last_seen=lambda: (
            kubectl.describe("pod", "training", namespace=NAMESPACE)
            + kubectl.try_run("logs", "training", "-n", NAMESPACE)
        ),
    )
    assert kubectl("logs", "training", "-c", "trainer", "-n", NAMESPACE).splitlines() == [
        "ring: full tmpfs 8192",
        "user: 1000",
        "root: read-only",
        "web: 200",
        "short: 200",
        "nowhere: True",
    ]


def test_services_are_reached_from_the_machine_too(web: Cluster) -> None:
    address = web.kubectl("get", "service", "web", "-n", NAMESPACE, "-o", "jsonpath={.spec.clusterIP}")
    with urllib.request.urlopen(f"http://{address}/", timeout=10) as answer:
        assert answer.status == 200


def test_nothing_of_the_node_is_seen_on_the_machine(web: Cluster) -> None:
    assert web.node is not None
    tables = subprocess.run(
        [find_program("iptables").with_name("iptables-save")], capture_output=True, text=True, check=True
    ).stdout
    assert f"{NAMESPACE}/web" not in tables
    assert f"{NAMESPACE}/web" in web.node.inside.run(["iptables-save"])
    assert str(web.work_dir) not in Path("/proc/self/mountinfo").read_text()
    assert str(web.work_dir) in web.node.inside.run(["cat", "/proc/self/mountinfo"])


SECOND = """
import sys, time
from pathlib import Path
from tests.cluster.addresses import HOST_ADDRESS
from tests.cluster.control_plane import control_plane
from tests.cluster.images import image_archives
from tests.cluster.kubectl import Kubectl
from tests.cluster.machine import whole_machine
from tests.cluster.network import host_bridge
from tests.cluster.node import node

folder = Path(sys.argv[1])
pod = '''
apiVersion: v1
kind: Pod
metadata: {name: sleeper}
spec:
  containers: [{name: sleeper, image: "localhost/bagelplane/base:test", command: [sleep, "86399"]}]
'''
with (
    whole_machine(folder),
    host_bridge(),
    control_plane(folder / "plane", advertise_address=HOST_ADDRESS) as plane,
    node(plane, folder / "node") as it,
):
    it.load_image(image_archives(["base"])["base"])
    kubectl = Kubectl(plane.kubeconfig)
    kubectl.apply(pod)
    kubectl.run("wait", "pod/sleeper", "--for=condition=Ready", "--timeout=60s")
    print("up", flush=True)
    if sys.argv[2] == "stay":
        time.sleep(600)
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """What pytest makes for a worker has a path too long for the kubelet's sockets."""
    with tempfile.TemporaryDirectory(prefix="bagelplane-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def second_cluster(folder: Path, then: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A cluster of another number beside the one of the tests, with a pod that runs. Killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", SECOND, str(folder), then],
        env={**os.environ, "BAGELPLANE_TEST_CLUSTER_NUMBER": "9", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        said = ""
        while (line := process.stdout.readline()) != "up\n":
            said += line
            assert line, f"the second cluster did not come up: {said}"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def left_on_the_machine(folder: Path) -> list[str]:
    """What a cluster of that folder and number has on the machine just now."""
    left = [str(path) for path in Path("/sys/fs/cgroup").glob("**/bagelplane-test-9")]
    left += [str(path) for path in Path("/sys/class/net").glob("bagelplane9*")]
    left += [
        f"mount {line}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if str(folder) in line
    ]
    left += [
        str(path) for path in folder.rglob("*") if path.is_dir() and path.name in {"etcd", "kubelet", "pki"}
    ]
    return left + living_processes(folder)


def living_processes(folder: Path) -> list[str]:
    """Processes of the cluster, its pod's and the containers' shims included."""
    living = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            groups = (process / "cgroup").read_text()
        except OSError:
            continue  # it ended while we looked
        if str(folder) in command or "sleep 86399" in command or "bagelplane-test-9" in groups:
            living.append(f"process {process.name}: {command[:200]}")
    return living


def wait_until_nothing_is_left(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while left := left_on_the_machine(folder):
        assert time.monotonic() < deadline, "\n".join(left)
        time.sleep(0.1)


@pytest.mark.slow
def test_killed_cluster_takes_its_processes_along_and_the_next_start_clears_the_rest(
    short_folder: Path,
) -> None:
    with second_cluster(short_folder, "stay") as killed:
        assert any("sleep 86399" in line for line in living_processes(short_folder))
        another_one = rf"another test cluster is on this machine: process {killed.pid} since "
        with pytest.raises(AssertionError, match=another_one), second_cluster(short_folder / "other", "end"):
            pass

    with second_cluster(short_folder, "end") as ending:
        assert ending.communicate(timeout=180) == ("", None)
        assert ending.returncode == 0
    wait_until_nothing_is_left(short_folder)


@pytest.mark.slow
def test_kubelet_that_ends_is_reported_in_its_own_words_and_nothing_stays(short_folder: Path) -> None:
    kubelet = short_folder / "broken-kubelet"
    kubelet.write_text("#!/bin/sh\necho no such flag: --wrong\nexit 3\n")
    kubelet.chmod(0o755)
    folder = short_folder / "cluster"
    with (
        pytest.raises(AssertionError, match=r"(?s)kubelet: ended with status 3.*no such flag: --wrong"),
        second_cluster(folder, "end", BAGELPLANE_KUBELET=str(kubelet)),
    ):
        pass
    wait_until_nothing_is_left(folder)


def test_missing_rights_are_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with (
        pytest.raises(ClusterError, match=r"a node needs root, and this is user 1000\. Fix: run as root"),
        node(None, tmp_path),
    ):
        pass


def test_a_folder_too_deep_for_the_kubelets_sockets_is_said_before_anything_starts(tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterError, match=r"the system takes 107\. Fix: take a folder with a shorter path"),
        node(None, tmp_path / ("deep" * 20)),
    ):
        pass


def test_machine_without_control_groups_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path)
    with pytest.raises(ClusterError, match=r"no control groups are mounted on .*\. Fix: run on a machine"):
        cgroups.create_cgroup()
