"""A real node on this machine: containerd, kubelet, kube-proxy and CoreDNS, for the time of a `with` block.

    with host_bridge(), control_plane(..., advertise_address=HOST_ADDRESS) as plane, node(plane, folder) as a_node:
        a_node.load_image(archive)      # what pods name with imagePullPolicy IfNotPresent

It lives in namespaces of its own (namespaces.py) and one control group (cgroups.py): all of it ends with this process,
however that ends, and a next run removes the empty control group and the folder.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.addresses import CGROUP, CLUSTER_DOMAIN, DNS_ADDRESS, NODE_ADDRESS, NODE_NAME
from tests.cluster.cgroups import create_cgroup, remove_cgroup
from tests.cluster.containerd import SOCKET, containerd, import_image
from tests.cluster.control_plane import ControlPlane
from tests.cluster.images import image_archives, image_tag
from tests.cluster.namespaces import HIDDEN_DIRS, Namespaces
from tests.cluster.network import connect_node, write_cni_configuration
from tests.cluster.processes import ClusterError, Component, component
from tests.tools.programs import find_program

_PAUSE = "pause"
_EVICTION_SIGNALS = ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available")
_PROXY_HEALTH_PORT = 10256
_DNS_READY_PORT = 8181
_READY_SECONDS = 90.0  # it takes a few on two free cores
_SERVICE_SECONDS = 30.0
_LONGEST_SOCKET_PATH = 107  # sun_path in unix(7), less its end


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    address: str
    inside: Namespaces
    image_store: Path
    components: tuple[Component, ...]

    def load_image(self, archive: Path) -> None:
        """Loads an archive of images, unless they are there. Raises ClusterError."""
        import_image(self.inside, self.image_store, archive)

    def wait_for_service(self, address: str) -> None:
        """Waits until a service's address leads somewhere: kube-proxy hears of a new one a moment later, and until
        then a pod finds no route. Raises ClusterError.
        """
        deadline = time.monotonic() + _SERVICE_SECONDS
        # A service without an endpoint has no rule in this table.
        while f"-d {address}/32" not in (rules := self.inside.run(["iptables-save", "-t", "nat"])):
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"kube-proxy has no rule for the service at {address} after {_SERVICE_SECONDS:.0f} s; "
                    f"it has {rules}"
                )
            time.sleep(0.1)

    def check(self) -> None:
        """Raises ClusterError if a component has ended."""
        for process in self.components:
            process.check()


@contextmanager
def node(
    control_plane: ControlPlane,
    work_dir: Path,
    *,
    image_store: Path | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Node]:
    """A node that is Ready, with the pods' pause image. `work_dir` is emptied at the start and removed at the end;
    the logs are beside those of the control plane. A folder `image_store` stays, and so do the images loaded into it:
    unpacking them takes longer than all the rest. Raises ClusterError, ImageError and ToolError.
    """
    _check_machine(work_dir)
    pause = image_archives([_PAUSE], say)[_PAUSE]
    logs_dir, store = control_plane.logs_dir, image_store or work_dir / "containerd"
    _remove_folder(work_dir)
    work_dir.mkdir(parents=True)
    with ExitStack() as stack:
        stack.callback(_remove_folder, work_dir)
        create_cgroup()
        stack.callback(remove_cgroup)
        inside = Namespaces(NODE_NAME)
        stack.callback(inside.end)
        connect_node(inside)
        cni_dir = work_dir / "cni"
        write_cni_configuration(cni_dir, work_dir / "addresses")

        def start(name: str, *arguments: str) -> Component:
            command = inside.command([find_program(name), *arguments])
            return stack.enter_context(
                component(name, command, logs_dir / f"{name}.log", stop_by=signal.SIGKILL)
            )

        runtime = stack.enter_context(
            containerd(
                inside,
                store,
                cni_configuration_dir=cni_dir,
                pause_image=image_tag(_PAUSE),
                log=logs_dir / "containerd.log",
                say=say,
            )
        )
        kubelet = start("kubelet", *_kubelet_arguments(control_plane, work_dir / "kubelet"))
        proxy = start("kube-proxy", *_kube_proxy_arguments(control_plane))
        dns = start("coredns", "-conf", str(_write_corefile(control_plane, work_dir)))
        # At once and before the single components, so that each is still waited for by who started it.
        stack.callback(inside.end)
        import_image(inside, store, pause)
        it = Node(NODE_NAME, NODE_ADDRESS, inside, store, (runtime, kubelet, proxy, dns))

        kubelet.wait_until("the node is Ready", lambda: _why_not_ready(control_plane), _READY_SECONDS)
        proxy.wait_until("it answers 200", lambda: _ask(_PROXY_HEALTH_PORT, "/healthz"), _READY_SECONDS)
        dns.wait_until("it knows the services", lambda: _ask(_DNS_READY_PORT, "/ready"), _READY_SECONDS)
        yield it


def _check_machine(work_dir: Path) -> None:
    if os.geteuid() != 0:
        raise ClusterError(f"a node needs root, and this is user {os.geteuid()}. Fix: run as root")
    hidden = [folder for folder in HIDDEN_DIRS if work_dir.resolve().is_relative_to(folder)]
    if hidden:
        raise ClusterError(
            f"the node's folder {work_dir} is in {hidden[0]}, where the node sees a folder of its own. "
            "Fix: take one elsewhere, such as in /tmp"
        )
    longest = work_dir.resolve() / "kubelet/root/pod-resources/4294967295"
    if len(bytes(longest)) > _LONGEST_SOCKET_PATH:
        raise ClusterError(
            f"the kubelet's sockets would have paths of {len(bytes(longest))} bytes, such as {longest}; the system "
            f"takes {_LONGEST_SOCKET_PATH}. Fix: take a folder with a shorter path than {work_dir}"
        )


def _remove_folder(work_dir: Path) -> None:
    """Mounts in it were seen in the node's namespace alone, so what is deleted is nobody else's."""
    if work_dir.exists():
        shutil.rmtree(work_dir)


def _kubelet_arguments(control_plane: ControlPlane, work_dir: Path) -> list[str]:
    kubeconfig = control_plane.kubeconfig_for("kubelet", f"system:node:{NODE_NAME}", group="system:nodes")
    work_dir.mkdir(parents=True)
    resolver = work_dir / "resolv.conf"
    resolver.touch()  # nothing of the machine's name service reaches pods
    configuration: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_ADDRESS,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(control_plane.ca_certificate)},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": CLUSTER_DOMAIN,
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "resolvConf": str(resolver),
        "podLogsDir": str(work_dir / "pod-logs"),
        "volumePluginDir": str(work_dir / "volume-plugins"),
        "failSwapOn": False,
        "oomScoreAdj": 0,  # may not be lowered without CAP_SYS_RESOURCE
        # The machine's disk is not ours to judge: a full one neither evicts pods nor removes images.
        "evictionHard": dict.fromkeys(_EVICTION_SIGNALS, "0%"),
        "imageGCHighThresholdPercent": 100,
        "maxPods": 100,
    }
    path = work_dir / "config.json"
    path.write_text(json.dumps(configuration, indent=1))
    return [
        f"--config={path}",
        f"--kubeconfig={kubeconfig}",
        f"--root-dir={work_dir / 'root'}",
        f"--cert-dir={work_dir / 'pki'}",
        f"--hostname-override={NODE_NAME}",
        f"--node-ip={NODE_ADDRESS}",
    ]


def _kube_proxy_arguments(control_plane: ControlPlane) -> list[str]:
    kubeconfig = control_plane.kubeconfig_for("kube-proxy", "system:kube-proxy")
    return [
        f"--kubeconfig={kubeconfig}",
        f"--hostname-override={NODE_NAME}",
        "--proxy-mode=iptables",
        "--conntrack-max-per-core=0",  # the machine's table is the machine's affair
        "--oom-score-adj=0",
        f"--healthz-bind-address={NODE_ADDRESS}:{_PROXY_HEALTH_PORT}",
        "--metrics-bind-address=127.0.0.1:10249",
    ]


def _write_corefile(control_plane: ControlPlane, work_dir: Path) -> Path:
    zones = f"{CLUSTER_DOMAIN} in-addr.arpa"
    path = work_dir / "Corefile"
    # Names of other domains do not exist: a refusal would be taken for a fault and asked again.
    path.write_text(
        f"""\
{zones} {{
    bind {DNS_ADDRESS}
    ready {DNS_ADDRESS}:{_DNS_READY_PORT}
    errors
    kubernetes {zones} {{
        kubeconfig {control_plane.kubeconfig}
        ttl 1
    }}
}}
. {{
    bind {DNS_ADDRESS}
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""
    )
    return path


def _why_not_ready(control_plane: ControlPlane) -> str:
    status, body = control_plane.get(f"/api/v1/nodes/{NODE_NAME}")
    if status != 200:
        return f"status {status}: {body[:500]}"
    answer = json.loads(body)
    ready = [c for c in answer["status"].get("conditions", []) if c["type"] == "Ready"]
    if not ready or ready[0]["status"] != "True":
        return f"its condition Ready is {ready}"
    return f"its taints are {taints}" if (taints := answer["spec"].get("taints")) else ""


def _ask(port: int, path: str) -> str:
    connection = http.client.HTTPConnection(NODE_ADDRESS, port, timeout=2)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")
        return "" if answer.status == 200 else f"status {answer.status}: {body[:500]}"
    except http.client.HTTPException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()
