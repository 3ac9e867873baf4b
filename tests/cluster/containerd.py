"""containerd with runc, in the node's namespaces: its sockets and state are on the node's own /run."""

from __future__ import annotations

import json
import shutil
import signal
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.namespaces import Namespaces
from tests.cluster.processes import ClusterError, Component, component
from tests.tools.programs import cni_folder, find_program

_CONFIGURATION = "/run/containerd.toml"
SOCKET = "/run/containerd/containerd.sock"
_NAMESPACE = "k8s.io"  # the one of Kubernetes' images and containers
_START_SECONDS = 60.0
_IMPORT_SECONDS = 600.0
_LOADED = "loaded.json"
# Arguments: ctr, and the command that starts containerd.
_FORGET_CONTAINERS = f"""
ctr=$1; shift
export CONTAINERD_ADDRESS={SOCKET} CONTAINERD_NAMESPACE={_NAMESPACE}
"$@" & trap 'kill $!; wait' EXIT
until "$ctr" version; do kill -0 $! || exit 1; sleep 0.05; done
containers=$("$ctr" containers list --quiet) || exit
[ -z "$containers" ] || "$ctr" containers delete $containers
"""


@contextmanager
def containerd(
    inside: Namespaces,
    image_store: Path,
    *,
    cni_configuration_dir: Path,
    pause_image: str,
    log: Path,
    say: Callable[[str], None],
) -> Iterator[Component]:
    """A containerd that answers. `image_store` has its images and layers, and may be one of before."""
    image_store.mkdir(parents=True, exist_ok=True)
    # In the node's own /run: the store may be emptied.
    configuration = _configuration(
        image_store / "root", cni_configuration_dir=cni_configuration_dir, pause_image=pause_image
    )
    inside.run(["sh", "-c", f'printf %s "$1" > {_CONFIGURATION}', "write", configuration])
    start = [find_program("containerd"), "--config", _CONFIGURATION]
    if (image_store / _LOADED).exists():
        _forget_containers(inside, image_store, start, say)
    with component("containerd", inside.command(start), log, stop_by=signal.SIGKILL) as process:
        process.wait_until("it answers", lambda: _ask(inside), _START_SECONDS)
        yield process


def _forget_containers(
    inside: Namespaces, image_store: Path, start: Sequence[str | Path], say: Callable[[str], None]
) -> None:
    """Removes the containers of a cluster that is gone, which this one's kubelet would take for its own."""
    try:
        inside.run(["sh", "-c", _FORGET_CONTAINERS, "forget", find_program("ctr"), *start])
    except ClusterError as error:
        say(f"the image store {image_store} cannot be used, and is made anew: {str(error).splitlines()[-1]}")
        shutil.rmtree(image_store)
        image_store.mkdir()


def import_image(inside: Namespaces, image_store: Path, archive: Path) -> None:
    """Loads the images of an archive (docker or OCI) that are not there yet. Raises ClusterError."""
    record = image_store / _LOADED
    loaded = json.loads(record.read_text()) if record.exists() else {}
    images = _images_of(archive)
    if images and images.items() <= loaded.items():
        return
    inside.run([*_ctr(), "images", "import", archive.resolve()], seconds=_IMPORT_SECONDS)
    unfinished = record.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(loaded | images))
    unfinished.replace(record)


def _images_of(archive: Path) -> dict[str, str]:
    """The images of a docker archive: the hash of each by name. Empty for archives that do not say."""
    try:
        with tarfile.open(archive) as tar:
            manifest = tar.extractfile("manifest.json")
            images = json.load(manifest) if manifest else []
    except KeyError:
        return {}
    return {name: image["Config"] for image in images for name in image["RepoTags"]}


def _ctr() -> list[str]:
    return [str(find_program("ctr")), "--address", SOCKET, "--namespace", _NAMESPACE]


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
