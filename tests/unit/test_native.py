"""The compiled resampler gives Pillow's bits, refuses what does not fit, and can be done without."""

from __future__ import annotations

import logging
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bagelplane import native, resampling
from bagelplane.errors import SpecError
from bagelplane.native import NativeError, Resampler, axis_weights, is_vertical_first
from bagelplane.resampling import Choice, choice, resize_rgb
from tests.native_library import SOURCES, build_hook, compiled_library

RANDOM_PAIRS = 3_000

Size = tuple[int, int]  # (width, height)


@pytest.fixture(scope="module")
def library() -> Path:
    return compiled_library()


@pytest.fixture(scope="module", params=[False, True], ids=["best", "portable"])
def resampler(library: Path, request: pytest.FixtureRequest) -> Resampler:
    return Resampler(library, portable=request.param)


def picture(size: Size, content: str, rng: np.random.Generator) -> Image.Image:
    width, height = size
    if content == "white":
        return Image.new("RGB", size, (255, 255, 255))
    if content == "black":
        return Image.new("RGB", size)
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    if content == "ringing":  # hard steps, where the filter leaves 0 to 255 and sums are clamped
        pixels = np.where(pixels > 127, np.uint8(255), np.uint8(0))
    return Image.fromarray(pixels)


def by_pillow(image: Image.Image, size: Size) -> np.ndarray:
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC))


def by_native(resampler: Resampler, image: Image.Image, size: Size) -> np.ndarray:
    source = np.frombuffer(image.tobytes("raw", "RGBX"), dtype=np.uint8).reshape(image.height, image.width, 4)
    room = np.full(size[0] * size[1] * 3 + 128, 171, dtype=np.uint8)
    out = room[64:-64].reshape(size[1], size[0], 3)
    resampler.resize(source, out, vertical_first=is_vertical_first(image.size, size))
    assert (room[:64] == 171).all()
    assert (room[-64:] == 171).all()
    return out


def test_random_sizes_give_pillows_bits(resampler: Resampler) -> None:
    draw, rng = random.Random(5), np.random.default_rng(5)

    def side() -> int:
        return int(2 ** draw.uniform(0, 8))

    for number in range(RANDOM_PAIRS):
        before, after = (side(), side()), (side(), side())
        content = draw.choice(["noise", "noise", "ringing", "white"])
        image = picture(before, content, rng)
        same = np.array_equal(by_native(resampler, image, after), by_pillow(image, after))
        assert same, f"pair {number}: {before} to {after}, {content}"
    print(f"{RANDOM_PAIRS} size pairs agree with Pillow ({resampler.instructions})")


SHAPES: list[tuple[Size, Size]] = [
    *(((width, height), (out, 4)) for width in (1, 2, 3, 5) for height in (1, 3) for out in (1, 2, 7)),
    ((4000, 1), (1, 1)),
    ((1, 4000), (1, 1)),
    ((4000, 3), (3, 400)),
    ((3, 4000), (400, 3)),
    ((1, 1), (300, 200)),
    ((2, 9000), (3, 5)),
    ((9000, 2), (5, 3)),
    ((65_535, 1), (7, 2)),
    ((1, 65_535), (2, 7)),
    ((1, 2), (65_535, 3)),
    ((2000, 1500), (1, 1)),
    ((50, 40), (50, 40)),  # neither side changes
    ((33, 21), (33, 21)),
    ((50, 40), (50, 16)),  # one side does
    ((50, 40), (50, 90)),
    ((50, 40), (16, 40)),
    ((50, 40), (90, 40)),
    ((1400, 1000), (720, 512)),
    ((700, 1000), (704, 992)),
    ((700, 1400), (512, 1024)),
]


@pytest.mark.parametrize("content", ["noise", "ringing", "white", "black"])
def test_extreme_shapes_give_pillows_bits(resampler: Resampler, content: str) -> None:
    rng = np.random.default_rng(6)
    for before, after in SHAPES:
        image = picture(before, content, rng)
        same = np.array_equal(by_native(resampler, image, after), by_pillow(image, after))
        assert same, f"{before} to {after}"


def test_the_order_of_passes_changes_where_pillows_does(resampler: Resampler) -> None:
    rng = np.random.default_rng(7)
    orders = set()
    for width, out_width in ((60, 41), (60, 59), (41, 60), (60, 30), (60, 1)):
        for out_height in (1, 7, 40):
            for beside in (-2, -1, 0, 1, 2):
                height = out_height + 2 * (width - out_width) + beside
                if height < 1:
                    continue
                before, after = (width, height), (out_width, out_height)
                image = picture(before, "noise", rng)
                assert np.array_equal(by_native(resampler, image, after), by_pillow(image, after)), (
                    before,
                    after,
                )
                orders.add(is_vertical_first(before, after))
    assert orders == {True, False}


def test_the_fourth_byte_of_a_pixel_does_not_matter(resampler: Resampler) -> None:
    source = np.random.default_rng(8).integers(0, 256, (37, 41, 4), dtype=np.uint8)
    first, second = np.empty((2, 20, 24, 3), dtype=np.uint8)
    resampler.resize(source, first)
    source[:, :, 3] = 0
    resampler.resize(source, second)
    assert np.array_equal(first, second)


def test_threads_get_the_same_pixels_as_one(resampler: Resampler) -> None:
    image = picture((300, 200), "noise", np.random.default_rng(9))
    expected = by_pillow(image, (144, 112))
    seen: list[bool] = []

    def work() -> None:
        seen.extend(np.array_equal(by_native(resampler, image, (144, 112)), expected) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert seen == [True] * 80


@pytest.mark.parametrize(
    ("source", "out"),
    [
        (np.zeros((4, 4, 4), np.float32), None),
        (np.zeros((4, 4, 4), np.int8), None),
        (np.zeros((4, 4, 3), np.uint8), None),
        (np.zeros((4, 4), np.uint8), None),
        (np.zeros((4, 8, 4), np.uint8)[:, ::2], None),
        (np.zeros((4, 4, 4), np.uint8)[::-1], None),
        (np.asfortranarray(np.zeros((4, 5, 4), np.uint8)), None),
        (np.zeros((0, 4, 4), np.uint8), None),
        (np.zeros((1, 65_536, 4), np.uint8), None),
        ([[[0, 0, 0, 0]]], None),
        (None, np.zeros((4, 4, 4), np.uint8)),
        (None, np.zeros((4, 4, 3), np.float64)),
        (None, np.zeros((4, 4, 6), np.uint8)[:, :, ::2]),
        (None, np.zeros((4, 0, 3), np.uint8)),
        (None, np.frombuffer(bytes(48), np.uint8).reshape(4, 4, 3)),
    ],
)
def test_arrays_of_another_kind_are_refused(resampler: Resampler, source: object, out: object) -> None:
    source = np.zeros((4, 4, 4), np.uint8) if source is None else source
    out = np.zeros((4, 4, 3), np.uint8) if out is None else out
    with pytest.raises(ValueError, match=r"source|out"):
        resampler.resize(source, out)  # type: ignore[arg-type]


def test_overlapping_arrays_are_refused(resampler: Resampler) -> None:
    room = np.zeros(100, np.uint8)
    with pytest.raises(ValueError, match="overlap"):
        resampler.resize(room[:64].reshape(4, 4, 4), room[52:].reshape(4, 4, 3))


UNSOUND = {
    "window before the input": ("start", -1),
    "window beyond the input": ("start", 40),
    "windows going backwards": ("start", 12),
    "more weights than there are": ("count", 99),
    "no weights": ("count", 0),
    "sums beyond int32": ("weights", 2**31 - 1),
    "sums below int32": ("weights", -(2**31)),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_the_library_itself_refuses_unsound_weights(
    resampler: Resampler, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = axis_weights(40, 20)
    parts = {name: getattr(good, name).copy() for name in ("start", "count", "weights")}
    name, value = UNSOUND[case]
    parts[name].reshape(20, -1)[5, 0] = value
    monkeypatch.setattr(native, "axis_weights", lambda inputs, outputs: native.AxisWeights(**parts))
    out = np.full((20, 20, 3), 7, np.uint8)
    with pytest.raises(ValueError, match="cannot resize"):
        resampler.resize(np.zeros((40, 40, 4), np.uint8), out)
    assert (out == 7).all()


def test_weights_are_sound_for_every_kind_of_side() -> None:
    sides = [*range(1, 40), 255, 256, 1000, 4093, 65_535]
    for inputs in sides:
        for outputs in (*range(1, 40), 512, 1001):
            axis = axis_weights(inputs, outputs)
            assert (axis.start >= 0).all()
            assert (axis.count >= 1).all()
            assert (axis.start + axis.count <= inputs).all()
            # resample.c adds pixels times weights in int32.
            assert 255 * np.abs(axis.weights.astype(np.int64)).sum(axis=1).max() + 2**21 < 2**31


# --- the choice between the two


@pytest.fixture
def fresh_choice() -> object:
    choice.cache_clear()
    yield
    choice.cache_clear()


CHOOSE = """
import logging, sys
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
from pathlib import Path
import bagelplane.native
bagelplane.native.LIBRARY_PATH = Path(sys.argv[1])
import numpy as np
from PIL import Image
from bagelplane.images import resize_into
from bagelplane.resampling import choice
image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 50, 3), dtype=np.uint8))
for _ in range(2):
    out = np.empty((16, 24, 3), np.uint8)
    resize_into(image, out)
    assert out.tobytes() == image.resize((24, 16), Image.Resampling.BICUBIC).tobytes()
print("choice:", choice())
"""


def lines_of_choice(path: Path, **environment: str) -> list[str]:
    command = [sys.executable, "-c", CHOOSE, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    return (ended.stdout + ended.stderr).splitlines()


def test_without_the_library_pillow_resizes_and_one_line_says_so(tmp_path: Path) -> None:
    lines = lines_of_choice(tmp_path / "missing.so")
    expected = "pillow (the compiled resampler is not installed)"
    assert lines == [f"images are resized by {expected}", f"choice: {expected}"]


def test_a_damaged_library_is_named_and_pillow_resizes(tmp_path: Path) -> None:
    path = tmp_path / "libresample.so"
    path.write_bytes(b"no library")
    lines = lines_of_choice(path)
    assert lines[0].startswith("the compiled resampler cannot be used: libresample.so does not load")
    assert lines[-1].startswith("choice: pillow")


def test_with_the_library_it_resizes_and_nothing_is_said(library: Path) -> None:
    assert len(lines_of_choice(library)) == 1
    assert lines_of_choice(library)[0].startswith("choice: native (")
    assert lines_of_choice(library, BAGELPLANE_RESAMPLER="native")[0].startswith("choice: native (")


def test_the_variable_decides(library: Path, tmp_path: Path) -> None:
    assert lines_of_choice(library, BAGELPLANE_RESAMPLER="pillow")[-1].startswith("choice: pillow")
    refused = lines_of_choice(tmp_path / "missing.so", BAGELPLANE_RESAMPLER="native")[-1]
    assert "BAGELPLANE_RESAMPLER is native, but there is none" in refused
    refused = lines_of_choice(library, BAGELPLANE_RESAMPLER="fast")[-1]
    assert "got 'fast'; expected auto, native or pillow" in refused


@pytest.mark.usefixtures("fresh_choice")
def test_a_resampler_that_differs_from_pillow_is_not_used(
    library: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(resampling.VARIABLE, raising=False)
    monkeypatch.setattr(resampling, "load", lambda: Resampler(library))
    monkeypatch.setattr(resampling, "is_vertical_first", lambda before, after: False)
    with caplog.at_level(logging.WARNING):
        assert choice().native is None
    assert "differs from Pillow" in caplog.text


@pytest.mark.usefixtures("fresh_choice")
def test_a_wrong_setting_is_told_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(resampling.VARIABLE, "quick")
    for _ in range(2):
        with pytest.raises(SpecError, match="quick"):
            choice()


def test_an_older_pillows_order_of_passes_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resampling, "_pillow_major", lambda: 12)
    assert resampling._is_for_native((1400, 1000), (720, 512))
    assert not resampling._is_for_native((700, 1000), (704, 992))
    assert not resampling._is_for_native((10, 1001), (1, 1000))
    assert resampling._is_for_native((700, 1000), (700, 500))


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("way", ["view", "bands", "too large to copy", "no arrow"])
def test_each_way_to_the_pixels_gives_pillows_bits(
    library: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    made = Choice(Resampler(library))
    monkeypatch.setattr(resampling, "choice", lambda: made)
    image = picture((150, 110), "noise", np.random.default_rng(3))
    if way != "view":
        monkeypatch.setattr(resampling, "_BAND_PIXELS", 1000)
        genuine = resampling._view
        limit = 0 if way == "no arrow" else 1000
        monkeypatch.setattr(
            resampling, "_view", lambda part: genuine(part) if part.width * part.height <= limit else None
        )
    if way == "too large to copy":
        monkeypatch.setattr(resampling, "_COPY_LIMIT_PIXELS", 100)
        assert resampling._pixels(image) is None
    out = np.empty((48, 64, 3), np.uint8)
    resize_rgb(image, out)
    assert np.array_equal(out, by_pillow(image, (64, 48)))


def test_an_image_in_several_pieces_gives_pillows_bits(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Choice(Resampler(library))
    monkeypatch.setattr(resampling, "choice", lambda: made)
    image = picture((2400, 1800), "noise", np.random.default_rng(3))
    assert resampling._view(image) is None
    out = np.empty((12, 16, 3), np.uint8)
    resize_rgb(image, out)
    assert np.array_equal(out, by_pillow(image, (16, 12)))


def test_pixels_are_a_view_that_outlives_the_image() -> None:
    image = picture((150, 110), "noise", np.random.default_rng(3))
    pixels, expected = resampling._pixels(image), image.tobytes()
    assert pixels is not None
    assert pixels.base is not None
    del image
    assert np.ascontiguousarray(pixels[:, :, :3]).tobytes() == expected


# --- the build


def test_without_a_compiler_the_build_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = build_hook()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = hook.compile_library(SOURCES, tmp_path / "lib.so")
    assert problem.startswith("there is no C compiler")


def test_a_compiler_that_fails_is_quoted_in_one_line(tmp_path: Path) -> None:
    hook = build_hook()
    source = tmp_path / "bad.c"
    source.write_text("int main(void) { return undeclared; }\n")
    problem = hook.compile_library([source], tmp_path / "lib.so")
    assert "undeclared" in problem
    assert "\n" not in problem


def test_a_library_of_a_failed_build_does_not_stay(tmp_path: Path) -> None:
    hook = build_hook()
    old = tmp_path / "libresample.so"
    old.write_bytes(b"old")
    hook.put_in_place(tmp_path / "not-compiled.so", old)
    assert not old.exists()


def test_a_library_of_another_version_is_not_used(tmp_path: Path, library: Path) -> None:
    resample, planes = SOURCES
    changed = tmp_path / "resample.c"
    changed.write_text(
        resample.read_text().replace("#define INTERFACE_VERSION 2", "#define INTERFACE_VERSION 99")
    )
    path = tmp_path / "other.so"
    assert not build_hook().compile_library([changed, planes], path)
    with pytest.raises(NativeError, match="version 99"):
        Resampler(path)


def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "the tests need a C compiler"
    flags = [
        "-std=c11",
        "-O3",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Wconversion",
        "-Werror",
        "-fPIC",
        "-shared",
    ]
    command = [compiler, *flags, "-o", str(tmp_path / "lib.so"), *map(str, SOURCES)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
