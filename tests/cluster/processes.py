"""A long-running program of the cluster: started, watched, ended by its process id, gone when its starter is gone.

with component("etcd", [etcd, "--data-dir", folder], logs / "etcd.log") as process:
    process.wait_until("it answers on /health", lambda: ..., seconds=30)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_LOG_LINES = 20
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.05

# Linux kills the program when the thread that started it is gone, however that came (PR_SET_PDEATHSIG). A starter that
# went before the call is noticed by the changed parent.
_DIES_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the starter is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ClusterError(Exception):
    """A part of the cluster does not do what it is there for. The message quotes its log and names the file."""


class Component:
    """One running program. Not thread-safe; start it in a thread that lives as long as it shall."""

    def __init__(
        self, name: str, command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """Starts it. `env` is added to this process's environment; output goes to the file `log`."""
        self.name, self.log = name, log
        self._command = [str(word) for word in command]
        self._env = {**os.environ, **(env or {})}
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIES_WITH_PARENT, str(os.getpid()), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,  # a Ctrl-C goes to us alone, and we end the parts in order
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until(self, claim: str, holds: Callable[[], str], seconds: float) -> None:
        """Returns once `holds` returns "" (else it returns, or raises as OSError, what it saw instead).

        Raises ClusterError if the program ends or the time is up.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.check()
            try:
                seen = holds()
            except OSError as error:
                seen = f"{type(error).__name__}: {error}"
            if not seen:
                return
            if time.monotonic() > deadline:
                raise self.error(f"not so within {seconds:.0f} s: {claim}; last seen: {seen}")
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raises ClusterError if the program has ended."""
        status = self._process.poll()
        if status is not None:
            raise self.error(f"ended with status {status}")

    def stop(self, *, first: signal.Signals = signal.SIGTERM, seconds: float = _STOP_SECONDS) -> None:
        """Ends it by the signal `first`, and by SIGKILL if that does not. No error if it has ended."""
        if self.is_running():
            self._process.send_signal(first)
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(seconds)

    def restart(self) -> None:
        """Kills it, if it runs, and starts it as it was started; its log goes on."""
        self.stop(first=signal.SIGKILL)
        self._process = self._start()

    def last_log_lines(self, count: int = _LOG_LINES) -> str:
        return last_lines(self.log, count)

    def error(self, what: str) -> ClusterError:
        said = self.last_log_lines()
        return ClusterError(f"{self.name}: {what}. Fix: read {self.log}; its last lines:\n{said or '(none)'}")


@contextmanager
def component(
    name: str,
    command: Sequence[str | Path],
    log: Path,
    env: Mapping[str, str] | None = None,
    *,
    stop_by: signal.Signals = signal.SIGTERM,
) -> Iterator[Component]:
    """A running program, ended on leaving by the signal `stop_by`."""
    process = Component(name, command, log, env)
    try:
        yield process
    finally:
        process.stop(first=stop_by)


def last_lines(log: Path, count: int = _LOG_LINES) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-count:])
    return ""
