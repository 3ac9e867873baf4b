"""How commands show things: `-o table|json` for results on stdout; notes and progress on stderr.

JSON is one document for a command, its keys are stable. Tables are for people and may change.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from bagelplane.errors import SpecError

_UNBOUNDED = 10_000


class Format(StrEnum):
    """How a result is printed."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[
    Format,
    typer.Option("--output", "-o", help="table for people, json for programs (one document on stdout)."),
]
DecodeThreadsOption = Annotated[int, typer.Option(help="Decode threads.", min=1)]


def check_output(path: Path | None) -> None:
    """Before the work, SpecError for a file that could not be written after it."""
    if path is None:
        return
    if path.is_dir():
        problem = "a folder of that name is there"
    elif not path.parent.is_dir():
        problem = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "Permission denied"
    else:
        return
    raise SpecError(f"{path} cannot be written: {problem}", fix="name a path in a folder of yours")


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, default=str) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout, of which only the title is left where it has no rows.

    Columns whose cells are all numbers are aligned to the right.
    """
    if title:
        print_line(title)  # a line of its own: rich folds a title to the width of its table
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], (int, float)) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console = Console(file=sys.stdout, markup=False, highlight=False)
    if not console.is_terminal:
        console.width = _UNBOUNDED  # a table that goes into a file or a pipe is not cut
    console.print(table)


def print_facts(title: str, facts: Mapping[str, object]) -> None:
    """Names and values, one a line, on stdout."""
    print_table(title, ("", ""), [(name, value) for name, value in facts.items()])


def print_line(text: str) -> None:
    """A line of the result on stdout."""
    sys.stdout.write(f"{text}\n")


def print_note(text: str) -> None:
    """A remark on stderr, which does not disturb the result on stdout."""
    sys.stderr.write(f"{text}\n")


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f}/s")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr with rate and time left while the block runs; yields `advance(count, total)`.

    The total may be left out where it stays what it was. Silent without a terminal.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _RateColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count, total=None: bar.update(task, advance=count, total=total)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
