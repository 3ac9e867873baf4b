"""Frames of a video file, by PyAV (extra `video`, loaded at the first video).

Frames are counted without decoding; chosen ones are decoded from the file's start, because only then do
frames that refer to earlier ones always come out the same. Every function may run in any number of threads.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from PIL import Image

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
    except ImageError:
        raise
    except Exception as error:
        raise _failure(error) from error
    if not 0 < width * height <= 2 * PIXEL_LIMIT:
        raise ImageError(f"a video of {width}x{height} pixels")
    if frames == 0 or frames < declared:
        raise ImageError(f"a video of {declared} frames ends after {frames}")
    return Video(frames, (width, height))


def decode_frames(data: bytes, indexes: Sequence[int]) -> list[Image.Image]:
    """The frames at `indexes` (0-based, in order of display), mode RGB, in the order asked for.

    An index may come more than once. Raises ImageError when one of them is not there or does not decode.
    """
    av = _library()
    wanted, decoded = set(indexes), dict[int, Image.Image]()
    if not wanted:
        return []
    try:
        with av.open(io.BytesIO(data), options=_OPTIONS) as container:
            stream = _video_stream(container)
            # Videos are decoded beside each other; threads of one would only get in the way.
            stream.codec_context.thread_count = 1
            for index, frame in enumerate(container.decode(stream)):
                if index in wanted:
                    decoded[index] = frame.to_image()
                if len(decoded) == len(wanted):
                    break
    except ImageError:
        raise
    except Exception as error:
        raise _failure(error) from error
    missing = wanted - decoded.keys()
    if missing:
        raise ImageError(f"the video has no frame {min(missing)} that decodes")
    return [decoded[index] for index in indexes]


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
    except ImportError as error:
        raise ImageError("video files need PyAV: pip install 'bagelplane[video]'") from error
    return av
