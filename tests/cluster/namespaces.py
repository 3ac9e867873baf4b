"""Namespaces of the test node: whatever runs in them ends with one process, and so do its mounts and its network.

The node is a process tree in mount, PID, network, UTS and IPC namespaces of its own. Its first process reads a pipe
that only the process of the tests holds. When that process ends, killed or not, the pipe closes, the first process
ends, and the kernel ends all others with it: container shims too. Mounts, interfaces and iptables rules were seen
in these namespaces only and go with them.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.processes import ClusterError
from tests.tools.programs import find_program

# Programs of the node keep state in these folders whatever they are told: the node gets empty ones.
HIDDEN_DIRS = ("/run", "/var/lib", "/var/log")
_STOP_SECONDS = 20
_COMMAND_SECONDS = 120


class Namespaces:
    """The namespaces of a running node, with /proc, and with empty folders in place of HIDDEN_DIRS."""

    def __init__(self, hostname: str) -> None:
        """Raises ClusterError."""
        set_up = [
            # Volumes may ask for propagation, which is from these mounts to those of containers only.
            "mount --make-rshared /",
            *(f"mount -t tmpfs -o mode=755 tmpfs {folder}" for folder in HIDDEN_DIRS),
            "mkdir -p /run/lock /run/netns",
            f"hostname {hostname}",
            "echo ready",
            # Orphans of the node are given to this process: ignoring the signal, it has the kernel reap them.
            "exec env --ignore-signal=CHLD cat",
        ]
        command = [
            "unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc",
            "--net", "--uts", "--ipc", "sh", "-ec", "\n".join(set_up),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, which then end the node
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._lifeline, self._output = self._process.stdin, self._process.stdout
        said = ""
        while (line := self._output.readline()) != "ready\n":
            said += line
            if not line:
                self.end()
                raise ClusterError(
                    f"the node's namespaces cannot be made: {said.strip() or 'nothing was said'}. "
                    "Fix: run as root; in a container, one that may do all (`docker run --privileged`)"
                )

    @property
    def pid(self) -> int:
        """A process in all of them but the PID namespace, which its children are in."""
        return self._process.pid

    def end(self) -> None:
        """Ends all that runs in them, and waits until it is gone. No error if that is so already."""
        self._lifeline.close()
        try:
            # The first process ends at this, and is gone only after all others are.
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_SECONDS)
        self._output.close()

    def command(self, command: Sequence[str | Path]) -> list[str]:
        """The command that runs `command` in them."""
        base = f"/proc/{self.pid}/ns"
        names = {"mount": "mnt", "uts": "uts", "ipc": "ipc", "net": "net", "pid": "pid_for_children"}
        enter = [f"--{option}={base}/{name}" for option, name in names.items()]
        return [str(find_program("nsenter")), *enter, "--", *(str(part) for part in command)]

    def run(self, command: Sequence[str | Path], *, seconds: float = _COMMAND_SECONDS) -> str:
        """Runs a command in them; returns what it printed. Raises ClusterError."""
        return run_command(self.command(command), shown=command, seconds=seconds)


def run_command(
    command: Sequence[str | Path], *, shown: Sequence[str | Path] = (), seconds: float = _COMMAND_SECONDS
) -> str:
    """Runs a command; returns what it printed. Raises ClusterError with its last lines; `shown` names it there."""
    name = shlex.join(str(part) for part in shown or command)
    try:
        result = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{name} did not end within {seconds:.0f} s") from None
    if result.returncode:
        lines = "\n".join((result.stdout + result.stderr).splitlines()[-10:])
        raise ClusterError(f"{name} ended with status {result.returncode}: {lines or '(no output)'}")
    return result.stdout
