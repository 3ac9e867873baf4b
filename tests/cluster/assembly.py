"""All parts put together: a cluster of one node with S3 beside it, and into it Kubeflow's operator and our chart.

    with running_cluster(say=print) as cluster:
        cluster.install()
        cluster.kubectl("get", "nodes")

Everything is in one folder of the user's cache; of that only logs/ stays, and only where something failed. The node's
images are in a folder beside it, for the next one.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tests.cluster import release, sample_data, training_operator
from tests.cluster.addresses import HOST_ADDRESS, NUMBER
from tests.cluster.control_plane import ControlPlane, control_plane
from tests.cluster.images import image_archives
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.cluster.machine import whole_machine
from tests.cluster.network import host_bridge
from tests.cluster.node import Node, node
from tests.cluster.processes import last_lines
from tests.cluster.trainer_environment import trainer_environment
from tests.services.s3 import S3Server, serve_versitygw
from tests.tools.programs import find_programs

_OTHERS_USE_SECONDS = 900.0  # another run of the tests on this machine is waited for
_SHOWN_LOG_LINES = 8
Say = Callable[[str], None]


@dataclass(slots=True)
class Cluster:
    """A cluster that answers. `plane` and `node` are None where it is somebody else's."""

    kubectl: Kubectl
    s3: S3Server
    work_dir: Path
    say: Say
    plane: ControlPlane | None = None
    node: Node | None = None
    archives: Mapping[str, Path] = field(default_factory=dict)
    failures: int = 0
    _is_installed: bool = False
    _loaded: set[str] = field(default_factory=set)

    @property
    def kubeconfig(self) -> Path:
        return self.kubectl.kubeconfig

    @property
    def logs_dir(self) -> Path:
        return self.work_dir / "logs"

    @property
    def trainer_environment(self) -> Path:
        """A folder of the node with torch and the client, for a trainer's PYTHONPATH."""
        return trainer_environment(self.say)

    def check(self) -> None:
        """Raises ClusterError if a part of it has ended."""
        for part in (self.plane, self.node):
            if part:
                part.check()

    def load_images(self, *names: str) -> None:
        """Gives the node some of the images of images.py. Another's cluster is to have them."""
        for name in names:
            if self.node and name not in self._loaded:
                with _told(f"loading the image {name}", self.say):
                    self.node.load_image(self.archives[name])
                self._loaded.add(name)

    def install(self) -> None:
        """Kubeflow's training operator and our chart, as users have them. Once: a second time does nothing."""
        if self._is_installed:
            return
        self.load_images("base", *training_operator.IMAGES, *release.IMAGES)
        with _told("deploying the training operator", self.say):
            training_operator.deploy_training_operator(self.kubectl, self.work_dir / "training-operator")
        with _told("installing the chart", self.say):
            release.install(self.kubectl, release.write_values(self.work_dir / "values.yaml"))
        self._is_installed = True

    def logs(self) -> str:
        """The last lines of each component, and what a person would ask kubectl first."""
        parts = [
            f"{log.name}\n{last_lines(log, _SHOWN_LOG_LINES)}" for log in sorted(self.logs_dir.glob("*.log"))
        ]
        for question in (
            ("get", "nodes,pods", "--all-namespaces", "--output=wide"),
            ("get", "events", "--all-namespaces", "--field-selector=type=Warning"),
        ):
            said = self.kubectl.try_run(*question, "--request-timeout=10s", seconds=20)
            parts.append(f"kubectl {' '.join(question)}\n{said}")
        return "\n\n".join(parts)

    def save_failure(self, name: str) -> Path:
        """Writes all objects and the pods' logs into a folder of logs/, which then stays; returns that folder."""
        self.failures += 1
        folder = self.logs_dir / "failures" / "".join(c if c.isalnum() else "-" for c in name)
        folder.mkdir(parents=True, exist_ok=True)
        arguments = ("cluster-info", "dump", "--all-namespaces", "--output-directory", str(folder))
        (folder / "dump.log").write_text(self.kubectl.try_run(*arguments, seconds=60))
        return folder


@contextmanager
def running_cluster(say: Say = print) -> Iterator[Cluster]:
    """The cluster that BAGELPLANE_TEST_KUBECONFIG names, or one of our own. Raises ClusterError, ToolError."""
    given = os.environ.get("BAGELPLANE_TEST_KUBECONFIG")
    work_dir = _work_dir()
    with _given_cluster(Path(given), work_dir, say) if given else _own_cluster(work_dir, say) as cluster:
        yield cluster


def _work_dir() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "bagelplane" / f"cluster-{NUMBER}"


@contextmanager
def _own_cluster(work_dir: Path, say: Say) -> Iterator[Cluster]:
    # What takes minutes comes before all that others may wait for.
    find_programs(say=say)
    archives = image_archives(say=say)
    image_store = work_dir.with_name(f"{work_dir.name}-images")
    with (
        whole_machine(work_dir, wait_seconds=_OTHERS_USE_SECONDS, say=say),
        _cleared_folder(work_dir) as clear,
    ):
        began = time.monotonic()
        with (
            host_bridge(),
            control_plane(work_dir, advertise_address=HOST_ADDRESS) as plane,
            node(plane, work_dir / "node", image_store=image_store, say=say) as the_node,
            serve_versitygw(work_dir / "s3", address=HOST_ADDRESS, say=say) as server,
        ):
            cluster = Cluster(Kubectl(plane.kubeconfig), server, work_dir, say, plane, the_node, archives)
            _publish(cluster, HOST_ADDRESS)
            the_node.wait_for_service(sample_data.service_address(cluster.kubectl))
            say(f"the cluster was up after {time.monotonic() - began:.1f} s; logs are in {cluster.logs_dir}")
            yield cluster
        if not cluster.failures:
            clear()


@contextmanager
def _given_cluster(kubeconfig: Path, work_dir: Path, say: Say) -> Iterator[Cluster]:
    """Starts nothing but S3, on the address of this machine that leads to the cluster. Its node has our images and
    sees our files, as that of `make cluster` does.
    """
    kubectl = Kubectl(kubeconfig)
    api_server = urlsplit(
        kubectl.run("config", "view", "--minify", "--output=jsonpath={.clusters[0].cluster.server}")
    )
    with socket.create_connection((api_server.hostname, api_server.port or 443), timeout=30) as connection:
        address = str(connection.getsockname()[0])
    # The folder beside it is that of a cluster of our own, which may be the one that is given.
    work_dir = work_dir.with_name("given-cluster")
    with (
        _cleared_folder(work_dir) as clear,
        serve_versitygw(work_dir / "s3", address=address, say=say) as server,
    ):
        cluster = Cluster(kubectl, server, work_dir, say)
        before = _published(kubectl)
        _publish(cluster, address)
        try:
            yield cluster
        finally:
            if before:
                sample_data.publish(kubectl, *before)  # the server that was there, and is still
        if not cluster.failures:
            clear()


def _published(kubectl: Kubectl) -> tuple[str, int] | None:
    try:
        found = kubectl.get_json("endpointslice", "s3", namespace=sample_data.NAMESPACE)
    except KubectlError:
        return None
    return found["endpoints"][0]["addresses"][0], found["ports"][0]["port"]


def _publish(cluster: Cluster, address: str) -> None:
    sample_data.fill_bucket(cluster.s3)
    sample_data.publish(cluster.kubectl, address, int(cluster.s3.url.rpartition(":")[2]))


@contextmanager
def _cleared_folder(folder: Path) -> Iterator[Callable[[], None]]:
    """An empty folder. At the end its logs/ stay, unless the given function was called."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    keeps = ["logs"]
    try:
        yield keeps.clear
    except KeyboardInterrupt:  # somebody has seen enough
        keeps.clear()
        raise
    finally:
        for path in folder.iterdir():
            if path.name not in keeps:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not keeps:
            folder.rmdir()


@contextmanager
def _told(what: str, say: Say) -> Iterator[None]:
    began = time.monotonic()
    yield
    say(f"{what} took {time.monotonic() - began:.1f} s")
