"""What goes wrong between bagelplane and a store: told within seconds, in one line, or tried again until it
passes.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bagelplane.errors import DataError, ObjectExistsError, StorageError, TransientStorageError
from bagelplane.storage import ObjectMissingError, Storage, StorageSettings, join_uri, open_storage
from bagelplane.storage.faults import Attempted, Retry, classify
from bagelplane.storage.uris import parse_uri
from tests.services.scripted import Answer, ScriptedServer, s3_error, serve_answers

URI = "s3://bucket/key"
# Cores may be busy; a fault that is tried again as one that passes takes a minute.
AT_ONCE_SECONDS = 20
OBJECT = Answer(200, b"0123456789", {"ETag": '"v1"'})


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StorageSettings:
    (tmp_path / "access_key_id").write_text("first\n")
    (tmp_path / "secret_access_key").write_text("AKIA-SECRET-TEXT")
    return StorageSettings(credentials_dir=str(tmp_path), region="eu-north-1", read_timeout_seconds=1.0)


def storage_at(server: ScriptedServer, settings: StorageSettings) -> Storage:
    return open_storage(replace(settings, endpoint_url=server.url))


# --- faults that pass ---


@pytest.mark.parametrize(
    "fault",
    [
        s3_error(503, "SlowDown"),
        s3_error(500, "InternalError"),
        s3_error(409, "ConditionalRequestConflict"),
        s3_error(429, "TooManyRequests"),
        Answer(502, b"<html>bad gateway"),
        replace(OBJECT, body_bytes_sent=5),
        replace(OBJECT, body_bytes_sent=0),
        Answer(stalls=True),
    ],
    ids=lambda fault: f"{fault.status}-{fault.body[:20]!r}-{fault.body_bytes_sent}",
)
def test_what_passes_is_tried_again(settings: StorageSettings, fault: Answer) -> None:
    with serve_answers(fault, fault, OBJECT) as server:
        storage = storage_at(server, settings)
        assert storage.read_bytes(URI) == b"0123456789"
        assert storage.retry_count == 2
        (cause,) = storage.costs.as_json()["retries"]
        assert cause == ("connection" if fault.stalls or fault.body_bytes_sent is not None else "store")
        assert len(server.requests) == 3


def test_503_on_a_lookup_is_not_an_absent_object(settings: StorageSettings) -> None:
    with serve_answers(s3_error(503, "SlowDown")) as server:
        storage = storage_at(server, replace(settings, attempts=2))
        with pytest.raises(TransientStorageError, match="in trouble"):
            storage.exists(URI)


def test_tries_end(settings: StorageSettings, caplog: pytest.LogCaptureFixture) -> None:
    with serve_answers(s3_error(503, "SlowDown")) as server:
        storage = storage_at(server, replace(settings, attempts=3))
        with caplog.at_level(logging.DEBUG, "bagelplane"), pytest.raises(TransientStorageError) as caught:
            storage.read_bytes(URI)
    assert "SlowDown (HTTP 503)" in str(caught.value)
    assert len(server.requests) == 3
    assert "AKIA-SECRET-TEXT" not in str(caught.value) + caplog.text


def test_no_try_begins_after_the_deadline(settings: StorageSettings) -> None:
    with serve_answers(s3_error(503, "SlowDown")) as server:
        storage = storage_at(server, replace(settings, attempts=1000, retry_seconds=1.0))
        began = time.monotonic()
        with pytest.raises(TransientStorageError):
            storage.read_bytes(URI)
    assert time.monotonic() - began < AT_ONCE_SECONDS


def test_a_conditional_write_whose_answer_was_lost_is_ours(settings: StorageSettings) -> None:
    probe = (Answer(), s3_error(412, "PreconditionFailed"), Answer(204))
    lost, exists = s3_error(503, "SlowDown"), s3_error(412, "PreconditionFailed")
    with serve_answers(*probe, lost, exists, Answer(body=b"mine")) as server:
        storage_at(server, settings).write_bytes(URI, b"mine", only_if_absent=True)
    with serve_answers(*probe, lost, exists, Answer(body=b"theirs")) as server:
        storage = storage_at(server, settings)
        with pytest.raises(ObjectExistsError):
            storage.write_bytes(URI, b"mine", only_if_absent=True)


# --- faults that last ---


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (s3_error(404, "NoSuchBucket"), StorageError, "no such bucket"),
        (s3_error(404, "NoSuchKey"), ObjectMissingError, "no such object"),
        (s3_error(403, "AccessDenied"), StorageError, "access is denied"),
        (s3_error(403, "RequestTimeTooSkewed"), StorageError, "clock"),
        (s3_error(400, "ExpiredToken"), StorageError, "credentials have expired"),
        (s3_error(301, "PermanentRedirect", {"x-amz-bucket-region": "us-west-2"}), StorageError, "us-west-2"),
        (s3_error(400, "AuthorizationHeaderMalformed"), StorageError, "another region than eu-north-1"),
        (s3_error(400, "Odd\nCode"), StorageError, "refused the request"),
        (Answer(404, b"<html>not S3"), StorageError, "404"),
        (Answer(200, b""), None, ""),
    ],
    ids=lambda value: value.body.decode()[:40] if isinstance(value, Answer) else "",
)
def test_what_lasts_is_told_at_once_without_secrets(
    settings: StorageSettings, answer: Answer, kind: type[StorageError] | None, said: str
) -> None:
    with serve_answers(answer) as server:
        storage = storage_at(server, settings)
        began = time.monotonic()
        if kind is None:
            assert storage.read_bytes(URI) == b""
            return
        for action in (storage.read_bytes, storage.info):
            with pytest.raises(StorageError) as caught:
                action(URI)
            message = str(caught.value)
            assert isinstance(caught.value, kind)
            assert said in message
            assert URI in message
            assert server.url in message
            assert "AKIA-SECRET-TEXT" not in message
            assert "\n" not in message
            assert caught.value.__cause__ is None
        assert time.monotonic() - began < AT_ONCE_SECONDS


def test_renewed_credentials_are_read_and_used(settings: StorageSettings) -> None:
    with serve_answers(OBJECT, s3_error(400, "ExpiredToken"), OBJECT) as server:
        storage = storage_at(server, settings)
        storage.read_bytes(URI)
        assert settings.credentials_dir
        Path(settings.credentials_dir, "access_key_id").write_text("second")
        assert storage.read_bytes(URI) == b"0123456789"
        assert server.access_keys == ["first", "first", "second"]


@pytest.mark.parametrize("name", ["access_key_id", "secret_access_key"])
def test_an_incomplete_credentials_folder_is_named(settings: StorageSettings, name: str) -> None:
    assert settings.credentials_dir
    Path(settings.credentials_dir, name).unlink()
    with pytest.raises(StorageError, match=f"{settings.credentials_dir}.*{name}"):
        open_storage(settings).read_bytes(URI)


@pytest.fixture
def closed_port() -> Iterator[int]:
    # Bound and not listening: nobody else can take it meanwhile.
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_an_endpoint_where_nobody_listens_is_told_within_seconds(
    settings: StorageSettings, closed_port: int
) -> None:
    endpoint = f"http://127.0.0.1:{closed_port}"
    storage = open_storage(replace(settings, endpoint_url=endpoint))
    began = time.monotonic()
    with pytest.raises(StorageError, match=f"{URI} at {endpoint}: no server answers there") as caught:
        storage.read_bytes(URI)
    assert not isinstance(caught.value, TransientStorageError)
    assert time.monotonic() - began < AT_ONCE_SECONDS


@pytest.mark.parametrize("endpoint", ["nonsense", "http://", "http://user:AKIA-SECRET-TEXT@127.0.0.1:1"])
def test_a_bad_endpoint_is_told_without_its_password(settings: StorageSettings, endpoint: str) -> None:
    storage = open_storage(replace(settings, endpoint_url=endpoint))
    with pytest.raises(StorageError, match="endpoint") as caught:
        storage.read_bytes(URI)
    assert "AKIA-SECRET-TEXT" not in str(caught.value)


def test_a_scheme_without_its_package_names_the_package() -> None:
    with pytest.raises(StorageError, match="install gcsfs"):
        open_storage().read_bytes("gs://bucket/key")


@pytest.mark.parametrize("uri", ["", "http://host/file", "s3://", "s3:///key", "file://relative"])
def test_an_address_that_cannot_be_opened_is_told(uri: str) -> None:
    with pytest.raises(StorageError, match=r"Fix: "):
        open_storage().read_bytes(uri)


def test_settings_and_errors_never_show_credentials(settings: StorageSettings) -> None:
    assert "AKIA-SECRET-TEXT" not in repr(settings) + repr(settings.read_credentials())


@pytest.mark.parametrize(
    ("number", "kind", "retry"),
    [
        (errno.EACCES, StorageError, Retry.NO),
        (errno.ENOENT, ObjectMissingError, Retry.NO),
        (errno.EROFS, StorageError, Retry.NO),
        (errno.EIO, TransientStorageError, Retry.BACKOFF),
        (errno.ESTALE, TransientStorageError, Retry.BACKOFF),
        (errno.EEXIST, ObjectExistsError, Retry.NO),
        (errno.EXFULL, StorageError, Retry.NO),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
def test_file_system_faults_are_told_apart(number: int, kind: type[StorageError], retry: Retry) -> None:
    fault = classify(OSError(number, "said by the system"), Attempted("read", parse_uri("/data/a")))
    assert (type(fault.error), fault.retry) == (kind, retry)
    assert errno.errorcode[number] in str(fault.error)
    assert "/data/a" in str(fault.error)


# --- names that are data ---


@pytest.mark.parametrize(
    ("base", "name", "followed", "inside"),
    [
        ("/data/images", "a.jpg", "/data/images/a.jpg", "/data/images/a.jpg"),
        ("/data/images/", "sub/a.jpg", "/data/images/sub/a.jpg", "/data/images/sub/a.jpg"),
        ("/data/images", "../a.jpg", "/data/images/../a.jpg", None),
        ("/data/images", "sub/../a.jpg", "/data/images/sub/../a.jpg", "/data/images/a.jpg"),
        ("/data/images", "sub/../../a.jpg", "/data/images/sub/../../a.jpg", None),
        ("/data/images", "/etc/passwd", "/etc/passwd", None),
        ("/data/images", "/data/images/a.jpg", "/data/images/a.jpg", "/data/images/a.jpg"),
        ("/data/images", "/data/images2/a.jpg", "/data/images2/a.jpg", None),
        ("file:///data", "../etc/passwd", "file:///data/../etc/passwd", None),
        ("images", "a b%20?.jpg", "images/a b%20?.jpg", "images/a b%20?.jpg"),
        ("s3://b/data/images", "a.jpg", "s3://b/data/images/a.jpg", "s3://b/data/images/a.jpg"),
        ("s3://b/data/images/", "frames/", "s3://b/data/images/frames/", "s3://b/data/images/frames/"),
        ("s3://b/data/images", "../a.jpg", "s3://b/data/a.jpg", None),
        ("s3://b/data/images", "../images2/a.jpg", "s3://b/data/images2/a.jpg", None),
        ("s3://b/data/images", "../../../a.jpg", None, None),
        ("s3://b/data", "/a.jpg", "s3://b/a.jpg", None),
        ("s3://b", "a/../b.jpg", "s3://b/b.jpg", "s3://b/b.jpg"),
        ("s3://b", "s3://other/a", "s3://b/s3:/other/a", "s3://b/s3:/other/a"),
        ("s3://b/data", "a\x00b", None, None),
        ("/data", "a\x00b", None, None),
        ("/data", "", None, None),
    ],
)
def test_names_lead_where_the_profile_lets_them(
    base: str, name: str, followed: str | None, inside: str | None
) -> None:
    for expected, is_strict in ((followed, False), (inside, True)):
        if expected is None:
            with pytest.raises(DataError):
                join_uri(base, name, inside=is_strict)
        else:
            assert join_uri(base, name, inside=is_strict) == expected


def test_a_key_cannot_fake_a_log_line() -> None:
    with pytest.raises(StorageError) as caught:
        open_storage().read_bytes("/data/a\nERROR all is lost\x1b[31m")
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
