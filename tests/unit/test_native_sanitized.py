"""The resampler's C has no undefined behaviour and stays within its memory: run under the compiler's sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native_library import ROOT, SOURCES, build_hook

PAIRS = 600
FIX = "Fix: install gcc with its sanitizers (Debian: apt-get install gcc libc6-dev)"
OPTIONS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiled = tmp_path_factory.mktemp("sanitized") / "libresample.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", gcc())
        patch.setenv("CFLAGS", OPTIONS)
        problem = build_hook().compile_library(SOURCES, compiled)
    assert not problem, f"{problem}. {FIX}"
    return compiled


def gcc() -> str:
    found = shutil.which("gcc")
    assert found, f"there is no gcc. {FIX}"
    return found


def run(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    found = subprocess.run([gcc(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    runtime = Path(found.stdout.strip())
    assert runtime.is_absolute(), f"gcc has no libasan.so. {FIX}"
    environment = {
        **os.environ,
        "LD_PRELOAD": str(runtime),
        # Python keeps memory until its end; it is not what is looked for.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", "tests.sanitized_resampler", str(library), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False
    )


def test_sizes_orders_and_damaged_weights_show_nothing(library: Path) -> None:
    ended = run(library, str(PAIRS))
    assert ended.returncode == 0, ended.stderr
    assert "runtime error" not in ended.stderr
    print(ended.stdout.strip())
    assert ended.stdout.startswith(f"{PAIRS} size pairs")


def test_a_call_that_writes_too_far_would_be_found(library: Path) -> None:
    ended = run(library, "0", "overflow")
    assert ended.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in ended.stderr
    assert "resample.c" in ended.stderr or "bagelplane_resample" in ended.stderr
