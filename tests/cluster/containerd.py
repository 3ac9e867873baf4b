"""containerd with runc, in the node's namespaces: its sockets and state are on the node's own /run."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.namespaces import Namespaces
from tests.cluster.processes import ClusterError, Component, component
from tests.tools.programs import cni_folder, find_program

SOCKET = "/run/containerd/containerd.sock"
_START_SECONDS = 60.0
_IMPORT_SECONDS = 600.0


@contextmanager
def containerd(
    inside: Namespaces, work_dir: Path, *, cni_configuration_dir: Path, pause_image: str, log: Path
) -> Iterator[Component]:
    """A containerd that answers. Images and layers are in `work_dir`."""
    work_dir.mkdir(parents=True, exist_ok=True)
    configuration = work_dir / "config.toml"
    configuration.write_text(
        _configuration(
            work_dir / "root", cni_configuration_dir=cni_configuration_dir, pause_image=pause_image
        )
    )
    command = inside.command([find_program("containerd"), "--config", configuration])
    with component("containerd", command, log, stop_by=signal.SIGKILL) as process:
        process.wait_until("it answers", lambda: _ask(inside), _START_SECONDS)
        yield process


def import_image(inside: Namespaces, archive: Path) -> list[str]:
    """Loads the images of an archive (docker or OCI); returns their names. Raises ClusterError."""
    printed = inside.run(
        [*_ctr(), "images", "import", "--snapshotter", "overlayfs", archive.resolve()],
        seconds=_IMPORT_SECONDS,
    )
    return [line.split()[1] for line in printed.splitlines() if line.startswith("unpacking ")]


def _ctr() -> list[str | Path]:
    # Kubernetes' images have a namespace of their own.
    return [find_program("ctr"), "--address", SOCKET, "--namespace", "k8s.io"]


def _ask(inside: Namespaces) -> str:
    try:
        inside.run([*_ctr(), "version"], seconds=10)
    except ClusterError as error:
        return str(error)
    return ""


def _configuration(root_dir: Path, *, cni_configuration_dir: Path, pause_image: str) -> str:
    def quoted(value: object) -> str:
        return json.dumps(str(value))  # JSON's strings are TOML's

    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""\
version = 2
root = {quoted(root_dir)}
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.internal.v1.opt", "io.containerd.tracing.processor.v1.otlp",
]

[grpc]
  address = {quoted(SOCKET)}

[{cri}]
  sandbox_image = {quoted(pause_image)}
  # Without CAP_SYS_RESOURCE no process may be made less likely to be killed than its parent.
  restrict_oom_score_adj = true
  [{cri}.cni]
    bin_dir = {quoted(cni_folder())}
    conf_dir = {quoted(cni_configuration_dir)}
  [{cri}.containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [{cri}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [{cri}.containerd.runtimes.runc.options]
        BinaryName = {quoted(find_program("runc"))}
        SystemdCgroup = false
"""
