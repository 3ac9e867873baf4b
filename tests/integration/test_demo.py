"""`bagelplane demo`: ends well with the bits compared, tells when they differ, and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bagelplane.cli.app import main
from bagelplane.cli.demo import RESOURCE, Demo, own_name
from bagelplane.cli.demo_comparison import Comparison, Ranks
from bagelplane.cli.demo_processes import Child, DemoError
from bagelplane.cli.demo_reference import undisturbed_packs
from bagelplane.cli.demo_trainer import Taken, describe, read_taken
from bagelplane.demo_data import Recipe, make_data_set
from bagelplane.errors import SpecError
from bagelplane.spec import load_dataset

START_SECONDS = 60.0


def processes_about(folder: Path) -> list[str]:
    """Command lines that name `folder`, this test's own aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words and path.parent.name != str(os.getpid()):
            found.append(f"{path.parent.name}: {words}")
    return found


def wait_for(met: Callable[[], bool], what: Callable[[], object], seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, f"waited {seconds} s, last seen: {what()}"
        time.sleep(0.05)


def run_directories(folder: Path) -> list[Path]:
    log = (folder / "logs" / "sidecar.log").read_text()
    return [Path(path).parent for path in re.findall(r"(/\S+sidecar\.sock)", log)]


def start_demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bagelplane.cli.app", "demo", "--dir", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def running_demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo whose trainers have begun to take packs."""
    folder = tmp_path / "out"
    process = start_demo(folder)
    outputs = [folder / "taken" / f"rank-{rank}-before.jsonl" for rank in range(2)]
    try:
        wait_for(
            lambda: process.poll() is not None or all(read_taken(path) for path in outputs),
            lambda: sorted(path.name for path in folder.rglob("*.jsonl")),
        )
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_compares_every_bit_and_leaves_only_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    process = start_demo(folder, "--packs", "50")
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert err == ""
    for words in (
        "killed all three with SIGKILL",
        "both resumed at step",
        "one rank alone went on with packs 20 to 39",
        "Every bit agrees.",
        "drew preview.png",
    ):
        assert words in out
    compared = re.search(r"(\d+) packs \((\d+) of them once more after the kill, 40 on changing ranks\)", out)
    assert compared is not None
    assert int(compared[1]) == 2 * 50 + int(compared[2]) + 40
    for name in ("preview.png", "plan.png"):
        with Image.open(folder / name) as image:
            assert image.format == "PNG"
    assert processes_about(folder) == []
    assert len(run_directories(folder)) == 4
    assert not any(path.exists() for path in run_directories(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_ends_all_its_processes(
    running_demo: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    running_demo.send_signal(number)
    _, err = running_demo.communicate(timeout=60)
    assert running_demo.returncode == 130
    assert err == "interrupted; all processes of the demo are ended\n"
    assert processes_about(tmp_path / "out") == []
    assert not any(path.exists() for path in run_directories(tmp_path / "out"))


@pytest.mark.slow
def test_killed_demo_takes_its_processes_along(running_demo: subprocess.Popen[str], tmp_path: Path) -> None:
    running_demo.kill()
    running_demo.communicate()
    wait_for(lambda: not processes_about(tmp_path / "out"), lambda: processes_about(tmp_path / "out"))


def test_folder_of_somebody_else_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--dir", str(tmp_path)])
    assert ended.value.code == SpecError.exit_code
    assert "was not made by the demo" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "ten years of work"


def test_the_commands_to_try_next_are_those_that_the_shell_finds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "bagelplane"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert own_name() == "bin/bagelplane"
    monkeypatch.setenv("PATH", str(program.parent))
    assert own_name() == "bagelplane"


def test_one_different_array_is_found_and_fails_the_demo(tmp_path: Path) -> None:
    comparison = Comparison()
    expected = Taken(7, {"a": "1", "b": "2"}, bits=64, tokens=5)
    comparison.add("rank 0", expected, expected)
    assert comparison.differences == []
    comparison.add("rank 1", Taken(7, {"a": "1", "b": "3"}, bits=64, tokens=5), expected)
    comparison.add("rank 1", Taken(8, {"a": "1"}, bits=64, tokens=5), expected)
    assert comparison.differences == ["rank 1, pack 7: b", "rank 1, pack 8: keys ['a']"]
    with ExitStack() as cleanup, pytest.raises(DemoError, match="the bits differ in 2 places") as raised:
        Demo(tmp_path, 50, cleanup)._finish(comparison)
    assert raised.value.exit_code != 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"steps": range(20, 39)}, ["took packs"]),
        ({"digest": "other"}, ["pack 39 of the run, pack 39: a"]),
    ],
)
def test_packs_on_changing_ranks_are_held_against_the_run_s_one_order(
    tmp_path: Path, change: dict[str, Any], said: list[str]
) -> None:
    def write(name: str, packs: Iterable[tuple[int, int]], last: str = "") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        lines = [Taken(step, {"a": str(number)}, bits=8, tokens=1) for step, number in packs]
        if last:
            lines[-1].digests["a"] = last
        path.write_text("".join(json.dumps(asdict(line)) + "\n" for line in lines))
        return path

    with ExitStack() as cleanup:
        demo, comparison = Demo(tmp_path, 50, cleanup), Comparison()
        write("taken/x", [])
        write("taken/in-order/rank-0.jsonl", [(number, number) for number in range(40)])
        two = [write(f"{rank}", [(step, 2 * step + rank) for step in range(10)]) for rank in (0, 1)]
        steps = change.get("steps", range(20, 40))
        one = write("one", [(step, step) for step in steps], change.get("digest", ""))
        demo._compare_in_order(comparison, Ranks([], two), Ranks([], [one]))
    assert len(comparison.differences) == len(said)
    assert all(words in found for words, found in zip(said, comparison.differences, strict=True))


def test_digest_sees_values_shapes_and_types() -> None:
    import numpy as np

    def digest(value: object) -> str:
        return describe(0, {"sequence_length": 1, "value": value}).digests["value"]

    zeros = np.zeros((2, 3), np.int64)
    different = [
        zeros,
        zeros.reshape(3, 2),
        zeros.astype(np.int32),
        zeros + 1,
        [zeros, zeros],
        [0, 0],
        [0],
        0,
    ]
    assert len({digest(value) for value in different}) == len(different)
    assert digest(zeros) == digest(np.asfortranarray(zeros))


def test_digest_of_a_tensor_is_that_of_its_array() -> None:
    import numpy as np
    import torch

    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    batches = [{"sequence_length": 1, "a": value, "b": [value]} for value in (array, torch.from_numpy(array))]
    assert describe(0, batches[0]).digests == describe(0, batches[1]).digests


def test_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    path.write_text('{"step": 0, "digests": {}, "bits": 0, "tokens": 1}\n{"step": 1, "dig')
    assert [taken.step for taken in read_taken(path)] == [0]
    assert read_taken(tmp_path / "nothing.jsonl") == []


def test_reference_is_the_same_with_and_without_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_data_set(tmp_path / "data", Recipe(distinct_pictures=8))
    (tmp_path / "local.yaml").write_text(
        RESOURCE.format(data=f"file://{tmp_path}/data", storage="", snapshots="")
    )
    dataset = load_dataset(tmp_path / "local.yaml")
    with_torch = list(islice(undisturbed_packs(dataset, 1, 2, tmp_path), 4))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    without = list(islice(undisturbed_packs(dataset, 1, 2, tmp_path), 4))
    for step, (left, right) in enumerate(zip(with_torch, without, strict=True)):
        assert describe(step, left).digests == describe(step, right).digests


def test_child_that_ends_early_is_reported_with_its_last_words(tmp_path: Path) -> None:
    arguments = ["/nowhere.yaml", str(tmp_path), "1", "1"]
    with Child("the reference", "bagelplane.cli.demo_reference", arguments, log=tmp_path / "log") as child:
        with pytest.raises(
            DemoError, match=r"(?s)the reference failed; got it ended with status 1\..*/nowhere\.yaml"
        ):
            child.wait(60)
        with pytest.raises(DemoError):
            child.check()
