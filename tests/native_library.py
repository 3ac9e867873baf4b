"""The compiled code, from the sources as they are, so that no library of an older install is what is tested."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "dataplane/bagelplane/native"
SOURCES = [NATIVE / "resample.c", NATIVE / "planes.c"]

_FOLDER = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


@functools.cache
def build_hook() -> types.ModuleType:
    """hatch_build.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def compiled_library() -> Path:
    path = Path(_FOLDER.name) / "libresample.so"
    problem = build_hook().compile_library(SOURCES, path)
    assert not problem, f"the tests need a C compiler: {problem}"
    return path
