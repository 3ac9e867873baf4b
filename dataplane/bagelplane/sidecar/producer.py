"""The producer: one process for one data-parallel rank, from the rank's stream into its ring.

    python -m bagelplane.sidecar.producer --control-fd N

Started by the supervisor as a fresh interpreter and told all it needs by a `setup` frame. The main thread
plans, decodes and writes the ring; the control thread frees what was acknowledged, and ends the process when
the supervisor says so or is gone. What goes wrong is told as `failed{code, message, fix, fatal}`; tracebacks
go to the log, and only for what no user could mend.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from bagelplane.costs import Costs
from bagelplane.engine.layout import write_planes
from bagelplane.engine.pack import Pack
from bagelplane.engine.pack_rows import rows_of
from bagelplane.errors import (
    BagelplaneError,
    DataError,
    RingError,
    SnapshotError,
    SpecError,
    StorageError,
    TransientStorageError,
)
from bagelplane.logs import LogFormat, configure_logs
from bagelplane.shm.record import Image, record_size, write_record
from bagelplane.shm.ring import RingCutError, RingStoppedError, RingWriter
from bagelplane.sidecar.control import Frame, receive_frame, send_frame
from bagelplane.sidecar.store import open_snapshot_store
from bagelplane.spec import BagelDataset

DEFAULT_STREAM_FACTORY = "bagelplane.stream:open_rank_stream"
PROGRESS_SECONDS = 5.0
"""How often planning forward says how far it is."""
_PR_SET_PDEATHSIG = 1
_CODES: Sequence[tuple[type[BagelplaneError], str]] = (
    (SpecError, "spec"),
    (DataError, "data"),
    (StorageError, "storage"),
    (TransientStorageError, "storage"),
    (RingError, "ring"),
    (SnapshotError, "snapshot"),
)

log = logging.getLogger("bagelplane.sidecar.producer")  # not __name__: this module is __main__


class RankStreamLike(Protocol):
    """What the producer needs of `bagelplane.stream.RankStream`."""

    costs: Costs

    def next_pack(self, allocate: Callable[[Pack], Sequence[Image]]) -> Pack: ...
    def skip_to(self, step: int, *, on_progress: Callable[[int], None] | None = None) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ProducerSetup:
    """All that a producer is told; JSON-able."""

    dataset: dict[str, Any]
    rank: int
    ring_number: int
    """Of the pod's rings."""
    world_size: int
    ring_path: str
    ring_bytes: int
    ring_mode: int
    decode_threads: int
    producers: int
    """How many there are in the pod."""
    start_step: int
    """Packs behind `state`."""
    target_step: int
    """Packs behind the first one to be published; those between are planned only."""
    state: dict[str, Any] | None = None
    known_bad: dict[str, str] = field(default_factory=dict)
    stream_factory: str = DEFAULT_STREAM_FACTORY
    log_level: int = logging.INFO
    log_format: LogFormat = "text"

    def as_frame(self) -> Frame:
        return {"type": "setup", **asdict(self)}


class Producer:
    """One rank's stream, ring and control channel."""

    def __init__(self, setup: ProducerSetup, control: socket.socket) -> None:
        self._setup = setup
        self._control, self._sending = control, threading.Lock()
        self._dataset = BagelDataset.from_mapping(setup.dataset)
        self._ring: RingWriter | None = None
        self._stopping = threading.Event()
        self._reserved: memoryview | None = None
        self._pixel_format = self._dataset.spec.dataplane.pixel_format
        self._decoded: list[np.ndarray] = []  # where floats travel: the pixels that they are made of
        self._waited_seconds = 0.0
        self._step = setup.target_step

    def run(self) -> int:
        """Produces until told to stop. The exit status: 0 after a stop, that of the error otherwise."""
        try:
            setup = self._setup
            self._ring = RingWriter.create(
                setup.ring_path, capacity_bytes=setup.ring_bytes, mode=setup.ring_mode
            )
            threading.Thread(target=self._listen, args=(self._ring,), name="control", daemon=True).start()
            self._produce(self._ring)
        except RingStoppedError:
            pass
        except BagelplaneError as error:
            if not self._stopping.is_set():
                self._send_failure(error)
                return error.exit_code
        except BrokenPipeError:
            return 0  # the supervisor is gone, and its rank with it
        except Exception as error:
            if not self._stopping.is_set():
                log.exception("rank %d: the producer failed", self._setup.rank)
                what = f"the producer of rank {self._setup.rank} failed: {type(error).__name__}: {error}"
                self._send_failure(BagelplaneError(what, fix="the sidecar's log has more"))
                return 1
        return 0

    def log_subject(self) -> Mapping[str, int]:
        """What its log lines are about, whatever thread writes them: the step being made."""
        return {"rank": self._setup.rank, "step": self._step}

    # -- main thread

    def _produce(self, ring: RingWriter) -> None:
        stream = self._open_stream()
        try:
            self._plan_forward(stream)
            ready = {"epoch": ring.epoch, "ring_path": str(ring.path), "ring_bytes": ring.capacity_bytes}
            state = stream.state() if self._step or self._setup.state is not None else None
            self._send({"type": "ready", "next_step": self._step, "state": state, **ready})
            while not self._stopping.is_set():
                self._produce_one(stream, ring)
        finally:
            stream.close()

    def _open_stream(self) -> RankStreamLike:
        setup = self._setup
        module, factory = load_factory(setup.stream_factory)
        topology = module.Topology(
            rank=setup.rank,
            world_size=setup.world_size,
            num_workers=self._dataset.spec.sharding.workers_per_rank,
        )
        stream: RankStreamLike = factory(
            self._dataset,
            topology,
            state=setup.state,
            decode_threads=setup.decode_threads,
            known_bad=setup.known_bad,
            on_bad_images=self._keep_bad_images,
            producers=setup.producers,
            on_wait=self._tell_wait,
        )
        at = setup.state.get("step") if setup.state is not None else setup.start_step
        if at != setup.start_step:
            raise SnapshotError(
                "a state is of another step than it was saved under",
                got=f"step {at}",
                expected=f"step {setup.start_step}",
                fix="resume from another snapshot or checkpoint",
            )
        return stream

    def _plan_forward(self, stream: RankStreamLike) -> None:
        """From the state given to the step wanted, without pixels."""
        setup = self._setup
        distance = setup.target_step - setup.start_step
        if distance <= 0:
            return
        log.info(
            "rank %d: planning forward from step %d to %d", setup.rank, setup.start_step, setup.target_step
        )
        started = told = time.monotonic()

        def tell(step: int) -> None:
            nonlocal told
            now = time.monotonic()
            if now - told < PROGRESS_SECONDS:
                return
            told = now
            done = step - setup.start_step
            rate = done / (now - started)
            log.info(
                "rank %d: planned %d of %d packs, %.1f a second, %.0f s left",
                setup.rank, done, distance, rate, (distance - done) / rate,
            )  # fmt: skip

        stream.skip_to(setup.target_step, on_progress=tell)
        log.info("rank %d: planned %d packs in %.2f s", setup.rank, distance, time.monotonic() - started)

    def _produce_one(self, stream: RankStreamLike, ring: RingWriter) -> None:
        started = time.monotonic()
        self._waited_seconds = 0.0
        self._reserved = None
        pack = stream.next_pack(self._allocate)
        place = self._take_reserved()
        if pack.step != self._step:
            raise RuntimeError(f"the stream gave step {pack.step} where {self._step} was to come")
        # Once more: what the stream found out while decoding (its state, say) may differ from the plan.
        places = write_record(pack, place, self._pixel_format)
        if self._pixel_format == "float32":
            write_planes(pack, self._decoded, places)
            self._decoded = []
        record = ring.publish(pack.step)
        self._step += 1
        self._send(
            {
                "type": "published",
                "step": record.step,
                "offset_bytes": record.offset_bytes,
                "length_bytes": record.length_bytes,
                "epoch": record.epoch,
                "state": pack.state,
                "tokens": int(pack.scalars.get("sequence_length", 0)),
                "images": len(pack.image_shapes),
                "pixel_bytes": sum(3 * height * width for height, width in pack.image_shapes),
                "work_seconds": time.monotonic() - started - self._waited_seconds,
                "ring_wait_seconds": self._waited_seconds,
                "costs": stream.costs.as_json(),
                "drops": pack.state.get("drops", {}),
                "rows": self._rows_of(pack),
            }
        )

    def _rows_of(self, pack: Pack) -> dict[str, Any] | None:
        """For the log of rows, if one is kept; a stream that tells no plan has none."""
        if pack.plan is None or not self._dataset.spec.snapshots.lineage:
            return None
        return rows_of(pack.plan, [group.name for group in self._dataset.spec.groups]).as_json()

    def _allocate(self, pack: Pack) -> list[Image]:
        """A place in the ring for the pack: waits while the trainer holds all of it."""
        assert self._ring is not None
        started = time.monotonic()
        self._reserved = None
        size = record_size(pack, self._pixel_format)
        if not self._ring.has_room(size):
            self._send({"type": "no_room", "step": self._step})
        buffer = self._ring.reserve(size)
        self._waited_seconds += time.monotonic() - started
        self._reserved = buffer
        places = write_record(pack, buffer, self._pixel_format)
        if self._pixel_format == "uint8":
            return places
        self._decoded = [np.empty((*shape, 3), np.uint8) for shape in pack.image_shapes]
        return list(self._decoded)

    def _take_reserved(self) -> memoryview:
        place, self._reserved = self._reserved, None
        if place is None:
            raise RuntimeError("the stream finished a pack without asking for its place")
        return place

    def _keep_bad_images(self, images: Mapping[str, str]) -> None:
        """Durable first, then known to the supervisor, and only then (when this returns) published."""
        store = open_snapshot_store(self._dataset)
        if store is not None:
            store.write_known_bad(self._setup.rank, self._step, images)
        self._send({"type": "known_bad", "images": dict(images)})

    def _tell_wait(self, what: str) -> None:
        """From any thread: the store is away, or (empty) back."""
        if what:
            log.warning("rank %d: waiting until the store is back: %s", self._setup.rank, what)
        with contextlib.suppress(OSError):
            self._send({"type": "store", "away": what})

    def _send(self, frame: Frame) -> None:
        with self._sending:
            send_frame(self._control, frame)

    def _send_failure(self, error: BagelplaneError) -> None:
        frame = {
            "type": "failed",
            "code": error_code(error),
            "message": BagelplaneError.__str__(_without_fix(error)),
            "fix": error.fix,
            "exit_code": error.exit_code,
            # What passes by itself, or a new ring mends, is tried again by the supervisor; so is what nobody foresaw.
            "fatal": not isinstance(error, (TransientStorageError, RingCutError))
            and type(error) is not BagelplaneError,
        }
        try:
            self._send(frame)
        except OSError:
            log.error("rank %d: %s", self._setup.rank, error)

    # -- control thread

    def _listen(self, ring: RingWriter) -> None:
        while True:
            frame = receive_frame(self._control)
            if frame is None:
                # Nobody is left to produce for: not even an orderly end is worth the memory in the meantime.
                os._exit(1)
            if frame["type"] == "ack":
                ring.release(frame["step"])
            elif frame["type"] == "stop":
                self._stopping.set()
                ring.stop()


def error_code(error: BagelplaneError) -> str:
    """The protocol's code for an error of ours."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), "internal")


def load_factory(path: str) -> tuple[ModuleType, Callable[..., Any]]:
    """Module and function that `package.module:function` names. SpecError when there is no such thing."""
    name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(name)
        factory = getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"the stream factory {path!r} cannot be loaded: {error}") from None
    assert callable(factory)
    return module, factory


def _without_fix(error: BagelplaneError) -> BagelplaneError:
    return BagelplaneError(error.what, got=error.got, expected=error.expected)


def _end_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when its parent dies. (The end of the control channel says so too.)"""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the request
        os._exit(1)


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description="One rank's producer; started by the sidecar's supervisor.")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args()
    _end_with_parent(arguments.parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the supervisor decides: a group's signal must not tear a pack
    control = socket.socket(fileno=arguments.control_fd)
    frame = receive_frame(control)
    if frame is None:
        os._exit(1)
    del frame["type"]
    setup = ProducerSetup(**frame)
    producer = Producer(setup, control)
    text_format = f"%(asctime)s %(levelname)s rank={setup.rank} %(name)s: %(message)s"
    configure_logs(setup.log_level, setup.log_format, text_format=text_format, subject=producer.log_subject)
    status = producer.run()
    logging.shutdown()
    # Not the interpreter's way out: it would wait for decode threads, and those may wait for storage.
    os._exit(status)


if __name__ == "__main__":
    main()
