"""Video files: counted from their packets, decoded by index, refused when they end early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest

from bagelplane.images import ImageError
from bagelplane.video import FrameDecoder, open_video

FRAMES = 14


def make_video(path: Path, codec: str = "mpeg4", **options: str) -> bytes:
    """A film that brightens by 15 a frame."""
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(FRAMES):
            pixels = np.full((48, 64, 3), index * 15, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path.read_bytes()


@pytest.mark.parametrize("name", ["film.mp4", "film.avi", "film.mkv", "film.ts"])
def test_frames_are_counted_and_found_by_index(tmp_path: Path, name: str) -> None:
    data = make_video(tmp_path / name, "mpeg2video" if name.endswith("ts") else "mpeg4")
    assert open_video(data) == (FRAMES, (64, 48))
    decoder = FrameDecoder(data)
    frames = [decoder.frame(index) for index in (13, 0, 7, 7)]
    assert all(frame.mode == "RGB" and frame.size == (64, 48) for frame in frames)
    assert [round(float(np.asarray(frame).mean()) / 15) for frame in frames] == [13, 0, 7, 7]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.8, 0.9])
def test_a_truncated_mp4_is_refused_wherever_its_index_is(tmp_path: Path, share: float) -> None:
    for options in ({}, {"movflags": "faststart"}):
        data = make_video(tmp_path / "film.mp4", **options)
        with pytest.raises(ImageError):
            open_video(data[: int(len(data) * share)])


def test_a_frame_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="no frame 14"):
        FrameDecoder(make_video(tmp_path / "film.mp4")).frame(14)


def test_a_playlist_does_not_make_us_read_other_files(tmp_path: Path) -> None:
    segment = tmp_path / "segment.ts"
    make_video(segment, "mpeg2video")
    playlist = f"ffconcat version 1.0\nfile file:{segment}\n"
    with pytest.raises(ImageError):
        open_video(playlist.encode())


def test_without_pyav_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['av'] = None\n"
        "from bagelplane.errors import SpecError\n"
        "from bagelplane.video import open_video\n"
        "try:\n    open_video(b'x')\n"
        "except SpecError as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "bagelplane[video]" in result.stdout
