"""The command line's frame, and `bagelplane validate`: exit codes, streams, messages without tracebacks."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import bagelplane
from bagelplane.cli import app as program
from bagelplane.cli import output
from bagelplane.cli.app import COMMANDS, load_command, main
from bagelplane.cli.reference import stale_files
from bagelplane.errors import SpecError, StorageError

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
EXAMPLE = EXAMPLES / "dataset.yaml"
HEAVY = ("pyarrow", "PIL", "s3fs", "pydantic", "tokenizers", "torch", "numpy")


def outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `bagelplane` in this process."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.yaml"
    text = EXAMPLE.read_text().replace("weight: 2", "weight: -2").replace("mode: Bagel", "mod: Bagel")
    path.write_text(text)
    return path


def test_valid_files_end_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "validate", *sorted(EXAMPLES.glob("*.yaml")))
    assert code == 0
    assert "dataset.yaml: bagel-sft is in order (3 groups, 3 data sets, hash " in out
    assert err == ""


def test_each_fault_is_a_line_on_stderr(capsys: pytest.CaptureFixture[str], broken: Path) -> None:
    code, out, err = outcome(capsys, "validate", EXAMPLE, broken)
    assert code == SpecError.exit_code
    assert "dataset.yaml: bagel-sft is in order" in out
    assert f"error: {broken}: 2 problems" in err
    assert "spec.groups[0].weight: must be at least 0 (got -2, line " in err
    assert "spec.sharding.mod: is no known field (line " in err
    assert "did you mean `mode`?" in err


def test_json_has_every_problem(capsys: pytest.CaptureFixture[str], broken: Path) -> None:
    code, out, err = outcome(capsys, "validate", "-o", "json", broken, EXAMPLE)
    first, second = json.loads(out)
    assert (code, err) == (2, "")
    assert [problem["path"] for problem in first["problems"]] == [
        "spec.groups[0].weight",
        "spec.sharding.mod",
    ]
    assert first["problems"][0]["line"] > 0
    assert (first["valid"], second["valid"]) == (False, True)
    assert len(second["specHash"]) == 64


def test_a_missing_file_is_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = outcome(capsys, "validate", tmp_path / "none.yaml")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "cannot be read: No such file or directory. Fix: " in err


def test_stdin_is_read_for_a_dash(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(EXAMPLE.read_text()))
    code, out, _ = outcome(capsys, "validate", "-")
    assert code == 0
    assert out.startswith("stdin: bagel-sft is in order")


def test_what_does_not_work_yet_and_unknown_types_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "unsupported.yaml"
    text = EXAMPLE.read_text().replace("  storage:\n", "  storage:\n    cache: {sizeLimit: 1Gi}\n")
    path.write_text(text.replace("type: t2i_pretrain", "type: t2i_pretraining"))
    code, _, err = outcome(capsys, "validate", path)
    assert code == 2
    assert "spec.storage.cache: is set, this release keeps no cache yet" in err
    assert "spec.groups[0].type: is no registered type" in err
    assert "did you mean `t2i_pretrain`?" in err


def test_advice_is_no_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "advice.yaml"
    path.write_text(EXAMPLE.read_text().replace("maxLatentSize: 64", "maxLatentSize: 32"))
    code, out, err = outcome(capsys, "validate", path)
    assert code == 0
    assert "is in order" in out
    assert err.startswith("advice: ")


def test_version_and_info_speak_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "version")[:2] == (0, f"{bagelplane.__version__}\n")
    assert outcome(capsys, "--version")[:2] == (0, f"{bagelplane.__version__}\n")
    code, out, _ = outcome(capsys, "info", "-o", "json")
    assert code == 0
    assert {"t2i_pretrain", "unified_edit", "vlm_sft"} <= set(json.loads(out)["groupTypes"])
    assert outcome(capsys, "info")[0] == 0


@pytest.mark.parametrize("arguments", [["validate"], ["nonsense"], ["--log-level", "loud", "version"]])
def test_wrong_arguments_end_with_two(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, _, err = outcome(capsys, *arguments)
    assert code == 2
    assert "Usage: bagelplane" in err


def test_a_mistyped_command_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean 'validate'?" in outcome(capsys, "validat")[2]


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(program, "app", fail)


def test_errors_become_one_message_and_their_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, StorageError("s3://bucket is not there", got="NoSuchBucket", fix="make it"))
    code, _, err = outcome(capsys, "version")
    assert code == StorageError.exit_code
    assert err == "error: s3://bucket is not there; got NoSuchBucket. Fix: make it\n"
    assert "Traceback" in outcome(capsys, "version", "--debug")[2]


def test_an_interrupt_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert outcome(capsys, "version") == (130, "", "")


def test_the_unexpected_is_short_and_asks_for_debug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, ZeroDivisionError("by zero"))
    code, _, err = outcome(capsys, "version")
    assert code == 70
    assert "ZeroDivisionError: by zero" in err
    assert "run it again with --debug" in err
    assert "Traceback" not in err
    assert "Traceback" in outcome(capsys, "--debug", "version")[2]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_of_the_table_loads_and_teaches(command: program.Command) -> None:
    loaded = load_command(command.name)
    assert loaded.name == command.name
    assert loaded.help


@pytest.mark.parametrize("command", program.COMMANDS, ids=lambda command: command.name)
def test_help_fills_its_paragraphs(command: program.Command) -> None:
    loaded = load_command(command.name)
    for each in (loaded, *getattr(loaded, "commands", {}).values()):
        assert each.rich_markup_mode == "markdown", f"{each.name}: breaks lines where the source does"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom bagelplane.cli.app import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print('loaded:', [name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "validate" in done.stdout
    assert "loaded: []" in done.stdout


def test_tables_are_not_cut_when_they_go_into_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    long = "s3://bucket/" + "x" * 200
    output.print_table("title", ("name", "count"), [(long, 12345), ("b", 1)])
    out = capsys.readouterr().out
    assert long in out
    assert "12,345" in out


def test_a_title_is_one_line_however_narrow_its_table_is(capsys: pytest.CaptureFixture[str]) -> None:
    title = "2 snapshots below s3://bucket/" + "x" * 200
    output.print_table(title, ("n",), [(1,)])
    assert capsys.readouterr().out.startswith(title + "\n")


def test_a_table_without_rows_is_its_title_alone(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table("0 snapshots", ("step", "run"), [])
    assert capsys.readouterr().out == "0 snapshots\n"


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress("packs", total=3) as advance:
        advance(3)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_generated_files_are_what_the_code_says() -> None:
    assert not list(stale_files()), "Fix: python -m bagelplane.cli.reference"
