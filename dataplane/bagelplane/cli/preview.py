"""`bagelplane preview`: packs as pictures, as the model will see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from PIL import Image
from tokenizers import Tokenizer

from bagelplane.cli.output import DecodeThreadsOption, check_output, print_note
from bagelplane.cli.plan import checked_topology, plans
from bagelplane.engine.planner import PackPlan
from bagelplane.engine.raw_samples import RawPixels
from bagelplane.engine.samples import PlannedImage
from bagelplane.errors import SpecError
from bagelplane.figures.contact_sheet import Fonts, draw_sheet
from bagelplane.figures.pack_cards import PackCards, cards_of_pack
from bagelplane.images import ImageError, resize_into
from bagelplane.settings import StreamSettings
from bagelplane.spec import BagelDataset, load_dataset, refuse_unsupported
from bagelplane.topology import Topology

_UNDECODED_GREY = 128


def preview(
    resource: Annotated[
        Path, typer.Argument(help="The resource file (kind: BagelDataset).", show_default=False)
    ],
    packs: Annotated[int, typer.Option(help="How many packs to show.", min=1)] = 4,
    start: Annotated[int, typer.Option(help="The first pack to show, counted from 0.", min=0)] = 0,
    rank: Annotated[int, typer.Option(help="The rank whose packs are shown.", min=0)] = 0,
    world_size: Annotated[int, typer.Option(help="How many ranks train.", min=1)] = 1,
    output: Annotated[Path, typer.Option("-o", "--output", help="The PNG to write.")] = Path("preview.png"),
    font: Annotated[
        Path | None,
        typer.Option(help="A font file, for captions in scripts that DejaVu lacks.", show_default=False),
    ] = None,
    threads: DecodeThreadsOption = 2,
) -> None:
    """Draw a contact sheet of packs: every sample in order, pictures at the size the model gets, texts as
    tokenized, what carries loss, and what conditioning dropout left out.

    The packs are those that a run gives, pixel for pixel. Look at them before a run costs anything: captions
    that belong to another picture, squeezed pictures and empty answers are seen at once.

    Examples:

        bagelplane preview dataset.yaml -o preview.png
        bagelplane preview dataset.yaml --packs 1 --start 250 --rank 3 --world-size 8
    """
    check_output(output)
    dataset = load_dataset(resource)
    refuse_unsupported(dataset, str(resource))
    topology = checked_topology(dataset, rank, world_size)
    write_preview(
        dataset, topology, output, packs=packs, start=start, fonts=Fonts.load(font), decode_threads=threads
    )
    print_note(f"wrote {output}")


def write_preview(
    dataset: BagelDataset,
    topology: Topology,
    path: Path,
    *,
    packs: int,
    start: int = 0,
    fonts: Fonts | None = None,
    decode_threads: int = 2,
) -> None:
    """Draw `packs` packs of one rank, from number `start` on, into the PNG `path`."""
    shown = list(pack_cards(dataset, topology, packs=packs, start=start, decode_threads=decode_threads))
    title = f"{dataset.metadata.name}: what rank {topology.rank} of {topology.world_size} trains on"
    write_sheet(shown, path, title=title, fonts=fonts or Fonts.load())


def write_sheet(shown: Sequence[PackCards], path: Path, *, title: str, fonts: Fonts) -> None:
    """Draw packs into the PNG `path`. Raises SpecError when it cannot be written."""
    sheet = draw_sheet(
        shown,
        title=title,
        subtitle="Samples follow one another in the pack as numbered; so do the items of a sample. "
        "Pictures are shown as resized for the model, scaled down where they are tall.",
        fonts=fonts,
    )
    try:
        sheet.save(path, format="PNG", optimize=False)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SpecError(
            f"the picture {path} cannot be written: {reason}", fix="name a path in a folder of yours"
        ) from None


def pack_cards(
    dataset: BagelDataset, topology: Topology, *, packs: int, start: int, decode_threads: int
) -> list[PackCards]:
    """`packs` packs of one rank, from number `start` on, as cards with their pixels."""
    shown = plans(dataset, topology, packs=packs, start=start, decode_threads=decode_threads)
    to_cards = _card_maker(dataset)
    return [to_cards(plan, start + number) for number, plan in enumerate(shown)]


def cards_of_plan(dataset: BagelDataset, plan: PackPlan, number: int) -> PackCards:
    """One planned pack as cards with their pixels."""
    return _card_maker(dataset)(plan, number)


def _card_maker(dataset: BagelDataset) -> Callable[[PackPlan, int], PackCards]:
    settings = StreamSettings.from_resource(dataset)
    tokenizer = Tokenizer.from_str(settings.storage.read_bytes(dataset.spec.tokenizer.uri).decode())
    return partial(
        cards_of_pack,
        config=settings.packing,
        groups=[group.name for group in dataset.spec.groups],
        pixels=pixels_of,
        decode_text=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
    )


def pixels_of(image: PlannedImage) -> np.ndarray:
    """uint8 [height, width, 3], as a run hands them to the trainer."""
    if isinstance(image.source, RawPixels):
        # Taken over from Automodel: finished floats, channels first.
        mean, std = (np.reshape(part, (3, 1, 1)) for part in (image.mean, image.std))
        scaled = np.rint((image.source.pixels * std + mean) * 255)
        taken: np.ndarray = np.clip(scaled, 0, 255).astype(np.uint8).transpose(1, 2, 0)
        return taken
    pixels = np.full((image.height, image.width, 3), _UNDECODED_GREY, np.uint8)
    try:
        decoded: Image.Image = image.source.decode()
    except ImageError:
        # In profile Strict an image that conditioning left out may be one that does not decode.
        return pixels
    resize_into(decoded, pixels)
    return pixels
