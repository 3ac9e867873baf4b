"""Whatever rows hold: an index of them gives the plans that they give themselves, drops and their messages included."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagelplane.settings import StreamSettings
from tests.property.hostile_rows import GOOD_IMAGES, captions, images, texts, values, words, write_parquet
from tests.property.test_engine_hostile_rows import arrow_columns
from tests.row_facts import answers, make_index, one_group

pytestmark = pytest.mark.timeout(300)
EXAMPLES = settings(max_examples=25)
PROFILES = pytest.mark.parametrize("profile", ["Automodel", "Strict"])


def check(kind: str, folder: Path, profile: str, **info: str) -> None:
    dataset = one_group(kind, {"data_dir": str(folder / "data"), **info}, profile, folder / "snapshots")
    report = make_index(dataset, threads=2)
    assert (report.problems, report.missing) == ([], 0)
    settings = StreamSettings.from_resource(dataset)
    assert settings.index is not None
    [config] = settings.groups
    assert list(answers(settings, config, settings.index)) == list(answers(settings, config, None))
    assert settings.index.coverage.is_whole, str(settings.index.coverage)


def utf8(text: Any) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogatepass")


@PROFILES
@EXAMPLES
@given(st.lists(st.tuples(images, st.one_of(captions, st.none())), min_size=1, max_size=5))
def test_text_to_image_rows(profile: str, rows: list[tuple[Any, Any]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        columns = {
            "image": pa.array([image for image, _ in rows], pa.binary()),
            "captions": pa.array([utf8(text) for _, text in rows], pa.binary()).cast(pa.string(), safe=False),
        }
        write_parquet(Path(name) / "data/a.parquet", columns)
        check("t2i_pretrain", Path(name), profile)


phrasings = st.lists(st.one_of(st.none(), texts), max_size=3)
chains = st.one_of(st.none(), st.lists(st.one_of(images, st.sampled_from(GOOD_IMAGES)), max_size=4))


@PROFILES
@EXAMPLES
@given(
    st.lists(
        st.tuples(chains, st.one_of(st.none(), st.lists(st.one_of(st.none(), phrasings), max_size=4))),
        min_size=1,
        max_size=4,
    )
)
def test_editing_rows(profile: str, rows: list[tuple[Any, Any]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        instructions = [
            steps and [some and [utf8(text) for text in some] for some in steps] for _, steps in rows
        ]
        kept = pa.array(instructions, pa.list_(pa.list_(pa.binary())))
        columns = {
            "image_list": pa.array([chain for chain, _ in rows], pa.list_(pa.binary())),
            "instruction_list": kept.cast(pa.list_(pa.list_(pa.string())), safe=False),
        }
        write_parquet(Path(name) / "data/a.parquet", columns)
        check("unified_edit", Path(name), profile)


@PROFILES
@EXAMPLES
@given(arrow_columns, arrow_columns, st.integers(1, 3), st.booleans())
def test_columns_of_the_wrong_type(
    profile: str, first: tuple[Any, Any], second: tuple[Any, Any], count: int, editing: bool
) -> None:
    kind, names = (
        ("unified_edit", ("image_list", "instruction_list"))
        if editing
        else ("t2i_pretrain", ("image", "captions"))
    )
    with tempfile.TemporaryDirectory() as name:
        columns = {
            column: pa.array([value] * count, of)
            for column, (of, value) in zip(names, (first, second), strict=True)
        }
        write_parquet(Path(name) / "data/a.parquet", columns)
        check(kind, Path(name), profile)


names = st.one_of(
    st.sampled_from(["good.png", "../data/good.png", "missing.png", "bad.png", "frames/", "", "\ud800"]),
    values,
)
turns = st.lists(
    st.one_of(
        values,
        st.builds(
            lambda who, text: {"from": who, "value": text},
            st.sampled_from(["human", "gpt", "system"]),
            st.one_of(
                texts,
                st.sampled_from(["<image>", "a <image> b <image>", "<video> what", "<video><image>"]),
                words,
            ),
        ),
    ),
    max_size=4,
)
lines = st.one_of(
    st.builds(
        lambda fields, said: json.dumps({**fields, "conversations": said}),
        st.one_of(
            st.just({}),
            st.builds(lambda name: {"image": name}, st.one_of(names, st.lists(names, max_size=3))),
            st.builds(lambda name: {"video": name}, names),
        ),
        st.one_of(turns, values),
    ),
    st.builds(json.dumps, values),
    st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\r"), max_size=20),
)


@PROFILES
@EXAMPLES
@given(st.lists(lines, min_size=1, max_size=5))
@example(['{"image": ["missing.png", "a\\u0000b"], "conversations": []}'])
def test_lines(profile: str, rows: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        (data / "frames").mkdir(parents=True)
        for place, picture in (
            ("good.png", GOOD_IMAGES[0]),
            ("frames/f_1.jpg", GOOD_IMAGES[1]),
            ("bad.png", b"no"),
        ):
            (data / place).write_bytes(picture)
        (data / "lines.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        check("vlm_sft", Path(name), profile, jsonl_path=str(data / "lines.jsonl"))
