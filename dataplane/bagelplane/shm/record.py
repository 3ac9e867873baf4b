"""How one pack lies in a record of the ring.

    prefix (64 bytes) | images, unpadded | index arrays | state (JSON) | meta (msgpack)

Everything begins at a multiple of 64 bytes and is little-endian. The images come first, so that their places
depend on their shapes alone and pixels can be decoded straight into them; each distinct image is there once, as
uint8 [h, w, 3] or, for readers that cannot make them, as finished floats, float32 [3, h, w] (`PIXEL_FORMATS`).
`meta` names the place of everything else. The state is JSON text, because that is what it has to survive as.

Reading copies nothing: arrays and images are read-only views of the buffer. All that is read is checked
first; a record that does not add up is a `RingError`.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, Literal

import msgpack
import numpy as np
import numpy.typing as npt

from bagelplane.engine.pack import Pack
from bagelplane.errors import RingError

RECORD_VERSION = 1
PREFIX_BYTES = 64
PREFIX_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("magic", "8s", 'the bytes "BGLPPACK"'),
    ("version", "I", "1; a reader refuses any other"),
    (
        "pixel_format",
        "I",
        "1: uint8 [h, w, 3], RGB, not normalised; 2: float32 [3, h, w], planes R, G, B, normalised",
    ),
    ("meta_offset_bytes", "Q", "where the msgpack map begins, from the start of the payload"),
    ("meta_bytes", "Q", "its length"),
    ("reserved", "32s", "zero"),
)
META_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("step", "int", "number of the pack in its rank's stream"),
    ("scalars", "map", "sequence_length, sample_lens, split_lens, attn_modes, batch_data_indexes, ..."),
    ("arrays", "list", "[name, dtype, length, offset in bytes] each; dtype `<i8` or `<f4`, one dimension"),
    (
        "images",
        "list",
        "[height, width, offset in bytes] of each distinct image: height * width * 3 values, as `pixel_format` says",
    ),
    ("vae_images", "list", "emitted VAE images in order, as indexes into images"),
    ("vit_images", "list", "emitted ViT images in order, as indexes into images"),
    ("patch_size", "int", "side of a ViT patch in pixels"),
    ("state", "list", "[offset in bytes, length in bytes] of the JSON text of the state after this pack"),
)
_MAGIC = b"BGLPPACK"
PixelFormat = Literal["uint8", "float32"]
PIXEL_FORMATS: dict[PixelFormat, int] = {"uint8": 1, "float32": 2}
"""Number in the prefix by name in the resource (`dataplane.pixelFormat`)."""
_PIXEL_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<f4")}
_PREFIX = struct.Struct("<" + "".join(code for _, code, _ in PREFIX_FIELDS))
_ALIGNMENT_BYTES = 64
_DTYPES: dict[str, np.dtype[Any]] = {"<i8": np.dtype("<i8"), "<f4": np.dtype("<f4")}
_META_ERRORS = (ValueError, TypeError, KeyError, OverflowError, RecursionError, msgpack.UnpackException)
_MAX_PIXELS_A_SIDE = 2**31

Bytes = npt.NDArray[np.uint8]
Image = npt.NDArray[np.uint8] | npt.NDArray[np.float32]
"""Pixels of one image: uint8 [h, w, 3], or float32 [3, h, w]."""


@dataclass(frozen=True, slots=True)
class _Layout:
    image_offsets: list[int]
    array_offsets: list[int]
    arrays: list[npt.NDArray[Any]]
    state: bytes
    state_offset: int
    meta: bytes
    meta_offset: int

    @property
    def size_bytes(self) -> int:
        return self.meta_offset + len(self.meta)


def record_size(pack: Pack, pixel_format: PixelFormat = "uint8") -> int:
    """Length in bytes of the record that holds `pack` and its images."""
    return _lay_out(pack, _dtype_of(pixel_format)).size_bytes


def write_record(pack: Pack, buffer: memoryview, pixel_format: PixelFormat = "uint8") -> list[Image]:
    """Writes all but the pixels, and returns a writable view for each of `pack.image_shapes`.

    The views are uint8 [h, w, 3] or float32 [3, h, w], as `pixel_format` says. May be called again with a pack
    whose images have the same shapes (a state that was finished after decoding): the views of the first call stay
    good. RingError when `buffer` is too short.
    """
    dtype = _dtype_of(pixel_format)
    layout = _lay_out(pack, dtype)
    if len(buffer) < layout.size_bytes:
        raise RingError(
            f"the record of step {pack.step} is longer than its place",
            got=f"{layout.size_bytes} bytes",
            expected=f"at most {len(buffer)}",
        )
    whole: Bytes = np.frombuffer(buffer, np.uint8)
    for array, offset in zip(layout.arrays, layout.array_offsets, strict=True):
        whole[offset : offset + array.nbytes] = array.view(np.uint8)
    buffer[layout.state_offset : layout.state_offset + len(layout.state)] = layout.state
    buffer[layout.meta_offset : layout.size_bytes] = layout.meta
    number = PIXEL_FORMATS[pixel_format]
    buffer[:PREFIX_BYTES] = _PREFIX.pack(
        _MAGIC, RECORD_VERSION, number, layout.meta_offset, len(layout.meta), b""
    )
    return [
        _shaped(whole[offset : offset + height * width * 3 * dtype.itemsize].view(dtype), height, width)
        for (height, width), offset in zip(pack.image_shapes, layout.image_offsets, strict=True)
    ]


def read_record(buffer: memoryview) -> tuple[Pack, list[Image]]:
    """The pack in `buffer` and its distinct images: read-only views, no copies.

    Images are all uint8 [h, w, 3], or all float32 [3, h, w] and normalised. RingError for anything that is not a
    record of this version, whole and consistent.
    """
    dtype, meta = _read_meta(buffer)
    whole: Bytes = np.frombuffer(buffer, np.uint8)
    whole.flags.writeable = False
    try:
        shapes = [_read_shape(height, width) for height, width, _ in meta["images"]]
        images = [
            _read_image(whole, dtype, shape, offset)
            for shape, (_, _, offset) in zip(shapes, meta["images"], strict=True)
        ]
        pack = Pack(
            step=_count(meta["step"]),
            scalars=_of_type(meta["scalars"], dict),
            arrays={
                _of_type(name, str): _read_array(whole, kind, length, offset)
                for name, kind, length, offset in meta["arrays"]
            },
            image_shapes=shapes,
            vae_images=_indexes(meta["vae_images"], len(images)),
            vit_images=_indexes(meta["vit_images"], len(images)),
            patch_size=_count(meta["patch_size"]),
            state=_read_state(whole, *meta["state"]),
        )
    except _META_ERRORS as error:
        raise RingError(f"a record's table of contents is damaged: {type(error).__name__}: {error}") from None
    return pack, images


def _dtype_of(pixel_format: PixelFormat) -> np.dtype[Any]:
    return _PIXEL_DTYPES[PIXEL_FORMATS[pixel_format]]


def _shaped(pixels: npt.NDArray[Any], height: int, width: int) -> Image:
    return pixels.reshape((height, width, 3) if pixels.dtype == np.uint8 else (3, height, width))


def _align(size: int) -> int:
    return (size + _ALIGNMENT_BYTES - 1) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES


def _lay_out(pack: Pack, pixels: np.dtype[Any]) -> _Layout:
    offset = PREFIX_BYTES

    def place(size: int) -> int:
        nonlocal offset
        start = offset
        offset = _align(offset + size)
        return start

    image_offsets = [place(height * width * 3 * pixels.itemsize) for height, width in pack.image_shapes]
    arrays = [_plain_array(name, array) for name, array in pack.arrays.items()]
    array_offsets = [place(array.nbytes) for array in arrays]
    state = json.dumps(pack.state, separators=(",", ":")).encode()
    state_offset = place(len(state))
    meta = {
        "step": pack.step,
        "scalars": pack.scalars,
        "arrays": [
            (name, array.dtype.str, array.size, at)
            for name, array, at in zip(pack.arrays, arrays, array_offsets, strict=True)
        ],
        "images": [(*shape, at) for shape, at in zip(pack.image_shapes, image_offsets, strict=True)],
        "vae_images": pack.vae_images,
        "vit_images": pack.vit_images,
        "patch_size": pack.patch_size,
        "state": (state_offset, len(state)),
    }
    packed: bytes = msgpack.packb(meta, use_bin_type=True)
    return _Layout(image_offsets, array_offsets, arrays, state, state_offset, packed, offset)


def _plain_array(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.ndim != 1 or array.dtype.str not in _DTYPES:
        raise RingError(
            f"array {name!r} cannot travel in a record",
            got=f"{array.dtype} of {array.ndim} dimensions",
            expected="one dimension of int64 or float32",
        )
    return np.ascontiguousarray(array)


def _read_meta(buffer: memoryview) -> tuple[np.dtype[Any], dict[str, Any]]:
    """(type of the pixels' values, table of contents)."""
    if len(buffer) < PREFIX_BYTES:
        raise RingError("a record is too short", got=f"{len(buffer)} bytes")
    magic, version, pixels, offset, length, _ = _PREFIX.unpack_from(buffer)
    if (magic, version) != (_MAGIC, RECORD_VERSION) or pixels not in _PIXEL_DTYPES:
        raise RingError(
            "a record has another format",
            got=f"{magic!r} version {version}, pixel format {pixels}",
            expected=f"{_MAGIC!r} version {RECORD_VERSION}, pixel format {' or '.join(map(str, _PIXEL_DTYPES))}",
            fix="install the same bagelplane release on both sides",
        )
    if offset < PREFIX_BYTES or offset + length > len(buffer):
        raise RingError("a record's table of contents lies outside it", got=f"{offset} + {length} bytes")
    try:
        meta = msgpack.unpackb(buffer[offset : offset + length], raw=False, ext_hook=_refuse_extension)
    except _META_ERRORS as error:
        raise RingError(f"a record's table of contents is not msgpack: {error}") from None
    if not isinstance(meta, dict):
        raise RingError("a record's table of contents is no map")
    return _PIXEL_DTYPES[pixels], meta


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _of_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, not {type(value).__name__}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("a count is expected")
    return value


def _indexes(values: Any, count: int) -> list[int]:
    if not all(_count(value) < count for value in _of_type(values, list)):
        raise ValueError("an image index is out of bounds")
    indexes: list[int] = values
    return indexes


def _bytes_at(whole: Bytes, offset: Any, size: int) -> Bytes:
    if _count(offset) % _ALIGNMENT_BYTES or offset + size > whole.size:
        raise ValueError(f"{size} bytes at {offset} lie outside the record")
    return whole[offset : offset + size]


def _read_shape(height: Any, width: Any) -> tuple[int, int]:
    if not (0 < _count(height) < _MAX_PIXELS_A_SIDE and 0 < _count(width) < _MAX_PIXELS_A_SIDE):
        raise ValueError("an image has no pixels")
    return height, width


def _read_image(whole: Bytes, dtype: np.dtype[Any], shape: tuple[int, int], offset: Any) -> Image:
    height, width = shape
    size = height * width * 3 * dtype.itemsize
    return _shaped(_bytes_at(whole, offset, size).view(dtype), height, width)


def _read_array(whole: Bytes, dtype: Any, length: Any, offset: Any) -> npt.NDArray[Any]:
    kind = _DTYPES[_of_type(dtype, str)]
    return _bytes_at(whole, offset, _count(length) * kind.itemsize).view(kind)


def _read_state(whole: Bytes, offset: Any, length: Any) -> dict[str, Any]:
    text = _bytes_at(whole, offset, _count(length)).tobytes()
    state: dict[str, Any] = _of_type(json.loads(text), dict)
    return state
