"""What users of comparable systems ran into: counts that do not fit, kinds of columns, lines as editors leave them."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagelplane.errors import DataError
from bagelplane.spec import BagelDataset
from bagelplane.stream import check_sources
from tests.property.hostile_rows import EDIT, GOOD_IMAGES, T2I, VLM, run_stream, write_parquet

STRING_LISTS = pa.list_(pa.list_(pa.string()))
ALL_PACKS = (3, {}, "")


def editing_files(folder: Path, files: int, row_groups: int = 1) -> None:
    for number in range(files):
        columns = {
            "image_list": pa.array([GOOD_IMAGES[:2]] * row_groups, pa.list_(pa.binary())),
            "instruction_list": pa.array([[["brighter", "lighter"]]] * row_groups, STRING_LISTS),
        }
        write_parquet(folder / f"part-{number}.parquet", columns, row_group_size=1)


def editing_group(folder: Path, counts: dict[str, int] | None) -> dict[str, Any]:
    place: dict[str, Any] = {"name": "edit", "uri": str(folder)}
    if counts is not None:
        info = {name: {"num_row_groups": count, "num_rows": count} for name, count in counts.items()}
        (folder / "info.json").write_text(json.dumps(info))
        place["parquetInfo"] = "info.json"
    return {**EDIT, "datasets": [place]}


def units_of(group: dict[str, Any], **sharding: Any) -> dict[str, int]:
    dataset = BagelDataset.from_mapping(
        {
            "apiVersion": "bagelplane.io/v1alpha1",
            "kind": "BagelDataset",
            "metadata": {"name": "cases"},
            "spec": {
                "profile": "Automodel",
                "tokenizer": {"uri": str(Path(__file__).parents[1] / "golden/data/tokenizer.json")},
                "groups": [group],
                "sharding": {"mode": "Bagel", "workersPerRank": sharding.get("workers", 0)},
            },
        }
    )
    return check_sources(dataset, world_size=sharding.get("world_size", 1))


@pytest.mark.parametrize("spelling", ["{folder}/part-{n}.parquet", "part-{n}.parquet", "./part-{n}.parquet"])
def test_row_groups_are_counted_for_names_however_they_are_spelt(spelling: str, tmp_path: Path) -> None:
    editing_files(tmp_path, 2, row_groups=3)
    counts = {spelling.format(folder=tmp_path, n=number): 3 for number in range(2)}
    assert units_of(editing_group(tmp_path, counts)) == {"edit": 6}


def test_without_counts_the_footers_are_asked(tmp_path: Path) -> None:
    editing_files(tmp_path, 2, row_groups=3)
    assert units_of(editing_group(tmp_path, None)) == {"edit": 6}


def test_files_without_a_count_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    editing_files(tmp_path, 3)
    with caplog.at_level(logging.WARNING):
        assert units_of(editing_group(tmp_path, {"part-0.parquet": 1})) == {"edit": 1}
    assert "2 of 3 files" in caplog.text
    assert "part-1.parquet" in caplog.text


def test_row_groups_that_a_file_does_not_have_are_passed_over(tmp_path: Path) -> None:
    editing_files(tmp_path, 1)
    assert run_stream(tmp_path, editing_group(tmp_path, {"part-0.parquet": 3})) == ALL_PACKS


@pytest.mark.parametrize(
    ("files", "sharding", "said"),
    [
        (3, {"world_size": 4}, ["3 units", "world size 4"]),
        (8, {"world_size": 2, "workers": 8}, ["4 units", "8 workers"]),
    ],
)
def test_too_few_units_are_refused_with_the_arithmetic(
    files: int, sharding: dict[str, int], said: list[str], tmp_path: Path
) -> None:
    editing_files(tmp_path, files)
    with pytest.raises(DataError) as caught:
        units_of(editing_group(tmp_path, None), **sharding)
    assert all(part in str(caught.value) for part in ["edit", *said]), caught.value


CAPTIONS = ['{"a": "one"}', '{"a": "two words"}', '{"a": "one"}']


@pytest.mark.parametrize(
    ("image_kind", "caption_kind"),
    [
        (pa.large_binary(), pa.large_string()),
        (pa.binary(), pa.dictionary(pa.int32(), pa.string())),
        (pa.dictionary(pa.int8(), pa.binary()), pa.string()),
        (pa.binary_view(), pa.string_view()),
    ],
    ids=str,
)
def test_columns_of_related_types_give_the_same_packs(
    image_kind: Any, caption_kind: Any, tmp_path: Path
) -> None:
    made = []
    for name, kinds in (("plain", (pa.binary(), pa.string())), ("related", (image_kind, caption_kind))):
        columns = {
            "image": pa.array(GOOD_IMAGES[:3], pa.binary()).cast(kinds[0]),
            "captions": pa.array(CAPTIONS, pa.string()).cast(kinds[1]),
        }
        write_parquet(tmp_path / name / "a.parquet", columns)
        made.append(packs_of({**T2I, "datasets": [{"name": "t2i", "uri": str(tmp_path / name)}]}))
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "kind", [pa.large_list(pa.large_binary()), pa.list_(pa.large_binary()), pa.list_(pa.binary(), 3)], ids=str
)
def test_lists_of_images_may_be_large_or_fixed(kind: Any, tmp_path: Path) -> None:
    made = []
    for name, images in (("plain", pa.list_(pa.binary())), ("related", kind)):
        columns = {
            "image_list": pa.array([GOOD_IMAGES[:3]] * 2, images),
            "instruction_list": pa.array([[["a"], ["b", "c"]]] * 2, STRING_LISTS),
        }
        write_parquet(tmp_path / name / "a.parquet", columns)
        made.append(packs_of(editing_group(tmp_path / name, None)))
    assert made[0] == made[1]


def packs_of(group: dict[str, Any]) -> list[Any]:
    """What is in the packs, without addresses."""
    from tests.golden.hashing import describe
    from tests.property import hostile_rows

    seen: list[Any] = []
    check = hostile_rows.check_batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hostile_rows, "check_batch", lambda batch: (check(batch), seen.append(describe(batch))))
        made, _, error = run_stream(Path(), group)
    assert (made, error) == (3, "")
    return seen


def lines_group(folder: Path, data: bytes) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "lines.jsonl").write_bytes(data)
    (folder / "a.png").write_bytes(GOOD_IMAGES[0])
    return {**VLM, "datasets": [{"name": "vlm", "uri": str(folder), "jsonl": "lines.jsonl", "images": "."}]}


def line(text: str, **fields: Any) -> str:
    row = {
        "image": "a.png",
        "conversations": [{"from": "human", "value": f"<image> {text}"}, {"from": "gpt", "value": text}],
    }
    return json.dumps(row | fields, ensure_ascii=False)  # fmt: skip


LINES = [line("one"), line("größer, 更大 😀"), line("three")]


@pytest.mark.parametrize(
    "data",
    ["\r\n".join(LINES) + "\r\n", "\n".join(LINES), "\r".join(LINES) + "\r"],
    ids=["crlf", "no-last-newline", "cr"],
)
def test_line_ends_do_not_matter(data: str, tmp_path: Path) -> None:
    plain = packs_of(lines_group(tmp_path / "plain", ("\n".join(LINES) + "\n").encode()))
    assert packs_of(lines_group(tmp_path / "other", data.encode())) == plain


def test_a_mark_of_byte_order_costs_its_line_alone(tmp_path: Path) -> None:
    """As at the peer, whose file object keeps it."""
    made, drops, error = run_stream(
        tmp_path, lines_group(tmp_path, b"\xef\xbb\xbf" + "\n".join(LINES).encode())
    )
    assert (made, error) == (3, "")
    assert list(drops["vlm"]) == ["jsonl_parse"]


def test_a_line_of_fifty_megabytes_is_read_like_any_other(tmp_path: Path) -> None:
    data = "\n".join([line("long", ballast="x" * 50_000_000), line("short")])
    begun = time.monotonic()
    assert run_stream(tmp_path, lines_group(tmp_path, data.encode())) == (3, {}, "")
    assert time.monotonic() - begun < 20


def test_a_file_in_one_row_group_is_walked_row_by_row(tmp_path: Path) -> None:
    columns = {
        "image": pa.array([GOOD_IMAGES[number % 4] for number in range(200)], pa.binary()),
        "captions": pa.array([f'{{"a": "row {number}"}}' for number in range(200)], pa.string()),
    }
    write_parquet(tmp_path / "a.parquet", columns, row_group_size=1000)
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1
    packs = packs_of({**T2I, "datasets": [{"name": "t2i", "uri": str(tmp_path)}]})
    rows = [entry["data_indexes"] for pack in packs for entry in pack["batch_data_indexes"]]
    assert sorted(rows) == [[0, 0, number] for number in range(len(rows))]
