"""What hangs, or is made to hang: it disturbs nobody else, and whoever waits for it is told its name in time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagelplane.errors import ProtocolError
from bagelplane.shm.protocol import Hello, StatusRequest, encode
from tests.integration.sidecar_harness import (
    DEADLINE_SECONDS,
    Sidecar,
    digest,
    fetch,
    free_port,
    make_dataset,
    undisturbed,
    wait_for,
)

pytestmark = pytest.mark.timeout(400)  # on a busy machine, a sidecar alone may take two minutes to start

HANGING_CLIENTS = 20
"""Of each kind."""
WAIT_SECONDS = 7.0


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    port = free_port()
    sidecar = Sidecar(tmp_path, make_dataset(snapshots=None), status_port=port)
    sidecar.port = port
    try:
        sidecar.wait_serving()
        yield sidecar
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(sidecar.pid, signal.SIGCONT)
        sidecar.kill()


def descriptors(sidecar: Sidecar) -> int:
    return sum(1 for _ in Path(f"/proc/{sidecar.pid}/fd").iterdir())


@pytest.mark.slow
def test_clients_that_hang_at_the_socket_and_at_the_status_port_disturb_nothing(sidecar: Sidecar) -> None:
    dataset = make_dataset(snapshots=None)
    greeting = encode(Hello(1, "hangs"))
    at_the_socket = (
        b"",  # says nothing
        greeting[:7],  # stops within a message
        greeting,  # never attaches
        greeting + encode(StatusRequest()) * 100,  # never reads its answers
    )
    at_the_port = (
        b"",
        b"GET /v1/status HTTP/1.1\r\nHost: x\r\n",  # stops within a request
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 200,  # never reads its answers
    )
    with sidecar.reader(timeout_seconds=120) as reader:
        digests = [digest(*reader.next_pack()) for _ in range(10)]
        before = descriptors(sidecar)
        with contextlib.ExitStack() as cleanup:
            for kind, address, texts in (
                (socket.AF_UNIX, str(sidecar.directory / "sidecar.sock"), at_the_socket),
                (socket.AF_INET, ("127.0.0.1", sidecar.port), at_the_port),
            ):
                for text in texts * HANGING_CLIENTS:
                    hanging = cleanup.enter_context(socket.socket(kind))
                    hanging.connect(address)
                    hanging.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        hanging.send(text)
            for _ in range(10):
                digests += [digest(*reader.next_pack()) for _ in range(20)]
                assert fetch(sidecar.port, "/healthz")[0] == fetch(sidecar.port, "/v1/status")[0] == 200
            assert descriptors(sidecar) > before
        wait_for(lambda: descriptors(sidecar) <= before, "the end of the hanging clients' connections", 60)
        digests += [digest(*reader.next_pack()) for _ in range(10)]
    assert digests == undisturbed(dataset, 0, 1, len(digests))
    assert sidecar.terminate() == 0, sidecar.tail()
    assert "Traceback" not in sidecar.log.read_text()


@pytest.mark.slow
def test_a_sidecar_that_is_stopped_is_named_to_who_waits_for_packs_and_to_who_comes(sidecar: Sidecar) -> None:
    named = rf"process {sidecar.pid}\) has said nothing for \d+ s, .*it is stopped"
    with sidecar.reader(timeout_seconds=120) as reader:
        reader.next_pack()
        reader._connection.timeout_seconds = WAIT_SECONDS
        os.kill(sidecar.pid, signal.SIGSTOP)
        with pytest.raises(ProtocolError, match=rf"waited 7 s for the next pack of rank 0 .*{named}"):
            list(reader.packs())  # those that were announced before are still given
        with pytest.raises(
            ProtocolError, match=rf"waited 7 s for the next pack of rank 0 .*connected to .*{named}"
        ):
            reader.next_pack()
        os.kill(sidecar.pid, signal.SIGCONT)
        reader._connection.timeout_seconds = 120
        reader.next_pack()


@pytest.mark.slow
def test_a_socket_that_was_deleted_is_named_while_nobody_makes_it_again(sidecar: Sidecar) -> None:
    path = sidecar.directory / "sidecar.sock"
    os.kill(sidecar.pid, signal.SIGSTOP)
    path.unlink()
    with sidecar.reader(timeout_seconds=2) as reader:
        with pytest.raises(ProtocolError, match=rf"waited 2 s .*no sidecar at {path} \(No such file"):
            reader.next_pack()
        os.kill(sidecar.pid, signal.SIGCONT)
        wait_for(path.exists, "the socket", DEADLINE_SECONDS)
        reader.close()
    with sidecar.reader(timeout_seconds=60) as reader:
        reader.next_pack()
