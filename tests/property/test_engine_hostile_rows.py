"""Bad data never kills a stream: whatever rows hold, there are packs, counted drops, or one error of ours in time."""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.hostile_rows import (
    EDIT,
    GOOD_IMAGES,
    T2I,
    VLM,
    captions,
    images,
    json_texts,
    run_stream,
    texts,
    values,
    words,
    write_parquet,
)

pytestmark = pytest.mark.timeout(300)
EXAMPLES = settings(max_examples=100)
PROFILES = pytest.mark.parametrize("profile", ["Automodel", "Strict"])
ALL_PACKS = (3, "")
"""What a stream with one good row among bad ones comes to: packs made, and no error."""
GOOD_CAPTION = '{"caption": "a good one"}'
GOOD_LINE = (
    b'{"image": "good.png", "conversations": [{"from": "human", "value": "what is <image>"}, '
    b'{"from": "gpt", "value": "a good picture"}]}'
)


def check(result: tuple[int, dict[str, dict[str, int]], str], *, empty: bool = False) -> None:
    """All packs, or the end that a group of nothing but drops comes to; nothing else is an answer to bad rows."""
    _, _, error = result
    if not error:
        return
    allowed = ["DataError: group"] + ["ShardingError: group"] * empty
    assert error.startswith(tuple(allowed)), error
    assert "25 rows in a row dropped" in error or (empty and "has no" in error), error


def utf8(text: Any) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogatepass")


@PROFILES
@EXAMPLES
@given(st.lists(st.tuples(images, st.one_of(captions, st.none())), min_size=1, max_size=5))
def test_text_to_image_rows(profile: str, rows: list[tuple[Any, Any]]) -> None:
    rows.append((GOOD_IMAGES[0], GOOD_CAPTION))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        columns = {
            "image": pa.array([image for image, _ in rows], pa.binary()),
            # Bytes said to be texts: a writer in another language may have left anything in them.
            "captions": pa.array([utf8(text) for _, text in rows], pa.binary()).cast(pa.string(), safe=False),
        }
        write_parquet(folder / "a.parquet", columns)
        made, _, error = run_stream(folder, {**T2I, "datasets": [{"name": "t2i", "uri": name}]}, profile)
    assert (made, error) == ALL_PACKS


arrow_columns = st.sampled_from(
    [
        (pa.string(), "text"),
        (pa.large_binary(), b"bytes"),
        (pa.int64(), 7),
        (pa.float64(), float("nan")),
        (pa.bool_(), True),
        (pa.list_(pa.binary()), [b"x"]),
        (pa.list_(pa.list_(pa.string())), [["x"]]),
        (pa.list_(pa.string()), ["x"]),
        (
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
            {"bytes": GOOD_IMAGES[0], "path": "a.png"},
        ),
        (pa.null(), None),
        (pa.dictionary(pa.int32(), pa.string()), "text"),
        (pa.large_list(pa.large_binary()), [GOOD_IMAGES[0], GOOD_IMAGES[1]]),
        (pa.binary(), GOOD_IMAGES[0]),
        (pa.map_(pa.string(), pa.string()), [("a", "b")]),
        (pa.timestamp("ns"), 9),
        (pa.decimal128(5, 2), None),
    ]
)


@PROFILES
@EXAMPLES
@given(arrow_columns, arrow_columns, st.integers(0, 3), st.booleans())
def test_columns_of_the_wrong_type(
    profile: str, first: tuple[Any, Any], second: tuple[Any, Any], count: int, editing: bool
) -> None:
    group, names = (EDIT, ("image_list", "instruction_list")) if editing else (T2I, ("image", "captions"))
    with tempfile.TemporaryDirectory() as name:
        columns = {
            column: pa.array([value] * count, kind)
            for column, (kind, value) in zip(names, (first, second), strict=True)
        }
        write_parquet(Path(name) / "a.parquet", columns)
        where = {"datasets": [{"name": "d", "uri": name}]}
        check(run_stream(Path(name), {**group, **where}, profile), empty=count == 0)


good_chains = st.lists(st.sampled_from(GOOD_IMAGES), min_size=2, max_size=4)
phrasings = st.lists(st.one_of(st.none(), texts), max_size=3)


@PROFILES
@EXAMPLES
@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.lists(images, max_size=5), good_chains),
            st.one_of(st.none(), st.lists(st.one_of(st.none(), phrasings), max_size=5)),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_editing_rows(profile: str, rows: list[tuple[Any, Any]]) -> None:
    rows.append((GOOD_IMAGES[:2], [["brighter"]]))
    with tempfile.TemporaryDirectory() as name:
        instructions = [
            steps and [phrasings and [utf8(text) for text in phrasings] for phrasings in steps]
            for _, steps in rows
        ]
        of_bytes = pa.array(instructions, pa.list_(pa.list_(pa.binary())))
        columns = {
            "image_list": pa.array([row for row, _ in rows], pa.list_(pa.binary())),
            "instruction_list": of_bytes.cast(pa.list_(pa.list_(pa.string())), safe=False),
        }
        write_parquet(Path(name) / "a.parquet", columns)
        made, _, error = run_stream(
            Path(name), {**EDIT, "datasets": [{"name": "edit", "uri": name}]}, profile
        )
    assert (made, error) == ALL_PACKS


file_names = st.one_of(
    st.sampled_from(
        [
            "good.png", "broken.webp", "empty.png", "../good.png", "../../../etc/hostname", "/etc/hostname", "folder",
            "folder/", "frames/", "frames", "", "/", ".", "..", "None", "a\0b", "\ud800.png", "missing.png", "missing/",
            "x" * 300, "x/" * 2000, "good.png/", "good.png/x", "s3://bucket/key", "http://h/a.png",
            "file:///etc/hostname", "~/good.png", "good.png\n", "%00", "loop/a.png", "frames/frame_1.jpg", "/dev/null",
        ]
    ),
    words,
    values,
)  # fmt: skip
speech = st.one_of(
    texts,
    st.sampled_from(["<image>", "<image> what? <image>", "<video>", "<image>" * 40, "a<image>b<image>c", "yes"]),
    values,
)  # fmt: skip
turns = st.one_of(
    st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "system", 7, None]), "value": speech}),
    st.dictionaries(words, values, max_size=2),
    values,
)
good_turns = st.just(
    [{"from": "human", "value": "what is <image>"}, {"from": "gpt", "value": "a good picture"}]
)
conversations = st.one_of(good_turns, st.lists(turns, max_size=4), values)
lines_of_json = json_texts(
    st.one_of(
        st.fixed_dictionaries({"image": file_names, "conversations": conversations}),
        st.fixed_dictionaries({"image": st.lists(file_names, max_size=3), "conversations": conversations}),
        st.fixed_dictionaries({"video": file_names, "conversations": conversations}),
        st.fixed_dictionaries({"image": file_names, "video": file_names, "conversations": conversations}),
        st.fixed_dictionaries({"conversations": conversations}),
        values,
    )
)


@pytest.fixture(scope="module")
def picture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, a broken one, folders, frames and a link that leads to itself."""
    from tests.golden.broken_images import broken_webp

    folder = tmp_path_factory.mktemp("hostile") / "images"
    (folder / "folder").mkdir(parents=True)
    (folder / "frames").mkdir()
    (folder / "good.png").write_bytes(GOOD_IMAGES[0])
    (folder.parent / "good.png").write_bytes(GOOD_IMAGES[1])
    (folder / "broken.webp").write_bytes(broken_webp(40, 30))
    (folder / "empty.png").write_bytes(b"")
    for number in range(11):
        (folder / "frames" / f"frame_{number}.jpg").write_bytes(GOOD_IMAGES[1])
    (folder / "loop").symlink_to("loop")
    return folder


def converse(picture_folder: Path, data: bytes, profile: str) -> Any:
    with tempfile.TemporaryDirectory() as name:
        lines = Path(name) / "lines.jsonl"
        lines.write_bytes(data)
        place = {"name": "vlm", "uri": name, "jsonl": str(lines), "images": str(picture_folder)}
        return run_stream(Path(name), {**VLM, "datasets": [place]}, profile)


@PROFILES
@EXAMPLES
@given(
    lines=st.lists(
        st.one_of(
            lines_of_json.map(lambda line: line.encode("utf-8", "surrogatepass")),
            st.binary(max_size=12),
            st.sampled_from([b"", b"\xef\xbb\xbf{}", b"\xff\xfe{\0}\0", b"\xc3", b'{"image": "\xff.png"}']),
        ),
        max_size=5,
    ),
    ending=st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n"]),
    last=st.booleans(),
)
def test_lines_of_conversations(
    picture_folder: Path, profile: str, lines: list[bytes], ending: bytes, last: bool
) -> None:
    data = ending.join([*lines, GOOD_LINE]) + (ending if last else b"")
    made, _, error = converse(picture_folder, data, profile)
    assert (made, error) == ALL_PACKS


@PROFILES
@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize(
    "name",
    [
        "", "/", ".", "..", "folder", "folder/", "frames", "a\0b", "a\0b/", "\ud800", "\ud800/", "x" * 300, "x/" * 2000,
        "good.png/", "good.png/x", "loop/a.png", "loop/", "loop", "s3://bucket/key", "s3://bucket/key/", "http://h/a.png",
        "file:///etc/hostname", "missing/", "missing", None, 7, [], {}, ["good.png", None], "/dev/null",
        "/root/secret\n", "good.png\n", ["good.png"] * 60, True, "broken.webp", "empty.png",
    ],
    ids=lambda value: json.dumps(value)[:24],
)  # fmt: skip
def test_no_file_name_ends_a_stream(kind: str, name: Any, picture_folder: Path, profile: str) -> None:
    """One good row beside it: the row with the name is dropped, or used, and the stream goes on."""
    answer = {"from": "gpt", "value": "an answer"}
    bad = {kind: name, "conversations": [{"from": "human", "value": f"<{kind}> what"}, answer]}
    good = {"image": "good.png", "conversations": [{"from": "human", "value": "<image> what"}, answer]}
    data = (json.dumps(bad) + "\n" + json.dumps(good) + "\n").encode()
    made, _, error = converse(picture_folder, data, profile)
    assert (made, error) == ALL_PACKS


T2I_CAPTIONS = {
    "list": '["a"]', "text": '"a"', "null": "null", "number": "3", "nan": '{"a": NaN}', "null-column": None,
    "nested": '{"a": ["b"]}', "surrogate": '{"a": "\\ud800"}', "empty": "{}", "empty-text": '{"a": ""}',
    "deep": "[" * 100_000, "not-json": "{'a': 1}", "huge-number": '{"a": ' + "9" * 5000 + "}", "bool": '{"a": true}',
}  # fmt: skip


@PROFILES
@pytest.mark.parametrize("kind", T2I_CAPTIONS)
def test_no_caption_ends_a_stream(kind: str, profile: str, tmp_path: Path) -> None:
    rows = [T2I_CAPTIONS[kind], GOOD_CAPTION]
    columns = {
        "image": pa.array([GOOD_IMAGES[0]] * 2, pa.binary()),
        "captions": pa.array(rows, pa.string()),
    }
    write_parquet(tmp_path / "a.parquet", columns)
    made, _, error = run_stream(
        tmp_path, {**T2I, "datasets": [{"name": "t2i", "uri": str(tmp_path)}]}, profile
    )
    assert (made, error) == ALL_PACKS


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("group", [T2I, EDIT], ids=["t2i", "edit"])
def test_files_without_rows_or_row_groups_are_passed_over(group: Any, rows: int, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    kinds = (
        {"image": pa.binary(), "captions": pa.string()}
        if group is T2I
        else {"image_list": pa.list_(pa.binary()), "instruction_list": pa.list_(pa.list_(pa.string()))}
    )
    schema = pa.schema(list(kinds.items()))
    with pq.ParquetWriter(tmp_path / "a.parquet", schema):
        pass  # no row group at all
    with pq.ParquetWriter(tmp_path / "b.parquet", schema) as writer:
        writer.write_table(schema.empty_table())
    if rows:
        good = (
            {"image": [GOOD_IMAGES[0]], "captions": ['{"a": "b"}']}
            if group is T2I
            else {"image_list": [GOOD_IMAGES[:2]], "instruction_list": [[["brighter"]]]}
        )
        write_parquet(
            tmp_path / "c.parquet", {name: pa.array(good[name], kind) for name, kind in kinds.items()}
        )
    made, _, error = run_stream(tmp_path, {**group, "datasets": [{"name": "d", "uri": str(tmp_path)}]})
    if rows:
        assert (made, error) == ALL_PACKS
    else:
        assert error.startswith(("DataError", "ShardingError")), error


@pytest.mark.parametrize("damage", ["cut", "zeroed", "empty", "text", "footer-only"])
def test_a_damaged_parquet_file_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.parquet"
    columns = {
        "image": pa.array([base64.b64encode(GOOD_IMAGES[0])] * 50, pa.binary()),
        "captions": pa.array(['{"a": "b"}'] * 50, pa.string()),
    }
    write_parquet(path, columns)
    data = path.read_bytes()
    middle = len(data) // 3
    path.write_bytes(
        {
            "cut": data[:middle],
            "zeroed": data[:4] + bytes(middle) + data[4 + middle :],
            "empty": b"",
            "text": b"PAR1" + b"hello" * 40 + b"PAR1",
            "footer-only": data[-200:],
        }[damage]
    )
    made, _, error = run_stream(tmp_path, {**T2I, "datasets": [{"name": "t2i", "uri": str(tmp_path)}]})
    assert made == 0
    assert "damaged.parquet" in error


@pytest.mark.parametrize("group", [T2I, EDIT], ids=["t2i", "edit"])
def test_a_missing_column_is_named_with_its_file(group: Any, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"picture": pa.array([b"x"])})
    made, _, error = run_stream(tmp_path, {**group, "datasets": [{"name": "d", "uri": str(tmp_path)}]})
    assert made == 0
    assert "a.parquet" in error
    assert ("image_list" if group is EDIT else "image") in error


@pytest.mark.parametrize(
    ("group", "reason"), [(T2I, "t2i_image_parse"), (VLM, "jsonl_parse")], ids=["t2i", "vlm"]
)
def test_a_group_of_bad_rows_alone_ends_with_the_reason_and_a_row(
    group: Any, reason: str, tmp_path: Path
) -> None:
    if group is T2I:
        columns = {"image": pa.array([b"no image"]), "captions": pa.array(['{"a": "b"}'])}
        write_parquet(tmp_path / "a.parquet", columns)
        place = {"name": "t2i", "uri": str(tmp_path)}
    else:
        (tmp_path / "lines.jsonl").write_text("no json\n" * 3)
        place = {"name": "vlm", "uri": str(tmp_path), "jsonl": "lines.jsonl", "images": "images"}
    made, _, error = run_stream(tmp_path, {**group, "datasets": [place]})
    assert made == 0
    assert reason in error
    assert "25 rows in a row" in error
