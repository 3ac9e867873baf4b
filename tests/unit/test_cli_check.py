"""`bagelplane check`: all that is wrong is found before a run, and its report fits where it has to."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagelplane.cli.app import main
from bagelplane.cli.check import REPORT_BYTES, build_report
from bagelplane.spec_memory import largest_pack_bytes
from tests.golden.recordings import load_recording, resource_of
from tests.integration.sidecar_harness import DEADLINE_SECONDS, wait_for
from tests.services.s3 import serve_rclone
from tests.services.scripted import Answer, s3_error, serve_answers

Break = Callable[[Path], None]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A copy of the recorded data set, to be broken."""
    return Path(shutil.copytree(load_recording("a_default").data, tmp_path / "data"))


def resource_in(folder: Path, data: Path | str, **changes: Any) -> Path:
    """A resource file over `data`; `changes` are fields of the spec."""
    text = json.dumps(resource_of(load_recording("a_default")).to_mapping())
    mapping = json.loads(text.replace(str(load_recording("a_default").data), str(data)))
    mapping["spec"].update(changes)
    path = folder / "dataset.yaml"
    path.write_text(json.dumps(mapping))
    return path


def outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in arguments])
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


def reported(path: Path) -> dict[str, Any]:
    text = path.read_bytes()
    assert len(text) <= REPORT_BYTES
    report: dict[str, Any] = json.loads(text)
    assert set(report) == {"ok", "problems", "groups"}
    assert all(set(problem) == {"what", "got", "expected", "fix"} for problem in report["problems"])
    return report


def test_a_ring_that_a_pack_of_the_budgets_may_not_fit_into_is_named_with_both_sizes(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = largest_pack_bytes(resource_of(load_recording("a_default")))
    for size, fits in ((needed, True), (needed - 1, False)):
        code, out, err = outcome(
            capsys, "check", resource_in(tmp_path, data, dataplane={"ring": {"size": size}})
        )
        assert (code == 0) == fits, out + err
    said = " ".join((out + err).split())
    assert "spec.dataplane.ring.size" in said
    assert f"{needed - 1} bytes" in said
    assert f"at least {needed} bytes" in said


def test_a_resource_in_order_ends_with_zero_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Path
) -> None:
    path = resource_in(tmp_path, data, snapshots={"uri": str(tmp_path / "snapshots")})
    code, text, errors = outcome(capsys, "check", path, "--report", tmp_path / "report", "--world-size", 2)
    assert (code, errors) == (0, "")
    assert "in order (3 groups" in text
    assert reported(tmp_path / "report") == {"ok": True, "problems": [], "groups": 3}
    assert list((tmp_path / "snapshots").iterdir()) == [], "the look leaves nothing"


def hugging_face_images(data: Path) -> None:
    image = pa.array([{"bytes": b"x", "path": "a.png"}])
    pq.write_table(pa.table({"image": image, "captions": ["{}"]}), data / "t2i/part-00000.parquet")


def other_columns(data: Path) -> None:
    pq.write_table(pa.table({"jpg": [b"x"], "txt": ["a cat"]}), data / "t2i/part-00000.parquet")


def captions_in_a_list(data: Path) -> None:
    pq.write_table(pa.table({"image": [b"x"], "captions": [["a cat"]]}), data / "t2i/part-00000.parquet")


def one_image_an_edit(data: Path) -> None:
    table = pa.table({"image_list": [b"x"], "instruction_list": [[["a"]]]})
    pq.write_table(table, data / "edit/chunk-00000.parquet")


def garbage(data: Path) -> None:
    (data / "t2i/part-00000.parquet").write_bytes(b"\x00garbage" * 100)


def binary_jsonl(data: Path) -> None:
    shutil.copy(data / "t2i/part-00000.parquet", data / "vlm/train.jsonl")


def other_jsonl(data: Path) -> None:
    (data / "vlm/train.jsonl").write_text('{"messages": []}\n' * 5)


def images_elsewhere(data: Path) -> None:
    (data / "vlm/images").rename(data / "vlm/pictures")
    (data / "vlm/images").mkdir()


@pytest.mark.parametrize(
    ("damage", "place", "parts"),
    [
        (hugging_face_images, "groups[0]", ["column image", "struct<bytes", "an encoded image"]),
        (other_columns, "groups[0]", ["lacks the column image, captions", "columns jpg, txt"]),
        (captions_in_a_list, "groups[0]", ["column captions", "list<", "JSON object of captions"]),
        (one_image_an_edit, "groups[1]", ["column image_list", "binary", "list<binary>"]),
        (garbage, "groups[0]", ["part-00000.parquet cannot be read as Parquet"]),
        (binary_jsonl, "groups[2]", ["begins with no conversation", "PAR1", '"conversations"']),
        (other_jsonl, "groups[2]", ["begins with no conversation", "messages"]),
        (images_elsewhere, "groups[2]", ["has no image of the first rows", "img_0000", "correct `images`"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_first_file_of_another_kind_is_an_error_and_not_dropped_rows(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    data: Path,
    damage: Break,
    place: str,
    parts: list[str],
) -> None:
    damage(data)
    code, _, errors = outcome(capsys, "check", resource_in(tmp_path, data))
    assert code == 5
    assert errors.startswith(f"error: spec.{place}.datasets[0]: ")
    assert errors.count("\n") == 1
    assert [part for part in parts if part not in errors] == []
    assert "Fix: " in errors


def test_one_bad_row_is_no_reason_to_refuse_a_data_set(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Path
) -> None:
    lines = (data / "vlm/train.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    first["image"] = ["missing.jpg"]
    (data / "vlm/train.jsonl").write_text("\n".join(["no JSON", "", json.dumps(first), *lines]) + "\n")
    assert outcome(capsys, "check", resource_in(tmp_path, data))[0] == 0


def test_all_problems_are_listed_and_the_first_gives_the_exit_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Path
) -> None:
    (data / "tokenizer.json").unlink()
    other_columns(data)
    images_elsewhere(data)
    (tmp_path / "file").touch()
    path = resource_in(tmp_path, data, snapshots={"uri": str(tmp_path / "file" / "snapshots")})
    code, text, _ = outcome(capsys, "check", path, "--report", tmp_path / "report", "-o", "json")
    assert code == 3, "the tokenizer is missing"
    report = reported(tmp_path / "report")
    assert json.loads(text) == report
    places = [problem["what"].partition(":")[0] for problem in report["problems"]]
    assert places == [
        "spec.tokenizer",
        "spec.groups[0].datasets[0]",
        "spec.groups[2].datasets[0]",
        "spec.snapshots.uri",
    ]
    assert all(problem["fix"] for problem in report["problems"])


def test_too_few_units_for_the_world_are_found_in_every_group(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Path
) -> None:
    code, _, errors = outcome(capsys, "check", resource_in(tmp_path, data), "--world-size", 50)
    assert code == 5
    assert errors.count("fewer units than ranks") == 2, "the third has 96 lines"


@pytest.mark.parametrize("text", [None, "spec: [", "apiVersion: x\nkind: BagelDataset\n"])
def test_a_resource_that_cannot_be_read_is_reported_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "dataset.yaml"
    if text is not None:
        path.write_text(text)
    code, _, errors = outcome(capsys, "check", path, "--report", tmp_path / "report")
    report = reported(tmp_path / "report")
    assert (code, report["ok"], report["groups"]) == (2, False, 0)
    assert report["problems"]
    assert errors.count("error: ") == len(report["problems"])


def test_a_report_that_cannot_be_written_is_one_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Path
) -> None:
    code, _, errors = outcome(
        capsys, "check", resource_in(tmp_path, data), "--report", tmp_path / "no" / "report"
    )
    assert code == 2
    assert "no/report cannot be written: there is no folder" in errors


@pytest.mark.parametrize("count", [1, 7, 300])
@pytest.mark.parametrize("text", ["short", "long " * 5000, "日本語" * 3000, "\x00\udc80"])
def test_a_report_fits_and_says_how_many_problems_it_leaves_out(count: int, text: str) -> None:
    data = build_report([dict.fromkeys(("what", "got", "expected", "fix"), text)] * count, 3)
    assert len(data) <= REPORT_BYTES
    problems = json.loads(data)["problems"]
    left = count - len(problems)
    if left:
        assert problems[-1]["what"] == f"and {left + 1} more"
    assert problems[0]["what"].startswith(text[:40])


def test_a_wrong_bucket_is_named_once_with_its_endpoint_all_its_places_and_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with serve_rclone(tmp_path / "s3") as server:
        storage = {"endpointURL": server.url, "credentialsDir": str(server.credentials_dir)}
        path = resource_in(tmp_path, "s3://bukket", storage=storage, snapshots={"uri": "s3://bukket/steps/"})
        code, _, errors = outcome(capsys, "check", path, "--report", tmp_path / "report")
    assert code == 3
    (problem,) = reported(tmp_path / "report")["problems"]
    assert errors.count("Fix:") == 1
    assert f"s3://bukket/tokenizer.json at {server.url}: there is no such bucket" in errors
    assert "Fix: create the bucket, or correct its name or the endpoint" in errors
    for place in (
        "spec.tokenizer",
        *(f"spec.groups[{n}].datasets[0]" for n in range(3)),
        "spec.snapshots.uri",
    ):
        assert problem["what"].count(place) == 1


def resource_on(folder: Path, url: str) -> Path:
    keys = folder / "keys"
    keys.mkdir()
    (keys / "access_key_id").write_text("AKIA-SECRET-ID")
    (keys / "secret_access_key").write_text("SECRET-KEY")
    return resource_in(folder, "s3://bucket", storage={"endpointURL": url, "credentialsDir": str(keys)})


def test_no_credential_is_in_what_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with serve_answers(s3_error(403, "InvalidAccessKeyId")) as server:
        path = resource_on(tmp_path, server.url)
        code, text, errors = outcome(capsys, "check", path, "--report", tmp_path / "report")
    assert code == 3
    assert "the credentials are wrong" in errors
    assert "SECRET" not in text + errors + (tmp_path / "report").read_text()


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_named_and_not_asked_for_every_data_set(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with serve_answers(Answer(stalls=True)) as server:
        path = resource_on(tmp_path, server.url)
        code, _, errors = outcome(capsys, "check", path, "--report", tmp_path / "report")
        requests = list(server.requests)
    assert code == 4
    first, rest = reported(tmp_path / "report")["problems"]
    assert f"cannot read s3://bucket/tokenizer.json at {server.url}" in first["what"]
    assert rest["what"] == "what comes after spec.tokenizer was not looked at"
    assert rest["fix"] == "correct what is named above, then look again"
    assert len(requests) == 1, errors


def test_sigterm_ends_a_check_that_waits_and_the_report_says_so(tmp_path: Path) -> None:
    report = tmp_path / "report"
    with serve_answers(Answer(stalls=True)) as server:
        path = resource_on(tmp_path, server.url)
        command = [sys.executable, "-m", "bagelplane.cli.app", "check", str(path), "--report", str(report)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: server.requests, "the first request")
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_SECONDS) == 143
        finally:
            process.kill()
            process.wait()
    (problem,) = reported(report)["problems"]
    assert "ended by SIGTERM" in problem["what"]


def test_run_refuses_what_check_finds_and_says_all_of_it(tmp_path: Path, data: Path) -> None:
    hugging_face_images(data)
    binary_jsonl(data)
    command = [sys.executable, "-m", "bagelplane.cli.app", "run", str(resource_in(tmp_path, data))]
    finished = subprocess.run(
        [*command, "--dir", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False,
    )  # fmt: skip
    assert finished.returncode == 5
    assert "error: spec.groups[0].datasets[0]: the column image" in finished.stderr
    assert "spec.groups[2].datasets[0]: " in finished.stderr
    assert "Traceback" not in finished.stderr
