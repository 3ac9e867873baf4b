"""The programs that tests need, and how each is had. `python -m tests.tools.programs [NAME...]` gets them ahead of a
test run and says where each came from.

A program is looked for in the variable BAGELPLANE_<NAME> (BAGELPLANE_KUBE_APISERVER), which is taken as it is; then in
the folder KUBEBUILDER_ASSETS and on PATH, where its version has to fit. What is then missing is built by Go from the
pinned module beside this file, once, into the user's cache and outside the clone; or it comes from a Debian package,
and all such packages are named at once in one command. BAGELPLANE_INSTALL_PACKAGES=1 lets this module run that command.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from tests.tools.go_build import ToolError, build, built_path

KUBERNETES = "v1.34.4"
# Debian keeps these from the PATH of users other than root.
_ADMIN_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_CNI_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin")
_INSTALL_SECONDS = 900


@dataclass(frozen=True, slots=True)
class GoProgram:
    """A program that Go builds. A found one is taken if what `version_arguments` make it print has `fits` in it;
    where `fits` is None, none is taken, since nothing could be said about it.
    """

    name: str
    module: str  # a folder beside this file, with go.mod and go.sum
    package: str
    fits: str | None = None  # a regular expression
    version_arguments: tuple[str, ...] = ()
    ldflags: str = ""


@dataclass(frozen=True, slots=True)
class SystemProgram:
    """A program that a Debian package brings."""

    name: str
    debian_package: str
    is_cni_plugin: bool = False  # then it is in a folder of its kind, not on PATH


def _kubernetes(
    name: str, fits: str = r"Kubernetes v1\.34\.", version_arguments: tuple[str, ...] = ("--version",)
) -> GoProgram:
    # Without the flag it calls itself v0.0.0-master, and clients that ask for the version go astray.
    ldflags = f"-X k8s.io/component-base/version.gitVersion={KUBERNETES}"
    return GoProgram(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", fits, version_arguments, ldflags)


Program = GoProgram | SystemProgram
_ALL: tuple[Program, ...] = (
    # Any will do: it does not tell its version.
    GoProgram("versitygw", "versitygw", "github.com/versity/versitygw/cmd/versitygw", fits=""),
    # The parts of one cluster are of one minor version: mixtures are allowed, but not what we test.
    _kubernetes("kube-apiserver"),
    _kubernetes("kube-controller-manager"),
    _kubernetes("kube-scheduler"),
    _kubernetes("kubelet"),  # 1.35 and later refuse machines with cgroup v1
    _kubernetes("kube-proxy"),
    # Kubernetes promises that kubectl works with servers one minor version older or newer.
    _kubernetes("kubectl", r'"v1\.3[345]\.', ("version", "--client", "--output=json")),
    GoProgram("helm", "helm", "helm.sh/helm/v3/cmd/helm", r"\Av3\.", ("version", "--short")),
    GoProgram("coredns", "coredns", "github.com/coredns/coredns", r"CoreDNS-1\.", ("-version",)),
    GoProgram(
        "training-operator",
        "training-operator",
        "github.com/kubeflow/training-operator/cmd/training-operator.v1",
    ),
    SystemProgram("etcd", "etcd-server"),
    SystemProgram("containerd", "containerd"),
    SystemProgram("ctr", "containerd"),
    SystemProgram("runc", "runc"),
    *(
        SystemProgram(plugin, "containernetworking-plugins", is_cni_plugin=True)
        for plugin in ("bridge", "host-local", "loopback", "portmap")
    ),
    SystemProgram("debootstrap", "debootstrap"),
    SystemProgram("buildah", "buildah"),
    SystemProgram("iptables", "iptables"),
    SystemProgram("ip", "iproute2"),
    SystemProgram("mount", "mount"),
    SystemProgram("umount", "mount"),
    SystemProgram("nsenter", "util-linux"),
    SystemProgram("openssl", "openssl"),
)
PROGRAMS = {program.name: program for program in _ALL}


@dataclass(frozen=True, slots=True)
class Found:
    path: Path
    origin: str  # how it was had, for the report


def find_program(name: str, say: Callable[[str], None] = print) -> Path:
    """The path of one program; builds it if need be. Raises ToolError."""
    return find_programs([name], say)[name].path


def cni_folder() -> Path:
    """Where the CNI plugins are."""
    return find_program("host-local").parent


def find_programs(names: Iterable[str] = PROGRAMS, say: Callable[[str], None] = print) -> dict[str, Found]:
    """Finds or builds the named programs. Raises ToolError, which names all missing Debian packages at once."""
    programs = [_program(name) for name in names]
    found = {program.name: place for program in programs if (place := _look_for(program))}
    missing = [program for program in programs if program.name not in found]
    # Packages first: nobody waits a quarter of an hour for Go to be told then that a package is missing.
    lacking = [program for program in missing if isinstance(program, SystemProgram)]
    if lacking:
        raise ToolError(_lacking_message(lacking))
    for module in dict.fromkeys(program.module for program in missing if isinstance(program, GoProgram)):
        of_module = [
            program for program in missing if isinstance(program, GoProgram) and program.module == module
        ]
        ldflags = of_module[0].ldflags
        variables = " and ".join(_variable(program.name) for program in of_module)
        say_how = f"set {variables} to the path of such a program"
        build(module, [program.package for program in of_module], ldflags, say, otherwise=say_how)
        for program in of_module:
            found[program.name] = Found(built_path(module, program.package, ldflags), "built")
    return {name: found[name] for name in dict.fromkeys(program.name for program in programs)}


def _program(name: str) -> Program:
    if name not in PROGRAMS:
        raise ToolError(f"{name} is no program of the tests. Fix: name some of {', '.join(PROGRAMS)}")
    return PROGRAMS[name]


def _look_for(program: Program) -> Found | None:
    variable = _variable(program.name)
    named = os.environ.get(variable)
    if named:
        if not os.access(named, os.X_OK) or Path(named).is_dir():
            raise ToolError(f"{variable} names {named}, which is no program. Fix: correct or unset it")
        return Found(Path(named), variable)
    for origin, folders in _search_folders(program):
        path = shutil.which(program.name, path=os.pathsep.join(folders))
        if path and _fits(program, path):
            return Found(Path(path), origin)
    if isinstance(program, GoProgram):
        path_built = built_path(program.module, program.package, program.ldflags)
        return Found(path_built, "built before") if path_built.exists() else None
    return None


def _search_folders(program: Program) -> list[tuple[str, Sequence[str]]]:
    if isinstance(program, SystemProgram) and program.is_cni_plugin:
        return [("CNI plugins", _CNI_FOLDERS)]
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    on_path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if isinstance(program, SystemProgram):
        on_path += _ADMIN_FOLDERS
    return [*([("KUBEBUILDER_ASSETS", [assets])] if assets else []), ("PATH", on_path)]


def _fits(program: Program, path: str) -> bool:
    if isinstance(program, SystemProgram):
        return True
    if program.fits is None:
        return False
    printed = _printed(path, program.version_arguments) if program.version_arguments else ""
    return bool(re.search(program.fits, printed))


@cache
def _printed(path: str, arguments: tuple[str, ...]) -> str:
    try:
        result = subprocess.run(
            [path, *arguments], capture_output=True, text=True, errors="replace", timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout


def _variable(name: str) -> str:
    return "BAGELPLANE_" + name.upper().replace("-", "_")


def _install_command(programs: Iterable[Program]) -> list[str]:
    packages = {program.debian_package for program in programs if isinstance(program, SystemProgram)}
    return ["apt-get", "install", "-y", "--no-install-recommends", *sorted(packages)]


def _lacking_message(lacking: Sequence[Program]) -> str:
    return (
        f"not installed: {', '.join(program.name for program in lacking)}. "
        f"Fix: {shlex.join(_install_command(lacking))} (as root, on Debian; with BAGELPLANE_INSTALL_PACKAGES=1 "
        "`make tools` does it), or set "
        f"{', '.join(_variable(program.name) for program in lacking)} to their paths"
    )


def install_packages(names: Iterable[str], say: Callable[[str], None] = print) -> None:
    """Installs the Debian packages of those programs that are missing. Raises ToolError."""
    lacking = [
        program
        for program in map(_program, names)
        if isinstance(program, SystemProgram) and not _look_for(program)
    ]
    if not lacking:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise ToolError(f"BAGELPLANE_INSTALL_PACKAGES=1 needs root and apt-get; {_lacking_message(lacking)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], _install_command(lacking)):
        began = time.monotonic()
        # Another run may be installing just now: wait for it.
        waiting = [command[0], "-q", "-o", "DPkg::Lock::Timeout=300", *command[1:]]
        result = subprocess.run(
            waiting, env=env, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False
        )
        if result.returncode:
            lines = "\n".join((result.stdout + result.stderr).splitlines()[-20:])
            raise ToolError(f"{shlex.join(command)} ended with {result.returncode}:\n{lines}")
        say(f"{shlex.join(command)} took {time.monotonic() - began:.0f} s")


def main(names: Sequence[str]) -> int:
    names = names or list(PROGRAMS)
    say = partial(print, flush=True)  # a build takes minutes: its reader sees that it began
    try:
        if os.environ.get("BAGELPLANE_INSTALL_PACKAGES") == "1":
            install_packages(names, say)
        for name, found in find_programs(names, say).items():
            say(f"{name}: {found.path} ({found.origin})")
    except ToolError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
