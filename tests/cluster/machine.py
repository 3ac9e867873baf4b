"""One test cluster on a machine at a time, and what is left of one that was killed.

Bridge, addresses and control group have fixed names, so the file _STATE is locked while they are in use. It says who
uses them, for the message to the next one, and which folders are to be removed if that process cannot do it itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.cluster.addresses import NUMBER
from tests.cluster.processes import ClusterError

_STATE = Path(f"/run/bagelplane-test-cluster-{NUMBER}.json")
_POLL_SECONDS = 0.2
_GONE_SECONDS = 60.0


@contextmanager
def whole_machine(
    *folders: Path, wait_seconds: float = 0.0, say: Callable[[str], None] = print
) -> Iterator[None]:
    """Keeps other test clusters away. `folders` are removed by the next one if this process is killed.

    Raises ClusterError if another one is there after `wait_seconds`, and says which.
    """
    try:
        state = _STATE.open("a+")
    except OSError as error:
        raise ClusterError(f"a test cluster needs root: {error}. Fix: run as root") from None
    with state:
        _lock(state, wait_seconds, say)
        for left in _read(state).get("folders", []):
            _remove(Path(left))
        _write(
            state,
            {
                "process": os.getpid(),
                "command": " ".join(sys.orig_argv)[:200],
                "since": time.strftime("%H:%M:%S"),
                "folders": [str(folder.resolve()) for folder in folders],
            },
        )
        try:
            yield
        finally:
            _write(state, {})


def _remove(folder: Path) -> None:
    """Processes of the killed cluster may be ending just now, and write until then."""
    deadline = time.monotonic() + _GONE_SECONDS
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{folder} of a killed test cluster stays. Fix: end what writes there, and remove it"
            )


def _lock(state: IO[str], wait_seconds: float, say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + wait_seconds
    is_told = False
    while True:
        try:
            fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(state)
            other = (
                f"another test cluster is on this machine: process {holder.get('process', 'unknown')} since "
                f"{holder.get('since', 'a moment')} ({holder.get('command', 'it starts or ends just now')})"
            )
            if time.monotonic() > deadline:
                raise ClusterError(f"{other}. Fix: wait for its end, or end that process") from None
            if not is_told:
                say(f"waiting for up to {wait_seconds:.0f} s: {other}")
                is_told = True
            time.sleep(_POLL_SECONDS)
        else:
            return


def _read(state: IO[str]) -> dict[str, object]:
    state.seek(0)
    try:
        content = json.load(state)
    except ValueError:
        return {}  # empty, or caught in the middle of a change
    return content if isinstance(content, dict) else {}


def _write(state: IO[str], content: dict[str, object]) -> None:
    state.seek(0)
    state.truncate()
    json.dump(content, state)
    state.flush()
