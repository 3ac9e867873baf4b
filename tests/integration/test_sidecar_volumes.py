"""A real volume of 64 MiB that is too small, fills up, shrinks, or whose ring somebody cuts: errors, and no SIGBUS.

The sidecar lives in a mount namespace of its own, so nothing is mounted for anybody else; the tests reach its volume
through /proc/<pid>/root.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bagelplane.client.reader import NumpyReader
from bagelplane.errors import RingError
from bagelplane.shm.ring import HEADER_BYTES
from bagelplane.sidecar.rank import _describe_exit
from bagelplane.spec import BagelDataset
from tests.integration.sidecar_harness import (
    SERVING_SECONDS,
    Sidecar,
    digest,
    make_dataset,
    undisturbed,
    wait_for,
)

# Five sidecars start; on a busy machine one alone may take two minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

VOLUME_BYTES = 64 << 20
RING_BYTES = 8 << 20

Start = Callable[..., Sidecar]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a sidecar on a volume of its own; `reader` and paths below its `directory` work from here."""
    as_root = os.geteuid() == 0
    unshare = ["unshare", "--mount", *([] if as_root else ["--map-root-user"])]
    if subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.fail("needs a mount namespace: run as root with CAP_SYS_ADMIN, or allow user namespaces")
    with contextlib.ExitStack() as cleanup:
        # A short path: the one of a socket may have 107 bytes, with /proc/<pid>/root before it.
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="bp-", dir="/tmp")))

        def start_one(dataset: BagelDataset, *, serves: bool = True, **settings: Any) -> Sidecar:
            (folder / "run").mkdir()
            mount = f'mount -t tmpfs -o size={VOLUME_BYTES} none {folder}/run && exec "$@"'
            sidecar = Sidecar(folder, dataset, before=(*unshare, "sh", "-c", mount, "sh"), **settings)
            cleanup.callback(sidecar.kill)
            if serves:
                wait_for(
                    lambda: "serving" in sidecar.log.read_text() or sidecar.popen.poll(),
                    "the sidecar",
                    SERVING_SECONDS,
                )
            sidecar.directory = Path(f"/proc/{sidecar.pid}/root{folder}/run")
            return sidecar

        yield start_one


def dataset_with_ring(size_bytes: int, **orders: str) -> BagelDataset:
    data = make_dataset(snapshots=None, **orders).to_mapping()
    data["spec"]["dataplane"]["ring"]["size"] = str(size_bytes)
    return BagelDataset.from_mapping(data)


def take(reader: NumpyReader, count: int) -> list[str]:
    return [digest(*reader.next_pack()) for _ in range(count)]


def fill(path: Path) -> None:
    """Writes until the volume has no byte left."""
    with pytest.raises(OSError, match="No space left"):
        path.write_bytes(bytes(VOLUME_BYTES))


def remount(sidecar: Sidecar, size_bytes: int) -> subprocess.CompletedProcess[str]:
    inside = str(sidecar.directory).partition("/root")[2]
    command = [
        "nsenter",
        f"--target={sidecar.pid}",
        "--mount",
        "mount",
        "-o",
        f"remount,size={size_bytes}",
        inside,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_ring_of_512_mib_is_refused_on_a_volume_of_64_mib_with_both_numbers(start: Start) -> None:
    sidecar = start(dataset_with_ring(512 << 20), serves=False)
    assert sidecar.wait() == 6
    text = sidecar.log.read_text()
    assert "the volume is too small for the ring" in text
    assert f"expected {(512 << 20) + HEADER_BYTES} bytes" in text
    free = int(text.partition("got ")[2].split()[0])
    assert VOLUME_BYTES - 65536 <= free <= VOLUME_BYTES
    assert "Traceback" not in text


def test_a_volume_that_fills_up_or_shrinks_later_takes_nothing_from_a_ring(start: Start) -> None:
    dataset = dataset_with_ring(RING_BYTES)
    sidecar = start(dataset)
    with sidecar.reader(timeout_seconds=120) as reader:
        digests = take(reader, 3)
        filler = sidecar.directory / "filler"
        fill(filler)
        digests += take(reader, 1200)  # once around and more: through pages that were never touched before
        os.kill(reader.status()["ranks"][0]["producer_pid"], signal.SIGKILL)
        digests += take(reader, 10)  # by a producer that took the ring over, with no byte free
        assert remount(sidecar, VOLUME_BYTES // 4).returncode != 0, (
            "the kernel takes no pages that are in use"
        )
        filler.unlink()
        assert remount(sidecar, 2 * RING_BYTES).returncode == 0
        digests += take(reader, 50)
    assert digests == undisturbed(dataset, 0, 1, len(digests))
    assert "SIGBUS" not in sidecar.log.read_text()


@pytest.mark.parametrize("left_bytes", [0, HEADER_BYTES + RING_BYTES // 2])
def test_a_ring_that_somebody_cuts_is_made_again_and_no_byte_is_lost(start: Start, left_bytes: int) -> None:
    dataset = dataset_with_ring(RING_BYTES)
    sidecar = start(dataset)
    with sidecar.reader(timeout_seconds=120) as reader:
        digests = take(reader, 3)
        os.truncate(sidecar.directory / "ring-0.bin", left_bytes)
        digests += take(reader, 100)
        assert (sidecar.directory / "ring-0.bin").stat().st_size == HEADER_BYTES + RING_BYTES
    assert digests == undisturbed(dataset, 0, 1, len(digests))
    text = sidecar.log.read_text()
    assert f"was cut to {left_bytes} of" in text or "was cut short" in text or "SIGBUS" in text
    assert "Traceback" not in text


def test_a_ring_that_was_cut_and_has_no_room_any_more_is_an_error_with_both_numbers(start: Start) -> None:
    sidecar = start(dataset_with_ring(RING_BYTES))
    with sidecar.reader(timeout_seconds=120) as reader:
        take(reader, 3)
        os.truncate(sidecar.directory / "ring-0.bin", HEADER_BYTES)
        assert remount(sidecar, RING_BYTES // 2).returncode == 0
        expected = f"too small for the ring; got \\d+ bytes free.*expected {RING_BYTES + HEADER_BYTES} bytes"
        with pytest.raises(RingError, match=expected) as caught:
            take(reader, 1000)
    assert "raise the volume's sizeLimit" in caught.value.fix


def test_a_producer_that_ends_by_sigbus_is_said_to_have_lost_its_ring_and_comes_again(start: Start) -> None:
    assert _describe_exit(-signal.SIGBUS) == "killed by SIGBUS: the ring's volume shrank or its file was cut"
    dataset = dataset_with_ring(RING_BYTES)
    sidecar = start(dataset)
    with sidecar.reader(timeout_seconds=120) as reader:
        digests = take(reader, 3)
        os.kill(reader.status()["ranks"][0]["producer_pid"], signal.SIGBUS)
        said = "killed by SIGBUS: the ring's volume shrank or its file was cut"
        wait_for(lambda: said in sidecar.log.read_text(), "the producer's end in the log")
        digests += take(reader, 3)
    assert digests == undisturbed(dataset, 0, 1, 6)
