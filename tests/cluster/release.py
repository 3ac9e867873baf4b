"""Our chart, installed into the tests' cluster by real helm, with the images that were built here."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.images import image_tag
from tests.cluster.kubectl import Kubectl
from tests.tools.programs import find_program

CHART = Path(__file__).parents[2] / "charts" / "bagelplane"
NAMESPACE = "bagelplane-system"
NAME = "bagelplane"
IMAGES = ("operator", "dataplane")  # to be loaded before
_SECONDS = 180


class HelmError(Exception):
    """helm ended with another status than 0; the text is what it said, and what the pods say."""


def values() -> dict[str, Any]:
    """What differs from the chart's defaults here: where the images come from."""

    def image(name: str) -> dict[str, str]:
        repository, _, tag = image_tag(name).rpartition(":")
        return {"repository": repository, "tag": tag, "pullPolicy": "Never"}

    return {"image": {name: image(name) for name in IMAGES}}


def write_values(path: Path) -> Path:
    path.write_text(yaml.safe_dump(values()))
    return path


def install(kubectl: Kubectl, values_file: Path) -> None:
    """Installs or upgrades, and waits until operator and webhook are available. Raises HelmError."""
    _helm(
        kubectl,
        "upgrade", "--install", NAME, CHART,
        "--namespace", NAMESPACE, "--create-namespace",
        "--values", values_file,
        "--wait", "--timeout", f"{_SECONDS}s",
    )  # fmt: skip


def uninstall(kubectl: Kubectl) -> None:
    _helm(kubectl, "uninstall", NAME, "--namespace", NAMESPACE, "--wait", "--timeout", f"{_SECONDS}s")


def _helm(kubectl: Kubectl, *arguments: str | Path) -> None:
    command = [find_program("helm"), "--kubeconfig", kubectl.kubeconfig, *arguments]
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=_SECONDS + 30, check=False
    )
    if result.returncode:
        pods = kubectl.describe("pods", namespace=NAMESPACE)
        raise HelmError(f"helm {arguments[0]} ended with {result.returncode}:\n{result.stderr}\n{pods}")
