"""Where tensors shall be, apart from the CPU: what copies there, and in which order it happens.

Each method is one thing that a device can do, and for CUDA one call of its library. What is done with them, and when,
is for `tensors`, which is tested with a device that only writes down what it is asked for.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from bagelplane.errors import SpecError

_HOST_REGISTER_READ_ONLY = 0x08
"""cudaHostRegisterReadOnly: memory that is mapped without the right to write is not registered without it."""


class Device(Protocol):
    """A device that copies and computes in queues."""

    @property
    def device(self) -> torch.device: ...
    def register(self, address: int, size_bytes: int) -> None:
        """Page-locks host memory, so that copies from it need no staging and do not wait. RuntimeError."""

    def unregister(self, address: int) -> None:
        """The reverse. No copy from there may be under way."""

    def queue(self) -> AbstractContextManager[Any]:
        """What is asked of torch inside runs in this device's own queue, beside the trainer's."""

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """Begins to copy; the array must stay as it is until a later mark has been waited for."""

    def mark(self) -> Any:
        """The point that the queue has reached."""

    def wait(self, mark: Any) -> None:
        """Returns when the queue is past the mark."""

    def follow(self, mark: Any, tensors: Iterable[torch.Tensor]) -> None:
        """What the caller asks of torch from now on comes after the mark; it may use and free the tensors."""


class PlainDevice:
    """Any device: copies are made when asked for, on the queue of whoever asks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def register(self, address: int, size_bytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass

    def queue(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def upload(self, array: np.ndarray) -> torch.Tensor:
        return tensor_over(array).to(self.device, copy=True)

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        pass

    def follow(self, mark: Any, tensors: Iterable[torch.Tensor]) -> None:
        pass


class CudaDevice:
    """A CUDA device: copies out of page-locked memory on a stream of its own, beside the trainer's kernels."""

    def __init__(self, device: torch.device) -> None:
        self._named = device

    @cached_property
    def device(self) -> torch.device:
        # Looked at when first needed: a trainer may choose its device after it made the loader.
        index = torch.cuda.current_device() if self._named.index is None else self._named.index
        return torch.device("cuda", index)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def register(self, address: int, size_bytes: int) -> None:
        # On a thread that ends: CUDA keeps a refusal as "the last error" of the thread that asked, and torch would
        # raise it there at the next kernel.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._register, self.device, address, size_bytes).result()

    def _register(self, device: torch.device, address: int, size_bytes: int) -> None:
        with torch.cuda.device(device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            _check(runtime.cudaHostRegister(address, size_bytes, _HOST_REGISTER_READ_ONLY))

    def unregister(self, address: int) -> None:
        if not sys.is_finalizing():  # the end of the process does it, too
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            _check(runtime.cudaHostUnregister(address))

    def queue(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        return tensor_over(array).to(self.device, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits sleeps
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def follow(self, mark: torch.cuda.Event, tensors: Iterable[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(stream)  # its memory is not used again before this stream is done with it


def parse_device(device: torch.device | str | int) -> torch.device:
    """SpecError for what is no device, or none that this process can use."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise SpecError(
            "device is not understood", got=repr(device), expected=f"one that torch knows ({error})"
        ) from None
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise SpecError(
            "device is not there", got=str(parsed), fix="install a torch with CUDA, or leave device out"
        )
    return parsed


def open_device(device: torch.device) -> Device:
    """What copies to `device`."""
    return CudaDevice(device) if device.type == "cuda" else PlainDevice(device)


def _check(code: Any) -> None:
    """Raises what CUDA's runtime says of a call that failed, a RuntimeError."""
    if int(code) != 0:
        raise torch.cuda.CudaError(int(code))


class _Writable:
    """The memory of an array, said to be writable."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array  # keeps the memory mapped
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def tensor_over(array: np.ndarray) -> torch.Tensor:
    """A tensor in the array's memory, only to be read. (torch warns about arrays that cannot be written.)"""
    return torch.from_numpy(np.asarray(_Writable(array)))
