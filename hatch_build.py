"""Compiles what is in C when the package is built or installed, and goes on without it where that fails.

A wheel takes the library in and is then one for this platform; an editable install finds it in the source tree.
It has no Python in it, so one wheel does for all Python versions. CC names another compiler, CFLAGS adds options.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("dataplane/bagelplane/native")
SOURCES = (NATIVE / "resample.c", NATIVE / "planes.c")
LIBRARY = NATIVE / "libresample.so"
# No -march: one library runs on all machines of an architecture and looks by itself for what they have.
OPTIONS = ["-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"]
COMPILE_SECONDS = 120


class ResamplerBuildHook(BuildHookInterface[Any]):
    """What hatchling calls before it builds a wheel; `version` is "standard" or "editable"."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        compiled = Path(self._folder.name) / LIBRARY.name
        problem = compile_library([Path(self.root) / source for source in SOURCES], compiled)
        if problem:
            self.app.display_warning(f"bagelplane: no compiled resampler, Pillow will resize: {problem}")
        if version == "editable":
            put_in_place(compiled, Path(self.root) / LIBRARY)
        elif not problem:
            build_data["force_include"][str(compiled)] = f"bagelplane/native/{LIBRARY.name}"
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._folder.cleanup()


def compile_library(sources: Sequence[Path], library: Path) -> str:
    """Why there is no library now, in one line; empty if there is one."""
    compiler = shlex.split(os.environ.get("CC", "")) or find_compiler()
    if not compiler:
        return "there is no C compiler (cc, gcc, clang). Fix: install one, or name it in CC"
    extra = shlex.split(os.environ.get("CFLAGS", ""))
    command = [*compiler, *OPTIONS, *extra, "-o", str(library), *map(str, sources)]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler[0]} does not run: {error}"
    if ended.returncode == 0 and library.exists():
        return ""
    library.unlink(missing_ok=True)
    lines = ended.stderr.strip().splitlines()
    first_error = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
    return f"{compiler[0]} failed: {first_error}"


def find_compiler() -> list[str]:
    return [found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))][:1]


def put_in_place(compiled: Path, library: Path) -> None:
    """Replaces the library in one step, since a process may be using it; without a new one the old one goes."""
    if not compiled.exists():
        library.unlink(missing_ok=True)
        return
    beside = library.with_suffix(f".{os.getpid()}.so")
    shutil.copy(compiled, beside)
    beside.replace(library)
