"""Packs on one picture: every sample in order, every item as a card, with a legend. Needs Pillow alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from bagelplane.errors import SpecError
from bagelplane.figures.pack_cards import Card, PackCards, Role, SampleCards

INK, FAINT, LINE, PAPER, SHADE = "#22303c", "#66737f", "#d5dce2", "#ffffff", "#f4f6f8"
LEFT_OUT = "#9aa5af"
COLOURS = {
    Role.LEARNT_IMAGE: "#dd6b20",
    Role.LEARNT_TEXT: "#dd6b20",
    Role.VAE: "#2f6fb0",
    Role.VIT: "#2f9460",
    Role.TEXT: "#5a6672",
}
_LEGEND: tuple[tuple[Role | None, str, str], ...] = (
    (Role.LEARNT_IMAGE, "carries loss", "a text to predict, or a picture to denoise (it gets noise)"),
    (Role.VAE, "VAE picture", "a condition, as clean latents"),
    (Role.VIT, "ViT picture", "a condition, as patches"),
    (Role.TEXT, "text", "a condition, or a question"),
    (None, "left out", "by conditioning dropout: the model does not see it here"),
)

WIDTH = 1640
MAX_HEIGHT = 60_000
"""Pixels. Many viewers show nothing of a taller picture."""
_MARGIN, _GAP, _PAD = 36, 12, 12
_HEAD, _FOOT = 24, 22  # of a card: caption above its content, size below
_CONTENT_HEIGHT = 176
_CARD_HEIGHT = _HEAD + _CONTENT_HEIGHT + _FOOT
_IMAGE_WIDTH, _MIN_WIDTH = 300, 110
_TEXT_WIDTHS, _FEW_LINES = (126, 170, 236), 6
_SAMPLE_HEAD = 28
_TEXT_LEADING = 17


@dataclass(frozen=True, slots=True)
class Fonts:
    """Sizes are in pixels."""

    title: ImageFont.FreeTypeFont
    heading: ImageFont.FreeTypeFont
    bold: ImageFont.FreeTypeFont
    normal: ImageFont.FreeTypeFont
    small: ImageFont.FreeTypeFont

    @staticmethod
    def load(path: Path | None = None) -> Fonts:
        """From a font file; else DejaVu (of matplotlib or the system), else Pillow's own, which has ASCII alone.

        Raises SpecError for a file that is no font.
        """
        regular, bold = _font_files(path)
        sized = _sized
        return Fonts(
            sized(bold, 26), sized(bold, 19), sized(bold, 13), sized(regular, 13), sized(regular, 12)
        )


def _font_files(path: Path | None) -> tuple[str | None, str | None]:
    if path is not None:
        try:
            ImageFont.truetype(str(path), 12)
        except OSError as error:
            raise SpecError(
                f"{path} is no font that can be read", got=str(error), expected="a TrueType or OpenType file"
            ) from None
        return str(path), str(path)
    names = ["DejaVuSans.ttf", "DejaVuSans-Bold.ttf"]
    matplotlib = importlib.util.find_spec("matplotlib")
    folder = (
        Path(matplotlib.origin).parent / "mpl-data/fonts/ttf" if matplotlib and matplotlib.origin else None
    )
    found: list[str | None] = []
    for name in names:
        beside = None if folder is None else folder / name
        candidate = str(beside) if beside is not None and beside.is_file() else name
        try:
            ImageFont.truetype(candidate, 12)
        except OSError:
            found.append(None)
        else:
            found.append(candidate)
    return found[0], found[1]


def _sized(name: str | None, size: int) -> ImageFont.FreeTypeFont:
    if name is not None:
        return ImageFont.truetype(name, size)
    default = ImageFont.load_default(size)
    assert isinstance(default, ImageFont.FreeTypeFont)
    return default


def draw_sheet(packs: Sequence[PackCards], *, title: str, subtitle: str, fonts: Fonts) -> Image.Image:
    """All packs below one another. Raises SpecError when they make too tall a picture."""
    # Laid out twice: the first time to learn the height.
    height = _Sheet(Image.new("RGB", (WIDTH, 1)), fonts).draw(packs, title, subtitle)
    if height > MAX_HEIGHT:
        raise SpecError(
            "the packs make too tall a picture",
            got=f"{height} pixels",
            expected=f"at most {MAX_HEIGHT}",
            fix="preview fewer packs at a time: --packs 1 --start 0, --start 1, ...",
        )
    image = Image.new("RGB", (WIDTH, height), PAPER)
    _Sheet(image, fonts).draw(packs, title, subtitle)
    return image


class _Sheet:
    """A cursor that goes down a picture. What lies outside of the picture is not drawn, only measured."""

    def __init__(self, image: Image.Image, fonts: Fonts) -> None:
        self._image, self._fonts = image, fonts
        self._draw = ImageDraw.Draw(image)
        self._y = _MARGIN

    def draw(self, packs: Sequence[PackCards], title: str, subtitle: str) -> int:
        """The height that was needed, in pixels."""
        self._text(_MARGIN, self._y, title, self._fonts.title)
        self._y += 36
        self._text(_MARGIN, self._y, subtitle, self._fonts.normal, FAINT)
        self._y += 30
        self._draw_legend()
        for pack in packs:
            self._draw_pack(pack)
        return self._y + _MARGIN

    def _text(self, x: float, y: float, text: str, font: ImageFont.FreeTypeFont, colour: str = INK) -> float:
        """Draws a line of text; the x where it ends."""
        if y < self._image.height:
            self._draw.text((x, y), text, fill=colour, font=font)
        return x + font.getlength(text)

    def _draw_legend(self) -> None:
        height = 58
        self._box((_MARGIN, self._y, WIDTH - _MARGIN, self._y + height), fill=SHADE)
        x = float(_MARGIN + _PAD)
        for role, name, meaning in _LEGEND:
            colour = LEFT_OUT if role is None else COLOURS[role]
            frame = (x, self._y + 11, x + 24, self._y + 27)
            if role is None:
                self._dashed(frame, colour, width=2)
            else:
                self._box(frame, fill=_tint(colour), outline=colour, width=2, radius=3)
            self._text(x + 32, self._y + 11, name, self._fonts.bold)
            end = self._text(x, self._y + 34, meaning, self._fonts.small, FAINT)
            x = max(end, x + 32 + self._fonts.bold.getlength(name)) + 26
        self._y += height + 26

    def _draw_pack(self, pack: PackCards) -> None:
        left, right = _MARGIN, WIDTH - _MARGIN
        end = self._text(left, self._y, f"Pack {pack.number}", self._fonts.heading)
        fill = pack.length / pack.max_tokens
        facts = (
            f"{pack.length:,} of {pack.max_tokens:,} tokens ({fill:.0%} full), {pack.loss_tokens:,} carry loss;  "
            f"{len(pack.samples)} samples, {pack.count(Role.VAE, Role.LEARNT_IMAGE)} VAE and "
            f"{pack.count(Role.VIT)} ViT pictures;  conditions left out: {pack.left_out}"
        )
        self._text(end + 16, self._y + 6, facts, self._fonts.normal, FAINT)
        self._y += 34
        self._draw_strip(pack, left, right)
        for line in self._rows(pack.samples, right - left):
            x = left
            tallest = max(height for _, _, height in line)
            for sample, width, _ in line:
                self._draw_sample(
                    sample, pack.samples.index(sample) + 1, (x, self._y, x + width, self._y + tallest)
                )
                x += width + _GAP
            self._y += tallest + _GAP
        if pack.drops:
            listed = ", ".join(f"{count} {group} ({reason})" for group, reason, count in pack.drops)
            self._text(
                left,
                self._y,
                f"Not trained on, met while filling this pack: {listed}",
                self._fonts.small,
                FAINT,
            )
            self._y += 18
        self._y += 26

    def _draw_strip(self, pack: PackCards, left: int, right: int) -> None:
        """The whole sequence as a bar, token for token; samples are set apart by white."""
        top, bottom = self._y, self._y + 14
        scale = (right - left) / pack.max_tokens
        self._box((left, top, right, bottom), fill=SHADE, outline=LINE, radius=0)
        for sample in pack.samples:
            start = sample.start
            for card in sample.cards:
                if card.tokens:
                    bounds = (left + start * scale, top, left + (start + card.tokens) * scale - 1, bottom)
                    self._box(bounds, fill=COLOURS[card.role], radius=0)
                    start += card.tokens
            edge = left + sample.end * scale
            self._box((edge - 2, top, edge, bottom), fill=PAPER, radius=0)
        expected = left + pack.expected_tokens * scale
        self._box((expected - 1, top - 3, expected + 1, bottom + 5), fill=INK, radius=0)
        label = f"finished from {pack.expected_tokens:,} tokens on"
        self._text(
            expected - 6 - self._fonts.small.getlength(label), bottom + 3, label, self._fonts.small, FAINT
        )
        self._text(left, bottom + 3, "the sequence, token by token", self._fonts.small, FAINT)
        self._y += 44

    def _rows(
        self, samples: Sequence[SampleCards], width: int
    ) -> Iterator[list[tuple[SampleCards, int, int]]]:
        """Samples in reading order, as many a row as fit, each with its width and height."""
        row: list[tuple[SampleCards, int, int]] = []
        used = 0
        for sample in samples:
            lines = self._card_lines(sample, width - 2 * _PAD)
            needed = max(sum(w for _, _, w in line) + _GAP * (len(line) - 1) for line in lines) + 2 * _PAD
            needed = max(needed, int(self._fonts.bold.getlength(_heading(sample, 99))) + 2 * _PAD + 8)
            if row and used + _GAP + needed > width:
                yield row
                row, used = [], 0
            used += needed + (_GAP if row else 0)
            row.append((sample, needed, _SAMPLE_HEAD + len(lines) * (_CARD_HEIGHT + _GAP)))
        if row:
            yield row

    def _card_lines(self, sample: SampleCards, width: int) -> list[list[tuple[int, Card, int]]]:
        """Cards (number, card, width) in lines that fit into `width`."""
        lines: list[list[tuple[int, Card, int]]] = [[]]
        used = 0
        for number, card in enumerate(sample.cards, 1):
            needed = self._card_width(card)
            if lines[-1] and used + _GAP + needed > width:
                lines.append([])
                used = 0
            used += needed + (_GAP if lines[-1] else 0)
            lines[-1].append((number, card, needed))
        return lines

    def _card_width(self, card: Card) -> int:
        caption = int(self._fonts.bold.getlength(f"9 {_caption(card)}")) + 16
        if card.image is None:
            return max(caption, self._text_width(card.text))
        shown = _fit(card.image.size)[0] + 12
        return max(caption, shown, int(self._fonts.small.getlength(_size_line(card))) + 14, _MIN_WIDTH)

    def _text_width(self, text: str) -> int:
        """The narrowest card that holds the text in few lines."""
        for width in _TEXT_WIDTHS:
            if len(wrap_text(text, self._fonts.normal, width - 18)) <= _FEW_LINES:
                return width
        return _TEXT_WIDTHS[-1]

    def _draw_sample(self, sample: SampleCards, number: int, frame: tuple[int, int, int, int]) -> None:
        left, top, right, _bottom = frame
        self._box(frame, fill=SHADE, outline=LINE)
        self._text(left + _PAD, top + 7, _heading(sample, number), self._fonts.bold)
        y = top + _SAMPLE_HEAD
        for line in self._card_lines(sample, right - left - 2 * _PAD):
            x = left + _PAD
            for position, card, width in line:
                self._draw_card(card, position, (x, y, x + width, y + _CARD_HEIGHT))
                x += width + _GAP
            y += _CARD_HEIGHT + _GAP

    def _draw_card(self, card: Card, position: int, frame: tuple[int, int, int, int]) -> None:
        left, top, right, bottom = frame
        colour = LEFT_OUT if card.left_out else COLOURS[card.role]
        if card.left_out:
            self._box(frame, fill=PAPER)
            self._dashed(frame, colour, width=2)
        else:
            self._box(frame, fill=_tint(colour), outline=colour, width=3)
        self._text(left + 8, top + 5, f"{position} {_caption(card)}", self._fonts.bold, colour)
        inner = (left + 6, top + _HEAD, right - 6, bottom - _FOOT)
        if card.image is not None:
            self._paste(card, inner)
        else:
            self._draw_words(card, inner)
        self._text(left + 8, bottom - _FOOT + 3, _size_line(card), self._fonts.small, FAINT)

    def _paste(self, card: Card, frame: tuple[int, int, int, int]) -> None:
        assert card.image is not None
        if frame[1] >= self._image.height:
            return
        shown = card.image.resize(_fit(card.image.size), Image.Resampling.LANCZOS)
        if card.left_out:
            grey = ImageOps.grayscale(shown).convert("RGB")
            shown = Image.blend(grey, Image.new("RGB", grey.size, PAPER), 0.62)
        x = frame[0] + (frame[2] - frame[0] - shown.width) // 2
        y = frame[1] + (frame[3] - frame[1] - shown.height) // 2
        self._image.paste(shown, (x, y))

    def _draw_words(self, card: Card, frame: tuple[int, int, int, int]) -> None:
        colour = LEFT_OUT if card.left_out else INK
        room = (frame[3] - frame[1] - 4) // _TEXT_LEADING
        text = card.text if card.text.strip() else "(empty)"
        lines = wrap_text(text, self._fonts.normal, frame[2] - frame[0] - 6)
        if len(lines) > room:
            lines = [*lines[: room - 1], lines[room - 1][:-3] + " ..."]
        for number, line in enumerate(lines):
            self._text(frame[0] + 3, frame[1] + 4 + number * _TEXT_LEADING, line, self._fonts.normal, colour)

    def _box(
        self,
        frame: tuple[float, float, float, float],
        *,
        fill: str,
        outline: str | None = None,
        width: int = 1,
        radius: int = 6,
    ) -> None:
        if frame[1] < self._image.height and frame[2] > frame[0]:
            self._draw.rounded_rectangle(frame, radius=radius, fill=fill, outline=outline, width=width)

    def _dashed(self, frame: tuple[float, float, float, float], colour: str, *, width: int) -> None:
        if frame[1] >= self._image.height:
            return
        left, top, right, bottom = (int(edge) for edge in frame)
        for x in range(left, right, 12):
            for y in (top, bottom - width):
                self._draw.rectangle((x, y, min(x + 6, right), y + width - 1), fill=colour)
        for y in range(top, bottom, 12):
            for x in (left, right - width):
                self._draw.rectangle((x, y, x + width - 1, min(y + 6, bottom)), fill=colour)


def _heading(sample: SampleCards, number: int) -> str:
    return f"Sample {number}: {sample.group}, row {sample.row}, {sample.end - sample.start:,} tokens"


def _caption(card: Card) -> str:
    return f"LEFT OUT: {card.role.value}" if card.left_out else card.role.value


def _size_line(card: Card) -> str:
    tokens = "0 tokens" if card.left_out else f"{card.tokens:,} tokens"
    return tokens if card.image is None else f"{card.image.width} x {card.image.height} px, {tokens}"


def _fit(size: tuple[int, int]) -> tuple[int, int]:
    """Shown size of a picture: never larger than the model's."""
    scale = min(1.0, _CONTENT_HEIGHT / size[1], _IMAGE_WIDTH / size[0])
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _tint(colour: str) -> str:
    """A light paper of the same hue."""
    channels = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - channel) * 0.08):02x}" for channel in channels)


def wrap_text(text: str, font: ImageFont.FreeTypeFont, width: float) -> list[str]:
    """Lines of at most `width` pixels; words that are longer are cut."""
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        line = ""
        for word in paragraph.split(" "):
            longer = f"{line} {word}" if line else word
            if font.getlength(longer) <= width:
                line = longer
                continue
            if line:
                lines.append(line)
            line = word
            while font.getlength(line) > width and len(line) > 1:
                cut = next(
                    n for n in range(len(line) - 1, 0, -1) if n == 1 or font.getlength(line[:n]) <= width
                )
                lines.append(line[:cut])
                line = line[cut:]
        lines.append(line)
    return lines
