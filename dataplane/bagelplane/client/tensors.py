"""Packs as torch tensors: in the CPU's memory, or on a device where the pixels are normalised after the copy.

A device gets each pixel once, as it travelled, and takes floats out of a table of 256 that NumPy made: so their bits
are those of the CPU, whatever arithmetic the device has.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from bagelplane.client.conversion import Conversion, to_arrays
from bagelplane.client.devices import Device
from bagelplane.engine.layout import arrange, emitted_pixels
from bagelplane.engine.masks import attention_mask
from bagelplane.engine.pack import Pack
from bagelplane.engine.pixels import float_tables
from bagelplane.shm.record import Image

logger = logging.getLogger(__name__)


class Tensors(Protocol):
    """Makes a trainer's mapping in two steps: `convert` on any thread, `hand_over` on the trainer's."""

    def convert(self, pack: Pack, images: Sequence[Image]) -> Any: ...
    def hand_over(self, converted: Any) -> dict[str, Any]: ...


class CpuTensors:
    """In the CPU's memory: NumPy's arrays, taken over."""

    def __init__(self, conversion: Conversion) -> None:
        self._conversion = conversion
        self._dtype = _torch_dtype(conversion)

    def convert(self, pack: Pack, images: Sequence[Image]) -> dict[str, Any]:
        conversion = replace(self._conversion, dtype=None)
        mapping = {key: _as_tensors(value) for key, value in to_arrays(pack, images, conversion).items()}
        if conversion.normalise:
            for key in {conversion.vae_key, conversion.vit_key} & mapping.keys():
                mapping[key] = self._cast(mapping[key])
        return mapping

    def hand_over(self, converted: dict[str, Any]) -> dict[str, Any]:
        return converted

    def _cast(self, pixels: Any) -> Any:
        return (
            [each.to(self._dtype) for each in pixels] if isinstance(pixels, list) else pixels.to(self._dtype)
        )


class DeviceTensors:
    """On another device. Knows of the ring's memory, to have it page-locked while copies are made from it."""

    def __init__(self, conversion: Conversion, device: Device) -> None:
        self._conversion = conversion
        self._device = device
        self._dtype = _torch_dtype(conversion)
        self._tables: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._registered: int | None = None
        # The ring may go (its sidecar did) while another thread copies from it.
        # Reentrant: what ends a loader that nobody closed may run within a conversion of its own.
        self._copying = threading.RLock()

    # -- the ring's memory

    def ring_opened(self, address: int, size_bytes: int) -> None:
        with self._copying:
            try:
                self._device.register(address, size_bytes)
            except RuntimeError as error:
                logger.warning("the ring's memory is not page-locked, copies will take longer: %s", error)
            else:
                self._registered = address

    def ring_closed(self) -> None:
        with self._copying:
            address, self._registered = self._registered, None
            if address is not None:
                self._device.unregister(address)

    # -- packs

    def convert(self, pack: Pack, images: Sequence[Image]) -> tuple[dict[str, Any], Any]:
        """(mapping, mark behind all that is still to be done for it). All copies from `images` have been made."""
        conversion, device = self._conversion, self._device
        conversion.check_pixels(images)
        with self._copying, device.queue():
            arrays: Any = {name: device.upload(array) for name, array in pack.arrays.items()}
            pixels = [device.upload(image) for image in images]
            copied = device.mark()
            mapping = arrange(
                replace(pack, arrays=arrays),
                vae=(conversion.vae_key, partial(self._vae_pixels, pack, pixels)),
                vit=(conversion.vit_key, partial(self._vit_pixels, pack, pixels)),
                array=lambda tensor: tensor,
                mask=self._mask if conversion.masks else None,
            )
            ready = device.mark()
            device.wait(copied)
        return mapping, ready

    def hand_over(self, converted: tuple[dict[str, Any], Any]) -> dict[str, Any]:
        mapping, ready = converted
        self._device.follow(ready, _tensors_in(mapping))
        return mapping

    def _mask(self, split_lens: Sequence[int], attn_modes: Sequence[str]) -> torch.Tensor:
        return self._device.upload(attention_mask(split_lens, attn_modes))

    def _vae_pixels(self, pack: Pack, pixels: list[torch.Tensor]) -> Any:
        emitted = emitted_pixels(pack, "vae")
        if not self._conversion.pad:
            return [self._whole(pixels[number], normalisation) for _, number, normalisation in emitted]
        shapes = [pack.image_shapes[number] for number in pack.vae_images]
        height, width = (max((shape[side] for shape in shapes), default=0) for side in (0, 1))
        padded = self._new(len(shapes), 3, height, width)
        for place, number, normalisation in emitted:
            rows, columns = shapes[place]
            padded[place, :, :rows, :columns] = self._planes(pixels[number], normalisation)
        return padded

    def _vit_pixels(self, pack: Pack, pixels: list[torch.Tensor]) -> Any:
        emitted = emitted_pixels(pack, "vit")
        if not self._conversion.patchify:
            return [self._whole(pixels[number], normalisation) for _, number, normalisation in emitted]
        patch = pack.patch_size
        grids = [(height // patch, width // patch) for height, width in pack.image_shapes]
        total = sum(grids[number][0] * grids[number][1] for number in pack.vit_images)
        tokens = self._new(total, patch * patch * 3)
        begin = 0
        for _, number, normalisation in emitted:
            rows, columns = grids[number]
            end = begin + rows * columns
            last = self._channels_last(pixels[number], normalisation)
            cut = last.reshape(rows, patch, columns, patch, 3).permute(0, 2, 1, 3, 4)
            tokens[begin:end].view(cut.shape).copy_(cut)
            begin = end
        return tokens

    def _new(self, *shape: int) -> torch.Tensor:
        dtype = self._dtype if self._conversion.normalise else torch.uint8
        return torch.zeros(shape, dtype=dtype, device=self._device.device)

    def _whole(self, pixels: torch.Tensor, normalisation: Any) -> torch.Tensor:
        # An image that is emitted twice is two images.
        if not self._conversion.normalise:
            return pixels.clone()
        return self._planes(pixels, normalisation).clone(memory_format=torch.contiguous_format)

    def _planes(self, pixels: torch.Tensor, normalisation: Any) -> torch.Tensor:
        """Floats [3, h, w] of an image, maybe in the memory of `pixels`."""
        if pixels.dtype != torch.uint8:
            return pixels.to(self._dtype)
        return self._floats(pixels, normalisation).permute(2, 0, 1)

    def _channels_last(self, pixels: torch.Tensor, normalisation: Any) -> torch.Tensor:
        """[h, w, 3] of an image: floats, or bytes where those are asked for."""
        if pixels.dtype != torch.uint8:
            return pixels.permute(1, 2, 0).to(self._dtype)
        return self._floats(pixels, normalisation) if self._conversion.normalise else pixels

    def _floats(self, rgb: torch.Tensor, normalisation: Any) -> torch.Tensor:
        """Floats [h, w, 3] of uint8 [h, w, 3]."""
        table, channels = self._table(normalisation)
        return table.index_select(0, (rgb.int() + channels).flatten()).view(rgb.shape)

    def _table(self, normalisation: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(float for each value of each channel, [3 * 256]; where each channel begins, int32 [3])."""
        mean, std = (tuple(part) for part in normalisation)
        if (mean, std) not in self._tables:
            table = torch.from_numpy(float_tables(mean, std).reshape(-1)).to(self._dtype)
            begins = torch.tensor([0, 256, 512], dtype=torch.int32)
            self._tables[mean, std] = (table.to(self._device.device), begins.to(self._device.device))
        return self._tables[mean, std]


def _torch_dtype(conversion: Conversion) -> torch.dtype:
    dtype = getattr(torch, conversion.dtype or "float32")
    assert isinstance(dtype, torch.dtype)
    return dtype


def _as_tensors(value: Any) -> Any:
    """Arrays, alone or in a list, as tensors that take over their memory; anything else as it is."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        return [torch.from_numpy(item) for item in value]
    return value


def _tensors_in(mapping: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in mapping.values():
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, torch.Tensor):
                yield item
