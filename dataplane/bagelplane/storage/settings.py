"""How a store is reached: endpoint, region, credentials, time limits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from bagelplane.errors import StorageError

MAX_CONNECTIONS = 64
_SECRET_FILES = ("access_key_id", "secret_access_key", "session_token")


@dataclass(frozen=True, slots=True)
class Credentials:
    """One set of keys. Never shown: its repr says nothing."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """How to reach the stores that URIs name. Holds no credential, only where they are found; safe to pickle
    and show.

    endpoint_url: address of an S3-compatible server; without it AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, else
    AWS.
    region: of the bucket; without it the environment's or the profile's, and us-east-1 at a custom endpoint.
    profile: of the AWS configuration files.
    credentials_dir: folder with the files access_key_id, secret_access_key and, if any, session_token (a
        mounted Secret). It is read when a connection is made, and again when the store calls the credentials
        expired.
    anonymous: requests are not signed (public buckets).
    checksum_validation: "when_supported" has botocore add and verify checksums of its own. Servers that do
        not know them, or answer a range with the whole object's, then fail every read.
    connect_timeout_seconds, read_timeout_seconds: for one connection; for one wait on the socket.
    attempts: most tries of one request that fails in a way that passes.
    retry_seconds: no new try begins later than this after the first.
    read_ahead_bytes, read_ahead_requests: most that is fetched before it is asked for, and by how many requests at a
        time. 0: nothing is.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    credentials_dir: str | None = None
    anonymous: bool = False
    checksum_validation: Literal["when_required", "when_supported"] = "when_required"
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 30.0
    attempts: int = 6
    retry_seconds: float = 60.0
    read_ahead_bytes: int = 512 * 2**20
    read_ahead_requests: int = MAX_CONNECTIONS

    @property
    def endpoint(self) -> str | None:
        """The custom endpoint that is in force, from the settings or the environment."""
        environment = os.environ
        return (
            self.endpoint_url
            or environment.get("AWS_ENDPOINT_URL_S3")
            or environment.get("AWS_ENDPOINT_URL")
            or None
        )

    def read_credentials(self) -> Credentials | None:
        """The keys in `credentials_dir`; None without that folder. Raises StorageError naming the file."""
        if self.credentials_dir is None:
            return None
        folder = Path(self.credentials_dir)
        found: dict[str, str] = {}
        for name in _SECRET_FILES:
            try:
                found[name] = (folder / name).read_text(encoding="utf-8").strip()
            except FileNotFoundError:
                found[name] = ""
            except (OSError, UnicodeDecodeError) as error:
                what = f"cannot read the credentials file {folder / name}"
                raise StorageError(
                    what, got=type(error).__name__, fix="correct its permissions or content"
                ) from None
            if not found[name] and name != "session_token":
                raise StorageError(
                    f"no credentials in {folder}",
                    got=f"no file {name}, or an empty one",
                    expected="the files access_key_id and secret_access_key",
                    fix="mount the Secret there, or correct credentialsDir (or BAGELPLANE_CREDENTIALS_DIR)",
                )
        return Credentials(found["access_key_id"], found["secret_access_key"], found["session_token"] or None)

    def s3_options(self, credentials: Credentials | None) -> dict[str, Any]:
        """Arguments of s3fs.S3FileSystem. They hold the credentials: never to be logged. Raises StorageError."""
        if "@" in (self.endpoint or ""):
            raise StorageError(
                f"the endpoint {show_endpoint(self.endpoint)} is given with a user or password",
                fix="write the endpoint without, and give the credentials by credentialsDir or the environment",
            )
        region = self.region
        if region is None and self.endpoint and not (_environment_region(os.environ) or self.profile):
            region = "us-east-1"
        options: dict[str, Any] = {
            "anon": self.anonymous,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": region} if region else {},
            "config_kwargs": {
                "connect_timeout": self.connect_timeout_seconds,
                "read_timeout": self.read_timeout_seconds,
                # Tries are counted and paced in one place, retries.py.
                "retries": {"total_max_attempts": 1, "mode": "standard"},
                "max_pool_connections": MAX_CONNECTIONS,
                "request_checksum_calculation": self.checksum_validation,
                "response_checksum_validation": self.checksum_validation,
            },
        }
        if self.profile:
            options["profile"] = self.profile
        if credentials:
            options["key"] = credentials.access_key_id
            options["secret"] = credentials.secret_access_key
            options["token"] = credentials.session_token
        return options


def _environment_region(environment: Mapping[str, str]) -> str | None:
    return environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")


def show_endpoint(endpoint: str | None, fallback: str = "the provider's own endpoint") -> str:
    """The endpoint without user, password or query, for messages."""
    if not endpoint:
        return fallback
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "an endpoint that is no URL"
    if not parts.scheme or not host:
        return "an endpoint that is no URL"
    return f"{parts.scheme}://{host}" + (f":{port}" if port else "")
