"""Made data: the same recipe gives the same data, and the faults it promises are there."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, UnidentifiedImageError
from tokenizers import Tokenizer

from bagelplane.demo_data import SPECIAL_TOKENS, Made, Recipe, make_data_set
from bagelplane.demo_pictures import as_jpeg, as_undecodable, photo

SMALL = Recipe(files=4, row_groups=2, rows=2, distinct_pictures=4, megapixels=(0.005, 0.01))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_data_set(tmp_path_factory.mktemp("made"), SMALL)


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def t2i_rows(folder: Path) -> Iterator[dict[str, object]]:
    for path in sorted((folder / "t2i").iterdir()):
        yield from pq.read_table(path).to_pylist()


def opens(data: bytes) -> bool:
    try:
        Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        return False
    return True


def test_same_recipe_gives_same_files(made: Made, tmp_path: Path) -> None:
    make_data_set(tmp_path, SMALL)
    assert digests(tmp_path) == digests(made.folder)


def test_every_group_has_the_rows_that_the_recipe_says(made: Made) -> None:
    assert (made.t2i_rows, made.edit_rows, made.conversations) == (16, 16, 16)
    assert len(list(t2i_rows(made.folder))) == 16
    info = json.loads((made.folder / "edit" / "parquet_info.json").read_text())
    for name, entry in info.items():
        file = pq.ParquetFile(made.folder / "edit" / name)
        assert (file.num_row_groups, file.metadata.num_rows) == (entry["num_row_groups"], entry["num_rows"])
    assert len((made.folder / "vlm" / "train.jsonl").read_text().splitlines()) == 16


def test_captions_and_images_have_the_promised_faults(made: Made) -> None:
    rows = list(t2i_rows(made.folder))
    captions = [row["captions"] for row in rows]
    assert None in captions
    assert json.dumps({"short": ""}) in captions
    images = [bytes(row["image"]) for row in rows]  # type: ignore[call-overload]
    opened = [Image.open(io.BytesIO(data)) for data in images if opens(data)]
    assert len(opened) == len(images) - 1
    assert {"RGB", "RGBA"} == {image.mode for image in opened}
    assert 6 in [image.getexif().get(0x0112) for image in opened]


def test_conversations_name_a_missing_image_a_blank_line_and_text_alone(made: Made) -> None:
    lines = (made.folder / "vlm" / "train.jsonl").read_text().splitlines()
    parsed = [json.loads(line) for line in lines if line]
    assert lines.count("") == 1
    assert [row["image"] for row in parsed if row.get("image") == "not_there.jpg"] == ["not_there.jpg"]
    assert sum("image" not in row for row in parsed) == 2


def test_without_faults_every_picture_decodes(tmp_path: Path) -> None:
    recipe = Recipe(
        files=1, row_groups=1, rows=4, distinct_pictures=2, megapixels=(0.005, 0.01), with_faults=False
    )
    make_data_set(tmp_path, recipe)
    for row in t2i_rows(tmp_path):
        Image.open(io.BytesIO(bytes(row["image"]))).load()  # type: ignore[call-overload]


def test_undecodable_image_opens_with_its_size_and_then_fails() -> None:
    picture = photo(np.random.default_rng(0), 64, 48)
    opened = Image.open(io.BytesIO(as_undecodable(picture)))
    assert opened.size == (64, 48)
    with pytest.raises(OSError, match="decoder error"):
        opened.load()


def test_pictures_weigh_what_photographs_weigh() -> None:
    picture = photo(np.random.default_rng(1), 1200, 800)
    assert 0.1 < len(as_jpeg(picture)) / (1200 * 800) < 0.5


def test_tokenizer_has_the_special_tokens_and_round_trips(made: Made) -> None:
    tokenizer = Tokenizer.from_file(str(made.folder / "tokenizer.json"))
    assert all(tokenizer.token_to_id(token) is not None for token in SPECIAL_TOKENS)
    text = "please make the lighthouse warmer, à côté"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
