"""`bagelplane check`: look at everything that a resource names, and say all that is wrong."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bagelplane.cli.output import Format, FormatOption, check_output, print_json, print_line, print_note
from bagelplane.cli.validate import check_file
from bagelplane.errors import BagelplaneError, SpecError
from bagelplane.indexing import coverage_of
from bagelplane.settings import StreamSettings, storage_settings
from bagelplane.sidecar.examination import Examination, examine
from bagelplane.spec import BagelDataset

REPORT_BYTES = 4096
"""What Kubernetes keeps of a container's last message."""
_EXIT_TERMINATED = 143  # as shells report SIGTERM


class Check:
    """One check: the problems found so far, and how they are shown."""

    def __init__(self, report_path: Path | None) -> None:
        self._report_path = report_path
        self._spec_problems: list[dict[str, str]] = []
        self.found = Examination()
        self.groups = 0
        self.index = ""
        """How much of the data an index knows; empty without one."""

    @property
    def problems(self) -> list[dict[str, str]]:
        return self._spec_problems + [_parts(error) for error in self.found.problems]

    def run(self, file: str, world_size: int) -> int:
        """Looks at the resource, then at what it names. The exit code: that of the first problem, else 0."""
        verdict = check_file(file)
        for problem in verdict.problems:
            what = f"{problem.path}: {problem.what}" if problem.loc else f"{file} {problem.what}"
            line = f" (line {problem.line})" if problem.line else ""
            self._spec_problems.append(
                {"what": what + line, "got": problem.got, "expected": "", "fix": problem.fix}
            )
        if verdict.dataset is not None:
            self.groups = len(verdict.dataset.spec.groups)
            self._examine(verdict.dataset, world_size)
        if self._spec_problems:
            return SpecError.exit_code
        return self.found.problems[0].exit_code if self.found.problems else 0

    def _examine(self, dataset: BagelDataset, world_size: int) -> None:
        # Less patient than a run: somebody waits for the answer, and may ask again.
        settings = replace(
            storage_settings(dataset), attempts=3, retry_seconds=10.0, read_timeout_seconds=10.0
        )
        examine(dataset, world_size=world_size, settings=settings, found=self.found)
        if not self.found.problems:
            coverage = coverage_of(StreamSettings.from_resource(dataset))
            self.index = "" if coverage is None else str(coverage)

    def write_report(self) -> None:
        """SpecError when it cannot be written."""
        if self._report_path is None:
            return
        try:
            self._report_path.write_bytes(build_report(self.problems, self.groups))
        except OSError as error:
            raise SpecError(
                f"the report {self._report_path} cannot be written: {error.strerror}",
                fix="give --report a file in a folder that this user may write",
            ) from None

    def end_early(self, what: str, fix: str) -> None:
        """The report of a check that did not come to its end."""
        self._spec_problems.append({"what": what, "got": "", "expected": "", "fix": fix})
        self.write_report()


def check(
    file: Annotated[str, typer.Argument(help="The resource file; - reads stdin.", metavar="FILE")],
    report: Annotated[
        Path | None,
        typer.Option(help="Write what was found as JSON of at most 4096 bytes, whatever was found."),
    ] = None,
    world_size: Annotated[
        int, typer.Option(min=1, help="Ranks of the run: each must get a part of the data.")
    ] = 1,
    output: FormatOption = Format.TABLE,
) -> None:
    """Look at everything that a resource names, as `run` does before it serves, and list all that is wrong.

    The resource itself, the tokenizer, the first file of every data set, whether there are enough files, row
    groups or lines for all ranks, and whether snapshots can be written and are of this run. A look at the
    snapshots writes a small object there and deletes it. A store that does not answer is given up after some
    ten seconds.

    Ends with 0 when all is in order, else with the exit code of the first problem.

    Example: bagelplane check dataset.yaml --world-size 64
    """
    check_output(report)
    looking = Check(report)

    def terminate(*_: object) -> None:
        # At once: a library's threads may hang, and as a container's first process nobody else ends us.
        looking.end_early("the check was ended by SIGTERM before it was done", "give it more time")
        os._exit(_EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        code = looking.run(file, world_size)
    except Exception as error:
        looking.end_early(f"something unexpected happened: {type(error).__name__}: {error}", "see the log")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    looking.write_report()
    problems = looking.problems
    if output is Format.JSON:
        print_json(_as_json(problems, looking.groups))
    elif problems:
        for problem in problems:
            print_note(f"error: {BagelplaneError(**problem)}")
    else:
        print_line(f"{file}: in order ({looking.groups} groups, world size {world_size})")
        if looking.index:
            print_line(f"index: {looking.index}")
    raise typer.Exit(code)


def build_report(problems: Sequence[dict[str, str]], groups: int) -> bytes:
    """The report as JSON of at most REPORT_BYTES: long texts are cut, and the last problems are only counted."""
    if not problems:
        return json.dumps(_as_json([], groups)).encode()
    most = REPORT_BYTES // 50  # their names alone take that much
    for longest_text in (1000, 200, 50):
        texts = [
            {key: _cut(text, longest_text) for key, text in problem.items()} for problem in problems[:most]
        ]
        for count in range(len(texts), 0, -1):
            left = len(problems) - count
            rest = {"what": f"and {left} more", "got": "", "expected": "", "fix": "see the log of the check"}
            data = json.dumps(_as_json(texts[:count] + [rest] * bool(left), groups)).encode()
            if len(data) <= REPORT_BYTES:
                return data
    raise AssertionError("one problem of short texts always fits")


def _as_json(problems: Sequence[dict[str, str]], groups: int) -> dict[str, Any]:
    return {"ok": not problems, "problems": list(problems), "groups": groups}


def _parts(error: BagelplaneError) -> dict[str, str]:
    return {"what": error.what, "got": error.got, "expected": error.expected, "fix": error.fix}


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
