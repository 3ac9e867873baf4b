"""Asking a cluster by kubectl, and waiting for what it is to become.

kubectl = Kubectl(kubeconfig)
kubectl.apply("apiVersion: v1 ...")             # or a path
kubectl.get_json("pods", namespace="training")  # or one object: get_json("pod", "a", namespace="training")
kubectl.wait_for(
    "the pod to run",
    lambda: kubectl.get_json("pod", "a")["status"]["phase"] == "Running",
    60,
    last_seen=lambda: kubectl.describe("pod", "a"),
)
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.tools.programs import find_program

T = TypeVar("T")
_POLL_SECONDS = 0.3


class KubectlError(Exception):
    """kubectl ended with another status than 0. `text` is what it said."""

    def __init__(self, command: str, status: int | None, text: str) -> None:
        self.command, self.status, self.text = command, status, text
        ended = f"ended with {status}" if status is not None else "was not done in time"
        super().__init__(f"{command} {ended}: {text}")


class Kubectl:
    """One cluster, as one user. All times are deadlines in seconds."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    def run(self, *arguments: str | Path, input: str | None = None, seconds: float = 120) -> str:  # noqa: A002
        """What `kubectl ARGUMENTS` prints. Raises KubectlError."""
        # Its cache of what the API server knows goes with the cluster.
        cache_dir = self.kubeconfig.parent / "kubectl-cache"
        command = [
            find_program("kubectl"), "--kubeconfig", self.kubeconfig, "--cache-dir", cache_dir, *arguments,
        ]  # fmt: skip
        shown = shlex.join(["kubectl", *map(str, arguments)])
        try:
            result = subprocess.run(
                list(map(str, command)),
                input=input,
                stdin=subprocess.DEVNULL if input is None else None,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(shown, None, f"{error.stdout!r} {error.stderr!r}") from None
        if result.returncode:
            raise KubectlError(shown, result.returncode, (result.stderr + result.stdout).strip())
        return result.stdout

    __call__ = run

    def wait_established(self, crd: str) -> None:
        """Waits until the API server serves a definition. `kubectl wait` fails on one that has no conditions yet."""
        self.wait_for(
            f"the definition {crd} to be established",
            lambda: self.run("wait", "--for=condition=Established", f"crd/{crd}", "--timeout=10s"),
            60,
        )

    def try_run(self, *arguments: str | Path, seconds: float = 120) -> str:
        """The same for reports: an error is given as text."""
        try:
            return self.run(*arguments, seconds=seconds)
        except KubectlError as error:
            return str(error)

    def apply(self, what: str | Path, *arguments: str, seconds: float = 120) -> str:
        """Applies a file, a folder or, given as text, YAML or JSON."""
        if isinstance(what, Path):
            return self.run("apply", "--filename", what, *arguments, seconds=seconds)
        return self.run("apply", "--filename", "-", *arguments, input=what, seconds=seconds)

    def get_json(
        self, *what: str, namespace: str | None = None, selector: str | None = None
    ) -> dict[str, Any]:
        """One object, or a list with `items`. Raises KubectlError, also where there is none of that name."""
        options = [f"--namespace={namespace}"] if namespace else []
        options += [f"--selector={selector}"] if selector else []
        got = json.loads(self.run("get", *what, *options, "--output=json"))
        assert isinstance(got, dict)
        return got

    def describe(self, *what: str, namespace: str | None = None) -> str:
        """What a person would read of an object, with its events."""
        return self.try_run("describe", *what, *([f"--namespace={namespace}"] if namespace else []))

    def wait_for(
        self,
        claim: str,
        seen: Callable[[], T],
        seconds: float,
        *,
        last_seen: Callable[[], object] | None = None,
    ) -> T:
        """Asks until `seen` returns something true, and returns that. An object that is not there yet is waited for.

        At the deadline raises AssertionError with `last_seen` (default: what `seen` returned or raised).
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                state: object = (value := seen())
                if value:
                    return value
            except KubectlError as error:
                state = error
            if time.monotonic() > deadline:
                shown = f"{last_seen()}\n(it was: {state})" if last_seen else state
                raise AssertionError(f"waited {seconds:g} s for {claim}; last seen: {shown}")
            time.sleep(_POLL_SECONDS)
