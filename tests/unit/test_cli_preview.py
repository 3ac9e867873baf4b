"""`bagelplane preview`: the sheet shows what the model gets, all of it, and says what it left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFont

from bagelplane.cli.app import main
from bagelplane.cli.demo import RESOURCE
from bagelplane.cli.preview import pack_cards
from bagelplane.demo_data import Recipe, make_data_set
from bagelplane.engine.pack import Pack
from bagelplane.errors import SpecError
from bagelplane.figures import contact_sheet
from bagelplane.figures.contact_sheet import COLOURS, WIDTH, Fonts, draw_sheet, wrap_text
from bagelplane.figures.pack_cards import Card, PackCards, Role
from bagelplane.spec import load_dataset
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology

PACKS = 6


@pytest.fixture(scope="module", params=["Automodel", "Strict"])
def resource(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("preview")
    make_data_set(folder / "data", Recipe(distinct_pictures=12))
    path = folder / "dataset.yaml"
    text = RESOURCE.format(data=f"file://{folder}/data", storage="", snapshots="")
    path.write_text(text.replace("profile: Automodel", f"profile: {request.param}"))
    return path


@pytest.fixture(scope="module")
def shown(resource: Path) -> list[PackCards]:
    return pack_cards(load_dataset(resource), Topology(0, 2, 0), packs=PACKS, start=0, decode_threads=2)


@pytest.fixture(scope="module")
def run(resource: Path) -> list[tuple[Pack, list[np.ndarray]]]:
    stream = open_rank_stream(load_dataset(resource), Topology(0, 2, 0))
    packs = []
    for _ in range(PACKS):
        images: list[np.ndarray] = []

        def allocate(pack: Pack, images: list[np.ndarray] = images) -> list[np.ndarray]:
            images[:] = [np.empty((*shape, 3), np.uint8) for shape in pack.image_shapes]
            return images

        packs.append((stream.next_pack(allocate), images))
    stream.close()
    return packs


def cards(pack: PackCards, *roles: Role) -> list[Card]:
    return [
        card for sample in pack.samples for card in sample.cards if card.role in roles and not card.left_out
    ]


def test_pictures_are_those_of_the_run_bit_for_bit(
    shown: list[PackCards], run: list[tuple[Pack, list[np.ndarray]]]
) -> None:
    for sheet, (pack, images) in zip(shown, run, strict=True):
        vae = [np.asarray(card.image) for card in cards(sheet, Role.VAE, Role.LEARNT_IMAGE)]
        vit = [np.asarray(card.image) for card in cards(sheet, Role.VIT)]
        assert len(vae) == len(pack.vae_images)
        assert len(vit) == len(pack.vit_images)
        assert all(
            np.array_equal(got, images[number]) for got, number in zip(vae, pack.vae_images, strict=True)
        )
        assert all(
            np.array_equal(got, images[number]) for got, number in zip(vit, pack.vit_images, strict=True)
        )


def test_cards_make_up_the_whole_sequence(
    shown: list[PackCards], run: list[tuple[Pack, list[np.ndarray]]]
) -> None:
    for sheet, (pack, _) in zip(shown, run, strict=True):
        assert sheet.length == pack.scalars["sequence_length"]
        lengths = [sum(card.tokens for card in sample.cards) for sample in sheet.samples]
        assert lengths == pack.scalars["sample_lens"]
        assert sheet.loss_tokens == len(pack.arrays["mse_loss_indexes"]) + len(pack.arrays["ce_loss_indexes"])


def test_what_conditioning_left_out_is_shown_with_no_tokens(shown: list[PackCards]) -> None:
    left_out = [card for pack in shown for sample in pack.samples for card in sample.cards if card.left_out]
    assert left_out
    assert all(card.tokens == 0 for card in left_out)
    assert all(card.role in (Role.TEXT, Role.VAE, Role.VIT) for card in left_out)
    assert all(card.text or card.image is not None for card in left_out)


def test_texts_are_those_of_the_data(shown: list[PackCards]) -> None:
    texts = [card.text for pack in shown for card in cards(pack, Role.TEXT, Role.LEARNT_TEXT)]
    assert any(text.startswith("What is to be seen?") for text in texts)
    assert any(" beside a " in text for text in texts)
    assert not any("�" in text for text in texts)


def test_sheet_shows_every_role_in_its_colour(shown: list[PackCards]) -> None:
    sheet = np.asarray(draw_sheet(shown, title="t", subtitle="s", fonts=Fonts.load()))
    assert sheet.shape[1] == WIDTH
    below_legend = sheet[200:].reshape(-1, 3)
    for role in COLOURS:
        colour = tuple(int(COLOURS[role][place : place + 2], 16) for place in (1, 3, 5))
        assert np.all(below_legend == colour, axis=1).sum() > 500, role


def test_sheet_is_as_tall_as_its_content(shown: list[PackCards]) -> None:
    fonts = Fonts.load()
    heights = [draw_sheet(shown[:count], title="", subtitle="", fonts=fonts).height for count in (1, 2, 3)]
    assert heights == sorted(set(heights))
    last_rows = np.asarray(draw_sheet(shown, title="", subtitle="", fonts=fonts))[-20:]
    assert (last_rows == 255).all(), "something is drawn over the lower edge"


def test_later_packs_are_the_same_from_any_start(resource: Path, shown: list[PackCards]) -> None:
    (later,) = pack_cards(load_dataset(resource), Topology(0, 2, 0), packs=1, start=4, decode_threads=2)
    assert (later.number, later.length) == (4, shown[4].length)


def test_command_writes_a_png(capsys: pytest.CaptureFixture[str], resource: Path, tmp_path: Path) -> None:
    png = tmp_path / "preview.png"
    with pytest.raises(SystemExit) as ended:
        main(["preview", str(resource), "--packs", "1", "-o", str(png)])
    assert not ended.value.code
    assert f"wrote {png}" in capsys.readouterr().err
    with Image.open(png) as image:
        assert (image.format, image.width) == ("PNG", WIDTH)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--world-size", "2", "--rank", "2"), "the rank is outside its world"),
        (("-o", "/nowhere/preview.png"), "/nowhere/preview.png cannot be written"),
        (("--font", "/etc/hostname"), "is no font that can be read"),
    ],
)
def test_wrong_arguments_are_one_message(
    capsys: pytest.CaptureFixture[str], resource: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["preview", str(resource), "--packs", "1", *arguments])
    err = capsys.readouterr().err
    assert ended.value.code == SpecError.exit_code
    assert message in err
    assert "Traceback" not in err


def test_too_tall_a_sheet_is_refused(monkeypatch: pytest.MonkeyPatch, shown: list[PackCards]) -> None:
    monkeypatch.setattr(contact_sheet, "MAX_HEIGHT", 500)
    with pytest.raises(SpecError, match="--packs 1"):
        draw_sheet(shown, title="", subtitle="", fonts=Fonts.load())


def test_sheet_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch, shown: list[PackCards]) -> None:
    monkeypatch.setattr(contact_sheet, "_font_files", lambda path: (None, None))
    assert draw_sheet(shown[:1], title="", subtitle="", fonts=Fonts.load()).height > 500


@given(text=st.text(alphabet="ab \n漢", max_size=80), width=st.integers(8, 120))
def test_wrapping_loses_nothing_and_fits(text: str, width: int) -> None:
    font = ImageFont.load_default(12)
    assert isinstance(font, ImageFont.FreeTypeFont)
    lines = wrap_text(text, font, width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(font.getlength(line) <= width or len(line) == 1 for line in lines)
