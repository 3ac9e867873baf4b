"""What every store must do for bagelplane: one list of claims, held against each kind of store."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagelplane.errors import ObjectExistsError, StorageError
from bagelplane.storage import (
    ObjectMissingError,
    ObjectTooLargeError,
    Storage,
    StorageSettings,
    UnusableNameError,
    open_storage,
)
from tests.services.s3 import S3Server, serve_rclone, serve_versitygw

# The first use may build versitygw.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with serve_rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def versitygw_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with serve_versitygw(tmp_path_factory.mktemp("versitygw"), say=say_at_once) as server:
        yield server


@lru_cache
def shared_storage(settings: StorageSettings) -> Storage:
    """One for all tests of a server: making connections is the slow part."""
    return open_storage(settings)


def say_at_once(text: str) -> None:
    """Past pytest's capture: a build of minutes should not look like a hang."""
    sys.__stderr__.write(f"\n{text}\n") if sys.__stderr__ else None


@dataclass(frozen=True, slots=True)
class Place:
    """Where one test works: a folder that nothing else uses, ending with a slash."""

    storage: Storage
    base: str

    def put(self, *names: str, data: bytes = b"data") -> None:
        for name in names:
            self.storage.write_bytes(self.base + name, data)

    def names(self, *, suffix: str = "") -> list[str]:
        return [info.uri.removeprefix(self.base) for info in self.storage.list_files(self.base, suffix)]


def storage_error(action: Callable[[], object], kind: type[StorageError] = StorageError) -> str:
    """The one-line message of the error that `action` raises, within seconds."""
    began = time.monotonic()
    with pytest.raises(StorageError) as caught:
        action()
    assert type(caught.value) is kind, caught.value
    # Cores may be busy; a fault that is tried again as one that passes takes a minute.
    assert time.monotonic() - began < 20
    assert caught.value.__cause__ is None
    assert "\n" not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    return str(caught.value)


class StorageClaims:
    """Subclasses give `place`, and say what their store cannot do."""

    # --- listing ---

    def test_listing_is_sorted_and_holds_direct_children_only(self, place: Place) -> None:
        place.put("b.parquet", "a.parquet", "A.parquet", "a/deep.parquet", "é.parquet", "10", "9")
        assert place.names() == ["10", "9", "A.parquet", "a.parquet", "b.parquet", "é.parquet"]
        assert place.names(suffix=".parquet") == ["A.parquet", "a.parquet", "b.parquet", "é.parquet"]

    def test_listing_is_the_same_with_and_without_a_slash(self, place: Place) -> None:
        place.put("a", "b")
        with_slash = place.storage.list_files(place.base)
        assert [info.uri for info in place.storage.list_files(place.base.rstrip("/"))] == [
            info.uri for info in with_slash
        ]

    def test_listing_gives_sizes_and_the_versions_of_info(self, place: Place) -> None:
        place.put("a", data=b"12345")
        [info] = place.storage.list_files(place.base)
        assert info.size_bytes == 5
        assert info == place.storage.info(place.base + "a")

    def test_a_neighbour_whose_name_begins_alike_is_not_listed(self, place: Place) -> None:
        place.put("data/a", "data2/b", "data-c")
        assert [info.uri for info in place.storage.list_files(place.base + "data")] == [place.base + "data/a"]

    def test_listing_is_never_stale(self, place: Place) -> None:
        place.put("a")
        assert place.names() == ["a"]
        open_storage(place.storage.settings).write_bytes(place.base + "b", b"from elsewhere")
        assert place.names() == ["a", "b"]
        place.storage.delete(place.base + "a")
        assert place.names() == ["b"]

    def test_what_vanishes_meanwhile_takes_nothing_else_out_of_a_listing(self, place: Place) -> None:
        place.put("stays")
        done = threading.Event()

        def write_and_delete() -> None:
            while not done.is_set():
                place.put("goes")
                place.storage.delete(place.base + "goes")

        with ThreadPoolExecutor(2) as pool:
            writers = [pool.submit(write_and_delete) for _ in range(2)]
            try:
                until = time.monotonic() + 1.0
                while time.monotonic() < until:
                    found = place.storage.list_files(place.base, missing_ok=True)
                    assert place.base + "stays" in [info.uri for info in found]
            finally:
                done.set()
        for writer in writers:
            writer.result()

    def test_folders_are_listed_with_their_slash(self, place: Place) -> None:
        place.put("step-2/manifest", "step-10/rank", "step-10/manifest", "file")
        assert place.storage.list_folders(place.base) == [place.base + "step-10/", place.base + "step-2/"]

    def test_an_empty_prefix_is_an_error_unless_asked_otherwise(self, place: Place) -> None:
        place.put("other/a.txt")
        missing, other = place.base + "missing/", place.base + "other"
        assert missing in storage_error(lambda: place.storage.list_files(missing), ObjectMissingError)
        storage_error(lambda: place.storage.list_folders(missing), ObjectMissingError)
        message = storage_error(lambda: place.storage.list_files(other, ".parquet"), ObjectMissingError)
        assert ".parquet" in message
        assert "1 other entries" in message
        assert place.storage.list_files(missing, missing_ok=True) == []
        assert place.storage.list_folders(missing, missing_ok=True) == []

    # --- reading ---

    def test_what_was_written_is_read(self, place: Place) -> None:
        place.put("a/b/c", data=b"\x00\xffdata")
        assert place.storage.read_bytes(place.base + "a/b/c") == b"\x00\xffdata"

    def test_an_empty_object_is_an_object(self, place: Place) -> None:
        place.put("empty", data=b"")
        assert place.names() == ["empty"]
        assert place.storage.read_bytes(place.base + "empty") == b""
        with place.storage.open_binary(place.base + "empty") as file:
            assert file.read() == b""

    def test_an_object_above_the_limit_is_refused_with_its_size(self, place: Place) -> None:
        place.put("large", data=bytes(300_000))
        place.put("empty", data=b"")
        uri = place.base + "large"
        message = storage_error(
            lambda: place.storage.read_bytes(uri, limit_bytes=299_999), ObjectTooLargeError
        )
        for part in ("large", "got 300000 bytes", "at most 299999 bytes"):
            assert part in message, part
        assert len(place.storage.read_bytes(uri, limit_bytes=300_000)) == 300_000
        assert place.storage.read_bytes(place.base + "empty", limit_bytes=0) == b""

    @pytest.mark.parametrize(
        "name", ["ünï cödé 日本", "a+b %20&=;", "what?#x", "it's [1] {2} $ @ ~ *", "..dots..", "?versionId=1"]
    )
    def test_names_are_literal(self, place: Place, name: str) -> None:
        place.put(name, data=name.encode())
        assert place.names() == [name]
        assert place.storage.read_bytes(place.base + name) == name.encode()
        place.storage.delete(place.base + name)
        assert not place.storage.exists(place.base + name)

    def test_an_open_file_seeks_and_reads_as_files_do(self, place: Place) -> None:
        data = os.urandom(300_000)
        place.put("a", data=data)
        with place.storage.open_binary(place.base + "a") as file:
            assert file.seek(-10, io.SEEK_END) == len(data) - 10
            assert file.read() == data[-10:]
            assert file.read(1) == b""
            file.seek(100)
            assert file.read(5) + file.read(200_000) == data[100:200_105]
            assert file.tell() == 200_105
            buffer = bytearray(7)
            assert file.readinto(buffer) == 7  # type: ignore[attr-defined]
            assert bytes(buffer) == data[200_105:200_112]
        with pytest.raises(ValueError, match="closed"):
            file.read(1)

    def test_an_open_file_gives_lines(self, place: Place) -> None:
        lines = [b"x" * length + b"\n" for length in (0, 5, 70_000, 3, 200_000, 1)] + [b"no newline"]
        place.put("a", data=b"".join(lines))
        with place.storage.open_binary(place.base + "a") as file:
            assert list(file) == lines

    def test_pyarrow_reads_single_columns_and_row_groups(self, place: Place) -> None:
        table = pa.table({"id": list(range(20_000)), "image": [os.urandom(50) for _ in range(20_000)]})
        buffer = io.BytesIO()
        pq.write_table(table, buffer, row_group_size=5_000)
        place.put("a.parquet", data=buffer.getvalue())
        with place.storage.open_binary(place.base + "a.parquet") as file:
            parquet = pq.ParquetFile(file)
            assert parquet.num_row_groups == 4
            assert parquet.read_row_group(2, columns=["image"]).equals(
                table.slice(10_000, 5_000).select(["image"])
            )

    def test_threads_share_one_storage(self, place: Place) -> None:
        place.put(*"abcdefgh", data=b"x" * 100_000)
        with ThreadPoolExecutor(16) as pool:
            sizes = list(
                pool.map(lambda name: len(place.storage.read_bytes(place.base + name)), "abcdefgh" * 8)
            )
        assert sizes == [100_000] * 64

    def test_a_large_object_goes_and_comes_whole(self, place: Place) -> None:
        data = os.urandom(1 << 20) * 48
        place.put("large", data=data)
        assert place.storage.info(place.base + "large").size_bytes == len(data)
        assert place.storage.read_bytes(place.base + "large") == data
        with place.storage.open_binary(place.base + "large") as file:
            file.seek(30_000_001)
            assert file.read(1000) == data[30_000_001:30_001_001]

    # --- writing ---

    def test_a_write_replaces(self, place: Place) -> None:
        place.put("a", data=b"long old content")
        before = place.storage.info(place.base + "a")
        place.put("a", data=b"new")
        assert place.storage.read_bytes(place.base + "a") == b"new"
        assert place.storage.info(place.base + "a").version != before.version

    def test_any_buffer_is_written_as_its_bytes(self, place: Place) -> None:
        place.storage.write_bytes(place.base + "a", memoryview(bytearray(b"0123456789"))[2:5])
        assert place.storage.read_bytes(place.base + "a") == b"234"

    def test_a_reader_never_sees_a_part(self, place: Place) -> None:
        contents = [bytes([value]) * 500_000 for value in range(4)]
        place.put("a", data=contents[0])

        def write_all() -> None:
            for data in contents * 4:
                place.put("a", data=data)

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write_all)
            while not writing.done():
                assert place.storage.read_bytes(place.base + "a") in contents
            writing.result()
        assert place.names() == ["a"]

    def test_a_conditional_write_keeps_what_is_there(self, place: Place) -> None:
        uri = place.base + "manifest.json"
        place.storage.write_bytes(uri, b"first", only_if_absent=True)
        message = storage_error(
            lambda: place.storage.write_bytes(uri, b"second", only_if_absent=True), ObjectExistsError
        )
        assert uri in message
        assert place.storage.read_bytes(uri) == b"first"
        # Neither the probe nor a temporary file stays.
        assert place.names() == ["manifest.json"]

    def test_deleting_twice_is_no_error(self, place: Place) -> None:
        place.put("a", "b")
        place.storage.delete(place.base + "a")
        place.storage.delete(place.base + "a")
        assert place.names() == ["b"]

    # --- faults ---

    def test_a_missing_object_is_named(self, place: Place) -> None:
        uri = place.base + "missing"
        for action in (place.storage.read_bytes, place.storage.info, place.storage.open_binary):
            message = storage_error(lambda action=action: action(uri), ObjectMissingError)  # type: ignore[misc]
            assert uri in message
            assert "Fix: " in message
        assert not place.storage.exists(uri)

    def test_a_folder_is_no_object(self, place: Place) -> None:
        place.put("folder/a")
        storage_error(lambda: place.storage.info(place.base + "folder"), ObjectMissingError)
        storage_error(lambda: place.storage.open_binary(place.base + "folder"), ObjectMissingError)
        assert not place.storage.exists(place.base + "folder")


class AtomicCreateClaims:
    """Of stores that know conditional puts. (Others leave a gap, as `write_bytes` says.)"""

    def test_of_many_conditional_writers_one_wins(self, place: Place) -> None:
        uri = place.base + "manifest.json"

        def write(number: int) -> int | None:
            try:
                place.storage.write_bytes(uri, str(number).encode() * 1000, only_if_absent=True)
            except ObjectExistsError:
                return None
            return number

        with ThreadPoolExecutor(16) as pool:
            winners = [number for number in pool.map(write, range(16)) if number is not None]
        content = place.storage.read_bytes(uri)
        assert [str(number).encode() * 1000 for number in winners] == [content]


class TestLocalFolder(AtomicCreateClaims, StorageClaims):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return Place(open_storage(), f"{tmp_path}/data/")

    def test_a_failed_write_leaves_nothing(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        place.put("a", data=b"old")

        def fail(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        message = storage_error(lambda: place.put("a", data=b"new"))
        assert "no space is left" in message
        assert [path.name for path in Path(place.base).iterdir()] == ["a"]
        assert place.storage.read_bytes(place.base + "a") == b"old"

    def test_without_hard_links_one_writer_wins_too(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*args: object, **options: object) -> None:
            raise OSError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
        self.test_a_conditional_write_keeps_what_is_there(place)

    def test_without_nameless_files_one_writer_wins_too(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # as old kernels read it: EISDIR
        self.test_a_conditional_write_keeps_what_is_there(place)
        assert [entry.name for entry in Path(place.base).iterdir() if entry.name.startswith(".")] == []

    def test_what_is_being_written_has_no_name_that_a_killed_writer_could_leave(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place.put("before")
        folder, seen = Path(place.base), set()
        monkeypatch.setattr(os, "fsync", lambda _: seen.update(path.name for path in folder.iterdir()))
        place.put("first")
        place.storage.write_bytes(place.base + "second", b"x", only_if_absent=True)
        assert seen == {"before", "first", "second"}  # the folder itself is synced, too

    def test_links_are_followed_and_broken_ones_left_out(self, place: Place) -> None:
        place.put("real")
        folder = Path(place.base)
        (folder / "link").symlink_to("real")
        (folder / "broken").symlink_to("nowhere")
        assert place.names() == ["link", "real"]

    def test_a_path_through_a_file_is_named(self, place: Place) -> None:
        place.put("a")
        storage_error(lambda: place.storage.read_bytes(place.base + "a/b"), ObjectMissingError)
        storage_error(lambda: place.put("a/b"), ObjectMissingError)

    @pytest.mark.timeout(30)
    def test_a_pipe_or_a_device_is_never_opened(self, place: Place) -> None:
        """Opening a pipe that nobody writes to waits for ever."""
        Path(place.base).mkdir()
        os.mkfifo(place.base + "pipe")
        Path(place.base, "device").symlink_to("/dev/zero")
        for name, kind in (("pipe", "a pipe"), ("device", "a device")):
            for read in (place.storage.read_bytes, place.storage.open_binary, place.storage.info):
                message = storage_error(partial(read, place.base + name), UnusableNameError)
                assert f"{place.base}{name}: it is no file; got {kind}" in message
        assert place.storage.list_files(place.base, missing_ok=True) == []

    def test_a_zero_byte_in_a_path_is_our_error(self, place: Place) -> None:
        message = storage_error(lambda: place.storage.read_bytes(place.base + "a\x00b"), UnusableNameError)
        assert "\\x00" in message

    @pytest.mark.parametrize("name", ["x" * 300, "\ud800", "loop/a"], ids=["long", "surrogate", "circle"])
    def test_a_name_of_nothing_is_our_error(self, place: Place, name: str) -> None:
        place.put("beside")
        Path(place.base, "loop").symlink_to("loop")
        storage_error(lambda: place.storage.read_bytes(place.base + name), UnusableNameError)

    def test_a_path_may_hold_the_signs_of_a_scheme(self, place: Place) -> None:
        name = "s3://bucket/key"
        place.put(name)
        assert place.storage.read_bytes(place.base + name) == b"data"

    def test_all_entries_of_a_folder_come_in_one_listing(self, place: Place) -> None:
        place.put("a", "folder/b")
        children = place.storage.list_all(place.base)
        assert [info.uri for info in children.files] == [place.base + "a"]
        assert children.folders == [place.base + "folder/"]
        Path(place.base, "empty").mkdir()
        assert place.storage.list_all(place.base + "empty/").files == []
        storage_error(lambda: place.storage.list_all(place.base + "missing/"), ObjectMissingError)


class TestLocalFileUri(AtomicCreateClaims, StorageClaims):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return Place(open_storage(), f"file://{tmp_path}/data/")


class TestMemory(StorageClaims):
    # fsspec keeps it in a dict that no lock guards; no two processes share it.
    test_what_vanishes_meanwhile_takes_nothing_else_out_of_a_listing = None  # type: ignore[assignment]

    @pytest.fixture
    def place(self) -> Place:
        return Place(open_storage(), f"memory://{uuid.uuid4().hex}/data/")


class S3Claims(StorageClaims):
    """What holds for S3 besides. Subclasses give `server`."""

    @pytest.fixture
    def place(self, server: S3Server) -> Place:
        return Place(shared_storage(server.settings), f"s3://{server.bucket}/{uuid.uuid4().hex}/")

    def test_listings_of_more_than_a_page_are_whole(self, place: Place, server: S3Server) -> None:
        # Put on the server's disk: a thousand requests would take their time.
        folder = server.root_dir / place.base.removeprefix("s3://")
        folder.mkdir()
        names = [f"{number:04}" for number in range(1005)]
        for name in names:
            (folder / name).write_bytes(b"")
        deadline = time.monotonic() + 20  # rclone sees a new folder within a second
        while not (found := place.storage.list_files(place.base, missing_ok=True)):
            assert time.monotonic() < deadline, f"nothing listed of {len(names)} files in {folder}"
        assert [info.uri.removeprefix(place.base) for info in found] == names

    def test_a_missing_bucket_is_named(self, place: Place, server: S3Server) -> None:
        uri = "s3://no-such-bucket/a"
        for action in (
            place.storage.read_bytes,
            place.storage.info,
            place.storage.exists,
            lambda uri: place.storage.list_files(uri, missing_ok=True),
            lambda uri: place.storage.write_bytes(uri, b""),
            lambda uri: place.storage.write_bytes(uri, b"", only_if_absent=True),
        ):
            message = storage_error(lambda action=action: action(uri))  # type: ignore[misc]
            assert "no such bucket" in message
            assert uri in message
            assert server.url in message

    @pytest.mark.parametrize("wrong", ["access_key_id", "secret_access_key"])
    def test_wrong_credentials_are_named_and_not_shown(
        self, place: Place, server: S3Server, tmp_path: Path, wrong: str
    ) -> None:
        folder = server.endpoint.write_credentials(tmp_path / "credentials")
        (folder / wrong).write_text("not-it-at-all")
        storage = open_storage(replace(server.settings, credentials_dir=str(folder)))
        for action in (storage.read_bytes, storage.info, storage.list_files, storage.open_binary):
            message = storage_error(lambda action=action: action(place.base + "a"))  # type: ignore[misc]
            assert "credentials are wrong" in message
            assert server.url in message
            for secret in ("not-it-at-all", server.access_key_id, server.secret_access_key):
                assert secret not in message.replace(server.bucket, "")

    def test_no_credentials_are_named(
        self, place: Place, server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        storage = open_storage(StorageSettings(endpoint_url=server.url))
        assert "no credentials were found" in storage_error(lambda: storage.info(place.base + "a"))

    def test_the_environment_alone_is_enough(
        self, place: Place, server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        place.put("a")
        assert open_storage().read_bytes(place.base + "a") == b"data"
        message = storage_error(lambda: open_storage().info(place.base + "b"), ObjectMissingError)
        assert server.url in message

    def test_a_profile_is_enough(
        self, place: Place, server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        file = tmp_path / "credentials"
        file.write_text(
            f"[bagel]\naws_access_key_id={server.access_key_id}\n"
            f"aws_secret_access_key={server.secret_access_key}\n"
        )
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
        settings = StorageSettings(endpoint_url=server.url, profile="bagel", region="us-east-1")
        place.put("a")
        assert open_storage(settings).read_bytes(place.base + "a") == b"data"
        unknown = open_storage(replace(settings, profile="none"))
        assert "no such AWS profile" in storage_error(lambda: unknown.info(place.base + "a"))

    def test_an_object_that_changed_under_a_reader_is_an_error(self, place: Place) -> None:
        place.put("a", data=b"1" * 1_000_000)
        with place.storage.open_binary(place.base + "a") as file:
            assert file.read(100_000) == b"1" * 100_000
            place.put("a", data=b"2" * 1_000_000)
            message = storage_error(lambda: file.read(500_000))
        assert "changed" in message

    def test_spawned_processes_reach_the_same_endpoint(self, place: Place) -> None:
        place.put("a", data=b"for all")
        assert place.storage.read_bytes(place.base + "a") == b"for all"
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            got = pool.apply_async(_read, (place.storage, place.base + "a")).get(timeout=60)
            # Ended by itself, not by a signal: connections are closed without a warning.
            pool.close()
            pool.join()
        assert got == b"for all"

    def test_nothing_hangs_after_a_fork(self, place: Place, server: S3Server) -> None:
        place.put("a", data=b"for all")
        script = _FORK_SCRIPT.format(settings=place.storage.settings, uri=place.base + "a")
        result = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
        )
        assert (result.stdout, result.returncode) == ("parent b'for all'\nchild b'for all'\n", 0), (
            result.stderr
        )


def _read(storage: Storage, uri: str) -> bytes:
    return storage.read_bytes(uri)


_FORK_SCRIPT = """
import os, signal
from bagelplane.storage import StorageSettings, open_storage
storage = open_storage({settings})
print("parent", storage.read_bytes({uri!r}), flush=True)
child = os.fork()
if child == 0:
    signal.alarm(20)
    print("child", storage.read_bytes({uri!r}), flush=True)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


class TestRclone(S3Claims):
    # It takes If-None-Match and ignores it.

    @pytest.fixture
    def server(self, rclone_server: S3Server) -> S3Server:
        return rclone_server


class TestVersitygw(AtomicCreateClaims, S3Claims):
    @pytest.fixture
    def server(self, versitygw_server: S3Server) -> S3Server:
        return versitygw_server

    def test_folder_markers_are_left_out(self, place: Place) -> None:
        place.put("", "sub/", "old_$folder$", data=b"")
        place.put("a")
        assert place.names() == ["a"]
        assert place.storage.list_folders(place.base) == [place.base + "sub/"]

    def test_denied_access_is_named(self, place: Place, server: S3Server, tmp_path: Path) -> None:
        place.put("a")
        assert server.stranger
        folder = server.stranger.write_credentials(tmp_path / "stranger")
        storage = open_storage(replace(server.settings, credentials_dir=str(folder)))
        uri = place.base + "a"
        for action in (
            storage.read_bytes,
            storage.info,
            storage.exists,
            storage.list_files,
            storage.delete,
            lambda uri: storage.write_bytes(uri, b""),
        ):
            message = storage_error(lambda action=action: action(uri))  # type: ignore[misc]
            assert "access is denied" in message
            assert uri in message
        assert place.storage.read_bytes(uri) == b"data"
