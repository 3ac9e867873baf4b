"""The build cache: what a key stands for, and what a killed run leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.build_cache import ImageError, cache_folder, copy_files, key_of, opened_cache
from tests.integration.sidecar_harness import wait_for

BUILD_AND_HANG = """
from tests.cluster.build_cache import opened_cache
with opened_cache(print) as cache:
    cache.unfinished("image.tar").write_text("half")
    cache.run("sh", "-c", f"sleep 600 & echo $! > {cache.folder}/started; wait")
"""


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / name for name in ("one", "two")}
    for name, path in paths.items():
        path.write_text(name)
    return paths


def test_key_is_of_names_modes_contents_and_recipe(files: dict[str, Path]) -> None:
    keys = [key_of(files), key_of(files, "recipe"), key_of({"one": files["one"]})]
    keys.append(key_of({"one": files["one"], "three": files["two"]}))
    files["one"].chmod(0o755)
    keys.append(key_of(files))
    files["one"].write_text("other")
    keys.append(key_of(files))
    assert len(set(keys)) == len(keys)


def test_key_is_not_of_order_and_dates(files: dict[str, Path]) -> None:
    key = key_of(files)
    os.utime(files["one"], (1, 1))
    assert key_of(dict(reversed(files.items()))) == key


def test_copies_have_the_key_of_what_they_copy(files: dict[str, Path], tmp_path: Path) -> None:
    files["one"].chmod(0o755)
    assert key_of(copy_files(files, tmp_path / "copies")) == key_of(files)


def test_failed_program_is_quoted() -> None:
    with (
        opened_cache(print) as cache,
        pytest.raises(ImageError, match=r"sh -c .* ended with 3\.[^:]*:\nno such release$"),
    ):
        cache.run("sh", "-c", "echo no such release; exit 3")


def test_late_program_is_ended_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    with opened_cache(print) as cache, pytest.raises(ImageError, match="was not done after"):
        cache.run("sh", "-c", f"sleep 600 & echo $! > {child}; wait", seconds=2)
    wait_for(lambda: not is_running(int(child.read_text())), "the child to be gone")


def test_cache_is_free_once_the_programs_of_a_killed_run_end_and_cleared_then() -> None:
    command = [sys.executable, "-c", BUILD_AND_HANG]
    said: list[str] = []
    with subprocess.Popen(command) as killed:
        started = cache_folder() / "started"
        program = int(wait_for(lambda: started.exists() and started.read_text(), "the build to run"))
        killed.kill()

    def end_program(message: str) -> None:
        said.append(message)
        os.kill(program, signal.SIGKILL)

    with opened_cache(end_program) as cache:
        assert "waiting for another build" in said[0]
        assert not cache.unfinished("image.tar").exists()


@pytest.mark.cluster
def test_mounts_of_a_killed_run_are_undone() -> None:
    mounted = cache_folder() / "rootfs.unfinished" / "proc"
    mounted.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(mounted)], check=True, timeout=30)
    try:
        with opened_cache(print):
            assert not mounted.parent.exists()
        assert str(mounted) not in Path("/proc/self/mountinfo").read_text()
    finally:
        subprocess.run(["umount", "--quiet", "--lazy", str(mounted)], check=False, timeout=30)


def test_old_builds_go_unless_they_were_just_used() -> None:
    with opened_cache(print) as cache:
        names = [f"base-{number:016x}.tar" for number in range(5)]
        other = cache.folder / f"base-image-{0:016x}.tar"
        for date, path in enumerate([other, *(cache.folder / name for name in names)]):
            path.touch()
            os.utime(path, (date, date))
        os.utime(cache.folder / names[0])
        cache.forget_old("base", keep=2)
        assert sorted(path.name for path in cache.folder.glob("base*")) == sorted(
            [names[0], *names[-1:], other.name]
        )


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
