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

from bagelplane.cli.demo_server import ENDS_WITH_PARENT
from bagelplane.errors import BagelplaneError

_STOP_SECONDS = 40.0
_POLL_SECONDS = 0.05


class DemoError(BagelplaneError):
    """A part of the demo failed, or the bits differ."""

    reaction = "Read the log that the message names and report it."


class Child:
    """`python -m MODULE ARGUMENTS`, with its output in a file. A context: the end of it ends the process.

    It has a process group of its own, so that what it started can be cleared away with it, and so that Ctrl-C
    reaches the demo alone, which then ends all of them in order. It ends with the demo, however that ends.
    """

    def __init__(
        self, name: str, module: str, arguments: list[str], *, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.log = name, log
        command = [sys.executable, "-m", module, *arguments]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", ENDS_WITH_PARENT, *command],
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
        status = self._status()
        if status is not None:
            raise self._error(f"it ended with status {status}")

    def kill(self) -> None:
        """SIGKILL to this one process: it gets no chance to tidy up, and its own children are left to notice."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """DemoError unless it ends with 0 in time."""
        deadline = time.monotonic() + seconds
        while (status := self._status()) is None:
            if time.monotonic() > deadline:
                raise self._error(f"it did not end within {seconds:.0f} s")
            time.sleep(_POLL_SECONDS)
        if status != 0:
            raise self._error(f"it ended with status {status}")

    def stop(self) -> None:
        """SIGTERM, and DemoError unless it ends with 0."""
        os.kill(self.pid, signal.SIGTERM)
        self.wait(_STOP_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The group outlives its first process where a child of that one still runs.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs.

        It is looked at and left: until the context ends the id stays this process's, so that no signal meant for
        it can reach another one.
        """
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

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
