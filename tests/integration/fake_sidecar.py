"""A sidecar for tests of the client: one thread a connection, a real ring, packs made up from their step."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bagelplane.engine.pack import Pack
from bagelplane.shm.protocol import (
    CLIENT_MESSAGES,
    SOCKET_NAME,
    Ack,
    Attach,
    Attached,
    Detach,
    Error,
    Hello,
    Message,
    MessageSocket,
    Published,
    Snapshot,
    Snapshotted,
    Status,
    StatusRequest,
    Welcome,
    ring_name,
)
from bagelplane.shm.record import Image, record_size, write_record
from bagelplane.shm.ring import Record, RingStoppedError, RingWriter

RING_BYTES = 128 * 1024
_POLL_SECONDS = 0.02


def make_pack(step: int) -> tuple[Pack, list[Image]]:
    """Pack number `step`, other in every step, with two images of two kinds."""
    random = np.random.RandomState(step)
    shapes = [(28, 14 * (1 + step % 2)), (32, 16)]
    images = [random.randint(0, 256, (*shape, 3)).astype(np.uint8) for shape in shapes]
    patches = 2 * (1 + step % 2)
    ints = {
        name: random.randint(0, 1000, 3)
        for name in (
            "packed_text_ids",
            "packed_text_indexes",
            "packed_position_ids",
            "packed_label_ids",
            "ce_loss_indexes",
        )
    }
    arrays = {
        **ints,
        "packed_latent_position_ids": np.arange(2),
        "packed_vae_token_indexes": np.arange(2) + 5,
        "packed_vit_position_ids": np.arange(patches),
        "packed_vit_token_indexes": np.arange(patches) + 9,
        "vit_token_seqlens": np.array([patches]),
        "mse_loss_indexes": np.arange(2),
        "packed_timesteps": random.randn(2).astype(np.float32),
        "ce_loss_weights": random.rand(3).astype(np.float32),
    }
    scalars = {
        "sequence_length": 12,
        "sample_lens": [5, 7],
        "split_lens": [5, 4, 3],
        "attn_modes": ["causal", "full", "noise"],
        "sample_split_counts": [1, 2],
        "max_num_tokens": 16,
        "use_flex": step % 3 == 2,
        "patchified_vae_latent_shapes": [(2, 1)],
        "batch_data_indexes": [{"data_indexes": [step, 0], "worker_id": 0, "dataset_name": "t2i_pretrain"}],
        "vae_normalisation": None,
        "vit_normalisation": None,
    }
    state = {"step": step + 1, "rng": random.randint(0, 2**31, 20).tolist()}
    return Pack(step, scalars, arrays, shapes, [1], [0], 14, state), images


class FakeSidecar:
    """Serves one rank. `crash` ends it as SIGKILL would; another one may then be started in its place."""

    def __init__(
        self,
        directory: Path,
        *,
        spec_hash: str = "hash",
        unacknowledged: int = 0,
        on_attach: Callable[[int], list[Message]] | None = None,
        publish: bool = True,
        change: Callable[[Published], Published] | None = None,
        make: Callable[[int], tuple[Pack, list[Image]]] = make_pack,
    ) -> None:
        """unacknowledged: where `latest` stands. on_attach: what comes after `attached`, or the error that is
        sent instead, at attach number n (from 1). publish: whether packs are made. change: what is announced
        instead of what is true. make: the packs."""
        self._make = make
        self.directory = directory
        self.spec_hash = spec_hash
        self.unacknowledged = unacknowledged
        self.attaches: list[Attach] = []
        self.acknowledged: list[int] = []
        self.snapshot_answer: Message | None = None
        self.detached = threading.Event()
        self._on_attach = on_attach
        self._publish = publish
        self._owner: MessageSocket | None = None
        self._lock = threading.Lock()
        self._change = change or (lambda message: message)
        self.ring = RingWriter.create(directory / ring_name(0), capacity_bytes=RING_BYTES)
        self._stopping = threading.Event()
        self._connections: list[socket.socket] = []
        self._path = directory / SOCKET_NAME
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._listener.settimeout(_POLL_SECONDS)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def crash(self) -> None:
        """Gone, without a word to anybody."""
        self._stopping.set()
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.ring.stop()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "a thread of the fake sidecar hangs"
        for connection in self._connections:
            connection.close()
        self.ring.close()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            self._connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        messages = MessageSocket(connection, CLIENT_MESSAGES)
        next_step = -1
        with contextlib.suppress(OSError, RingStoppedError):
            while not self._stopping.is_set():
                message = messages.receive(timeout_seconds=_POLL_SECONDS)
                if isinstance(message, Detach):
                    self.detached.set()
                    return
                if isinstance(message, Attach):
                    next_step = self._attach(message, messages)
                elif message is not None:
                    self._answer(message, messages)
                while next_step >= 0 and self._publish and len(self.ring.unreleased()) < 3:
                    with self._lock:
                        if self._owner is not messages:
                            return  # another trainer has the rank now
                        record = self._put(next_step)
                    bell = Published(record.step, record.offset_bytes, record.length_bytes, record.epoch)
                    messages.send(self._change(bell), timeout_seconds=5)
                    next_step += 1

    def _answer(self, message: Message, messages: MessageSocket) -> None:
        answer: Message | None = None
        if isinstance(message, Hello):
            answer = Welcome(1, "bagel-sft", self.spec_hash)
        elif isinstance(message, Ack):
            self.ring.release(message.step)
            self.acknowledged.append(message.step)
            self.unacknowledged = message.step + 1
        elif isinstance(message, Snapshot):
            answer = self.snapshot_answer or Snapshotted(self.unacknowledged, "s3://bucket/snapshots")
        elif isinstance(message, StatusRequest):
            answer = Status({"unacknowledged": self.unacknowledged})
        if answer is not None:
            messages.send(answer, timeout_seconds=5)

    def _attach(self, attach: Attach, messages: MessageSocket) -> int:
        self.attaches.append(attach)
        more = self._on_attach(len(self.attaches)) if self._on_attach else []
        for message in more:
            if isinstance(message, Error):
                messages.send(message, timeout_seconds=5)
                return -1
        resume = attach.resume
        if resume.mode == "state":
            assert resume.state == make_pack((resume.step or 0) - 1)[0].state
        step = {"latest": self.unacknowledged, "none": 0}.get(resume.mode, resume.step)
        assert step is not None
        with self._lock:
            self._owner = messages
            epoch = self.ring.reset()
        messages.send(
            Attached("/elsewhere/" + self.ring.path.name, epoch, RING_BYTES, step, step * attach.world_size),
            timeout_seconds=5,
        )
        for message in more:
            messages.send(message, timeout_seconds=5)
        return step

    def _put(self, step: int) -> Record:
        pack, images = self._make(step)
        place = self.ring.reserve(record_size(pack), timeout_seconds=10)
        for view, image in zip(write_record(pack, place), images, strict=True):
            view[:] = image
        return self.ring.publish(step)


def same(left: Any, right: Any) -> bool:
    """Whether two yielded mappings (NumPy or torch) agree in keys, their order, dtypes, shapes and bits."""
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "shape"):
        one, other = np.asarray(left), np.asarray(right)
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(left) is type(right) and bool(left == right)
