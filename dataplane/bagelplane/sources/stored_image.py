"""An encoded image where it is stored: its key, its bytes, and what its header says."""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image

from bagelplane.engine.samples import UnreadableImage
from bagelplane.images import ImageError, decode_rgb, header_size


class StoredImage:
    """The engine's EncodedImage over bytes that are at hand or read on first use.

    `load` gives the bytes and raises UnreadableImage where there are none. Bytes once read are kept, since an
    image that was opened is decoded soon.
    """

    __slots__ = ("_data", "_load", "_size", "key")

    def __init__(self, key: str, load: Callable[[], bytes]) -> None:
        self.key = key
        self._load = load
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
                self._size = header_size(self.data)
            except ImageError as error:
                raise UnreadableImage(f"{self.key}: {error}") from None
        return self._size

    def decode(self) -> Image.Image:
        """The pixels, mode RGB. Raises ImageError, also for pixels of another size than the header says."""
        image = decode_rgb(self.data)
        if image.size != self.size():
            raise ImageError(f"decodes to {image.size} pixels, its header says {self.size()}")
        return image
