"""Frames of a video file, by PyAV (extra `video`, loaded at the first video).

Frames are counted without decoding, and decoded by going forward through the file.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from PIL import Image

from bagelplane.errors import SpecError
from bagelplane.images import PIXEL_LIMIT, ImageError

# What may be in a video file. Playlists and the like are not: they name other files and addresses to read.
_OPTIONS = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,h264,hevc,flv,ogg",
    "protocol_whitelist": "none",
}


class Video(NamedTuple):
    """What a video holds: number of frames, and (width, height) of each in pixels."""

    frames: int
    size: tuple[int, int]


def open_video(data: bytes) -> Video:
    """Number and size of the frames of a video file. Raises ImageError.

    A file that ends before the number of frames that it declares is refused (mp4, mov and avi declare one;
    of the others, the frames that are there count).
    """
    av = _library()
    try:
        with av.open(io.BytesIO(data), options=_OPTIONS) as container:
            stream = _video_stream(container)
            declared, width, height = stream.frames, stream.width, stream.height
            # The last packet has no bytes: it tells decoders that there is no more.
            frames = sum(1 for packet in container.demux(stream) if packet.size and not packet.is_corrupt)
    except (ImageError, SpecError):
        raise
    except Exception as error:
        raise _failure(error) from error
    if not 0 < width * height <= 2 * PIXEL_LIMIT:
        raise ImageError(f"a video of {width}x{height} pixels")
    if frames == 0 or frames < declared:
        raise ImageError(f"a video of {declared} frames ends after {frames}")
    return Video(frames, (width, height))


class FrameDecoder:
    """Decodes frames of one video, in any order; in rising order each frame once. For any number of threads."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._lock = threading.Lock()
        self._frames: Iterator[Any] = iter(())
        self._next_index = -1

    def frame(self, index: int) -> Image.Image:
        """The frame at `index` (from 0, in order of display), mode RGB. Raises ImageError."""
        with self._lock:
            try:
                return self._advance_to(index)
            except ImageError:
                self._next_index = -1
                raise
            except Exception as error:
                self._next_index = -1
                raise _failure(error) from error

    def _advance_to(self, index: int) -> Image.Image:
        if self._next_index < 0 or index < self._next_index:
            # From the start: only then do frames that refer to earlier ones always come out the same.
            self._frames, self._next_index = self._decode_all(), 0
        for frame in self._frames:
            self._next_index += 1
            if self._next_index > index:
                image: Image.Image = frame.to_image()
                return image
        raise ImageError(f"the video has no frame {index} that decodes")

    def _decode_all(self) -> Iterator[Any]:
        with _library().open(io.BytesIO(self._data), options=_OPTIONS) as container:
            stream = _video_stream(container)
            # Videos are decoded beside each other; threads of one would only get in the way.
            stream.codec_context.thread_count = 1
            yield from container.decode(stream)


def _video_stream(container: Any) -> Any:
    if not container.streams.video:
        raise ImageError("a file without a video stream")
    return container.streams.video[0]


def _failure(error: Exception) -> ImageError:
    text = getattr(error, "strerror", None) or str(error)
    return ImageError(f"the video does not decode: {text}"[:160])


def _library() -> Any:
    try:
        import av  # noqa: PLC0415 - an extra, and a tenth of a second that only videos are worth
    except ImportError:
        # No fault of the row: dropping all videos of a data set in silence would be.
        raise SpecError(
            "a group has video files, and PyAV is not installed", fix="pip install 'bagelplane[video]'"
        ) from None
    return av
