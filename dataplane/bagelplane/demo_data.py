"""Makes a BAGEL-format data set on disk: pictures with captions, edits, conversations, a tokenizer.

For `bagelplane demo` and the benchmark: all pictures are made (demo_pictures), nothing is downloaded. The
same recipe gives the same rows and pixels. Knows nothing of packing; reads nothing but what it wrote.

    <folder>/t2i/part-00000.parquet ...       columns image (binary), captions (JSON object of texts)
    <folder>/edit/chunk-00000.parquet ...     columns image_list, instruction_list
    <folder>/edit/parquet_info.json           row groups of each file, names relative to the folder
    <folder>/vlm/train.jsonl, vlm/images/     conversations
    <folder>/tokenizer.json                   byte-level BPE with the four special tokens
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from bagelplane.demo_pictures import (
    as_jpeg,
    as_png_with_alpha,
    as_undecodable,
    edited,
    photo,
    picture_size,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_LOOKS = [
    "small",
    "large",
    "old",
    "bright",
    "dark",
    "quiet",
    "busy",
    "golden",
    "misty",
    "snowy",
    "sunlit",
    "wooden",
    "painted",
    "broken",
    "empty",
    "crowded",
]
_THINGS = [
    "bridge",
    "harbour",
    "market",
    "garden",
    "bicycle",
    "lighthouse",
    "kitchen",
    "mountain",
    "river",
    "cat",
    "dog",
    "train",
    "tower",
    "boat",
    "street",
    "window",
    "library",
    "orchard",
    "desert",
    "waterfall",
    "rooftop",
    "table",
    "lantern",
    "station",
    "meadow",
]
_PLACES = [
    "at dawn",
    "in the rain",
    "under a clear sky",
    "by the sea",
    "after the storm",
    "in winter",
    "seen from above",
    "at night",
]
_CHANGES = [
    "make the {} warmer",
    "remove the {}",
    "add a {} on the left",
    "turn the {} blue",
    "replace the {} by a {}",
    "blur all but the {}",
    "make the {} larger",
    "let it snow over the {}",
]
_EDIT_TYPE = pa.schema(
    [("image_list", pa.list_(pa.binary())), ("instruction_list", pa.list_(pa.list_(pa.string())))]
)
_T2I_TYPE = pa.schema([("image", pa.binary()), ("captions", pa.string())])


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to make. Each group has `files` times `row_groups` times `rows` rows (or lines).

    distinct_pictures: pictures made; rows take them in turn, so more rows cost disk and no time.
    megapixels: smallest and largest area of a picture, in millions of pixels.
    with_faults: add the rows that real data has: see `FAULTS`.
    """

    files: int = 8
    row_groups: int = 2
    rows: int = 4
    distinct_pictures: int = 48
    megapixels: tuple[float, float] = (0.05, 0.25)
    with_faults: bool = True
    seed: int = 0


DEMO = Recipe()
BENCHMARK = Recipe(
    files=8, row_groups=2, rows=8, distinct_pictures=120, megapixels=(0.4, 2.0), with_faults=False
)
FAULTS = (
    "a JPEG cut in half",
    "a JPEG that its EXIF orientation turns",
    "a PNG with alpha",
    "an image that opens and does not decode",
    "an image that does not open",
    "an empty caption",
    "captions that are null",
    "an edit of one image",
    "a conversation whose image is missing",
    "a blank line",
    "a conversation that trains on nothing",
    "a conversation without images",
)


@dataclass(frozen=True, slots=True)
class Made:
    """What was made: where it is, rows of each group, bytes of everything on disk."""

    folder: Path
    t2i_rows: int
    edit_rows: int
    conversations: int
    size_bytes: int


def make_data_set(folder: Path, recipe: Recipe = DEMO) -> Made:
    """Write the data set into `folder` (made if missing; files of the same names are overwritten)."""
    rng = np.random.default_rng(recipe.seed)
    pictures = [photo(rng, *picture_size(rng, recipe.megapixels)) for _ in range(recipe.distinct_pictures)]
    stock = _Stock(pictures, [as_jpeg(picture) for picture in pictures])
    for name in ("t2i", "edit", "vlm/images"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    t2i_rows = _write_t2i(folder / "t2i", recipe, stock, rng)
    edit_rows = _write_edits(folder / "edit", recipe, stock, rng)
    conversations = _write_conversations(folder / "vlm", recipe, stock, rng)
    _write_tokenizer(folder / "tokenizer.json")
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Made(folder, t2i_rows, edit_rows, conversations, size_bytes)


@dataclass(slots=True)
class _Stock:
    """The pictures, handed out in turn."""

    pictures: list[Image.Image]
    jpegs: list[bytes]
    taken: int = 0

    def number(self) -> int:
        self.taken += 1
        return (self.taken - 1) % len(self.jpegs)

    def jpeg(self) -> bytes:
        return self.jpegs[self.number()]


def _caption(rng: np.random.Generator, sentences: int = 1) -> str:
    parts = []
    for _ in range(sentences):
        looks, things = rng.choice(_LOOKS, 2), rng.choice(_THINGS, 2, replace=False)
        parts.append(f"a {looks[0]} {things[0]} beside a {looks[1]} {things[1]} {rng.choice(_PLACES)}")
    return ". ".join(parts)


def _change(rng: np.random.Generator) -> list[str]:
    things = rng.choice(_THINGS, 2)
    text = str(rng.choice(_CHANGES)).format(*things)
    return [text, f"please {text}", f"could you {text}?"][: int(rng.integers(1, 4))]


def _write_parquet(path: Path, schema: pa.Schema, rows: list[dict[str, Any]], row_groups: int) -> None:
    table = pa.Table.from_pylist(rows, schema=schema)
    per_group = -(-len(rows) // row_groups)
    # Pictures are compressed already; texts are small.
    pq.write_table(table, path, row_group_size=per_group, compression="NONE", use_dictionary=False)


def _write_t2i(folder: Path, recipe: Recipe, stock: _Stock, rng: np.random.Generator) -> int:
    faults = _t2i_faults(stock) if recipe.with_faults else []
    count = recipe.files * recipe.row_groups * recipe.rows
    rows = [
        {
            "image": stock.jpeg(),
            "captions": json.dumps({"short": _caption(rng), "long": _caption(rng, 4)}),
        }
        for _ in range(count)
    ]
    _spread(rows, faults)
    _write_in_files(folder, "part", _T2I_TYPE, rows, recipe)
    return count


def _t2i_faults(stock: _Stock) -> list[dict[str, Any]]:
    """Fields that replace those of a good row."""
    whole, picture = stock.jpegs[0], stock.pictures[0]
    return [
        {"image": whole[: len(whole) // 2]},
        {"image": as_jpeg(picture, orientation=6)},
        {"image": as_png_with_alpha(picture)},
        {"image": as_undecodable(picture)},
        {"image": b"no image at all"},
        {"captions": json.dumps({"short": ""})},
        {"captions": None},
    ]


def _write_edits(folder: Path, recipe: Recipe, stock: _Stock, rng: np.random.Generator) -> int:
    count = recipe.files * recipe.row_groups * recipe.rows
    chains: list[list[bytes]] = []
    for _ in range(min(count, max(1, recipe.distinct_pictures // 3))):
        number = stock.number()
        steps = [stock.jpegs[number]]
        picture = stock.pictures[number]
        for _ in range(int(rng.integers(1, 4))):
            picture = edited(rng, picture)
            steps.append(as_jpeg(picture))
        chains.append(steps)
    rows: list[dict[str, Any]] = []
    for index in range(count):
        images = chains[index % len(chains)]
        rows.append({"image_list": images, "instruction_list": [_change(rng) for _ in images[1:]]})
    if recipe.with_faults:
        _spread(rows, [{"image_list": [stock.jpeg()], "instruction_list": []}])
    names = _write_in_files(folder, "chunk", _EDIT_TYPE, rows, recipe)
    per_file = recipe.row_groups * recipe.rows
    info = {name: {"num_row_groups": recipe.row_groups, "num_rows": per_file} for name in names}
    (folder / "parquet_info.json").write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")
    return count


def _write_conversations(folder: Path, recipe: Recipe, stock: _Stock, rng: np.random.Generator) -> int:
    names = []
    for number, jpeg in enumerate(stock.jpegs):
        names.append(f"picture_{number:05d}.jpg")
        (folder / "images" / names[-1]).write_bytes(jpeg)
    count = recipe.files * recipe.row_groups * recipe.rows
    lines = [json.dumps(_conversation(rng, names, index), ensure_ascii=False) for index in range(count)]
    if recipe.with_faults:
        places = np.linspace(1, count - 1, 4).astype(int)
        untrained = {"conversations": [{"from": "human", "value": "describe nothing"}]}
        text_only = {"conversations": _turns(rng, 0)}
        missing = {"image": "not_there.jpg", "conversations": _turns(rng, 1)}
        for place, line in zip(
            places, (json.dumps(missing), "", json.dumps(untrained), json.dumps(text_only)), strict=True
        ):
            lines[place] = line
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return count


def _conversation(rng: np.random.Generator, names: list[str], index: int) -> dict[str, Any]:
    images = [names[(index + step) % len(names)] for step in range(int(rng.choice([1, 1, 1, 2, 3])))]
    return {
        "id": index,
        "image": images[0] if len(images) == 1 else images,
        "conversations": _turns(rng, len(images)),
    }


def _turns(rng: np.random.Generator, images: int) -> list[dict[str, str]]:
    turns = [{"from": "human", "value": "<image>\n" * images + "What is to be seen?"}]
    turns.append({"from": "gpt", "value": f"I see {_caption(rng, int(rng.integers(1, 5)))}."})
    for _ in range(int(rng.integers(0, 3))):
        turns.append({"from": "human", "value": f"Tell me more about the {rng.choice(_THINGS)}."})
        turns.append({"from": "gpt", "value": f"There is {_caption(rng, int(rng.integers(1, 7)))}."})
    return turns


def _spread(rows: list[dict[str, Any]], faults: list[dict[str, Any]]) -> None:
    """Put the faulty fields into rows that lie evenly apart, so that every worker meets some."""
    for place, fault in zip(
        np.linspace(0, len(rows) - 1, len(faults) + 2)[1:-1].astype(int), faults, strict=True
    ):
        rows[place] = {**rows[place], **fault}


def _write_in_files(
    folder: Path, prefix: str, schema: pa.Schema, rows: list[dict[str, Any]], recipe: Recipe
) -> list[str]:
    names = []
    per_file = recipe.row_groups * recipe.rows
    for number in range(recipe.files):
        names.append(f"{prefix}-{number:05d}.parquet")
        part = rows[number * per_file : (number + 1) * per_file]
        _write_parquet(folder / names[-1], schema, part, recipe.row_groups)
    return names


def _write_tokenizer(path: Path) -> None:
    """Byte-level BPE as large-model tokenizers are, trained on the words used here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415  (slow to load)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = np.random.default_rng(0)
    texts = [_caption(rng, 3) for _ in range(300)] + [text for _ in range(200) for text in _change(rng)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
