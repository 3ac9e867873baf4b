"""`bagelplane info` and `bagelplane version`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from importlib import metadata

import bagelplane
from bagelplane.cli.output import Format, FormatOption, print_facts, print_json, print_line

_PACKAGES = (
    "numpy",
    "pillow",
    "pyarrow",
    "fsspec",
    "s3fs",
    "simplejpeg",
    "tokenizers",
    "torch",
    "av",
    "matplotlib",
)


def version(output: FormatOption = Format.TABLE) -> None:
    """Print the version of this release."""
    if output is Format.JSON:
        print_json({"version": bagelplane.__version__})
    else:
        print_line(bagelplane.__version__)


def info(output: FormatOption = Format.TABLE) -> None:
    """Show what is installed and what this machine offers: the first thing to put into a bug report.

    Pixels depend on Pillow's version and generators on NumPy's; both are named here.

    Example:

        bagelplane info -o json
    """
    from bagelplane import jpeg, resampling
    from bagelplane.sources.registry import registered_types

    packages = {name: _version_of(name) for name in _PACKAGES}
    document = {
        "version": bagelplane.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)),
        "sharedMemoryFreeBytes": _free_bytes("/dev/shm"),
        "groupTypes": list(registered_types()),
        "canReadVideoFiles": importlib.util.find_spec("av") is not None,
        "canDraw": importlib.util.find_spec("matplotlib") is not None,
        "resampler": str(resampling.choice()),
        "jpegDecoder": str(jpeg.choice()),
        "packages": packages,
    }
    if output is Format.JSON:
        print_json(document)
        return
    facts: dict[str, object] = {
        "bagelplane": document["version"],
        "Python": document["python"],
        "system": document["system"],
        "CPUs": document["cpus"],
        "free shared memory, bytes": document["sharedMemoryFreeBytes"],
        "group types": ", ".join(registered_types()),
        "images are resized by": document["resampler"],
        "JPEGs are decoded by": document["jpegDecoder"],
        **{name: found or "not installed" for name, found in packages.items()},
    }
    print_facts("", facts)


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _free_bytes(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
