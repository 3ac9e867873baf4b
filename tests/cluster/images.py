"""The images that the test cluster runs, built from our own Dockerfiles on a machine without any registry.

`image_archives()` gives for each a `docker-archive`, ready for `ctr --namespace k8s.io images import`. Built once into
`$XDG_CACHE_HOME/bagelplane/images/<name>-<hash of all that goes in>.tar`; a change of our source makes its last
layers anew. `python -m tests.cluster.images [NAME...]` builds ahead of a test run, and prints sizes and times.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.cluster.build_cache import (
    ROOT,
    BuildCache,
    ImageError,
    cache_folder,
    copy_files,
    key_of,
    opened_cache,
    remove,
)
from tests.cluster.image_store import ImageStore
from tests.tools.go_build import ToolError
from tests.tools.programs import find_program

# What debootstrap makes: a Debian with nothing but Python, of the release that the Dockerfiles' default image has.
RELEASE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-venv")
_LEFT_OUT = (
    "./dev/*", "./etc/hostname", "./etc/resolv.conf", "./usr/share/doc/*", "./usr/share/locale/*",
    "./usr/share/man/*", "./var/cache/apt/*", "./var/lib/apt/lists/*", "./var/log/*",
)  # fmt: skip
_BASE = """\
FROM scratch
ADD rootfs.tar /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
CMD ["sh"]
"""
_PAUSE = """\
FROM scratch
COPY pause /pause
USER 65535:65535
ENTRYPOINT ["/pause"]
"""
_TRAINING_OPERATOR = """\
FROM scratch
COPY manager /manager
USER 65532:65532
ENTRYPOINT ["/manager"]
"""
# The init container of PyTorchJob workers asks `nslookup` for the master. busybox's fails on a pod's search domains.
_LOOKUP = """\
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN printf '#!/bin/sh\\nexec getent hosts "$@"\\n' > /usr/local/bin/nslookup && chmod 755 /usr/local/bin/nslookup
USER 65532:65532
"""


@cache
def debian_mirror() -> str:
    """Where apt on this machine gets that release from; empty if it does not, for debootstrap's own default."""
    apt = shutil.which("apt-get")
    if not apt:
        return ""
    command = [apt, "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(LABEL)", "Created-By: Packages"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    for line in listed.stdout.splitlines():
        address, release, label = line.split(maxsplit=2)
        if (release, label) == (RELEASE, "Debian"):
            return address.rstrip("/")
    return ""


def _bootstrap(cache: BuildCache, context: Path) -> None:
    rootfs = context.parent / "rootfs"
    debootstrap = str(find_program("debootstrap", cache.say))
    include = f"--include={','.join(PACKAGES)}"
    mirror = [address] if (address := debian_mirror()) else []
    cache.run(debootstrap, "--variant=minbase", include, RELEASE, str(rootfs), *mirror, seconds=1500)
    left_out = [f"--exclude={pattern}" for pattern in _LEFT_OUT]
    options = ["--numeric-owner", "--one-file-system", *left_out]
    cache.run("tar", "-C", str(rootfs), *options, "-cf", str(context / "rootfs.tar"), ".")


def _compile_pause(cache: BuildCache, context: Path) -> None:
    cache.run("cc", "-static", "-O2", "-o", str(context / "pause"), str(context / "pause.c"), seconds=60)


@dataclass(frozen=True, slots=True)
class Image:
    """How one image is made."""

    dockerfile: str
    files: Callable[[], Mapping[str, Path]] = dict  # what goes into its context, by name there
    prepare: Callable[[BuildCache, Path], None] | None = None  # completes the context
    recipe: tuple[object, ...] = ()  # what else the image depends on
    stages: tuple[
        str, ...
    ] = ()  # kept from pruning, so that a changed source finds its dependencies installed

    @property
    def on_base(self) -> bool:
        return "${BASE_IMAGE}" in self.dockerfile


def repository_files() -> dict[str, Path]:
    """What .dockerignore lets into a build."""
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    files = {".dockerignore": ROOT / ".dockerignore"}
    for top in (ROOT / rule[1:] for rule in rules if rule.startswith("!")):
        for path in top.rglob("*") if top.is_dir() else [top]:
            if path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts:
                files[str(path.relative_to(ROOT))] = path
    return files


def images() -> dict[str, Image]:
    """All images by name."""
    ours = {
        name: Image(
            (ROOT / name / "Dockerfile").read_text(), repository_files, stages=("dependencies", "package")
        )
        for name in ("operator", "dataplane")
    }
    return {
        "base": Image(
            _BASE, prepare=_bootstrap, recipe=(_BASE, RELEASE, PACKAGES, _LEFT_OUT, debian_mirror())
        ),
        "pause": Image(_PAUSE, lambda: {"pause.c": ROOT / "tests/cluster/pause.c"}, _compile_pause),
        "lookup": Image(_LOOKUP),
        "training-operator": Image(
            _TRAINING_OPERATOR, lambda: {"manager": find_program("training-operator")}
        ),
        **ours,
    }


def image_tag(name: str) -> str:
    return f"localhost/bagelplane/{name}:test"


def image_archives(names: Iterable[str] = (), say: Callable[[str], None] = print) -> dict[str, Path]:
    """Archives of the named images, or of all, by name; builds what is missing. Raises ImageError and ToolError."""
    known = images()
    wanted = list(dict.fromkeys(names)) or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise ImageError(f"no such image: {', '.join(unknown)}. Fix: name some of {', '.join(known)}")
    return {name: _archive(name, known, say) for name in wanted}


def _archive(name: str, known: Mapping[str, Image], say: Callable[[str], None]) -> Path:
    image = known[name]
    archive = _archive_path(name, known, image.files())
    if not archive.exists():
        base = _archive("base", known, say) if image.on_base else None
        with opened_cache(say) as cache:
            folder = cache.unfinished("build")
            files = copy_files(image.files(), folder / "context")
            # Since they were hashed, the files may have changed, and another process may have built them.
            archive = _archive_path(name, known, files)
            if not archive.exists():
                _build(cache, name, image, folder, base, archive)
            remove(folder)
    os.utime(archive)
    return archive


def _archive_path(name: str, known: Mapping[str, Image], files: Mapping[str, Path]) -> Path:
    image = known[name]
    base = known["base"].recipe if image.on_base else ()
    return cache_folder() / f"{name}-{key_of(files, image.dockerfile, image.recipe, base)}.tar"


def _build(
    cache: BuildCache, name: str, image: Image, folder: Path, base: Path | None, archive: Path
) -> None:
    cache.say(f"building the image {name} into {archive}")
    began = time.monotonic()
    store = ImageStore(cache)
    arguments = {}
    if base:
        # By its hash: clones with different bases share the storage.
        arguments["BASE_IMAGE"] = f"localhost/bagelplane/{base.stem.replace('base-', 'base:')}"
        store.load(arguments["BASE_IMAGE"], base, image_tag("base"))
    if image.prepare:
        image.prepare(cache, folder / "context")
    (folder / "Dockerfile").write_text(image.dockerfile)
    for stage in (*image.stages, ""):
        tag = f"localhost/bagelplane/{name}-{stage}:test" if stage else image_tag(name)
        store.build(tag, folder / "Dockerfile", folder / "context", arguments=arguments, target=stage)
    store.prune()
    store.write_archive(image_tag(name), archive)
    cache.forget_old(name)
    cache.say(f"built the image {name} in {time.monotonic() - began:.1f} s")


def main(names: Sequence[str]) -> int:
    known = list(images())
    try:
        for name in names or known:
            began = time.monotonic()
            (archive,) = image_archives([name]).values()
            seconds, mebibytes = time.monotonic() - began, archive.stat().st_size / 2**20
            print(f"{image_tag(name)}: {mebibytes:.0f} MiB, {seconds:.1f} s, {archive}")
    except (ImageError, ToolError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
