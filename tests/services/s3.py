"""S3 servers for tests.

with serve_versitygw(tmp_path) as server:      # signatures, ETags, conditional put and get, users
    server.url, server.access_key_id, server.secret_access_key, server.bucket
with serve_rclone(tmp_path) as server:         # no conditional put, no request checksums
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bagelplane.cli.demo_server import LOOPBACK, S3Endpoint, running, serve_folder
from bagelplane.storage import StorageSettings
from tests.tools.programs import find_program

BUCKET = "bagel-test"


@dataclass(frozen=True, slots=True)
class S3Server:
    """A server with one bucket, an owner of it, and (versitygw) a user without any right."""

    endpoint: S3Endpoint
    work_dir: Path
    root_dir: Path  # each subfolder is a bucket
    log: Path
    stranger: S3Endpoint | None = field(default=None)

    @property
    def url(self) -> str:
        return self.endpoint.url

    @property
    def access_key_id(self) -> str:
        return self.endpoint.access_key_id

    @property
    def secret_access_key(self) -> str:
        return self.endpoint.secret_access_key

    @property
    def bucket(self) -> str:
        return self.endpoint.bucket

    @property
    def credentials_dir(self) -> Path:
        return self.endpoint.write_credentials(self.work_dir / "credentials")

    @property
    def settings(self) -> StorageSettings:
        """How bagelplane reaches it."""
        return StorageSettings(endpoint_url=self.url, credentials_dir=str(self.credentials_dir))

    @property
    def environment(self) -> dict[str, str]:
        """How any AWS client reaches it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@contextmanager
def serve_rclone(work_dir: Path) -> Iterator[S3Server]:
    """`rclone serve s3` over `work_dir`/rclone."""
    root_dir, log = work_dir / "rclone", work_dir / "rclone.log"
    with serve_folder(root_dir, BUCKET, log=log) as endpoint:
        yield S3Server(endpoint, work_dir, root_dir, log)


@contextmanager
def serve_versitygw(
    work_dir: Path, *, address: str = LOOPBACK, say: Callable[[str], None] = print
) -> Iterator[S3Server]:
    """versitygw over `work_dir`/versitygw on that address. Builds it if need be, and says so through `say`."""
    binary = find_program("versitygw", say)
    root_dir, log = work_dir / "versitygw-objects", work_dir / "versitygw.log"
    metadata_dir, users_dir = work_dir / "versitygw-metadata", work_dir / "versitygw-users"
    for folder in (root_dir / BUCKET, metadata_dir, users_dir):
        folder.mkdir(parents=True, exist_ok=True)
    owner = ("bagelplane", "bagelplane-local-only")
    env = {"ROOT_ACCESS_KEY_ID": owner[0], "ROOT_SECRET_ACCESS_KEY": owner[1]}
    # Metadata in a folder of their own: not every file system that tests run on has extended attributes.
    command: list[str | Path] = [
        binary, "--port", f"{address}:{{port}}", "--keep-alive", "--iam-dir", users_dir,
        "posix", "--sidecar", metadata_dir, root_dir,
    ]  # fmt: skip
    with running("versitygw", command, log, env, address) as server:
        stranger = S3Endpoint(server.url, "stranger", "stranger-local-only", BUCKET)
        _add_user(binary, server.url, owner, stranger)
        yield S3Server(S3Endpoint(server.url, *owner, BUCKET), work_dir, root_dir, log, stranger)


def _add_user(binary: Path, url: str, owner: tuple[str, str], user: S3Endpoint) -> None:
    command = [
        str(binary), "admin", "--access", owner[0], "--secret", owner[1], "--endpoint-url", url,
        "create-user", "--access", user.access_key_id, "--secret", user.secret_access_key, "--role", "user",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if result.returncode:
        raise RuntimeError(
            f"versitygw admin create-user ended with {result.returncode}: {result.stdout}{result.stderr}"
        )
