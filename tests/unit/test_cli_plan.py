"""`bagelplane plan`: the forecast is what the stream gives, counted right, and shown in three forms."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bagelplane.cli.app import main
from bagelplane.cli.demo import RESOURCE
from bagelplane.cli.plan import make_forecast
from bagelplane.demo_data import Recipe, make_data_set
from bagelplane.engine.pack import Pack
from bagelplane.errors import SpecError
from bagelplane.figures.tally import PlanTally
from bagelplane.spec import load_dataset
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology

PACKS = 24
PLACE = ("--rank", "1", "--world-size", "2")


@pytest.fixture(scope="module")
def resource(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's resource over the demo's data, faults and all."""
    folder = tmp_path_factory.mktemp("plan")
    make_data_set(folder / "data", Recipe(distinct_pictures=12))
    text = RESOURCE.format(data=f"file://{folder}/data", storage="", snapshots="")
    path = folder / "dataset.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def strict_resource(resource: Path) -> Path:
    path = resource.with_name("strict.yaml")
    path.write_text(resource.read_text().replace("profile: Automodel", "profile: Strict"))
    return path


def outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def packs_of_run(resource: Path, count: int) -> tuple[list[Pack], dict[str, dict[str, int]]]:
    """What a run hands over, and its counts of drops."""
    stream = open_rank_stream(load_dataset(resource), Topology(1, 2, 0))

    def allocate(pack: Pack) -> list[np.ndarray]:
        return [np.empty((*shape, 3), np.uint8) for shape in pack.image_shapes]

    packs = [stream.next_pack(allocate) for _ in range(count)]
    drops = stream.state()["drops"]
    stream.close()
    return packs, drops


@pytest.fixture(scope="module")
def run(resource: Path) -> tuple[list[Pack], dict[str, dict[str, int]]]:
    return packs_of_run(resource, PACKS)


@pytest.fixture(scope="module")
def tally(resource: Path) -> PlanTally:
    return make_forecast(load_dataset(resource), Topology(1, 2, 0), packs=PACKS, decode_threads=2).tally


def test_verified_forecast_is_what_a_run_gives(
    tally: PlanTally, run: tuple[list[Pack], dict[str, dict[str, int]]]
) -> None:
    packs, drops = run
    assert tally.lengths == [pack.scalars["sequence_length"] for pack in packs]
    assert tally.vae_images == [len(pack.vae_images) for pack in packs]
    assert tally.vit_images == [len(pack.vit_images) for pack in packs]
    assert tally.pixel_bytes == [sum(3 * h * w for h, w in pack.image_shapes) for pack in packs]
    assert tally.samples_a_pack == [len(pack.scalars["sample_lens"]) for pack in packs]
    counted: dict[str, int] = {}
    for row in drops.values():
        for reason, count in row.items():
            counted[reason] = counted.get(reason, 0) + count
    forecast: dict[str, int] = {}
    for row in tally.drops().values():
        for reason, count in row.items():
            forecast[reason] = forecast.get(reason, 0) + count
    assert forecast == counted
    assert forecast, "the data have faults, so something must have been dropped"


def test_loss_tokens_are_those_of_the_arrays(
    tally: PlanTally, run: tuple[list[Pack], dict[str, dict[str, int]]]
) -> None:
    packs, _ = run
    text_loss = sum(len(pack.arrays["ce_loss_indexes"]) for pack in packs)
    image_loss = sum(len(pack.arrays["mse_loss_indexes"]) for pack in packs)
    assert sum(group.text_loss_tokens for group in tally.groups) == text_loss
    assert sum(group.image_loss_tokens for group in tally.groups) == image_loss


def test_every_token_belongs_to_a_group(tally: PlanTally) -> None:
    report = tally.as_json()
    assert sum(group["tokens"] for group in report["groups"]) == sum(tally.lengths)
    for share in ("weight_share", "sample_share", "token_share"):
        assert sum(group[share] for group in report["groups"]) == pytest.approx(1.0)
    assert report["fill"] == pytest.approx(np.mean(tally.lengths) / report["budgets"]["max_tokens"])


def test_conditions_left_out_come_near_to_what_was_asked_for(resource: Path) -> None:
    tally = make_forecast(load_dataset(resource), Topology(0, 2, 0), packs=150).tally
    for kind, row in tally.as_json()["conditioning"].items():
        spread = (row["dropout"] * (1 - row["dropout"]) / row["offered"]) ** 0.5
        assert abs(row["share"] - row["dropout"]) < 4 * spread, kind


def test_data_repeat_after_the_packs_that_a_pass_takes(resource: Path) -> None:
    dataset = load_dataset(resource)
    tally = make_forecast(dataset, Topology(0, 2, 0), packs=200).tally
    for number, share in enumerate(tally.group_shares):
        packs = tally.packs_a_pass(number)
        assert packs is not None
        # 32 rows of each group are rank 0's; every row met is packed, dropped or still buffered.
        met = tally.groups[number].samples + tally.groups[number].drops.total()
        assert packs == pytest.approx(32 * tally.packs / met, rel=0.15), share.name


def test_table_tells_a_forecast_from_a_verified_plan(
    capsys: pytest.CaptureFixture[str], resource: Path
) -> None:
    code, out, err = outcome(capsys, "plan", resource, "--packs", 20, *PLACE)
    assert (code, err) == (0, "")
    for words in (
        "20 packs of rank 1 of 2",
        "Fill ",
        "repeats after",
        "Conditions left out",
        "Drops: ",
    ):
        assert words in out
    assert "A forecast: " in out
    code, out, _ = outcome(capsys, "plan", resource, "--packs", 5, *PLACE, "--verify")
    assert code == 0
    assert "with every image decoded" in out
    assert "A forecast: " not in out


def test_json_is_one_document(capsys: pytest.CaptureFixture[str], resource: Path) -> None:
    code, out, err = outcome(capsys, "plan", resource, "--packs", 20, "-o", "json", *PLACE)
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["packs"], report["rank"], report["world_size"], report["verified"]) == (20, 1, 2, False)
    assert [group["name"] for group in report["groups"]] == ["pictures", "edits", "talks"]


def test_png_is_a_picture(capsys: pytest.CaptureFixture[str], resource: Path, tmp_path: Path) -> None:
    png = tmp_path / "plan.png"
    code, _, err = outcome(capsys, "plan", resource, "--packs", 20, "--png", png)
    assert code == 0
    assert f"wrote {png}" in err
    with Image.open(png) as image:
        assert image.format == "PNG"
        assert min(image.size) > 800


def test_chart_of_packs_without_drops_is_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_data_set(folder, Recipe(files=2, distinct_pictures=4, with_faults=False))
    text = RESOURCE.format(data=f"file://{folder}", storage="", snapshots="").replace(
        "maxTokensPerSample: 2048", "maxTokensPerSample: 3584"
    )
    (tmp_path / "dataset.yaml").write_text(text)
    forecast = make_forecast(load_dataset(tmp_path / "dataset.yaml"), Topology(0, 1, 0), packs=4)
    forecast.tally.groups[1].drops.clear()
    forecast.write_png(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rank", "2", "--world-size", "2"), "the rank is outside its world"),
        (("--packs", "2", "--png", "/nowhere/plan.png"), "/nowhere/plan.png cannot be written"),
    ],
)
def test_wrong_arguments_are_one_message(
    capsys: pytest.CaptureFixture[str], resource: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = outcome(capsys, "plan", resource, *arguments)
    assert code == SpecError.exit_code
    assert message in err
    assert "Traceback" not in err
    assert err.count("error:") == 1


def test_missing_data_are_named(capsys: pytest.CaptureFixture[str], resource: Path, tmp_path: Path) -> None:
    other = tmp_path / "dataset.yaml"
    other.write_text(resource.read_text().replace("/data/t2i", "/data/nothing"))
    code, out, err = outcome(capsys, "plan", other)
    assert code not in (0, 70)
    assert out == ""
    assert "data/nothing" in err
    assert "Traceback" not in err


def test_chart_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tally: PlanTally, tmp_path: Path
) -> None:
    from bagelplane.figures.plan_chart import write_plan_chart

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SpecError, match=r"pip install 'bagelplane\[plot\]'"):
        write_plan_chart(tmp_path / "plan.png", tally, title="", subtitle="")


# --- elastic sharding ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def elastic_resource(resource: Path) -> Path:
    path = resource.with_name("elastic.yaml")
    text = resource.read_text()
    before = next(line for line in text.splitlines() if "mode: Bagel" in line)
    indent = " " * (len(before) - len(before.lstrip()))
    assert before.strip().startswith("sharding:"), before
    path.write_text(text.replace(before, f"{indent}sharding: {{mode: Elastic, streams: 4}}"))
    return path


def test_a_rank_of_elastic_sharding_is_forecast_as_it_runs(
    elastic_resource: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packs, _ = packs_of_run(elastic_resource, 6)
    dataset = load_dataset(elastic_resource)
    tally = make_forecast(dataset, Topology(1, 2, 0), packs=6, decode_threads=2).tally
    assert tally.lengths == [pack.scalars["sequence_length"] for pack in packs]
    code, out, _ = outcome(capsys, "plan", elastic_resource, "--packs", 3, *PLACE, "-o", "json")
    assert (code, json.loads(out)["streams"]) == (0, 4)


def test_a_world_size_that_the_streams_do_not_fit_is_refused(
    elastic_resource: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("plan", "preview"):
        code, _, error = outcome(capsys, command, elastic_resource, "--world-size", 3)
        assert code == SpecError.exit_code
        assert "one of the world sizes 1, 2, 4" in error.replace("\n", " ")
    picture = tmp_path / "packs.png"
    assert outcome(capsys, "preview", elastic_resource, "--packs", 1, *PLACE, "-o", picture)[0] == 0
    with Image.open(picture) as drawn:
        assert drawn.size[0] > 100


# --- profile Strict -------------------------------------------------------------------------------------


def test_a_strict_forecast_leaves_out_what_does_not_decode_and_moves_nothing_else(
    strict_resource: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planned, verified and run: the same packs, but for the samples that do not decode."""
    dataset = load_dataset(strict_resource)
    packs, drops = packs_of_run(strict_resource, PACKS)
    verified = make_forecast(dataset, Topology(1, 2, 0), packs=PACKS, decode_threads=2).tally
    assert verified.lengths == [pack.scalars["sequence_length"] for pack in packs]
    assert verified.pixel_bytes == [sum(3 * h * w for h, w in pack.image_shapes) for pack in packs]
    assert verified.drops() == {group: dict(row) for group, row in drops.items()}
    forecast = make_forecast(dataset, Topology(1, 2, 0), packs=PACKS).tally
    left = {"image_truncated", "image_undecodable"}
    gone = sum(count for row in drops.values() for reason, count in row.items() if reason in left)
    assert gone > 0, "the demo's data have such images"
    assert sum(forecast.samples_a_pack) - sum(verified.samples_a_pack) == gone
    code, out, _ = outcome(capsys, "plan", strict_resource, "--packs", PACKS, *PLACE)
    assert code == 0
    assert "takes its sample out of its pack" in " ".join(out.split())
