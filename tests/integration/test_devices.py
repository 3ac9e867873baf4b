"""In which order a device is asked for things: with one that writes down what it is asked for, and a real ring."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bagelplane.client import PackedLoader, loader
from bagelplane.client.devices import tensor_over
from bagelplane.engine.layout import assemble
from tests.integration.fake_sidecar import RING_BYTES, FakeSidecar, make_pack, same
from tests.integration.sidecar_harness import wait_for

TIMEOUT_SECONDS = 120.0


class FakeDevice:
    """Keeps its promises and no more: a copy is made only when the mark behind it is waited for, or followed."""

    def __init__(self, sidecar: list[FakeSidecar]) -> None:
        self.device = torch.device("cpu")
        self.log: list[str] = []
        self.registered: dict[int, int] = {}
        self.refuses = False
        self._sidecar = sidecar
        self._in_queue = threading.local()

    def register(self, address: int, size_bytes: int) -> None:
        if self.refuses:
            raise RuntimeError("CUDA error: operation not permitted")
        self.log.append("register")
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        self.log.append("unregister")
        del self.registered[address]

    @contextlib.contextmanager
    def queue(self) -> Iterator[None]:
        self._in_queue.yes = True
        yield
        self._in_queue.yes = False

    def upload(self, array: np.ndarray) -> torch.Tensor:
        assert self._in_queue.yes, "a copy outside of the device's own queue"
        in_ring = any(
            address <= array.ctypes.data and array.ctypes.data + array.nbytes <= address + size
            for address, size in self.registered.items()
        )
        self.log.append("copy" if in_ring or not self.registered else "copy from elsewhere")
        return tensor_over(array).clone()

    def mark(self) -> int:
        self.log.append("mark")
        return len(self.log)

    def wait(self, mark: int) -> None:
        self.log.append("wait")
        copies = [number for number, what in enumerate(self.log[:mark]) if what == "copy"]
        assert copies
        # Nothing was taken back by the ring before its copy was made.
        self.log.append(f"acknowledged {len(self._sidecar[-1].acknowledged)}")

    def follow(self, mark: int, tensors: Iterable[torch.Tensor]) -> None:
        count = len(list(tensors))
        self.log.append("follow" if count > 10 else f"follow with {count} tensors alone")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def sidecars(tmp_path: Path, stack: ExitStack) -> list[FakeSidecar]:
    made: list[FakeSidecar] = []

    def serve() -> None:
        made.append(FakeSidecar(tmp_path))
        stack.callback(made[-1].crash)

    serve()
    made[0].serve_again = serve  # type: ignore[attr-defined]
    return made


@pytest.fixture
def device(sidecars: list[FakeSidecar], monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    made = FakeDevice(sidecars)
    monkeypatch.setattr(loader, "open_device", lambda device: made)
    return made


def connect(stack: ExitStack, directory: Path, **options: Any) -> PackedLoader:
    options = {"rank": 0, "world_size": 1, "timeout_seconds": TIMEOUT_SECONDS, "device": "meta", **options}
    made = PackedLoader(directory, **options)
    stack.callback(made.close)
    return made


def test_a_slot_is_given_back_when_its_copies_were_made_and_waited_for(
    tmp_path: Path, stack: ExitStack, sidecars: list[FakeSidecar], device: FakeDevice
) -> None:
    packed = connect(stack, tmp_path, prefetch=0)
    for step in range(4):
        del device.log[:]
        batch = next(packed)
        packed.status()  # an answer: the acknowledgement has arrived
        copies = len(make_pack(step)[0].arrays) + 2
        masks = ["copy from elsewhere"] * (0 if "split_lens" in batch else 2)
        register = ["register"] if step == 0 else []
        waited = ["wait", f"acknowledged {step}"]
        assert device.log == [*register, *["copy"] * copies, "mark", *masks, "mark", *waited, "follow"]
        assert sidecars[0].acknowledged == list(range(step + 1))
        assert same(batch, assemble(*make_pack(step)))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_memory_of_each_ring_is_registered_once_and_given_back(
    tmp_path: Path, stack: ExitStack, sidecars: list[FakeSidecar], device: FakeDevice, prefetch: int
) -> None:
    packed = connect(stack, tmp_path, prefetch=prefetch)

    def registrations() -> list[str]:
        return [what for what in device.log if "register" in what]

    for step in range(3):
        assert same(next(packed), assemble(*make_pack(step)))
    assert registrations() == ["register"]
    assert list(device.registered.values()) == [RING_BYTES + 4096]
    sidecars[-1].crash()
    sidecars[0].serve_again()  # type: ignore[attr-defined]
    for step in range(3, 6):
        assert same(next(packed), assemble(*make_pack(step)))
    assert registrations() == ["register", "unregister", "register"]
    packed.close()
    assert registrations() == ["register", "unregister", "register", "unregister"]
    assert device.registered == {}


def test_memory_that_cannot_be_registered_is_said_and_used_all_the_same(
    tmp_path: Path, stack: ExitStack, device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    device.refuses = True
    packed = connect(stack, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert same(next(packed), assemble(*make_pack(0)))
    assert "not page-locked, copies will take longer: CUDA error: operation not permitted" in caplog.text
    packed.close()
    assert "unregister" not in device.log


def test_memory_is_not_given_back_while_a_copy_is_made_from_it(
    tmp_path: Path, stack: ExitStack, sidecars: list[FakeSidecar], device: FakeDevice
) -> None:
    is_slow, entered, go_on = threading.Event(), threading.Event(), threading.Event()
    stack.callback(go_on.set)
    wait = device.wait

    def slow_wait(mark: int) -> None:
        if is_slow.is_set():
            entered.set()
            assert go_on.wait(TIMEOUT_SECONDS)
        wait(mark)

    device.wait = slow_wait  # type: ignore[method-assign]
    packed = connect(stack, tmp_path, prefetch=1)
    next(packed)
    wait_for(lambda: device.log.count("wait") == 2, "the second pack to be converted ahead")
    is_slow.set()
    next(packed)  # which was ready; the third one begins
    assert entered.wait(TIMEOUT_SECONDS)
    closing = threading.Thread(target=packed._tensors.ring_closed)  # type: ignore[attr-defined]
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    assert "unregister" not in device.log
    go_on.set()
    closing.join(TIMEOUT_SECONDS)
    assert device.log.index("unregister") > len(device.log) - device.log[::-1].index("wait") - 1


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_second_real_device_gets_all_tensors(
    tmp_path: Path, stack: ExitStack, sidecars: list[FakeSidecar], prefetch: int
) -> None:
    packed = connect(stack, tmp_path, prefetch=prefetch, dtype=torch.bfloat16)
    for _ in range(3):
        batch = next(packed)
        tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
        assert {tensor.device.type for tensor in tensors} == {"meta"}
        assert batch["padded_images"].dtype == batch["packed_vit_tokens"].dtype == torch.bfloat16
        assert batch["packed_timesteps"].dtype == torch.float32
