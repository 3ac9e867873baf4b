"""Wrong arguments of any command end with exit code 2 and name what is wrong, before anything takes its time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bagelplane.cli.app import COMMANDS, load_command, main
from bagelplane.cli.demo import RESOURCE
from bagelplane.demo_data import Recipe, make_data_set


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a resource, its data and its snapshots' place, where nothing is yet."""
    folder = tmp_path_factory.mktemp("arguments")
    make_data_set(folder / "data", Recipe(distinct_pictures=4))
    text = RESOURCE.format(
        data=f"file://{folder}/data", storage="", snapshots=f"  snapshots: {{uri: {folder}/snapshots}}\n"
    )
    (folder / "dataset.yaml").write_text(text)
    (folder / "broken.yaml").write_text(text.replace("profile: Automodel", "profile: Nonsense"))
    (folder / "rank_0.pt").write_bytes(b"")
    (folder / "rank_5.pt").write_bytes(b"")
    return folder


# Each value is of the right type, so that no parser of options finds it out. F is the folder, R the resource.
WRONG = [
    ("validate F/nowhere.yaml", "nowhere.yaml"),
    ("check F/nowhere.yaml", "nowhere.yaml"),
    ("check R --report F/nowhere/report.json", "report.json"),
    ("plan F/nowhere.yaml", "nowhere.yaml"),
    ("plan R --rank 3", "rank 3"),
    ("plan R --png F/nowhere/plan.png", "no folder .*nowhere"),
    ("index F/nowhere.yaml", "nowhere.yaml"),
    ("index R --shard 8/8", "8/8"),
    ("preview F/nowhere.yaml", "nowhere.yaml"),
    ("preview R --rank 3", "rank 3"),
    ("preview R -o F/nowhere/x.png", "no folder .*nowhere"),
    ("preview R -o F", "a folder of that name"),
    ("preview R --font F/nowhere.ttf", "nowhere.ttf"),
    ("explain F/nowhere.yaml --step 1", "nowhere.yaml"),
    ("explain R --step 1 --rank 3", "rank 3"),
    ("explain R --step 1 --picture F/nowhere/x.png", "no folder .*nowhere"),
    ("explain R --step 1 --picture F/x.png --font F/nowhere.ttf", "nowhere.ttf"),
    ("find F/nowhere.yaml --object a.parquet --row 0", "nowhere.yaml"),
    ("find R --object F/data/nowhere.parquet --row 0 --steps 1", "no group of this resource reads"),
    ("find R --object OBJECT --row 99999 --steps 1", "has no row 99999"),
    ("find R --object OBJECT --row 0 --row-group 99 --steps 1", "row group 99"),
    ("find R --object LINES --row 99999 --steps 1", "has no line 99999"),
    ("find R --object LINES --row 0 --row-group 0 --steps 1", "no row groups"),
    ("run F/nowhere.yaml", "nowhere.yaml"),
    ("run R --resume nonsense", "nonsense"),
    ("run R --log-level loud", "loud"),
    ("top --url nonsense", "nonsense"),
    ("inject -f F/nowhere.yaml --dataset-file R", "nowhere.yaml"),
    ("inject -f R --dataset-file F/nowhere.yaml", "nowhere.yaml"),
    ("snapshots list F/nowhere.yaml", "nowhere.yaml"),
    ("snapshots list s3://", "s3://"),
    ("snapshots show R nonsense", "nonsense"),
    ("snapshots diff R nonsense", "nonsense"),
    ("snapshots diff R latest nonsense", "nonsense"),
    ("snapshots diff F/snapshots latest now", "now is the resource"),
    ("snapshots prune F/snapshots", "--keep-last"),
    ("snapshots verify F/nowhere.yaml", "nowhere.yaml"),
    ("snapshots import F/nowhere.pt R", "nowhere.pt"),
    ("snapshots import F/rank_0.pt F/nowhere.yaml", "nowhere.yaml"),
    ("snapshots import F/rank_0.pt F/broken.yaml", "Nonsense"),
    ("snapshots import F/rank_0.pt F/rank_5.pt R", "rank 0, 5"),
    ("demo --packs 0", "packs"),
]


@pytest.mark.parametrize(("line", "named"), WRONG)
def test_a_mistyped_value_ends_with_two_and_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, named: str
) -> None:
    data = folder / "data"
    words = {
        "R": str(folder / "dataset.yaml"),
        "OBJECT": str(min(data.rglob("*.parquet"))),
        "LINES": str(min(data.rglob("*.jsonl"))),
    }
    arguments = [words.get(word, re.sub("^F", str(folder), word)) for word in line.split()]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr().err
    assert ended.value.code == 2, printed
    assert re.search(named, printed), printed
    assert "Traceback" not in printed


def test_every_command_that_takes_values_is_tried() -> None:
    tried = {
        tuple(line.split()[:2]) if line.startswith("snapshots") else (line.split()[0],) for line, _ in WRONG
    }
    known = set()
    for command in COMMANDS:
        loaded = load_command(command.name)
        inner = getattr(loaded, "commands", None)
        known |= {(command.name, name) for name in inner} if inner else {(command.name,)}
    assert known - tried == {("info",), ("version",)}
