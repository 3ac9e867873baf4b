"""`bagelplane explain` and `find`: what they print agrees with itself, and wrong arguments get one line with a fix."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bagelplane.cli import explain as explain_module
from bagelplane.cli.app import main
from bagelplane.cli.demo import RESOURCE
from bagelplane.cli.preview import cards_of_plan
from bagelplane.demo_data import Recipe, make_data_set
from bagelplane.engine.pack_rows import rows_of
from bagelplane.engine.planner import PackPlan
from bagelplane.figures.contact_sheet import WIDTH
from bagelplane.figures.pack_cards import PackCards
from bagelplane.lineage.explanation import tell_pack
from bagelplane.lineage.replay import Reader, Replay
from bagelplane.sidecar.lease import LeaseTimes
from bagelplane.sidecar.lineage_log import LineageLog
from bagelplane.sidecar.store import begin_run, open_snapshot_store
from bagelplane.spec import BagelDataset, load_dataset


@pytest.fixture(scope="module")
def resource(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explain")
    make_data_set(folder / "data", Recipe(distinct_pictures=12))
    path = folder / "dataset.yaml"
    text = RESOURCE.format(data=f"file://{folder}/data", storage="", snapshots="")
    path.write_text(text.replace("profile: Automodel", "profile: Strict"))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    printed = capsys.readouterr()
    assert (ended.value.code or 0) == code, printed.err
    return printed.out if code == 0 else printed.err


def explained(capsys: pytest.CaptureFixture[str], resource: Path, step: int) -> dict[str, Any]:
    text = run(capsys, "explain", str(resource), "--step", str(step), "--world-size", "2", "-o", "json")
    document: dict[str, Any] = json.loads(text)
    return document


def test_json_adds_up_and_the_table_names_every_row(
    capsys: pytest.CaptureFixture[str], resource: Path
) -> None:
    document = explained(capsys, resource, 5)
    assert (document["step"], document["rank"], document["world_size"]) == (5, 0, 2)
    assert sum(sample["tokens"] for sample in document["samples"]) == document["tokens"]
    assert document["is_sure"]
    table = run(capsys, "explain", str(resource), "--step", "5", "--world-size", "2")
    for sample in document["samples"]:
        assert sample["object"] in table
        assert sample["group"] in table
        assert sample["tokens"] == sum(item["tokens"] for item in sample["items"])
    for drop in document["drops"]:
        assert drop["description"]
        assert drop["reason"] in table


def test_drops_are_told_with_their_documented_reason_and_row(
    capsys: pytest.CaptureFixture[str], resource: Path
) -> None:
    drops = [drop for step in range(8) for drop in explained(capsys, resource, step)["drops"]]
    assert drops
    assert all(drop["description"].endswith(".") and drop["object"] for drop in drops)
    drop = drops[0]
    row = ["--row", str(drop["row"])]
    row += ["--row-group", str(drop["row_group"])] if drop["row_group"] is not None else []
    place = ["--object", drop["object"], *row, "--steps", "8", "--world-size", "2"]
    found = json.loads(run(capsys, "find", str(resource), *place, "-o", "json"))
    assert drop["reason"] in [one["reason"] for one in found["sightings"] if one["fate"] == "dropped"]
    table = run(capsys, "find", str(resource), *place)
    assert "dropped 1 time" in table
    assert table.count(drop["description"]) == 1, "what a reason means is said once, not in each row"
    assert ".:" not in table


def test_a_row_in_a_pack_is_found_at_that_step(capsys: pytest.CaptureFixture[str], resource: Path) -> None:
    sample = explained(capsys, resource, 4)["samples"][1]
    row = ["--object", sample["object"], "--row", str(sample["row"])]
    row += ["--row-group", str(sample["row_group"])] if sample["row_group"] is not None else []
    text = run(capsys, "find", str(resource), *row, "--steps", "5", "--world-size", "2", "-o", "json")
    sightings = json.loads(text)["sightings"]
    assert (4, 0, 1) in [(one["step"], one["rank"], one["sample"]) for one in sightings]


def test_a_row_that_is_not_reached_is_told_so(capsys: pytest.CaptureFixture[str], resource: Path) -> None:
    lines = f"{resource.parent}/data/vlm/train.jsonl"
    told = [
        run(capsys, "find", str(resource), "--object", lines, "--row", str(row), "--steps", "1")
        for row in range(60, 64)
    ]
    assert any("not reached, before step 1 of each rank" in text for text in told)


def test_a_row_beyond_what_is_used_is_told_so(
    capsys: pytest.CaptureFixture[str], resource: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short.yaml"
    text = resource.read_text().replace("numUsedData: 64", "numUsedData: 10")
    assert text != resource.read_text()
    short.write_text(text)
    lines = f"file://{resource.parent}/data/vlm/train.jsonl"
    told = run(capsys, "find", str(short), "--object", lines, "--row", "40", "--steps", "1")
    assert "no rank reads it: it lies beyond numUsedData" in told


def test_the_picture_is_drawn(capsys: pytest.CaptureFixture[str], resource: Path, tmp_path: Path) -> None:
    png = tmp_path / "pack.png"
    run(capsys, "explain", str(resource), "--step", "2", "--picture", str(png))
    with Image.open(png) as image:
        assert (image.format, image.width) == ("PNG", WIDTH)


def test_the_pack_that_is_drawn_is_the_verified_one(
    capsys: pytest.CaptureFixture[str], resource: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In profile Automodel an image that does not decode changes the pack, which only a look at it can tell."""
    path, png = tmp_path / "automodel.yaml", tmp_path / "pack.png"
    path.write_text(resource.read_text().replace("profile: Strict", "profile: Automodel"))
    drawn: list[PackPlan] = []

    def draw(dataset: BagelDataset, plan: PackPlan, number: int) -> PackCards:
        drawn.append(plan)
        return cards_of_plan(dataset, plan, number)

    monkeypatch.setattr(explain_module, "cards_of_plan", draw)
    command = ("explain", str(path), "--step", "1", "--world-size", "2", "-o", "json")
    guessed, verified, pictured = (
        json.loads(run(capsys, *command, *options))
        for options in ((), ("--verify",), ("--picture", str(png)))
    )
    assert not guessed["is_sure"]
    assert guessed["samples"] != verified["samples"], "no image on the way fails to decode"
    assert pictured == verified
    (plan,) = drawn
    assert tell_pack(plan, load_dataset(path)).as_json()["samples"] == verified["samples"]
    assert png.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("explain", "--rank", "2", "--world-size", "2", "--step", "1"), 2, "rank is outside its world"),
        (("explain",), 2, "one pack has to be named"),
        (("explain", "--position", "4"), 2, "a position names no pack under Bagel sharding"),
        (("explain", "--step", "1", "--world-size", "500"), 5, "fewer units than ranks"),
        (
            ("find", "--object", "nowhere.parquet", "--row", "1", "--steps", "2"),
            2,
            "no group of this resource",
        ),
        (("find", "--object", "nowhere.parquet", "--row", "1"), 2, "no snapshot that says how far.*--steps"),
    ],
)
def test_wrong_arguments_are_one_line_with_a_fix(
    capsys: pytest.CaptureFixture[str], resource: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    command, *rest = arguments
    text = run(capsys, command, str(resource), *rest, code=code)
    assert text.count("\n") == 1
    assert re.search(message, text), text
    assert "Fix: " in text


def test_files_are_told_by_name_where_that_tells_them_apart_and_their_addresses_once(
    capsys: pytest.CaptureFixture[str], resource: Path
) -> None:
    names = explain_module._short_names(["s3://a/x/1.parquet", "s3://a/y/1.parquet", "s3://a/2.parquet"] * 2)
    assert names == {
        "s3://a/x/1.parquet": "s3://a/x/1.parquet",
        "s3://a/y/1.parquet": "s3://a/y/1.parquet",
        "s3://a/2.parquet": "2.parquet",
    }
    table = run(capsys, "explain", str(resource), "--step", "5", "--world-size", "2")
    objects = {sample["object"] for sample in explained(capsys, resource, 5)["samples"]}
    assert all(table.count(uri) == 1 for uri in objects)


LOGGED_STEPS = 6


@pytest.fixture(scope="module")
def logged(resource: Path) -> Path:
    """The resource with snapshots, and the log of a run that took six packs on each of two ranks."""
    path = resource.with_name("logged.yaml")
    path.write_text(
        resource.read_text() + f"  snapshots: {{uri: {resource.parent}/snapshots, lineage: true}}\n"
    )
    dataset = load_dataset(path)
    store = open_snapshot_store(dataset)
    assert store is not None
    begin_run(
        store, job="", lock="", resume="latest", world_size=2, ranks_in_use=tuple, times=LeaseTimes(60.0)
    )
    row_log, groups = LineageLog(store), [group.name for group in dataset.spec.groups]
    for rank in (0, 1):
        with closing(Replay(dataset, Reader(rank, 2), 0, store=None)) as replay:
            for step in range(LOGGED_STEPS):
                row_log.add(rank, 2, step, rows_of(replay.plan(whole=True), groups))
        assert row_log.write(rank) == LOGGED_STEPS
    assert store.lease is not None
    store.lease.end()
    return path


def test_what_the_log_tells_is_what_planning_tells_and_it_says_where_it_is_from(
    capsys: pytest.CaptureFixture[str], logged: Path
) -> None:
    for step in range(LOGGED_STEPS):
        command = ("explain", str(logged), "--step", str(step), "--rank", "1", "--world-size", "2")
        by_log = json.loads(run(capsys, *command, "-o", "json"))
        by_plan = json.loads(run(capsys, *command, "-o", "json", "--plan"))
        assert (by_log["source"], by_plan["source"]) == ("log", "plan")
        assert by_log["logged_run"]
        for document in (by_log, by_plan):
            for sample in document["samples"]:
                del sample["splits"], sample["items"]
            for name in ("source", "logged_run", "planned_from", "buffered_samples"):
                del document[name]
        assert by_log == by_plan
    table = run(capsys, *command)
    assert "from the log of rows of run" in table
    assert "splits" not in table.partition("(--plan tells splits and pictures too)")[2]
    beyond = ("explain", str(logged), "--step", str(LOGGED_STEPS), "--world-size", "2", "-o", "json")
    assert json.loads(run(capsys, *beyond))["source"] == "plan"
    from_start = run(capsys, *command, "-o", "json", "--from-start")
    assert json.loads(from_start)["source"] == "plan"


def test_find_reads_the_log_and_plans_what_it_lacks(capsys: pytest.CaptureFixture[str], logged: Path) -> None:
    sample = explained(capsys, logged, 4)["samples"][1]
    row = ["--object", sample["object"], "--row", str(sample["row"])]
    row += ["--row-group", str(sample["row_group"])] if sample["row_group"] is not None else []
    command = ("find", str(logged), *row, "--steps", str(LOGGED_STEPS + 3), "--world-size", "2")
    found = json.loads(run(capsys, *command, "-o", "json"))
    planned = json.loads(run(capsys, *command, "-o", "json", "--plan"))
    readers = planned["planned_packs"] // (LOGGED_STEPS + 3)
    assert (found["logged_packs"], found["planned_packs"]) == (readers * LOGGED_STEPS, readers * 3)
    assert planned["logged_packs"] == 0
    assert found["sightings"] == planned["sightings"] != []
    assert f"{readers * LOGGED_STEPS} packs from the log of rows, {readers * 3} planned again" in run(
        capsys, *command
    )


def test_a_damaged_part_is_said_so_and_its_steps_are_planned(
    capsys: pytest.CaptureFixture[str], logged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [part] = (logged.parent / "snapshots" / "lineage").glob("*/rank-00000-of-00002/*.parquet")
    whole = part.read_bytes()
    try:
        part.write_bytes(whole[: len(whole) // 2])
        assert explained(capsys, logged, 4)["source"] == "plan"
        assert f"the part {part} of the log of rows is damaged" in caplog.text
    finally:
        part.write_bytes(whole)
