"""What holds of the ring file, whoever dies and whatever the file is."""

from __future__ import annotations

import os
import random
import re
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bagelplane.errors import RingError
from bagelplane.shm.reference import with_tables
from bagelplane.shm.ring import (
    HEADER_BYTES,
    RECORD_HEADER_BYTES,
    Record,
    RingCutError,
    RingReader,
    RingStoppedError,
    RingWriter,
    StaleEpochError,
)

CAPACITY = 16 * 1024
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "ring.md"
WAIT_SECONDS = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ring-0.bin"


@pytest.fixture
def writer(path: Path) -> Iterator[RingWriter]:
    writer = RingWriter.create(path, capacity_bytes=CAPACITY)
    yield writer
    writer.close()


def content_of(step: int, length: int) -> bytes:
    return random.Random(step).randbytes(length)


def put(writer: RingWriter, step: int, length: int) -> Record:
    writer.reserve(length, timeout_seconds=0)[:] = content_of(step, length)
    return writer.publish(step)


def documented_reader() -> dict[str, object]:
    """The names of the example in the reference page, which uses nothing of ours."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


# ---- content


class RingMachine(RuleBasedStateMachine):
    """Random sizes, releases, cancellations, new epochs: a reader sees what was written and not released."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ring"
        self.writer = RingWriter.create(self.path, capacity_bytes=CAPACITY)
        self.reader = RingReader(self.path)
        self.model: deque[Record] = deque()
        self.step = 0

    @rule(length=st.integers(0, CAPACITY - RECORD_HEADER_BYTES) | st.integers(0, 900))
    def publish(self, length: int) -> None:
        try:
            place = self.writer.reserve(length, timeout_seconds=0)
        except RingError:
            assert self.model, "with nothing unreleased, everything fits that is not larger than the ring"
            return
        place[:] = content_of(self.step, length)
        self.model.append(self.writer.publish(self.step))
        self.step += 1

    @rule(length=st.integers(0, 4000))
    def reserve_and_cancel(self, length: int) -> None:
        try:
            self.writer.reserve(length, timeout_seconds=0)[:] = b"x" * length
        except RingError:
            return
        self.writer.cancel()

    @precondition(lambda self: self.model)
    @rule(count=st.integers(1, 4))
    def release(self, count: int) -> None:
        released = [self.model.popleft() for _ in range(min(count, len(self.model)))]
        assert self.writer.release(released[-1].step) == len(released)

    @rule()
    def begin_anew(self) -> None:
        old = self.model[-1] if self.model else None
        self.writer.reset()
        if old is not None:
            with pytest.raises(StaleEpochError):
                self.reader.read(old)
        self.model.clear()
        self.reader.close()
        self.reader = RingReader(self.path)

    @invariant()
    def reader_sees_what_was_published_and_not_released(self) -> None:
        assert list(self.reader.unreleased()) == list(self.model) == self.writer.unreleased()
        for record in self.model:
            assert bytes(self.reader.read(record)) == content_of(record.step, record.length_bytes)
            assert self.reader.is_intact(record)
            assert record.offset_bytes % 64 == 0

    def teardown(self) -> None:
        self.reader.close()
        self.writer.close()
        self.folder.cleanup()


TestRingMachine = RingMachine.TestCase


def test_reader_sees_nothing_until_published(path: Path, writer: RingWriter) -> None:
    reader = RingReader(path)
    writer.reserve(100)[:] = b"x" * 100
    assert list(reader.unreleased()) == []
    record = writer.publish(7)
    assert [found.step for found in reader.unreleased()] == [7]
    assert bytes(reader.read(record)) == b"x" * 100
    reader.close()


def test_the_documented_reader_reads_the_ring(path: Path, writer: RingWriter) -> None:
    for step in range(20):
        writer.release(step - 3)
        put(writer, step, 3000 + step)
    read = documented_reader()["unreleased_packs"]
    assert callable(read)
    # Its third value is the place of the meta, which these payloads do not have: give them a prefix.
    for step in range(20, 23):
        writer.release(step - 3)
        place = writer.reserve(3000)
        place[:] = (
            b"BGLPPACK" + struct.pack("<IIQQ", 1, 1, 64, 8) + bytes(32) + b"the meta" + bytes(3000 - 72)
        )
        writer.publish(step)
    found = [(step, len(payload), meta) for step, payload, meta in read(path)]
    assert found == [(step, 3000, b"the meta") for step in (20, 21, 22)]


def test_the_page_holds_the_tables_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, f"run: python -m bagelplane.shm.reference {PAGE}"


# ---- room


def test_a_record_larger_than_the_ring_names_both_sizes_and_the_setting(writer: RingWriter) -> None:
    largest = writer.largest_payload_bytes
    with pytest.raises(RingError, match=f"{largest + 1} bytes.*at most {largest} bytes.*dataplane.ring"):
        writer.reserve(largest + 1)
    writer.reserve(largest)


def test_a_producer_waits_until_a_release_makes_room(writer: RingWriter) -> None:
    put(writer, 0, 10_000)
    placed = threading.Event()

    def produce() -> None:
        writer.reserve(10_000, timeout_seconds=WAIT_SECONDS)
        placed.set()

    thread = threading.Thread(target=produce)
    thread.start()
    assert not placed.wait(0.05)
    writer.release(0)
    assert placed.wait(WAIT_SECONDS), "the producer still waits after the release"
    thread.join(WAIT_SECONDS)


def test_a_reader_that_never_releases_is_named_at_the_deadline(writer: RingWriter) -> None:
    put(writer, 41, 10_000)
    with pytest.raises(RingError, match=r"0\.01 s: the trainer did not release step 41.*1 packs unreleased"):
        writer.reserve(10_000, timeout_seconds=0.01)


def test_stop_wakes_a_waiting_producer(writer: RingWriter) -> None:
    put(writer, 0, 10_000)
    outcome: list[BaseException] = []

    def produce() -> None:
        try:
            writer.reserve(10_000, timeout_seconds=WAIT_SECONDS)
        except RingError as error:
            outcome.append(error)

    thread = threading.Thread(target=produce)
    thread.start()
    writer.stop()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive(), "the producer still waits after stop"
    assert isinstance(outcome[0], RingStoppedError)


def test_releasing_a_step_releases_all_before_it_and_unknown_steps_nothing(writer: RingWriter) -> None:
    for step in (5, 6, 7):
        put(writer, step, 100)
    assert writer.release(4) == 0
    assert writer.release(6) == 2
    assert [record.step for record in writer.unreleased()] == [7]
    assert writer.release(1000) == 1
    assert writer.used_bytes == 0


def test_publishing_without_a_reservation_is_our_own_fault(writer: RingWriter) -> None:
    writer.reserve(10)
    writer.cancel()
    with pytest.raises(RuntimeError, match="without a reservation"):
        writer.publish(0)


# ---- making the file


def test_only_the_owner_may_read_the_ring(path: Path, writer: RingWriter) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_page_is_allocated_at_once(path: Path, writer: RingWriter) -> None:
    assert path.stat().st_blocks * 512 >= HEADER_BYTES + CAPACITY


SMALL_VOLUME = """
import ctypes, os, resource, sys
from pathlib import Path
from bagelplane.errors import RingError
from bagelplane.shm.ring import RingWriter

folder = Path(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUSER, MS_REC_PRIVATE = 0x20000, 0x10000000, 0x44000
mounted = (
    libc.unshare(CLONE_NEWNS if os.geteuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER) == 0
    and libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None) == 0
    and libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=64m") == 0
)
if not mounted:  # a machine that forbids mounts: the kernel's file size limit refuses in the same call
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
try:
    RingWriter.create(folder / "ring-0.bin", capacity_bytes=512 << 20)
except RingError as error:
    print(error)
print("left:", os.listdir(folder))
print("mounted:", mounted)
"""


def test_a_volume_too_small_is_an_error_with_both_numbers_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SMALL_VOLUME, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    assert "the volume is too small for the ring" in done.stdout
    assert f"expected {(512 << 20) + HEADER_BYTES} bytes" in done.stdout
    assert "lower dataplane.ring" in done.stdout
    assert "left: []" in done.stdout
    if "mounted: True" in done.stdout:
        assert f"got {64 << 20} bytes free" in done.stdout


def test_a_place_that_cannot_be_written_is_a_ring_error(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="BAGELPLANE_DIR"):
        RingWriter.create(tmp_path / "missing" / "ring", capacity_bytes=CAPACITY)


def test_two_producers_do_not_share_a_ring(path: Path, writer: RingWriter) -> None:
    with pytest.raises(RingError, match="in use by another producer"):
        RingWriter.create(path, capacity_bytes=CAPACITY, lock_timeout_seconds=0.05)


def test_a_ring_left_behind_is_taken_over_in_place_under_a_larger_epoch(
    path: Path, writer: RingWriter
) -> None:
    record = put(writer, 3, 100)
    reader = RingReader(path)
    writer.close()
    inode = path.stat().st_ino
    with_new_epoch = RingWriter.create(path, capacity_bytes=CAPACITY)
    assert path.stat().st_ino == inode
    assert with_new_epoch.epoch > writer.epoch
    assert not reader.is_intact(record)
    with pytest.raises(StaleEpochError):
        reader.read(record)
    assert list(RingReader(path).unreleased()) == []
    reader.close()
    with_new_epoch.close()


@pytest.mark.parametrize("other", [CAPACITY // 2, CAPACITY * 2])
def test_a_ring_of_another_size_is_replaced_and_never_cut_under_a_reader(
    path: Path, writer: RingWriter, other: int
) -> None:
    record = put(writer, 3, 100)
    reader = RingReader(path)
    writer.close()
    replaced = RingWriter.create(path, capacity_bytes=other)
    assert path.stat().st_size == HEADER_BYTES + other
    assert bytes(reader.read(record)) == content_of(3, 100)  # its own file, unlinked, still whole
    reader.close()
    replaced.close()


def test_closing_with_unlink_leaves_no_file_though_views_are_alive(path: Path) -> None:
    writer = RingWriter.create(path, capacity_bytes=CAPACITY)
    place = writer.reserve(10)
    writer.close(unlink=True)
    assert not path.exists()
    place[:] = b"0123456789"  # still mapped


# ---- files not to be trusted


def damage(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.write_bytes(b""), "too short"),
        (lambda path: path.write_bytes(b"x" * 10_000), "not a bagelplane ring"),
        (lambda path: path.mkdir(), "no regular file|cannot be opened"),
        (os.mkfifo, "no regular file"),
        (lambda path: path.symlink_to("/dev/null"), "cannot be opened"),
    ],
)
def test_a_foreign_file_is_a_ring_error(path: Path, make: object, message: str) -> None:
    assert callable(make)
    make(path)
    with pytest.raises(RingError, match=message):
        RingReader(path)


def test_a_damaged_header_is_a_ring_error(path: Path, writer: RingWriter) -> None:
    damage(path, 24, b"\xff")
    with pytest.raises(RingError, match="damaged header"):
        RingReader(path)


def test_another_version_is_a_ring_error_that_names_both(path: Path, writer: RingWriter) -> None:
    header = path.read_bytes()[:60]
    changed = header[:8] + struct.pack("<I", 2) + header[12:]
    damage(path, 0, changed + struct.pack("<I", zlib.crc32(changed)))
    with pytest.raises(RingError, match=r"got version 2.*expected version 1"):
        RingReader(path)


@pytest.mark.parametrize("left_bytes", [HEADER_BYTES, 0])
def test_a_file_cut_short_is_an_error_and_no_signal(path: Path, writer: RingWriter, left_bytes: int) -> None:
    record = put(writer, 0, 12_000)
    reader = RingReader(path)
    writer.reserve(100)
    os.truncate(path, left_bytes)
    with pytest.raises(
        RingCutError, match=f"cut short.*got {left_bytes} bytes.*{HEADER_BYTES + CAPACITY} bytes"
    ):
        reader.read(record)
    assert not reader.is_intact(record)
    with pytest.raises(RingCutError, match="cut short"):
        list(reader.unreleased())
    with pytest.raises(RingCutError, match="cut short"):
        writer.publish(1)
    with pytest.raises(RingCutError, match="cut short"):
        writer.reserve(100)
    assert writer.release(0) == 1
    with pytest.raises(RingError, match=r"cut short|too short"):
        RingReader(path)
    reader.close()


@given(
    st.builds(
        Record,
        st.integers(0, 2**64 - 1) | st.just(3),
        st.integers(0, 2**64 - 1) | st.integers(0, HEADER_BYTES + CAPACITY),
        st.integers(0, 2**64 - 1) | st.just(100),
        st.just(5) | st.integers(0, 2**64 - 1),
    )
)
def test_an_announced_record_is_checked_before_it_is_followed(record: Record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ring"
        writer = RingWriter.create(path, capacity_bytes=CAPACITY, epoch=5)
        published = put(writer, 3, 100)
        reader = RingReader(path)
        if record != published:
            with pytest.raises(RingError):
                reader.read(record)
        reader.close()
        writer.close()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 400) | st.integers(0, HEADER_BYTES + CAPACITY - 9),
            st.binary(min_size=1, max_size=8),
        ),
        max_size=8,
    )
)
def test_a_ring_of_random_bytes_gives_its_records_or_an_error(changes: list[tuple[int, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ring"
        writer = RingWriter.create(path, capacity_bytes=CAPACITY)
        published = [put(writer, step, 1000) for step in range(3)]
        for offset, data in changes:
            damage(path, offset + (HEADER_BYTES if offset % 2 else 0), data[: CAPACITY // 2])
        try:
            reader = RingReader(path)
        except RingError:
            pass
        else:
            for record in published:
                try:
                    assert len(reader.read(record)) == 1000
                    list(reader.unreleased())
                except RingError:
                    continue
            reader.close()
        writer.close()


# ---- killed producers

KILLED_WRITER = """
import random, sys
from bagelplane.shm.ring import RingWriter

writer = RingWriter.create(sys.argv[1], capacity_bytes=int(sys.argv[2]))
sizes = random.Random(int(sys.argv[3]))
print("ready", flush=True)
step = 0
while True:
    length = sizes.randrange(6000)
    writer.release(step - 3)
    writer.reserve(length)[:] = random.Random(step).randbytes(length)
    writer.publish(step)
    step += 1
"""


def test_what_a_killed_producer_had_published_is_whole(path: Path) -> None:
    """Killed at random moments, its file holds whole records only, and the next producer takes it over."""
    rounds, seed = 12, 20261
    moments = random.Random(seed)
    checked = 0
    for round_number in range(rounds):
        arguments = [sys.executable, "-c", KILLED_WRITER, str(path), str(CAPACITY), str(round_number)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(moments.random() * 0.05)  # the moment of death, not a wait for anything
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_SECONDS)
        reader = RingReader(path)
        for record in reader.unreleased():
            assert bytes(reader.read(record)) == content_of(record.step, record.length_bytes), (
                f"torn: seed {seed}, round {round_number}, {record}"
            )
            checked += 1
        reader.close()
    print(f"{rounds} rounds, {checked} records whole, seed {seed}")
    assert checked > rounds
    last = RingWriter.create(path, capacity_bytes=CAPACITY)
    assert last.unreleased() == []
    last.close(unlink=True)


def test_reader_in_another_process_sees_whole_records_while_the_producer_writes(path: Path) -> None:
    code = textwrap.dedent(
        """
        import random, sys
        from bagelplane.shm.ring import Record, RingReader
        reader = RingReader(sys.argv[1])
        for line in sys.stdin:
            record = Record(*map(int, line.split()))
            data = bytes(reader.read(record))
            assert data == random.Random(record.step).randbytes(record.length_bytes), record
            assert reader.is_intact(record)
            print(record.step, flush=True)
        """
    )
    writer = RingWriter.create(path, capacity_bytes=CAPACITY)
    sizes = random.Random(7)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        reader_side = process.stdout

        def acknowledge() -> None:
            for line in reader_side:
                writer.release(int(line))

        thread = threading.Thread(target=acknowledge)
        thread.start()
        for step in range(2000):
            length = sizes.randrange(7000)
            writer.reserve(length, timeout_seconds=WAIT_SECONDS)[:] = content_of(step, length)
            record = writer.publish(step)
            process.stdin.write(f"{step} {record.offset_bytes} {length} {record.epoch}\n")
            process.stdin.flush()
        process.stdin.close()
        thread.join(WAIT_SECONDS)
        assert process.wait(WAIT_SECONDS) == 0
    assert writer.used_bytes == 0
    writer.close()
