"""Object stores through fsspec: S3 tuned (s3fs), others as their fsspec package gives them.

Calls are synchronous for the caller and run on fsspec's event-loop thread. An S3 request is one botocore
call made through s3fs: its higher-level calls list when a lookup fails, read versions out of keys and try
again by themselves.
"""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from contextlib import suppress
from datetime import datetime
from typing import Any

from bagelplane.errors import StorageError
from bagelplane.storage.backends import Children, FileInfo
from bagelplane.storage.faults import Attempted, ObjectTooLargeError, answer_of, changed, is_bodyless
from bagelplane.storage.settings import Credentials, StorageSettings, show_endpoint
from bagelplane.storage.uris import Location

MAX_PUT_BYTES = 5 * 2**30  # S3's limit for one request
_SLOWEST_BYTES_A_SECOND = 64 * 1024
_PROBE_NAME = ".bagelplane-probe-"


class S3Objects:
    """S3 and its likes. One connection pool a process, made at first use."""

    def __init__(self, settings: StorageSettings) -> None:
        self._settings = settings
        self._connection: tuple[int, Any] | None = None
        self._credentials: Credentials | None = None
        self._generation = 0
        self._left_behind: list[Any] = []
        self._conditional: dict[str, bool] = {}
        self._probe_lock = threading.Lock()

    def endpoint(self) -> str:
        client = getattr(self._connection[1], "_s3", None) if self._connection else None
        url = client.meta.endpoint_url if client is not None else self._settings.endpoint
        return show_endpoint(url, "AWS")

    def region(self) -> str:
        client = getattr(self._connection[1], "_s3", None) if self._connection else None
        return str(client.meta.region_name or "") if client is not None else self._settings.region or ""

    def generation(self) -> int:
        return max(self._generation, 1)

    def reconnect(self, generation: int) -> bool:
        if generation < self._generation:
            # Another thread has done it since.
            return True
        credentials = self._settings.read_credentials()
        if credentials is not None and credentials == self._credentials:
            return False
        self._connection = None
        return True

    def _filesystem(self) -> Any:
        connection = self._connection
        if connection is not None and connection[0] == os.getpid():
            return connection[1]
        import s3fs  # noqa: PLC0415 (half a second that local data need not wait for)

        if connection is not None:
            # After a fork. Kept alive: closing it would wait for the parent's event loop.
            self._left_behind.append(connection[1])
        credentials = self._settings.read_credentials()
        options = self._settings.s3_options(credentials)
        filesystem = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False, **options)
        filesystem.retries = 1  # retries.py counts and paces them
        # No lock: two threads that come here at once make two, and one is dropped.
        self._connection, self._credentials = (os.getpid(), filesystem), credentials
        self._generation += 1
        return filesystem

    def children(self, location: Location) -> Children:
        filesystem, prefix = self._filesystem(), location.folder_prefix
        request: dict[str, Any] = {"Bucket": location.bucket, "Prefix": prefix, "Delimiter": "/"}
        files, folders = [], []
        while True:
            page = filesystem.call_s3("list_objects_v2", **request)
            for entry in page.get("Contents") or []:
                key, size_bytes = entry["Key"], int(entry.get("Size") or 0)
                if not is_marker(key, size_bytes):
                    version = _version(entry)
                    files.append(FileInfo(location.child_uri(key), size_bytes, version))
            folders += [location.child_uri(entry["Prefix"]) for entry in page.get("CommonPrefixes") or []]
            token = page.get("NextContinuationToken")
            if not page.get("IsTruncated") or not token:
                return Children(files, folders)
            request["ContinuationToken"] = token

    def info(self, location: Location) -> FileInfo:
        filesystem = self._filesystem()
        try:
            head = filesystem.call_s3("head_object", Bucket=location.bucket, Key=location.key)
        except Exception as error:
            # HEAD answers have no body, so no code: a GET of one byte says what is wrong.
            if is_bodyless(error):
                self.read(location, 0, 1, None)
            raise
        return FileInfo(location.uri, int(head["ContentLength"]), _version(head))

    def read(
        self,
        location: Location,
        start: int,
        end: int | None,
        version: str | None,
        limit_bytes: int | None = None,
    ) -> bytes:
        from fsspec.asyn import sync  # noqa: PLC0415 (as above)

        if end is not None and end <= start:
            return b""
        request: dict[str, Any] = {"Bucket": location.bucket, "Key": location.key}
        if start or end is not None:
            request["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        if version:
            request["IfMatch"] = f'"{version}"'
        filesystem = self._filesystem()
        try:
            seconds = self._settings.read_timeout_seconds
            data, current = sync(filesystem.loop, _fetch, filesystem, request, seconds, location, limit_bytes)
        except Exception as error:
            if version and _is_refused_condition(error):
                raise changed(Attempted("read", location, self.endpoint()), version) from None
            raise
        if version and current != version:
            # The server ignored the condition.
            raise changed(Attempted("read", location, self.endpoint()), version)
        return bytes(data)

    def write(self, location: Location, data: bytes | memoryview) -> None:
        self._put(location, data)

    def create(self, location: Location, data: bytes | memoryview) -> None:
        self._put(location, data, IfNoneMatch="*")

    def _put(self, location: Location, data: bytes | memoryview, **condition: str) -> None:
        if len(data) > MAX_PUT_BYTES:
            raise StorageError(
                f"cannot write {location.uri}: it is too large for one request",
                got=f"{len(data)} bytes",
                expected=f"at most {MAX_PUT_BYTES}",
                fix="write it in parts under several keys",
            )
        body = bytes(data)
        self._filesystem().call_s3(
            "put_object", Bucket=location.bucket, Key=location.key, Body=body, **condition
        )

    def is_conditional(self, location: Location) -> bool:
        """Found out once a bucket: some servers ignore the condition in silence. Leaves no object behind."""
        with self._probe_lock:
            if location.bucket not in self._conditional:
                self._conditional[location.bucket] = self._probe(location)
            return self._conditional[location.bucket]

    def _probe(self, location: Location) -> bool:
        folder = location.key.rpartition("/")[0]
        key = f"{folder}/{_PROBE_NAME}{uuid.uuid4().hex}" if folder else _PROBE_NAME + uuid.uuid4().hex
        probe = Location(location.child_uri(key), location.scheme, location.bucket, key)
        self.write(probe, b"probe")
        try:
            self.create(probe, b"probe")
        except Exception as error:
            if _is_refused_condition(error):
                return True
            answer = answer_of(error)
            if answer is not None and (answer.code == "NotImplemented" or answer.status == 501):
                return False
            raise
        else:
            return False
        finally:
            # The probe has its answer; the right to delete is not needed for it.
            with suppress(Exception):
                self.delete(probe)

    def delete(self, location: Location) -> None:
        try:
            self._filesystem().call_s3("delete_object", Bucket=location.bucket, Key=location.key)
        except Exception as error:
            answer = answer_of(error)
            if answer is None or answer.code != "NoSuchKey":
                raise


def _is_refused_condition(error: Exception) -> bool:
    answer = answer_of(error)
    return answer is not None and answer.code in {"PreconditionFailed", "412"}


async def _fetch(
    filesystem: Any, request: dict[str, Any], seconds: float, location: Location, limit_bytes: int | None
) -> tuple[bytes, str]:
    """The body and its version. TimeoutError when it takes more than `seconds` beside what its bytes may take."""
    response = await filesystem._call_s3("get_object", **request)
    expected_bytes = response.get("ContentLength")
    # A wait on the socket has its own limit, which a body that drips never meets.
    longest = seconds + (expected_bytes or limit_bytes or 0) / _SLOWEST_BYTES_A_SECOND
    async with asyncio.timeout(longest), response["Body"] as body:
        if limit_bytes is not None and (expected_bytes or 0) > limit_bytes:
            raise ObjectTooLargeError.of(location, f"{expected_bytes} bytes", limit_bytes)
        if limit_bytes is not None and expected_bytes is None:
            data = await _read_at_most(body, location, limit_bytes)
        else:
            data = await body.read()
    if expected_bytes is not None and len(data) != expected_bytes:
        raise ConnectionResetError(f"{len(data)} of {expected_bytes} bytes came")
    if "Range" in request and "ContentRange" not in response:
        # The server ignored the range and sent everything.
        first, _, last = request["Range"].removeprefix("bytes=").partition("-")
        data = data[int(first) : int(last) + 1 if last else None]
    return data, _version(response)


async def _read_at_most(body: Any, location: Location, limit_bytes: int) -> bytes:
    """A body of which the server does not tell the length."""
    data = bytearray()
    while part := await body.read(limit_bytes + 1 - len(data)):
        data += part
        if len(data) > limit_bytes:
            raise ObjectTooLargeError.of(location, f"more than {limit_bytes} bytes", limit_bytes)
    return bytes(data)


def _version(answer: dict[str, Any]) -> str:
    return str(answer.get("ETag") or "").strip('"')


class FsspecObjects:
    """Any other scheme that fsspec knows (gs, az; memory in tests), configured by that package's own
    environment.
    """

    def __init__(self, scheme: str, settings: StorageSettings) -> None:
        self._scheme, self._settings = scheme, settings
        self._connection: tuple[int, Any] | None = None

    def endpoint(self) -> str:
        return show_endpoint(self._settings.endpoint_url, f"{self._scheme}://")

    def region(self) -> str:
        return self._settings.region or ""

    def generation(self) -> int:
        return 0

    def reconnect(self, generation: int) -> bool:
        self._connection = None
        return True

    def _filesystem(self) -> Any:
        connection = self._connection
        if connection is None or connection[0] != os.getpid():
            import fsspec  # noqa: PLC0415 (as above)

            filesystem = fsspec.filesystem(self._scheme, skip_instance_cache=True, use_listings_cache=False)
            self._connection = connection = (os.getpid(), filesystem)
        return connection[1]

    def children(self, location: Location) -> Children:
        files, folders = [], []
        try:
            entries = self._filesystem().ls(f"{location.bucket}/{location.folder_prefix}", detail=True)
        except FileNotFoundError:
            return Children([], [])
        for entry in entries:
            key = str(entry["name"]).strip("/").partition("/")[2]
            if entry["type"] == "directory":
                folders.append(location.child_uri(key) + "/")
            elif not is_marker(key, int(entry["size"] or 0)) and key != location.key.rstrip("/"):
                files.append(_describe(location.child_uri(key), entry))
        return Children(files, folders)

    def info(self, location: Location) -> FileInfo:
        entry = self._filesystem().info(_path(location))
        if entry["type"] == "directory":
            raise FileNotFoundError(location.uri)
        return _describe(location.uri, entry)

    def read(
        self,
        location: Location,
        start: int,
        end: int | None,
        version: str | None,
        limit_bytes: int | None = None,
    ) -> bytes:
        if end is not None and end <= start:
            return b""
        if limit_bytes is not None and (size_bytes := self.info(location).size_bytes) > limit_bytes:
            raise ObjectTooLargeError.of(location, f"{size_bytes} bytes", limit_bytes)
        data = bytes(self._filesystem().cat_file(_path(location), start=start or None, end=end))
        # Not every package can make a read depend on a version; looked at after it, none is missed.
        if version and self.info(location).version != version:
            raise changed(Attempted("read", location, self.endpoint()), version)
        return data

    def write(self, location: Location, data: bytes | memoryview) -> None:
        self._filesystem().pipe_file(_path(location), bytes(data))

    def create(self, location: Location, data: bytes | memoryview) -> None:
        self._filesystem().pipe_file(_path(location), bytes(data), mode="create")

    def is_conditional(self, location: Location) -> bool:
        # Only the store inside this process is known to keep the condition.
        return self._scheme == "memory"

    def delete(self, location: Location) -> None:
        with suppress(FileNotFoundError):
            self._filesystem().rm_file(_path(location))


def _path(location: Location) -> str:
    return f"{location.bucket}/{location.key}"


def _describe(uri: str, entry: dict[str, Any]) -> FileInfo:
    size_bytes = int(entry["size"] or 0)
    for field in ("ETag", "etag", "md5Hash", "generation", "mtime", "last_modified", "created"):
        value = entry.get(field)
        if value:
            # A package may give a time as a number in listings and as a date elsewhere.
            mark = value.timestamp() if isinstance(value, datetime) else value
            return FileInfo(uri, size_bytes, f"{size_bytes}-{mark}".replace('"', ""))
    return FileInfo(uri, size_bytes, str(size_bytes))


def is_marker(key: str, size_bytes: int) -> bool:
    """Whether a key stands for a folder, as consoles and Hadoop write them."""
    return key.endswith("/") or (size_bytes == 0 and key.endswith("_$folder$"))
