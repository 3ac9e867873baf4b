"""The index: what is read for it, what is read again, who may write it, and what is believed of it."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bagelplane.cli.demo import RESOURCE
from bagelplane.demo_data import Recipe, make_data_set
from bagelplane.errors import DataError, StorageError
from bagelplane.images import ImageError, head_size, header_size
from bagelplane.settings import StreamSettings
from bagelplane.sources.index_format import INVENTORY_SCHEMA, ROW_SCHEMA, form_of, parse_part_name, value_of
from bagelplane.spec import BagelDataset
from bagelplane.storage import Storage, open_storage
from bagelplane.stream import open_rank_stream
from bagelplane.strict_images import upright_head_size, upright_size
from bagelplane.topology import Topology
from tests.jpeg_corpus import corpus
from tests.row_facts import make_index, told_plan
from tests.services.s3 import S3Server, serve_versitygw

PLACE = Topology(0, 1, 0)
PACKS = 8


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index") / "data"
    make_data_set(folder, Recipe(files=3, distinct_pictures=6))
    return folder


@pytest.fixture
def data(original: Path, tmp_path: Path) -> Path:
    """The demo's data, faults and all; of its own for each test."""
    return Path(shutil.copytree(original, tmp_path / "data", copy_function=shutil.copy2))


def resource(data: str | Path, snapshots: str | Path, profile: str = "Automodel") -> BagelDataset:
    lines = f"  snapshots: {{uri: {snapshots}}}\n" if snapshots else ""
    text = RESOURCE.format(data=data, storage="", snapshots=lines).replace("Automodel", profile)
    return BagelDataset.from_yaml(text, "dataset.yaml")


def plans(dataset: BagelDataset, count: int = PACKS) -> list[Any]:
    with closing(open_rank_stream(dataset, PLACE, decode_threads=0)) as stream:
        return [told_plan(stream.plan_pack()) for _ in range(count)]


def make_packs(stream: Any) -> None:
    for _ in range(PACKS):
        stream.next_pack(lambda pack: [np.empty((*shape, 3), np.uint8) for shape in pack.image_shapes])


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Requests by what they ask and for what: ("read", "look_up" or "list") and the object's name."""
    asked: Counter[str] = Counter()
    run = Storage._run

    def counting(self: Storage, verb: str, location: Any, action: Any) -> Any:
        asked[f"{verb} {location.uri}"] += 1
        return run(self, verb, location, action)

    monkeypatch.setattr(Storage, "_run", counting)
    return asked


def of_data(reads: Counter[str], root: str | Path) -> Counter[str]:
    names = ("tokenizer.json", "parquet_info.json")
    return Counter(
        {key: count for key, count in reads.items() if f" {root}/" in key and not key.endswith(names)}
    )


@pytest.fixture(scope="module")
def server(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The data in a real store."""
    with serve_versitygw(tmp_path_factory.mktemp("index-s3")) as server:
        storage = open_storage(server.settings)
        for path in sorted(path for path in original.rglob("*") if path.is_file()):
            storage.write_bytes(f"s3://{server.bucket}/data/{path.relative_to(original)}", path.read_bytes())
        yield server


def far_resource(server: S3Server, snapshots: Path | str) -> BagelDataset:
    place = f"endpointURL: '{server.url}', region: us-east-1, credentialsDir: {server.credentials_dir}"
    storage = f"  storage: {{{place}}}\n"
    lines = f"  snapshots: {{uri: {snapshots}}}\n" if snapshots else ""
    text = RESOURCE.format(data=f"s3://{server.bucket}/data", storage=storage, snapshots=lines)
    return BagelDataset.from_yaml(text, "dataset.yaml")


# --- what is read ---------------------------------------------------------------------------------------


def test_an_object_costs_at_most_two_requests_beside_listing(
    server: S3Server, reads: Counter[str], tmp_path: Path
) -> None:
    report = make_index(far_resource(server, tmp_path))
    assert not report.problems
    asked = of_data(reads, f"s3://{server.bucket}/data")
    by_object: Counter[str] = Counter()
    for key, count in asked.items():
        verb, _, uri = key.rpartition(" ")
        if verb == "list":
            assert count <= 2, "the row groups that the resource names need a listing of their own"
        else:
            by_object[uri] += count
    assert len(by_object) > 12
    parquet = {uri: count for uri, count in by_object.items() if uri.endswith(".parquet")}
    assert set(parquet.values()) == {1}
    # A name that leads nowhere is asked for once more: planning hears of a read, not of a look.
    assert max(count for uri, count in by_object.items() if "missing" not in uri) == 2


def test_planning_from_an_index_asks_the_store_for_nothing_but_listings(
    server: S3Server, reads: Counter[str], tmp_path: Path
) -> None:
    dataset = far_resource(server, tmp_path)
    expected = plans(far_resource(server, ""))
    make_index(dataset)
    reads.clear()
    assert plans(dataset) == expected
    asked = of_data(reads, f"s3://{server.bucket}/data")
    assert {key.partition(" ")[0] for key in asked} == {"list", "look"}
    assert sum(asked.values()) <= 6, asked


def test_a_far_index_is_read_ahead_in_the_order_of_planning_and_each_part_once(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = far_resource(server, f"s3://{server.bucket}/snapshots")
    make_index(dataset)
    parts, read = Counter[str](), Storage.read_bytes

    def noting(self: Storage, uri: str, **options: Any) -> bytes:
        if "/parts/" in uri:
            parts[f"{threading.current_thread().name.partition('_')[0]} {uri}"] += 1
        return read(self, uri, **options)

    monkeypatch.setattr(Storage, "read_bytes", noting)
    assert plans(dataset) == plans(far_resource(server, ""))
    assert set(parts.values()) == {1}
    ahead = [key for key in parts if key.startswith("index-ahead ")]
    assert len(ahead) >= len(parts) - 3, "the first of each group alone is waited for"


def test_packs_from_a_store_are_the_same_with_an_index(server: S3Server, tmp_path: Path) -> None:
    dataset = far_resource(server, tmp_path)
    make_index(dataset)
    made = list[Any]()
    for one in (dataset, far_resource(server, "")):
        with closing(open_rank_stream(one, PLACE, decode_threads=3)) as stream:
            made.append([])
            for _ in range(PACKS):
                arrays: list[np.ndarray] = []

                def allocate(pack: Any, arrays: list[np.ndarray] = arrays) -> list[np.ndarray]:
                    arrays[:] = [np.empty((*shape, 3), np.uint8) for shape in pack.image_shapes]
                    return arrays

                pack = stream.next_pack(allocate)
                made[-1].append(
                    (
                        pack.scalars,
                        [array.tobytes() for array in arrays],
                        pack.arrays["packed_text_ids"].tolist(),
                    )
                )
    assert made[0] == made[1]


def test_a_large_image_is_looked_at_from_its_beginning(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.RandomState(1).randint(0, 255, (700, 900, 3), np.uint8)
    Image.fromarray(noise).save(data / "vlm/images/large.jpg", quality=95)
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "x"}]
    line = {"image": "large.jpg", "conversations": turns}
    (data / "vlm/train.jsonl").write_text(json.dumps(line) + "\n")
    assert (data / "vlm/images/large.jpg").stat().st_size > 256 * 1024
    dataset = resource(data, tmp_path / "snap")
    read = StreamSettings.from_resource(dataset).storage
    report = make_index(dataset)
    assert not report.problems
    [row] = [row for row in rows_of(tmp_path / "snap/index") if row["text"] and "large.jpg" in row["text"]]
    [image] = row["images"]
    assert (image["width"], image["height"], image["format"]) == (900, 700, "JPEG")
    assert image["length_bytes"] == (data / "vlm/images/large.jpg").stat().st_size
    assert read is not None


def rows_of(index: Path) -> list[dict[str, Any]]:
    return [row for part in sorted((index / "parts").iterdir()) for row in pq.read_table(part).to_pylist()]


def test_a_beginning_says_what_the_whole_says_or_nothing() -> None:
    said = 0
    for _, data in corpus():
        for head in (data[:600], data[: len(data) // 2], data):
            for from_head, from_all in ((head_size, header_size), (upright_head_size, upright_size)):
                try:
                    expected: Any = from_all(data)
                except ImageError:
                    expected = None
                found = from_head(head, len(data))
                assert found in (None, expected)
                said += found is not None
    assert said > 50


# --- what is read again -----------------------------------------------------------------------------------


def test_an_index_made_again_reads_nothing(data: Path, tmp_path: Path, reads: Counter[str]) -> None:
    dataset, index = resource(data, tmp_path / "snap"), tmp_path / "snap/index"
    make_index(dataset)
    before = content(index)
    reads.clear()
    report = make_index(dataset)
    assert (report.written, report.missing, report.kept) == (0, 0, report.parts)
    assert not [key for key in of_data(reads, data) if key.startswith("read")]
    assert content(index) == before


def test_only_what_has_changed_is_read_again(data: Path, tmp_path: Path, reads: Counter[str]) -> None:
    dataset, index = resource(data, tmp_path / "snap"), tmp_path / "snap/index"
    make_index(dataset)
    changed = sorted((data / "edit").glob("*.parquet"))[1]
    pq.write_table(pq.read_table(changed).slice(1), changed)
    assert "1 changed since" in coverage(dataset)
    expected = plans(resource(data, ""))
    assert plans(dataset) == expected, "with an index that is out of date"
    reads.clear()
    report = make_index(dataset)
    assert (report.written, report.kept) == (1, report.parts - 1)
    assert [key for key in of_data(reads, data) if key.startswith("read")] == [f"read {changed}"]
    assert plans(dataset) == expected
    assert len(list((index / "parts").iterdir())) == report.parts, "the old part is gone"
    shutil.rmtree(tmp_path / "other", ignore_errors=True)
    make_index(dataset, str(tmp_path / "other"))
    assert content(tmp_path / "other") == content(index), "as if it had been made at once"


def coverage(dataset: BagelDataset) -> str:
    settings = StreamSettings.from_resource(dataset)
    assert settings.index is not None
    for config in settings.groups:
        settings.list_units(config)
    return str(settings.index.coverage)


def test_verifying_adds_what_does_not_decode_and_is_kept(data: Path, tmp_path: Path) -> None:
    dataset, index = resource(data, tmp_path / "snap"), tmp_path / "snap/index"
    assert make_index(dataset).undecodable_images is None
    report = make_index(dataset, verify=True)
    assert report.written == report.parts == len(list((index / "parts").iterdir()))
    assert report.undecodable_images is not None
    assert report.undecodable_images > 0
    again = make_index(dataset)
    assert (again.written, again.undecodable_images) == (0, report.undecodable_images)
    bad = [image for row in rows_of(index) for image in row["images"] or () if image["undecodable"]]
    assert len(bad) == report.undecodable_images


# --- who writes it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 5, 30])
def test_shards_together_write_what_one_would(data: Path, tmp_path: Path, count: int) -> None:
    dataset = resource(data, tmp_path / "snap")
    reports = [make_index(dataset, shard=(number, count)) for number in range(count)]
    assert sum(report.written for report in reports) == reports[0].parts
    assert reports[0].missing > 0
    assert [report.missing for report in reports][-1] == 0
    make_index(dataset, str(tmp_path / "whole"))
    assert content(tmp_path / "snap/index") == content(tmp_path / "whole")


def test_a_shard_that_is_started_again_writes_its_own_parts_alone(data: Path, tmp_path: Path) -> None:
    dataset, index = resource(data, tmp_path / "snap"), tmp_path / "snap/index"
    make_index(dataset, shard=(0, 2))
    first = content(index)
    make_index(dataset, shard=(1, 2))
    for name in first:
        (index / name).unlink()
    make_index(dataset, shard=(0, 2))
    assert first.items() <= content(index).items()
    assert make_index(dataset, shard=(0, 2)).missing == 0


def test_a_large_file_of_lines_is_several_parts(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("bagelplane.indexing", "bagelplane.sources.index"):
        monkeypatch.setattr(f"{module}.LINES_A_PART", 10)
    monkeypatch.setattr("bagelplane.indexing.LINES_A_GROUP", 3)
    monkeypatch.setattr("bagelplane.sources.index._ROWS_READ_AT_ONCE", 4)
    dataset = resource(data, tmp_path / "snap")
    count = len((data / "vlm/train.jsonl").read_text().splitlines())
    report = make_index(dataset)
    assert sum(summary.type == "vlm_sft" for summary in report.summaries) == -(-count // 10)
    assert plans(dataset) == plans(resource(data, ""))
    parts = tmp_path / "snap/index/parts"
    sorted(path for path in parts.iterdir() if "-of-00001" not in path.name)[1].unlink()
    assert "1 indexed in part" in coverage(dataset)
    assert plans(dataset) == plans(resource(data, ""))


@pytest.mark.slow
def test_an_indexer_that_is_killed_goes_on_to_the_same_files(data: Path, tmp_path: Path) -> None:
    """SIGKILL at several moments, each time later; then it finishes."""
    make_index(resource(data, tmp_path / "undisturbed"))
    file = tmp_path / "dataset.yaml"
    file.write_text(
        RESOURCE.format(data=data, storage="", snapshots=f"  snapshots: {{uri: {tmp_path}/killed}}\n")
    )
    parts, index = set[int](), tmp_path / "killed/index"
    wanted = content(tmp_path / "undisturbed/index")
    for kill_at in (1, 3, 6):
        process = subprocess.Popen(
            [sys.executable, "-m", "bagelplane.cli.app", "index", str(file), "--threads", "1"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while process.poll() is None and len(list(index.glob("parts/*.parquet"))) < kill_at:
            pass
        process.kill()
        process.wait(timeout=30)
        written = content(index)
        parts.add(len(written))
        assert {name: data for name, data in written.items() if name in wanted} == {
            name: wanted[name] for name in written if name in wanted
        }
    assert len(parts) > 1, "it was killed at one moment only"
    report = make_index(resource(data, tmp_path / "killed"))
    assert report.missing == 0
    assert content(index) == wanted


def test_what_cannot_be_read_is_named_and_the_rest_is_indexed(data: Path, tmp_path: Path) -> None:
    broken = min((data / "t2i").glob("*.parquet"))
    broken.write_bytes(b"PAR1" + b"no parquet" * 20 + b"PAR1")
    report = make_index(resource(data, tmp_path / "snap"))
    [problem] = report.problems
    assert broken.name in str(problem)
    assert report.missing == 1
    assert report.written == report.parts - 1


def test_no_credential_is_in_an_index(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA-OF-THE-TEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    make_index(resource(original, tmp_path))
    for data in content(tmp_path / "index").values():
        assert b"of-the-test" not in data.lower()


# --- what is believed -------------------------------------------------------------------------------------


def test_no_index_is_no_word_about_it(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = StreamSettings.from_resource(resource(data, tmp_path / "snap"))
    assert settings.index is None
    assert caplog.records == []


@pytest.mark.parametrize("change", ["profile", "tokenizer", "library"])
def test_an_index_looked_at_in_another_way_is_out_of_date(
    change: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = resource(data, tmp_path / "snap")
    make_index(dataset)
    assert "0 of" not in coverage(dataset)
    if change == "profile":
        dataset = resource(data, tmp_path / "snap", "Strict")
    elif change == "tokenizer":
        tokenizer = json.loads((data / "tokenizer.json").read_text())
        (data / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    else:
        monkeypatch.setattr("bagelplane.sources.index_format.metadata.version", lambda name: "99")
    with caplog.at_level(logging.WARNING):
        found = plans(dataset)
    assert found == plans(resource(data, "", dataset.spec.profile))
    assert any("changed since" in record.getMessage() for record in caplog.records)


def damaged(part: Path, how: str) -> None:
    data = part.read_bytes()
    table = pq.read_table(part)
    metadata = table.schema.metadata
    middle = len(data) // 3
    bad: dict[str, Any] = {
        "cut": lambda: data[:middle],
        "empty": lambda: b"",
        "bits": lambda: data[:middle] + bytes(byte ^ 0x55 for byte in data[middle : middle + 40]) + data[middle + 40 :],
        "text": lambda: b"PAR1" + b"hello" * 40 + b"PAR1",
        "columns": lambda: as_bytes(pa.table({"row": [1, 2]})),
        "no summary": lambda: as_bytes(table.replace_schema_metadata({})),
        "negative": lambda: as_bytes(with_image(table, width=-5), metadata),
        "no size": lambda: as_bytes(with_image(table, width=None), metadata),
        "fewer rows": lambda: as_bytes(table.slice(1), metadata),
        "other counts": lambda: as_bytes(table.set_column(
            table.schema.get_field_index("token_counts"), ROW_SCHEMA.field("token_counts"),
            pa.array([[1]] * len(table), ROW_SCHEMA.field("token_counts").type)), metadata),
        "other form": lambda: as_bytes(table.set_column(
            table.schema.get_field_index("text_form"), ROW_SCHEMA.field("text_form"),
            pa.array(["pickle"] * len(table), pa.string())), metadata),
        "deep value": lambda: as_bytes(with_rows(table, text_form="json", text="[" * 100_000), metadata),
        "no value": lambda: as_bytes(with_rows(table, text_form="json", text="{"), metadata),
        "deep summary": lambda: as_bytes(table, {b"bagelplane": b"[" * 100_000}),
        "other summary": lambda: as_bytes(table, {b"bagelplane": with_drops(metadata[b"bagelplane"], [])}),
    }  # fmt: skip
    part.write_bytes(bad[how]())


def as_bytes(table: pa.Table, metadata: Any = None) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata) if metadata else table, sink)
    return sink.getvalue()


def with_drops(summary: bytes, drops: Any) -> bytes:
    content = json.loads(summary)
    content["summary"]["drops"] = drops
    return json.dumps(content).encode()


def with_rows(table: pa.Table, **fields: Any) -> pa.Table:
    return pa.Table.from_pylist([row | fields for row in table.to_pylist()], ROW_SCHEMA)


def with_image(table: pa.Table, **fields: Any) -> pa.Table:
    rows = table.to_pylist()
    for row in rows:
        row["images"] = [image | fields for image in row["images"] or ()]
    return pa.Table.from_pylist(rows, ROW_SCHEMA)


@pytest.mark.parametrize(
    "how",
    [
        "cut",
        "empty",
        "bits",
        "text",
        "columns",
        "no summary",
        "negative",
        "no size",
        "fewer rows",
        "other counts",
        "other form",
        "deep value",
        "no value",
        "deep summary",
        "other summary",
    ],
)
@pytest.mark.parametrize("kind", ["t2i_pretrain", "unified_edit", "vlm_sft"])
def test_a_damaged_part_is_named_and_its_object_planned_from_the_data(
    how: str, kind: str, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = resource(data, tmp_path / "snap")
    report = make_index(dataset)
    expected = plans(resource(data, ""))
    parts = pq.read_table(tmp_path / "snap/index/inventory.parquet").to_pylist()
    for row in parts:
        if row["type"] == kind:
            damaged(tmp_path / "snap/index/parts" / row["part"], how)
    with caplog.at_level(logging.WARNING):
        assert plans(dataset) == expected
    assert any("is planned from the data" in record.getMessage() for record in caplog.records)
    assert not report.problems


@pytest.mark.parametrize("images", [None, [], [None], "twice"])
def test_a_part_whose_rows_have_not_one_image_each_is_damaged(
    images: Any, data: Path, tmp_path: Path
) -> None:
    dataset = resource(data, tmp_path / "snap")
    make_index(dataset)
    for row in pq.read_table(tmp_path / "snap/index/inventory.parquet").to_pylist():
        if row["type"] == "t2i_pretrain":
            part = tmp_path / "snap/index/parts" / row["part"]
            table = pq.read_table(part)
            rows = [one | {"images": (one["images"] or []) * 2 if images == "twice" else images}
                    for one in table.to_pylist()]  # fmt: skip
            part.write_bytes(as_bytes(pa.Table.from_pylist(rows, ROW_SCHEMA), table.schema.metadata))
    assert plans(dataset) == plans(resource(data, ""))


def test_parts_under_names_that_we_do_not_write_are_no_traceback(data: Path, tmp_path: Path) -> None:
    dataset = resource(data, tmp_path / "snap")
    make_index(dataset)
    for part in list((tmp_path / "snap/index/parts").iterdir()):
        for number in range(2):
            part.with_name(
                part.name.replace("00000-of-00001", f"0000{number}-of-00002-verified")
            ).write_bytes(b"")
    assert plans(dataset) == plans(resource(data, ""))


def test_an_inventory_that_is_no_file_is_done_without(data: Path, tmp_path: Path) -> None:
    dataset, inventory = (
        resource(data, tmp_path / "snap", "Strict"),
        tmp_path / "snap/index/inventory.parquet",
    )
    make_index(dataset)
    inventory.unlink()
    os.mkfifo(inventory)
    assert plans(dataset) == plans(resource(data, "", "Strict"))


def test_a_file_without_a_line_is_indexed_as_one(data: Path, tmp_path: Path) -> None:
    (data / "vlm/train.jsonl").write_bytes(b"")
    report = make_index(resource(data, tmp_path / "snap"))
    assert (report.problems, report.missing) == ([], 0)
    part = next(row for row in pq.read_table(tmp_path / "snap/index/inventory.parquet").to_pylist()
                if row["type"] == "vlm_sft")  # fmt: skip
    assert (part["rows"], part["row_groups"]) == (0, [0])


def test_each_object_is_looked_for_among_its_own_parts_alone(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It was looked for among all: 2,000 objects took 20 seconds, and 20,000 half an hour.
    dataset, compared = resource(data, tmp_path / "snap"), Counter[str]()
    report = make_index(dataset)
    parts = tmp_path / "snap/index/parts"
    for number in range(3):  # a name of many parts of which hardly any is there
        (parts / f"{'0' * 20}-{'1' * 20}-{number:05d}-of-99999.parquet").touch()

    def counting(name: Any, **fields: Any) -> Any:
        compared["names"] += 1
        return replace(name, **fields)

    monkeypatch.setattr("bagelplane.indexing.replace", counting)
    assert make_index(dataset).kept == report.parts
    assert compared["names"] <= report.parts


@pytest.mark.parametrize("damage", [b"", b"PAR1 nothing PAR1", as_bytes(pa.table({"a": [1]}))])
def test_a_damaged_inventory_is_done_without_and_written_anew(
    damage: bytes, data: Path, tmp_path: Path
) -> None:
    dataset, inventory = (
        resource(data, tmp_path / "snap", "Strict"),
        tmp_path / "snap/index/inventory.parquet",
    )
    make_index(dataset)
    good = inventory.read_bytes()
    inventory.write_bytes(damage)
    assert plans(dataset) == plans(resource(data, "", "Strict"))
    make_index(dataset)
    assert inventory.read_bytes() == good


def test_an_image_replaced_after_it_was_indexed_is_an_error_that_names_it(data: Path, tmp_path: Path) -> None:
    """Images in a folder are not listed at a start: what is found when they are decoded has to be what was planned."""
    dataset = resource(data, tmp_path / "snap")
    make_index(dataset)
    for path in (data / "vlm/images").rglob("*.jpg"):
        Image.new("RGB", (321, 123)).save(path)
    with (
        closing(open_rank_stream(dataset, PLACE, decode_threads=1)) as stream,
        pytest.raises(DataError) as caught,
    ):
        make_packs(stream)
    assert "vlm/images" in str(caught.value)
    assert "was replaced since it was indexed" in str(caught.value)


def test_a_file_replaced_between_planning_and_reading_is_an_error_that_names_it(
    data: Path, tmp_path: Path
) -> None:
    dataset = resource(data, tmp_path / "snap")
    make_index(dataset)
    with closing(open_rank_stream(dataset, PLACE, decode_threads=1)) as stream:
        stream.plan_pack()
        for path in (*(data / "t2i").glob("*.parquet"), *(data / "edit").glob("*.parquet")):
            pq.write_table(pq.read_table(path).slice(1), path)
        # The listing at the start told its version, which a reader that knows nothing of an index minds too.
        with pytest.raises(StorageError, match=r"\.parquet: it was changed since it was first seen"):
            make_packs(stream)


# --- the format -------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text()
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
)


@given(st.one_of(json_values, st.binary(), st.text(st.characters())))
def test_a_value_is_kept_as_it_is(value: Any) -> None:
    form, text = form_of(value)
    found = value_of(form, text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", [(1, 2), [b"bytes"], {1: 2}, 1j, object])
def test_a_value_that_would_change_is_left_to_the_data(value: Any) -> None:
    with pytest.raises(ValueError, match="is not kept"):
        form_of(value)


@pytest.mark.parametrize(
    "name", ["x.parquet", "../../etc/passwd", f"{'a' * 20}-{'b' * 20}-00003-of-00003.parquet"]
)
def test_other_names_are_no_parts(name: str) -> None:
    assert parse_part_name(name) is None


def test_the_inventory_tells_of_every_object(data: Path, tmp_path: Path) -> None:
    report = make_index(resource(data, tmp_path / "snap"))
    table = pq.read_table(tmp_path / "snap/index/inventory.parquet")
    assert table.schema.remove_metadata() == INVENTORY_SCHEMA
    rows = table.to_pylist()
    assert len(rows) == report.parts == 7
    assert {row["part"] for row in rows} == {path.name for path in (tmp_path / "snap/index/parts").iterdir()}
    for row in rows:
        if row["object"].endswith(".parquet"):
            file = pq.ParquetFile(row["object"])
            assert row["row_groups"] == [
                file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)
            ]
            assert row["size_bytes"] == Path(row["object"]).stat().st_size
