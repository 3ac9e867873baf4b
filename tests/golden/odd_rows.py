"""Rows as no one should write them, one beside a good one, and what the peer does with each.

    python tests/golden/odd_rows.py        # in the peer's environment: writes fixtures/peer/odd_rows.json

A case is recorded as the packs that the peer made and the drops it counted; null where it raised, or made no
pack within seconds: there a stream of ours drops the row.
"""

from __future__ import annotations

import io
import json
import logging
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
FIXTURE = HERE.parent / "fixtures" / "peer" / "odd_rows.json"
PACKS = 2
TRANSFORM = {"image_stride": 16, "max_image_size": 96, "min_image_size": 16}
VIT_TRANSFORM = {"image_stride": 14, "max_image_size": 56, "min_image_size": 14}


def picture(width: int, height: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    pixels = np.random.RandomState(width).randint(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


ANSWER = {"from": "gpt", "value": "an answer"}
GOOD_LINE = {
    "image": "good.png",
    "conversations": [{"from": "human", "value": "<image> what"}, {"from": "gpt", "value": "a good picture"}],
}


def asked(text: Any = "<image> what", **fields: Any) -> dict[str, Any]:
    return {**fields, "conversations": [{"from": "human", "value": text}, ANSWER]}


def said(*turns: Any, **fields: Any) -> dict[str, Any]:
    return {**fields, "conversations": [*turns, ANSWER]}


HUMAN = {"from": "human", "value": "q"}
LINES: dict[str, Any] = {
    **{f"image {name!r}"[:24]: asked(image=name) for name in (
        "", "a\0b", "\ud800", "x" * 300, "/", "frames", "s3://bucket/key", "good.png/", "good.png\n", "missing.png",
        "../images/good.png", None, 7, True, [], {}, ["good.png", None], ["good.png"] * 3, "empty.png", "broken.webp",
    )},
    **{f"video {name!r}"[:24]: asked("<video> what", video=name) for name in (
        "", "a\0b", "\ud800/", "x" * 300 + "/", "/", "frames/", "with-folder/", "with-text/", "with-hidden/", "empty/",
        "missing/", "good.png/", "..", "../images/frames/", None, 7, [],
    )},
    "text that is half a pair": asked("\ud800"),
    "answer that is half a pair": {"conversations": [HUMAN, {"from": "gpt", "value": "\ud800"}]},
    "piece that is half a pair": asked("<image> \ud800", image="good.png"),
    "turn without from": said({"value": "x"}),
    "turn without value": said({"from": "human"}),
    "turn with null": asked(None),
    "turn with a number": asked(5),
    "answer with a list": {"conversations": [HUMAN, {"from": "gpt", "value": ["x"]}]},
    "turn that is a text": said("x"),
    "turns that are an object": {"conversations": {"a": 1}},
    "turns that are a text": {"conversations": "abc"},
    "turns that are null": {"conversations": None},
    "turns that are missing": {"image": "good.png"},
    "no turns": {"conversations": []},
    "speaker that is a list": said({"from": ["human"], "value": "x"}),
    "other speaker with a number": said({"from": "system", "value": 5}, HUMAN),
    "other speaker without value": said({"from": "system"}, HUMAN),
    "other speaker at the end": {"conversations": [HUMAN, ANSWER, {"from": "tool", "value": ["x"]}]},
    "empty answer": {"conversations": [HUMAN, {"from": "gpt", "value": ""}]},
    "more tags than images": asked("<image><image> q", image="good.png"),
    "more tags in two turns": said(*[{"from": "human", "value": "<image> q"}] * 2, image="good.png"),
    "fewer tags than images": asked("<image> q", image=["good.png", "other.png"]),
    "tag in the answer": {"image": "good.png", "conversations": [HUMAN, {"from": "gpt", "value": "<image> is"}]},
    "video tag in another's turn": said({"from": "system", "value": "<video>"}, HUMAN, video="frames/"),
    "video tag in the second turn": said(HUMAN, {"from": "human", "value": "<video>"}, video="frames/"),
    "video without tag": asked("q", video="frames/"),
    "video and null without tag": asked("q", video=None),
    "video with a number said": asked(5, video="frames/"),
    "video and no turns": {"video": "frames/", "conversations": []},
    "video and null turns": {"video": "frames/", "conversations": None},
    "image beside video": asked("<image> q", image="good.png", video="missing/"),
}  # fmt: skip
RAW_LINES: dict[str, bytes] = {
    "a list": b"[1]", "a number": b"3", "not a number": b"NaN", "null": b"null", "a text": b'"abc"', "blank": b"",
    "spaces": b"   ", "very deep": b"[" * 100_000, "a very long number": b'{"conversations":' + b"9" * 5000 + b"}",
    "a mark of byte order": b"\xef\xbb\xbf" + json.dumps(GOOD_LINE).encode(), "cut short": b'{"image": "good.p',
    "bytes that are no text": b'{"conversations": "\xff"}', "carriage return": json.dumps(GOOD_LINE).encode() + b"\r",
    "image twice": b'{"image":"missing",' + json.dumps(GOOD_LINE).encode()[1:],
}  # fmt: skip
CAPTIONS: dict[str, bytes | None] = {
    "half a pair": b'{"a":"\\ud800"}', "half a pair beside a good one": b'{"a":"\\ud800","b":"fine"}',
    "bytes that are no text": b'{"a":"\xff\xfe"}', "very deep": b"[" * 100_000, "not a number": b'{"a":NaN}',
    "a very long number": b'{"a":' + b"9" * 5000 + b"}", "true": b'{"a":true}', "list": b'["a"]', "text": b'"a"',
    "null": b"null", "number": b"3", "null column": None, "inner list": b'{"a":["b"]}', "inner null": b'{"a":null}',
    "empty object": b"{}", "empty text": b'{"a":""}', "a mark of byte order": b'\xef\xbb\xbf{"a":"x"}',
    "single quotes": b"{'a':'b'}", "blank": b"", "twice": b'{"a":"x","a":"y"}', "empty list": b"[]",
}  # fmt: skip
INSTRUCTIONS: dict[str, Any] = {
    "null phrasing": [[None]], "null step": [None], "null": None, "no phrasing": [[]], "no step": [],
    "empty phrasing": [[b""]], "more steps than images": [[b"a"], [b"b"], [b"c"]],
}  # fmt: skip


def make_pictures(folder: Path) -> None:
    try:
        from tests.golden.broken_images import broken_webp
    except ModuleNotFoundError:  # as a script
        from broken_images import broken_webp

    folder.mkdir()
    for name in ("frames", "with-folder/inner", "with-text", "with-hidden", "empty"):
        (folder / name).mkdir(parents=True)
    frames = [
        "good.png", "frames/f_1.jpg", "frames/f_2.jpg", "with-folder/f_1.jpg", "with-text/f_1.jpg",
        "with-hidden/f_1.jpg", "with-hidden/.f_0.jpg",
    ]  # fmt: skip
    for name in frames:
        (folder / name).write_bytes(picture(40, 30))
    (folder / "other.png").write_bytes(picture(64, 20))
    (folder / "with-text/notes.txt").write_text("no picture")
    (folder / "empty.png").write_bytes(b"")
    (folder / "broken.webp").write_bytes(broken_webp(40, 30))


def of_lines(folder: Path, line: bytes) -> dict[str, Any]:
    """`dataset_info` of two lines, the given one and a good one."""
    make_pictures(folder / "images")
    (folder / "lines.jsonl").write_bytes(line + b"\n" + json.dumps(GOOD_LINE).encode() + b"\n")
    return {
        "data_dir": str(folder / "images"),
        "jsonl_path": str(folder / "lines.jsonl"),
        "num_total_samples": 2,
    }


def of_table(folder: Path, columns: dict[str, Any]) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "files").mkdir()
    table = pa.table(columns)
    pq.write_table(table, folder / "files/a.parquet")
    info = {"data_dir": str(folder / "files"), "num_files": 1, "num_total_samples": 2}
    if "image_list" in columns:
        counts = folder / "counts.json"
        counts.write_text(
            json.dumps({str(folder / "files/a.parquet"): {"num_row_groups": 1, "num_rows": len(table)}})
        )
        info["parquet_info_path"] = str(counts)
    return info


def captioned(captions: bytes | None) -> dict[str, Any]:
    import pyarrow as pa

    texts = pa.array([captions, b'{"a":"good"}'], pa.binary()).cast(pa.string(), safe=False)
    return {"image": pa.array([picture(40, 30)] * 2, pa.binary()), "captions": texts}


def edited(instructions: Any, images: int = 2) -> dict[str, Any]:
    import pyarrow as pa

    texts = pa.array([instructions, [[b"brighter"]]], pa.list_(pa.list_(pa.binary())))
    pictures = [picture(40, 30), picture(64, 20), picture(48, 48)]
    return {
        "image_list": pa.array([pictures[:images], pictures[:2]], pa.list_(pa.binary())),
        "instruction_list": texts.cast(pa.list_(pa.list_(pa.string())), safe=False),
    }


def cases() -> dict[str, tuple[str, Any]]:
    """Name to group type and what writes the data into a folder."""
    made: dict[str, tuple[str, Any]] = {}
    for name, row in LINES.items():
        made[f"vlm, {name}"] = ("vlm_sft", lambda folder, row=row: of_lines(folder, json.dumps(row).encode()))
    for name, line in RAW_LINES.items():
        made[f"vlm, line: {name}"] = ("vlm_sft", lambda folder, line=line: of_lines(folder, line))
    for name, text in CAPTIONS.items():
        made[f"t2i, {name}"] = ("t2i_pretrain", lambda folder, text=text: of_table(folder, captioned(text)))
    for name, value in INSTRUCTIONS.items():
        made[f"edit, {name}"] = ("unified_edit", lambda folder, value=value: of_table(folder, edited(value)))
    for count in (0, 1, 3):
        made[f"edit, {count} images"] = (
            "unified_edit", lambda folder, count=count: of_table(folder, edited([[b"a"]], count))
        )  # fmt: skip
    return made


def dataset_of(packing: Any, kind: str, info: dict[str, Any], tokenizer: Any) -> Any:
    group: dict[str, Any] = {
        "dataset_names": ["d"], "image_transform_args": TRANSFORM, "is_mandatory": False, "num_used_data": [1],
        "weight": 1,
    }  # fmt: skip
    if kind == "unified_edit":
        group["vit_image_transform_args"] = VIT_TRANSFORM
    if kind == "vlm_sft":
        group |= {
            "image_transform_args": VIT_TRANSFORM,
            "num_used_data": [2],
            "shuffle_lines": False,
            "shuffle_seed": 0,
        }
        group["frame_sampler_args"] = {"min_num_frames": 2, "max_num_frames": 4}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "start_of_image": 3, "end_of_image": 4}
    dataset = packing.PackedDataset(
        packing.DataConfig(grouped_datasets={kind: group}), tokenizer, tokens, 0, 1, 1,
        dataset_info={kind: {"d": info}},
        expected_num_tokens=200, max_num_tokens=320, max_num_tokens_per_sample=300, use_flex=True,
    )  # fmt: skip
    dataset.set_epoch(1)
    return dataset


class _TooLongError(BaseException):
    """Not caught by what catches exceptions."""


def _raise_too_long(*_: object) -> None:
    raise _TooLongError


def main() -> None:
    from hashing import describe
    from nemo_automodel.components.datasets.multimodal import packing
    from record import Tokenizer

    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _raise_too_long)
    tokenizer = Tokenizer(str(HERE / "data/tokenizer.json"))
    recorded: dict[str, Any] = {}
    for name, (kind, write) in cases().items():
        with tempfile.TemporaryDirectory() as folder:
            signal.alarm(5)
            try:
                dataset = dataset_of(packing, kind, write(Path(folder)), tokenizer)
                packs = iter(dataset)
                made = [describe(next(packs)) for _ in range(PACKS)]
                recorded[name] = {"packs": made, "drops": dict(dataset.grouped_datasets[0]._drop_counters)}
            except (Exception, _TooLongError) as error:  # noqa: BLE001 (whatever the peer raises is the finding)
                recorded[name] = None
                print(f"{name}: {type(error).__name__}", flush=True)
            finally:
                signal.alarm(0)
    FIXTURE.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
    print(FIXTURE.name, FIXTURE.stat().st_size, "bytes,", len(recorded), "cases")


if __name__ == "__main__":
    main()
