"""The network of the test cluster: one Ethernet segment over the host and the node.

    host: bridge BRIDGE (HOST_ADDRESS: API server, S3 server) ---- veth ---- node: bridge with all pods (NODE_ADDRESS)

kube-proxy's rules are in the node's network namespace alone, so the host's iptables are not touched. Pods and host
reach each other directly; the host reaches services through the node. Nothing leads out of the segment.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.addresses import (
    BRIDGE,
    FIRST_POD_ADDRESS,
    HOST_ADDRESS,
    LAST_POD_ADDRESS,
    NODE_ADDRESS,
    POD_NETWORK,
    SERVICE_NETWORK,
)
from tests.cluster.namespaces import Namespaces, run_command
from tests.cluster.processes import ClusterError
from tests.tools.programs import find_program

_PREFIX = POD_NETWORK.partition("/")[2]
_UPLINK = f"{BRIDGE}up"  # the host's end of the cable to the node
_NODE_UPLINK = "uplink"
_NODE_BRIDGE = "pods"
_GONE_SECONDS = 10.0


@contextmanager
def host_bridge() -> Iterator[None]:
    """The bridge with HOST_ADDRESS. One that a crashed run left behind is replaced."""
    ip = str(find_program("ip"))
    remove_host_bridge()
    try:
        run_command([ip, "link", "add", BRIDGE, "type", "bridge"])
    except ClusterError as error:
        raise ClusterError(f"the cluster's bridge cannot be made: {error}. Fix: run as root") from None
    try:
        run_command([ip, "address", "add", f"{HOST_ADDRESS}/{_PREFIX}", "dev", BRIDGE])
        run_command([ip, "link", "set", BRIDGE, "up"])
        yield
    finally:
        remove_host_bridge()


def remove_host_bridge() -> None:
    """Removes the bridge and the cable to a node. No error if they are not there."""
    ip = str(find_program("ip"))
    for link in (_UPLINK, BRIDGE):
        if Path("/sys/class/net", link).exists():
            # The kernel may be removing it itself at this moment: with the node's namespace it goes too.
            subprocess.run([ip, "link", "delete", link], capture_output=True, timeout=30, check=False)
    deadline = time.monotonic() + _GONE_SECONDS
    while any(Path("/sys/class/net", link).exists() for link in (_UPLINK, BRIDGE)):
        if time.monotonic() > deadline:
            raise ClusterError(f"the interface {BRIDGE} stays. Fix: ip link delete {BRIDGE}, as root")
        time.sleep(0.02)


def connect_node(inside: Namespaces) -> None:
    """Gives the node its bridge and lays the cable between it and the host's bridge."""
    ip = str(find_program("ip"))
    settings = [
        "net.ipv4.ip_forward=1",
        # Answers within the segment are to meet kube-proxy's translation too.
        "net.bridge.bridge-nf-call-iptables=1",
        # Services are forwarded back into the segment they came from; pods shall not learn a short cut from that.
        "net.ipv4.conf.all.send_redirects=0",
        "net.ipv4.conf.default.send_redirects=0",
    ]
    if not Path("/proc/sys/net/bridge").exists():
        run_command(["modprobe", "br_netfilter"])  # for the whole machine, as Kubernetes asks of any node
    for setting in settings:
        name, _, value = setting.partition("=")
        # No sysctl: it is not installed everywhere.
        inside.run(["sh", "-c", f"echo {value} > /proc/sys/{name.replace('.', '/')}"])
    inside.run([ip, "link", "set", "lo", "up"])
    inside.run([ip, "link", "add", _NODE_BRIDGE, "type", "bridge"])
    inside.run([ip, "address", "add", f"{NODE_ADDRESS}/{_PREFIX}", "dev", _NODE_BRIDGE])
    inside.run([ip, "link", "set", _NODE_BRIDGE, "up"])
    run_command(
        [ip, "link", "add", _UPLINK, "type", "veth", "peer", "name", _NODE_UPLINK, "netns", str(inside.pid)]
    )
    run_command([ip, "link", "set", _UPLINK, "master", BRIDGE, "up"])
    inside.run([ip, "link", "set", _NODE_UPLINK, "master", _NODE_BRIDGE, "up"])
    run_command([ip, "route", "replace", SERVICE_NETWORK, "via", NODE_ADDRESS, "dev", BRIDGE])


def write_cni_configuration(folder: Path, state_dir: Path) -> None:
    """How pods get their interface and address."""
    addresses = {
        "subnet": POD_NETWORK,
        "rangeStart": FIRST_POD_ADDRESS,
        "rangeEnd": LAST_POD_ADDRESS,
        "gateway": NODE_ADDRESS,
    }
    plugin = {
        "type": "bridge",
        "bridge": _NODE_BRIDGE,
        "isDefaultGateway": True,
        "hairpinMode": True,  # a pod may reach itself through its service
        "ipam": {"type": "host-local", "dataDir": str(state_dir), "ranges": [[addresses]]},
    }
    folder.mkdir(parents=True, exist_ok=True)
    configuration = {"cniVersion": "0.4.0", "name": BRIDGE, "plugins": [plugin]}
    (folder / "10-pods.conflist").write_text(json.dumps(configuration, indent=2))
