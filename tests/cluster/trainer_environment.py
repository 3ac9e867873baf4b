"""What a trainer's container has beside its Python: torch, and our client as its documentation installs it.

Torch is five gigabytes, so no image holds it: pods mount this folder through a claim and put it on PYTHONPATH. It is
for the Python of the base image, and readable by any user. Its files are hard links into uv's cache where that is on
the same file system, and take no space.
`python -m tests.cluster.trainer_environment` prints its path.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.build_cache import (
    ROOT,
    BuildCache,
    ImageError,
    cache_folder,
    copy_files,
    key_of,
    opened_cache,
)
from tests.cluster.images import repository_files

PYTHON_VERSION = "3.11"
# Pods of a cluster that is kept may have older ones mounted.
_KEPT = 8
# Only files with hashes are taken, and none is built. Compiled ahead, since pods may not write here.
_FETCHED = ("--require-hashes", "--only-binary=:all:", "--compile-bytecode")
# As a trainer's image has it, and never from uv's cache, which knows a folder by its path and dates.
_OURS = ("--no-deps", "--no-build-isolation", "--no-cache", "--compile-bytecode")


def trainer_environment(say: Callable[[str], None] = print) -> Path:
    """The folder; makes it if there is none for our source as it is now. Raises ImageError."""
    environment = _environment_path(repository_files())
    if not environment.exists():
        with opened_cache(say) as cache:
            source = cache.unfinished("source")
            environment = _environment_path(copy_files(repository_files(), source))
            if not environment.exists():
                began = time.monotonic()
                _install(cache, source, environment)
                say(f"made the trainer's environment {environment} in {time.monotonic() - began:.1f} s")
            shutil.rmtree(source)
    os.utime(environment)
    return environment


def _environment_path(files: dict[str, Path]) -> Path:
    return cache_folder() / f"trainer-{key_of(files, PYTHON_VERSION, _FETCHED, _OURS, sys.version_info[:2])}"


def _install(cache: BuildCache, source: Path, environment: Path) -> None:
    dependencies = _dependencies(cache, source / "constraints")
    unfinished = cache.unfinished("trainer")
    shutil.copytree(dependencies, unfinished, symlinks=True, copy_function=os.link)
    _uv_install(cache, unfinished, *_OURS, str(source))
    unfinished.rename(environment)
    cache.forget_old("trainer", keep=_KEPT)


def _dependencies(cache: BuildCache, constraints: Path) -> Path:
    """Torch and what the client needs: the part that stays when our source changes."""
    pins = {name: constraints / name for name in ("client.txt", "dev.txt")}
    torch = re.search(r"^torch==\S+", pins["dev.txt"].read_text(), re.MULTILINE)
    if not torch:
        raise ImageError("constraints/dev.txt pins no torch. Fix: make pins")
    key = key_of(pins, PYTHON_VERSION, _FETCHED, sys.version_info[:2])
    installed = cache.folder / f"trainer-dependencies-{key}"
    if not installed.exists():
        cache.say(f"installing {torch[0]} for trainers (minutes, once)")
        unfinished = cache.unfinished("trainer-dependencies")
        wanted = cache.folder / "tmp" / "trainer.in"
        wanted.write_text(f"{torch[0]}\n")
        given = [f"--requirement={pins['client.txt']}", f"--requirement={wanted}"]
        _uv_install(cache, unfinished, *_FETCHED, *given, f"--constraint={pins['dev.txt']}")
        unfinished.rename(installed)
        cache.forget_old("trainer-dependencies", keep=1)
    os.utime(installed)
    return installed


def _uv_install(cache: BuildCache, target: Path, *arguments: str) -> None:
    uv = str(ROOT / "tools" / "environment.sh")
    python = [f"--python={sys.executable}", f"--python-version={PYTHON_VERSION}"]
    cache.run(uv, "uv", "pip", "install", f"--target={target}", *python, *arguments, seconds=1800)


def main() -> int:
    try:
        print(trainer_environment())
    except ImageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
