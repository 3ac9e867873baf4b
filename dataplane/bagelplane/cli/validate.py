"""`bagelplane validate`: check resource files without touching any storage."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bagelplane.cli.output import Format, FormatOption, print_json, print_line, print_note
from bagelplane.errors import SpecError
from bagelplane.sources.registry import registered_types
from bagelplane.spec import BagelDataset, InvalidDatasetError, load_dataset, refuse_unsupported, spec_hash
from bagelplane.spec_advice import give_advice
from bagelplane.spec_errors import Problem


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found in one file. `dataset` is None when there are problems in it."""

    file: str
    dataset: BagelDataset | None
    problems: tuple[Problem, ...] = ()
    advice: tuple[Problem, ...] = ()


def validate(
    files: Annotated[list[str], typer.Argument(help="Resource files; - reads stdin.", metavar="FILE...")],
    output: FormatOption = Format.TABLE,
) -> None:
    """Check resource files: syntax, fields, and the rules between them.

    Every fault is named in one line with its path, line, value and what to do. Advice is not an error.
    Nothing is read but the files: whether buckets and files are there shows `bagelplane check`.

    Examples:

        bagelplane validate dataset.yaml
        bagelplane validate -o json examples/*.yaml
        kubectl get bgds bagel-sft -o yaml | bagelplane validate -

    Ends with 0 when all files are in order, with 2 when one is not.
    """
    verdicts = [check_file(file) for file in files]
    if output is Format.JSON:
        print_json([_as_json(verdict) for verdict in verdicts])
    else:
        for verdict in verdicts:
            _print(verdict)
    if any(verdict.problems for verdict in verdicts):
        raise typer.Exit(SpecError.exit_code)


def check_file(file: str) -> Verdict:
    """Read and judge one file; problems become part of the verdict, none is raised."""
    name = "stdin" if file == "-" else file
    try:
        dataset = _read(file)
    except InvalidDatasetError as error:
        return Verdict(name, None, error.problems)
    try:
        refuse_unsupported(dataset, name, registered_types())
    except InvalidDatasetError as error:
        return Verdict(name, dataset, error.problems, tuple(give_advice(dataset)))
    return Verdict(name, dataset, (), tuple(give_advice(dataset)))


def _read(file: str) -> BagelDataset:
    if file != "-":
        return load_dataset(Path(file))
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        problem = Problem((), f"is no UTF-8 text (byte {error.start})", fix="save it as UTF-8")
        raise InvalidDatasetError("stdin", [problem]) from None
    return BagelDataset.from_yaml(text, "stdin")


def _print(verdict: Verdict) -> None:
    if verdict.problems:
        print_note(f"error: {InvalidDatasetError(verdict.file, verdict.problems)}")
    elif verdict.dataset is not None:
        groups = verdict.dataset.spec.groups
        datasets = sum(len(group.datasets) for group in groups)
        counts = f"{_count(len(groups), 'group')}, {_count(datasets, 'data set')}"
        name = verdict.dataset.metadata.name
        print_line(f"{verdict.file}: {name} is in order ({counts}, hash {spec_hash(verdict.dataset)[:12]})")
    for advice in verdict.advice:
        print_note(f"advice: {verdict.file}: {advice}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _as_json(verdict: Verdict) -> dict[str, Any]:
    dataset = verdict.dataset
    return {
        "file": verdict.file,
        "valid": not verdict.problems,
        "name": dataset.metadata.name if dataset else None,
        "specHash": spec_hash(dataset) if dataset else None,
        "problems": [_problem_as_json(problem) for problem in verdict.problems],
        "advice": [_problem_as_json(problem) for problem in verdict.advice],
    }


def _problem_as_json(problem: Problem) -> dict[str, Any]:
    fields = asdict(problem)
    del fields["loc"]
    return {"path": problem.path, **fields, "message": str(problem)}
