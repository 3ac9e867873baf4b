"""Plain JPEGs decoded directly: whatever the file, Pillow's pixels or Pillow's refusal, and Pillow alone will do."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from PIL import Image

from bagelplane import images, jpeg
from bagelplane.errors import SpecError
from bagelplane.images import ImageError, decode_rgb, header_size
from bagelplane.jpeg import Choice, choice, decode_plain, first_scans, read_header
from tests import jpeg_corpus

FEWEST_FILES = 900


@pytest.fixture(scope="module", autouse=True)
def _configured() -> None:
    images.configure_pillow()


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    choice.cache_clear()
    yield
    choice.cache_clear()


@pytest.fixture
def fast() -> jpeg.Decode:
    decode = choice().decode
    assert decode is not None, f"the tests need simplejpeg: {choice()}"
    return decode


def by_pillow_alone(data: bytes) -> bytes:
    """Size and pixels by Pillow, without any code of ours."""
    with Image.open(io.BytesIO(data)) as opened:
        return repr(opened.size).encode() + opened.convert("RGB").tobytes()


def by_us(data: bytes) -> bytes | str:
    """Size and pixels, or why there are none."""
    try:
        image = decode_rgb(data)
    except ImageError as refusal:
        return str(refusal)
    return repr(image.size).encode() + image.tobytes()


def sound(name: str) -> bytes:
    return next(data for made, data in jpeg_corpus.corpus() if made == name)


# Where the process turns warnings into errors, Pillow is asked again without: not the reference's matter.
@pytest.mark.filterwarnings("ignore:Image appears to be a malformed MPO")
def test_every_file_of_the_corpus_gives_pillows_pixels_or_pillows_refusal(
    monkeypatch: pytest.MonkeyPatch, fast: jpeg.Decode
) -> None:
    ways: Counter[str] = Counter()
    taken: list[str] = []

    def watched(data: bytes) -> np.ndarray:
        taken[:] = ["refused by libjpeg-turbo, left to Pillow"]
        pixels = fast(data)
        taken[:] = ["decoded by libjpeg-turbo"]
        return pixels

    for name, data in jpeg_corpus.corpus():
        taken[:] = ["Pillow's from the header"]
        monkeypatch.setattr(jpeg, "choice", lambda: Choice(watched))
        ours = by_us(data)
        monkeypatch.setattr(jpeg, "choice", lambda: Choice(None))
        assert ours == by_us(data), f"{name}: not as without libjpeg-turbo"
        if isinstance(ours, bytes):
            assert ours == by_pillow_alone(data), f"{name}: not Pillow's pixels"
            assert repr(header_size(data)).encode() == ours[: ours.index(b")") + 1], f"{name}: the size"
        ways["refused by both" if isinstance(ours, str) else taken[0]] += 1
    print(f"{ways.total()} files as with Pillow: {dict(ways)}")
    assert ways.total() >= FEWEST_FILES
    assert ways["decoded by libjpeg-turbo"] >= 400
    assert min(ways.values()) >= 20
    assert len(ways) == 4


PLAIN = {
    **{f"{sampling} quality 75": True for sampling in jpeg_corpus.SAMPLINGS},
    "grey quality 75": True,
    "progressive quality 75": True,
    "restart 2 17x33": True,
    "optimized": True,
    "comment": True,
    "orientation 6": True,
    "adobe 1": True,
    "without JFIF": True,
    "identifiers b'\\x00\\x01\\x02', no JFIF": True,
    "frame C1": True,
    "zeros after the end": True,
    "two in one file": True,
    "cmyk quality 75": False,
    "four components, adobe 2": False,
    "kept as RGB": False,
    "adobe 0": False,
    "adobe 2": False,
    "short adobe": False,
    "grey, adobe 0": False,
    "identifiers b'RGB'": False,
    "frame C9": False,  # arithmetic coding
    "12 bits": False,
    "sampling 13": False,
    "colours' sampling 21": False,
    "bytes between segments": False,
}


def test_the_header_alone_says_which_files_are_decoded_directly() -> None:
    seen = {}
    for name, data in jpeg_corpus.sound_files():
        if name in PLAIN:
            scan = data.index(b"\xff\xda")
            header = read_header(data)
            seen[name] = header is not None and header.is_plain
            assert read_header(data[: scan + 4]) == header, name
    assert seen == PLAIN


def test_a_header_that_ends_anywhere_is_read_or_left_to_pillow() -> None:
    for name, data in jpeg_corpus.marked_files(sound("optimized")):
        for end in range(min(len(data), 400)):
            header = read_header(data[:end])
            assert header is None or header == read_header(data), f"{name} at {end}"


def test_what_is_plain_and_has_no_flaw_is_decoded_directly(fast: jpeg.Decode) -> None:
    for name in ("420 quality 75", "grey quality 75", "progressive quality 75", "two in one file"):
        image = decode_plain(sound(name), (90, 70) if name.startswith("two") else (61, 47))
        assert image is not None, name
        assert image.mode == "RGB"


@pytest.mark.parametrize("lost", [1, 2, 40, 400])
def test_a_file_that_ends_early_is_pillows(fast: jpeg.Decode, lost: int) -> None:
    data = sound("420 quality 75")[:-lost]
    assert decode_plain(data, (61, 47)) is None
    assert by_us(data) == by_pillow_alone(data)


def test_another_size_than_pillow_read_is_pillows(fast: jpeg.Decode) -> None:
    assert decode_plain(sound("420 quality 75"), (47, 61)) is None


@pytest.mark.parametrize("error", [ValueError, RuntimeError, MemoryError])
def test_whatever_the_library_raises_pillow_decodes(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def broken(data: bytes) -> np.ndarray:
        raise error("of the library")

    data = sound("420 quality 75")
    monkeypatch.setattr(jpeg, "choice", lambda: Choice(broken))
    assert by_us(data) == by_pillow_alone(data)


def test_another_shape_than_the_header_says_is_pillows(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sound("420 quality 75")
    monkeypatch.setattr(jpeg, "choice", lambda: Choice(lambda _: np.zeros((61, 47, 4), np.uint8)))
    assert by_us(data) == by_pillow_alone(data)


def test_the_image_outlives_the_array_and_is_resized_from_one_piece(fast: jpeg.Decode) -> None:
    """Pillow's own images of this size are in several pieces."""
    data = jpeg_corpus.by_turbo(np.full((1800, 2400, 3), 90, np.uint8), "420", 50)
    image = decode_plain(data, (2400, 1800))
    assert image is not None
    out = np.empty((12, 16, 3), np.uint8)
    images.resize_into(image, out)
    assert out.tobytes() == Image.open(io.BytesIO(data)).resize((16, 12), Image.Resampling.BICUBIC).tobytes()


def test_threads_get_the_same_pixels_as_one(fast: jpeg.Decode) -> None:
    files = [data for name, data in jpeg_corpus.sound_files() if "quality" in name]
    expected = [by_us(data) for data in files]
    seen: list[bool] = []

    def work() -> None:
        seen.extend([by_us(data) for data in files] == expected for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert seen == [True] * 20


# --- the choice between the two

CHOOSE = """
import logging, sys
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
if sys.argv[1] == "without":
    sys.modules["simplejpeg"] = None
from bagelplane.images import decode_rgb
from bagelplane.jpeg import choice
data = sys.stdin.buffer.read()
for _ in range(2):
    assert decode_rgb(data).size == (61, 47)
print("choice:", choice())
"""


def lines_of_choice(way: str = "with", **environment: str) -> list[str]:
    command = [sys.executable, "-c", CHOOSE, way]
    ended = subprocess.run(
        command, capture_output=True, input=sound("420 quality 75"), timeout=60, check=False, env=environment
    )
    return (ended.stdout + ended.stderr).decode().splitlines()


def test_with_simplejpeg_nothing_is_said() -> None:
    (line,) = lines_of_choice()
    assert line.startswith("choice: libjpeg-turbo (simplejpeg ")


def test_without_simplejpeg_pillow_decodes_and_one_line_says_so() -> None:
    said, chosen = lines_of_choice("without")
    assert said.startswith("JPEGs are decoded by pillow (simplejpeg is not installed")
    assert chosen.startswith("choice: pillow (simplejpeg is not installed")


def test_the_variable_decides() -> None:
    assert lines_of_choice(BAGELPLANE_JPEG="pillow") == ["choice: pillow (BAGELPLANE_JPEG says so)"]
    refused = lines_of_choice("without", BAGELPLANE_JPEG="turbo")[-1]
    assert "BAGELPLANE_JPEG is turbo, but there is none" in refused
    assert "Fix: install simplejpeg" in refused
    refused = lines_of_choice(BAGELPLANE_JPEG="fast")[-1]
    assert "got 'fast'; expected auto, turbo or pillow" in refused


@pytest.mark.usefixtures("fresh_choice")
def test_a_wrong_setting_is_told_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(jpeg.VARIABLE, "quick")
    for _ in range(2):
        with pytest.raises(SpecError, match="quick"):
            choice()


def other_upsampling(data: bytes, decode: Callable[..., np.ndarray]) -> np.ndarray:
    return decode(data, colorspace="RGBA", fastupsample=True)


def other_transform(data: bytes, decode: Callable[..., np.ndarray]) -> np.ndarray:
    return decode(data, colorspace="RGBA", fastdct=True)


def forgives_what_is_cut_off(data: bytes, decode: Callable[..., np.ndarray]) -> np.ndarray:
    return decode(data, colorspace="RGBA", strict=False)


def is_broken(data: bytes, decode: Callable[..., np.ndarray]) -> np.ndarray:
    raise OSError("of the library")


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize(
    "way",
    [other_upsampling, other_transform, forgives_what_is_cut_off, is_broken],
    ids=lambda way: way.__name__,
)
def test_a_decoder_that_differs_from_pillow_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: Callable[[bytes, Callable[..., np.ndarray]], np.ndarray],
) -> None:
    import simplejpeg

    genuine = simplejpeg.decode_jpeg
    monkeypatch.delenv(jpeg.VARIABLE, raising=False)
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda data, **options: way(data, genuine))
    with caplog.at_level(logging.WARNING):
        assert choice().decode is None
    assert "differs from Pillow" in caplog.text
    assert len(caplog.records) == 1


def test_first_scans_are_a_file_that_ends_as_it_should(fast: jpeg.Decode) -> None:
    whole = sound("progressive quality 75")
    part = first_scans(whole, 1)
    assert len(part) < len(whole)
    assert decode_plain(part, (61, 47)) is not None
