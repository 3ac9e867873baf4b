"""The images as they are shipped: who runs in them, what is in them and what not."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.images import image_archives
from tests.cluster.trainer_environment import trainer_environment
from tests.cluster.unpacked_image import UnpackedImage, unpacked
from tests.integration.sidecar_harness import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

OURS = ["dataplane", "operator"]
ANYONE = "1234567:7654321"
MEBIBYTE = 2**20

# Imports all modules of the named packages, but for those that need torch, which no image has.
IMPORT_ALL = """
import importlib, pkgutil, sys
no_module = "bagelplane.native.libresample"
with_torch = ("bagelplane.packing", "bagelplane.distributed_iterable", "bagelplane.client")
for package in map(importlib.import_module, sys.argv[1:]):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.startswith(no_module) or module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name != "torch" or not module.name.startswith(with_torch):
                raise
        print(module.name)
"""
ALL_REDUCE = """
import os, torch, torch.distributed, bagelplane.client
torch.distributed.init_process_group("gloo")
sum_of_ranks = torch.ones(3) * torch.distributed.get_rank()
torch.distributed.all_reduce(sum_of_ranks)
print("rank", torch.distributed.get_rank(), "user", os.getuid(), "has", sum_of_ranks.tolist(), flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], UnpackedImage]]:
    with contextlib.ExitStack() as stack:

        @functools.cache
        def unpack(name: str) -> UnpackedImage:
            archive = image_archives([name])[name]
            return stack.enter_context(unpacked(archive, tmp_path_factory.mktemp(name)))

        yield unpack


def output(finished: subprocess.CompletedProcess[str]) -> str:
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.mark.parametrize("name", OURS)
def test_ours_run_as_a_number_that_is_not_root_and_own_nothing(
    name: str, image: Callable[[str], UnpackedImage]
) -> None:
    config = image(name).config
    assert config["User"] == "65532:65532"
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    writable = [
        path
        for path in (image(name).root / "opt").rglob("*")
        if not path.is_symlink() and (path.stat().st_uid or path.stat().st_gid or path.stat().st_mode & 0o022)
    ]
    assert not writable


@pytest.mark.parametrize("name", OURS)
def test_ours_hold_nothing_to_build_with(name: str, image: Callable[[str], UnpackedImage]) -> None:
    paths = image(name).paths()
    builders = {"cc", "gcc", "c++", "g++", "clang", "ld", "make", "pip", "pip3", "uv"}
    assert not [path for path in paths if path.name in builders and path.parent.name == "bin"]
    left_behind = ("root/.cache/", "var/cache/pip/", "source/", "wheels/", "constraints/", "etc/pip.conf")
    assert not [path for path in paths if str(path).startswith(left_behind)]
    assert not [path for path in paths if path.match("opt/bagelplane/lib/*/site-packages/pip")]


@pytest.mark.parametrize(("name", "most_mebibytes"), [("dataplane", 750), ("operator", 350)])
def test_ours_have_not_grown(name: str, most_mebibytes: int, image: Callable[[str], UnpackedImage]) -> None:
    assert image(name).archive_bytes < most_mebibytes * MEBIBYTE


def test_dataplane_resizes_by_compiled_code_and_reads_video(image: Callable[[str], UnpackedImage]) -> None:
    lines = output(image("dataplane").run("bagelplane", "info")).splitlines()
    found = {
        name.strip(): value.strip() for name, _, value in (line.strip().partition("  ") for line in lines)
    }
    assert found["images are resized by"].startswith("native")
    assert found["av"] != "not installed"
    assert found["torch"] == "not installed"


@pytest.mark.parametrize("user", [None, ANYONE])
def test_dataplane_starts_on_a_read_only_root_as_whoever(
    user: str | None, image: Callable[[str], UnpackedImage]
) -> None:
    dataplane = image("dataplane")
    assert "Usage" in output(dataplane.run(*dataplane.config["Entrypoint"], "--help", user=user))
    assert "Read-only file system" in dataplane.run("touch", "/opt/x", user="0:0").stdout


def test_operator_has_all_that_it_imports(image: Callable[[str], UnpackedImage]) -> None:
    operator = image("operator")
    assert operator.config["Entrypoint"] == ["python", "-m", "bagelplane_operator"]
    usage = output(operator.run(*operator.config["Entrypoint"], "--help", user=ANYONE))
    assert "webhook" in usage
    imported = operator.run("python", "-c", IMPORT_ALL, "bagelplane_operator", user=ANYONE)
    assert "bagelplane_operator" in output(imported)


def test_dataplane_has_all_that_it_imports(image: Callable[[str], UnpackedImage]) -> None:
    imported = image("dataplane").run("python", "-c", IMPORT_ALL, "bagelplane", user=ANYONE)
    assert {"bagelplane.cli.run", "bagelplane.video"} < set(output(imported).splitlines())


def test_lookup_finds_what_the_hosts_file_says_and_fails_on_other_names(
    image: Callable[[str], UnpackedImage],
) -> None:
    lookup = image("lookup")
    assert output(lookup.run("sh", "-c", "nslookup another-pod")).split() == [
        "10.1.2.3",
        "another-pod",
    ]
    assert lookup.run("sh", "-c", "nslookup nobody.invalid").returncode != 0


def test_pause_reaps_orphans_and_ends_on_sigterm(image: Callable[[str], UnpackedImage]) -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child", "chroot", str(image("pause").root), "/pause"]
    with subprocess.Popen(command) as outer:
        try:
            (pause,) = wait_for(lambda: children(outer.pid), "pause to run")
            orphan_command = "sleep 1000 & exec true"
            subprocess.run(
                ["nsenter", f"--target={pause}", "--pid", "sh", "-c", orphan_command], check=True, timeout=30
            )
            (orphan,) = wait_for(lambda: children(pause), "an orphan of pause")
            os.kill(orphan, signal.SIGKILL)
            wait_for(lambda: not children(pause), "the orphan to be reaped")
            os.kill(pause, signal.SIGTERM)
            assert outer.wait(30) == 0
        finally:
            outer.kill()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_trainers_environment_forms_a_process_group_as_a_plain_user(
    image: Callable[[str], UnpackedImage],
) -> None:
    base = image("base")
    script = "PYTHONPATH=/mnt python3 -m torch.distributed.run --standalone --nproc-per-node 2 --no-python python3 -c"
    finished = base.run(
        "sh",
        "-c",
        f'{script} "$1"',
        "sh",
        ALL_REDUCE,
        user="1000:1000",
        volume=trainer_environment(),
        seconds=180,
    )
    for rank in range(2):
        assert f"rank {rank} user 1000 has [1.0, 1.0, 1.0]" in output(finished)
