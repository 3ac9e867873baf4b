"""Frames of a video file as encoded images that are decoded on demand."""

from __future__ import annotations

from PIL import Image

from bagelplane.video import FrameDecoder, open_video


class VideoFrame:
    """One frame: the engine's EncodedImage over a video that its frames share."""

    __slots__ = ("_index", "_size", "_video", "key")

    def __init__(self, key: str, video: FrameDecoder, index: int, size: tuple[int, int]) -> None:
        self.key, self._video, self._index, self._size = key, video, index, size

    def size(self) -> tuple[int, int]:
        return self._size

    def decode(self) -> Image.Image:
        """The pixels, mode RGB. Raises ImageError."""
        return self._video.frame(self._index)


def video_frames(uri: str, data: bytes) -> list[VideoFrame]:
    """All frames of a video file, in order. Raises ImageError when it is none; SpecError without PyAV."""
    count, size = open_video(data)
    video = FrameDecoder(data)
    return [VideoFrame(f"{uri}#{index}", video, index, size) for index in range(count)]
