"""An encoded image where it is stored: its key, its bytes, and what its header says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image

from bagelplane.engine.profile import Profile
from bagelplane.engine.samples import UnreadableImage
from bagelplane.images import PLAIN_READING, ImageError, ImageReading
from bagelplane.strict_images import STRICT_READING


class StoredImage:
    """The engine's EncodedImage over bytes that are at hand or read on first use.

    `load` gives the bytes and raises UnreadableImage where there are none. Bytes once read are kept, since an
    image that was opened is decoded soon. `reading` is the profile's.
    """

    __slots__ = ("_data", "_load", "_reading", "_size", "key")

    def __init__(self, key: str, load: Callable[[], bytes], reading: ImageReading = PLAIN_READING) -> None:
        self.key = key
        self._load, self._reading = load, reading
        self._data: bytes | None = None
        self._size: tuple[int, int] | None = None

    @property
    def data(self) -> bytes:
        if self._data is None:
            self._data = self._load()
        return self._data

    def size(self) -> tuple[int, int]:
        """(width, height) in pixels. Raises UnreadableImage."""
        if self._size is None:
            try:
                self._size = self._reading.size(self.data)
            except ImageError as error:
                raise UnreadableImage(f"{self.key}: {error}") from None
        return self._size

    def decode(self) -> Image.Image:
        """The pixels, mode RGB. Raises ImageError, also for pixels of another size than the header says."""
        image = self._reading.decode(self.data)
        if image.size != self.size():
            raise ImageError(f"decodes to {image.size} pixels, its header says {self.size()}")
        return image


def reading_of(profile: Profile) -> ImageReading:
    return STRICT_READING if profile.mends_pictures else PLAIN_READING


def image_of_value(key: str, value: Any, profile: Profile) -> StoredImage:
    """An image of a Parquet value: encoded bytes, in profile Strict also {bytes, path}; anything else does not open."""

    def load() -> bytes:
        data = value
        if profile.reads_other_shapes and isinstance(value, dict):
            data = value.get("bytes")
        if not isinstance(data, bytes):
            raise UnreadableImage(f"{key}: a {type(data).__name__} instead of encoded bytes")
        return data

    return StoredImage(key, load, reading_of(profile))
