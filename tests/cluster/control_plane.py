"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler on this machine, for the time of a `with` block.

    with control_plane(work_dir, advertise_address=HOST_ADDRESS) as plane:
        plane.kubeconfig                                   # of a cluster administrator
        plane.url, plane.ca_certificate                    # https://10.231.0.1:PORT
        plane.kubeconfig_for("kubelet", "system:node:" + NODE_NAME, group="system:nodes")
        plane.authority.issue(...)                         # a certificate that the API server and kubelets trust

`advertise_address` has to be an address of this machine that exists already (the bridge comes first); the API server
listens there alone, so pods reach it and nothing outside the machine does. A loopback address will do where there is
no node. Authorization is Node and RBAC, admission is Kubernetes' default with PodSecurity, and NodeRestriction.
Files are in `work_dir`: certificates, etcd's data, and logs/*.log, which stay behind; all else goes at the end. The
processes die with this one, however it ends.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import shutil
import signal
import ssl
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bagelplane.cli.demo_server import free_port
from tests.cluster.addresses import API_SERVICE_ADDRESS, CLUSTER_DOMAIN, SERVICE_NETWORK
from tests.cluster.certificates import Authority, KeyPair
from tests.cluster.processes import Component, component
from tests.tools.programs import find_program

_START_SECONDS = 120.0  # it takes five on two free cores
_MASTERS = "system:masters"


@dataclass(frozen=True, slots=True)
class ControlPlane:
    work_dir: Path
    url: str
    authority: Authority
    admin: KeyPair
    components: list[Component] = field(default_factory=list)

    @property
    def kubeconfig(self) -> Path:
        """For an administrator. It holds keys and certificates itself, and so works anywhere."""
        return self.work_dir / "admin.kubeconfig"

    @property
    def ca_certificate(self) -> Path:
        return self.authority.certificate

    @property
    def logs_dir(self) -> Path:
        return self.work_dir / "logs"

    def kubeconfig_for(self, name: str, user: str, *, group: str = "") -> Path:
        """Writes `name`.kubeconfig for a client that the API server knows as that user; returns its path."""
        pair = self.authority.issue(name, user, organization=group)
        return self._write_kubeconfig(self.work_dir / f"{name}.kubeconfig", pair)

    def get(self, path: str) -> tuple[int, str]:
        """Asks the API server as an administrator: status and body. Raises OSError."""
        context = ssl.create_default_context(cafile=str(self.ca_certificate))
        context.load_cert_chain(self.admin.certificate, self.admin.key)
        host = self.url.removeprefix("https://")
        connection = http.client.HTTPSConnection(host, context=context, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def check(self) -> None:
        """Raises ClusterError if a component has ended."""
        for process in self.components:
            process.check()

    def _write_kubeconfig(self, path: Path, pair: KeyPair) -> Path:
        def encoded(file: Path) -> str:
            return b64encode(file.read_bytes()).decode()

        cluster = {"server": self.url, "certificate-authority-data": encoded(self.ca_certificate)}
        user = {
            "client-certificate-data": encoded(pair.certificate),
            "client-key-data": encoded(pair.key),
        }
        name = "bagelplane-test"
        config: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=1))  # JSON is YAML
        return path


@contextmanager
def control_plane(work_dir: Path, *, advertise_address: str) -> Iterator[ControlPlane]:
    """A control plane that answers, with the default namespace ready for pods. Raises ClusterError."""
    # A run that was killed may have left its data; that cluster is gone.
    _clear(work_dir)
    work_dir.mkdir(parents=True, exist_ok=True)
    work_dir.chmod(
        0o755
    )  # kubelets mount from below it for any user; keys have folders and modes of their own
    authority = Authority(work_dir / "pki", "bagelplane-test-ca")
    port = free_port(advertise_address)
    url = f"https://{advertise_address}:{port}"
    admin = authority.issue("admin", "bagelplane-test-admin", organization=_MASTERS)
    plane = ControlPlane(work_dir, url, authority, admin)
    plane._write_kubeconfig(plane.kubeconfig, admin)
    try:
        with ExitStack() as stack:

            def start(name: str, flags: Mapping[str, object]) -> Component:
                command = [str(find_program(name)), *(f"--{flag}={value}" for flag, value in flags.items())]
                # Nothing of it is kept, so nothing needs an orderly end: SIGKILL is quick and sure.
                process = stack.enter_context(
                    component(name, command, plane.logs_dir / f"{name}.log", stop_by=signal.SIGKILL)
                )
                plane.components.append(process)
                return process

            etcd_url = f"http://127.0.0.1:{free_port()}"
            etcd = start("etcd", _etcd_flags(work_dir, etcd_url))
            etcd.wait_until("it answers", lambda: _ask_etcd(etcd_url), _START_SECONDS)
            server = start("kube-apiserver", _api_server_flags(plane, etcd_url, advertise_address, port))
            server.wait_until("/readyz answers 200", lambda: _ask(plane, "/readyz"), _START_SECONDS)
            manager = start("kube-controller-manager", _controller_manager_flags(plane))
            start("kube-scheduler", _scheduler_flags(plane))
            # Pods need these two objects, and the controller manager makes them.
            for made in ("serviceaccounts/default", "configmaps/kube-root-ca.crt"):
                asked = partial(_ask, plane, f"/api/v1/namespaces/default/{made}")
                manager.wait_until(f"{made} exists in default", asked, _START_SECONDS)
            plane.check()
            yield plane
    finally:
        _clear(work_dir)


def _clear(work_dir: Path) -> None:
    for folder in ("pki", "etcd"):
        shutil.rmtree(work_dir / folder, ignore_errors=True)
    for path in work_dir.glob("*.kubeconfig"):
        path.unlink()


def _etcd_flags(work_dir: Path, url: str) -> dict[str, object]:
    peer_url = f"http://127.0.0.1:{free_port()}"
    return {
        "name": "etcd",
        "data-dir": work_dir / "etcd",
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-peer-urls": peer_url,
        "initial-advertise-peer-urls": peer_url,
        "initial-cluster": f"etcd={peer_url}",
        "unsafe-no-fsync": "true",  # nothing of it outlives the run
    }


def _api_server_flags(plane: ControlPlane, etcd_url: str, address: str, port: int) -> dict[str, object]:
    hosts = [
        address,
        "127.0.0.1",
        API_SERVICE_ADDRESS,
        "localhost",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        f"kubernetes.default.svc.{CLUSTER_DOMAIN}",
    ]
    pki = plane.work_dir / "pki"
    serving = plane.authority.issue("kube-apiserver", "kube-apiserver", hosts=hosts)
    to_kubelets = plane.authority.issue("kube-apiserver-to-kubelets", "kube-apiserver", organization=_MASTERS)
    # Requests that the API server hands on to aggregated servers are signed by an authority of their own: otherwise
    # any client's certificate could speak for any user.
    front_proxy = Authority(pki / "front-proxy", "bagelplane-test-front-proxy-ca")
    aggregator = front_proxy.issue("client", "front-proxy-client")
    tokens = plane.authority.issue("service-accounts", "service-accounts")
    flags: dict[str, object] = {
        "etcd-servers": etcd_url,
        "bind-address": address,
        "secure-port": port,
        "advertise-address": address,
        "tls-cert-file": serving.certificate,
        "tls-private-key-file": serving.key,
        "client-ca-file": plane.ca_certificate,
        "kubelet-client-certificate": to_kubelets.certificate,
        "kubelet-client-key": to_kubelets.key,
        "kubelet-preferred-address-types": "InternalIP",
        "requestheader-client-ca-file": front_proxy.certificate,
        "requestheader-allowed-names": "front-proxy-client",
        "requestheader-extra-headers-prefix": "X-Remote-Extra-",
        "requestheader-group-headers": "X-Remote-Group",
        "requestheader-username-headers": "X-Remote-User",
        "proxy-client-cert-file": aggregator.certificate,
        "proxy-client-key-file": aggregator.key,
        # Service addresses are the work of kube-proxy in the pods' world; webhooks are called at their pods' addresses.
        "enable-aggregator-routing": "true",
        "service-account-issuer": f"https://kubernetes.default.svc.{CLUSTER_DOMAIN}",
        "service-account-key-file": tokens.certificate,
        "service-account-signing-key-file": tokens.key,
        "service-cluster-ip-range": SERVICE_NETWORK,
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "allow-privileged": "true",
        "profiling": "false",
    }
    if ipaddress.ip_address(address).is_loopback:
        flags["endpoint-reconciler-type"] = (
            "none"  # the service `kubernetes` may not lead to a loopback address
        )
    return flags


def _controller_manager_flags(plane: ControlPlane) -> dict[str, object]:
    kubeconfig = plane.kubeconfig_for("kube-controller-manager", "system:kube-controller-manager")
    return {
        "kubeconfig": kubeconfig,
        "service-account-private-key-file": plane.work_dir / "pki" / "service-accounts.key",
        "root-ca-file": plane.ca_certificate,
        "cluster-signing-cert-file": plane.ca_certificate,
        "cluster-signing-key-file": plane.authority.pair.key,
        "use-service-account-credentials": "true",
        "leader-elect": "false",
        "secure-port": 0,
        "profiling": "false",
    }


def _scheduler_flags(plane: ControlPlane) -> dict[str, object]:
    kubeconfig = plane.kubeconfig_for("kube-scheduler", "system:kube-scheduler")
    return {"kubeconfig": kubeconfig, "leader-elect": "false", "secure-port": 0, "profiling": "false"}


def _ask(plane: ControlPlane, path: str) -> str:
    status, body = plane.get(path)
    return "" if status == 200 else f"status {status}: {body[:1000]}"


def _ask_etcd(url: str) -> str:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=2)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")
        return "" if '"true"' in body else f"status {answer.status}: {body}"
    except http.client.HTTPException as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
