"""`bagelplane index` and the commands that plan from what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagelplane.cli.app import main
from bagelplane.cli.demo import RESOURCE
from bagelplane.cli.index import parse_shard
from bagelplane.demo_data import Recipe, make_data_set
from bagelplane.errors import SpecError


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


@pytest.fixture
def file(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    make_data_set(data, Recipe(files=3, distinct_pictures=6))
    path = tmp_path / "dataset.yaml"
    path.write_text(
        RESOURCE.format(data=data, storage="", snapshots=f"  snapshots: {{uri: {tmp_path}/snap}}\n")
    )
    return path


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    code, out, err = run(capsys, "index", file)
    assert (code, err) == (0, "")
    assert "t2i_image_parse" in out
    assert "The image of a text-to-image row is missing" in out
    code, out, _ = run(capsys, "index", file, "-o", "json", "--verify")
    report = json.loads(out)
    assert (code, report["written"], report["missing"]) == (0, 7, 0)
    assert report["costs"]["requests"]["read"] > 0


def test_plan_says_that_it_plans_from_the_index(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    _, before, _ = run(capsys, "plan", file, "--packs", 20)
    assert "from headers and text alone" in before
    run(capsys, "index", file)
    code, after, err = run(capsys, "plan", file, "--packs", 20)
    assert (code, err) == (0, "")
    assert "planned from the index alone" in after
    assert after.splitlines()[2:] == before.splitlines()[2:]


def test_explain_and_check_say_that_there_is_an_index(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    arguments = ("explain", file, "--step", 3, "--world-size", 1, "--from-start")
    _, before, _ = run(capsys, *arguments)
    assert "from headers and text alone" in before
    assert "index" not in run(capsys, "check", file)[1]
    run(capsys, "index", file, "--verify")
    code, after, _ = run(capsys, *arguments)
    assert code == 0
    assert "planned from the start, from the index alone" in after
    assert "once their headers are good" in before
    assert "once their headers are good" not in after
    code, out, _ = run(capsys, "check", file)
    assert (code, "7 of 7 objects are planned from the index" in out) == (0, True)


def test_a_plan_from_a_verified_index_is_sure(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    _, verified, _ = run(capsys, "plan", file, "--packs", 20, "--verify")
    run(capsys, "index", file, "--verify")
    _, planned, _ = run(capsys, "plan", file, "--packs", 20)
    assert "A forecast" not in planned

    def told(text: str) -> list[str]:
        # What is known to decode is decoded when it is in a pack, no more.
        return [line for line in text.splitlines()[1:] if "megapixels" not in line]

    assert told(planned) == told(verified)


def test_progress_is_told_in_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bagelplane.cli.index.LINE_SECONDS", 0.0)
    _, _, err = run(capsys, "index", file)
    assert "indexed 1 of " in err
    assert " s left" in err


@pytest.mark.parametrize("text", ["3", "3/3", "-1/2", "a/b", "0/0", "1/2/3"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--shard"):
        parse_shard(text)


def test_a_resource_without_snapshots_needs_a_place(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "without.yaml"
    path.write_text(RESOURCE.format(data=tmp_path / "data", storage="", snapshots=""))
    code, _, err = run(capsys, "index", path)
    assert code == SpecError.exit_code
    assert "--out" in err
    code, _, _ = run(capsys, "index", path, "--out", tmp_path / "elsewhere")
    assert code == 0
    assert (tmp_path / "elsewhere/inventory.parquet").is_file()
