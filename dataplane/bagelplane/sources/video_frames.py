"""Frames of a video file as encoded images that are decoded on demand."""

from __future__ import annotations

from PIL import Image

from bagelplane.video import decode_frames, open_video


class VideoFrame:
    """One frame: the engine's EncodedImage over a video's bytes."""

    __slots__ = ("_data", "_index", "_size", "key")

    def __init__(self, key: str, data: bytes, index: int, size: tuple[int, int]) -> None:
        self.key, self._data, self._index, self._size = key, data, index, size

    def size(self) -> tuple[int, int]:
        return self._size

    def decode(self) -> Image.Image:
        """The pixels, mode RGB. Raises ImageError."""
        return decode_frames(self._data, [self._index])[0]


def video_frames(uri: str, data: bytes) -> list[VideoFrame]:
    """All frames of a video file, in order. Raises ImageError when it is none, or the `video` extra is missing."""
    count, size = open_video(data)
    return [VideoFrame(f"{uri}#{index}", data, index, size) for index in range(count)]
