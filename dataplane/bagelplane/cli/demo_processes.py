"""Processes of the demo: started, watched, killed and cleared away, each by its own id."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from bagelplane.errors import BagelplaneError

_STOP_SECONDS = 40.0
_POLL_SECONDS = 0.05


class DemoError(BagelplaneError):
    """A part of the demo failed, or the bits differ."""

    reaction = "Read the log that the message names and report it."


class Child:
    """`python -m MODULE ARGUMENTS`, with its output in a file. A context: the end of it ends the process.

    It has a process group of its own, so that what it started can be cleared away with it, and so that Ctrl-C
    reaches the demo alone, which then ends all of them in order.
    """

    def __init__(
        self, name: str, module: str, arguments: list[str], *, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.log = name, log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """DemoError when it has ended although it should run."""
        status = self._process.poll()
        if status is not None:
            raise self._error(f"it ended with status {status}")

    def kill(self) -> None:
        """SIGKILL to this one process: it gets no chance to tidy up, and its own children are left to notice."""
        self._process.kill()
        self._process.wait()

    def wait(self, seconds: float) -> None:
        """DemoError unless it ends with 0 in time."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise self._error(f"it did not end within {seconds:.0f} s") from None
        if status != 0:
            raise self._error(f"it ended with status {status}")

    def stop(self) -> None:
        """SIGTERM, and DemoError unless it ends with 0."""
        self._process.terminate()
        self.wait(_STOP_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The group outlives its first process where a child of that one still runs.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _error(self, got: str) -> DemoError:
        lines = self.log.read_text(errors="replace").splitlines()[-12:]
        said = "".join(f"\n    {line}" for line in lines)
        return DemoError(f"{self.name} failed", got=got, fix=f"read {self.log}; its last lines:{said}")


def wait_until(
    met: Callable[[], bool], what: Callable[[], str], *children: Child, seconds: float = 90.0
) -> None:
    """Returns once `met`. DemoError with the last state when a child ends meanwhile, or at the deadline."""
    deadline = time.monotonic() + seconds
    while not met():
        for child in children:
            child.check()
        if time.monotonic() > deadline:
            raise DemoError(
                f"waited {seconds:.0f} s in vain", got=what(), fix="look at the logs, or run it again"
            )
        time.sleep(_POLL_SECONDS)
