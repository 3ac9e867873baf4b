"""`bagelplane index`: look at all data once, so that planning need not."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bagelplane.cli.explain import print_reasons
from bagelplane.cli.output import (
    Format,
    FormatOption,
    print_facts,
    print_json,
    print_line,
    print_note,
    print_table,
    progress,
)
from bagelplane.engine.drops import DropReason
from bagelplane.errors import SpecError
from bagelplane.indexing import Indexer, IndexReport
from bagelplane.settings import StreamSettings, index_uri
from bagelplane.spec import load_dataset, refuse_unsupported

LINE_SECONDS = 5.0
"""How often a line tells how far it is, where no terminal shows a bar."""
_SHARD = re.compile(r"([0-9]+)/([0-9]+)")


def index(
    resource: Annotated[
        Path, typer.Argument(help="The resource file (kind: BagelDataset).", show_default=False)
    ],
    out: Annotated[
        str | None,
        typer.Option(
            help="Where it is written. Default: index/ below snapshots.uri, where it is looked for."
        ),
    ] = None,
    shard: Annotated[
        str,
        typer.Option(metavar="I/N", help="Write every n-th part alone, from the i-th on; i counts from 0."),
    ] = "0/1",
    verify: Annotated[
        bool, typer.Option("--verify", help="Decode every image, and keep which do not. Slow.")
    ] = False,
    threads: Annotated[
        int, typer.Option(help="Images looked at at once; of a distant store more may be of use.", min=1)
    ] = 16,
    output: FormatOption = Format.TABLE,
) -> None:
    """Look at every object of a resource once, and write down what planning needs to know of its rows.

    What has an index is planned without reading the data: their pixels are read when packs are made. Interrupt it
    when you like: run again, it goes on where it was. After a change of the data, only what has changed is read.

    Examples:

        bagelplane index dataset.yaml
        bagelplane index dataset.yaml --verify
        bagelplane index dataset.yaml --shard $JOB_COMPLETION_INDEX/8

    Ends with 0 when it could look at all objects; else with the exit code of the first that it could not.
    """
    dataset = load_dataset(resource)
    refuse_unsupported(dataset, str(resource))
    uri, part = out or index_uri(dataset), parse_shard(shard)
    if uri is None:
        raise SpecError(
            "nothing says where the index goes", fix="give the resource a snapshots.uri, or say it with --out"
        )
    settings = StreamSettings.from_resource(dataset)
    with told_progress() as on_progress:
        indexer = Indexer(settings, uri, verify=verify, threads=threads, on_progress=on_progress)
        report = indexer.run(part)
    if output is Format.JSON:
        print_json(report.as_json() | {"costs": settings.storage.costs.as_json()})
    else:
        _print(report)
    for problem in report.problems:
        print_note(f"error: {problem}")
    if report.problems:
        raise typer.Exit(report.problems[0].exit_code)


def parse_shard(text: str) -> tuple[int, int]:
    """(i, n) of "i/n". Raises SpecError."""
    match = _SHARD.fullmatch(text)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if number >= count:
        raise SpecError(
            "--shard names no part of the work",
            got=repr(text),
            expected="i/n with i from 0 to below n, as in 0/8",
            fix="an Indexed Job counts from 0: --shard $JOB_COMPLETION_INDEX/8",
        )
    return number, count


@contextmanager
def told_progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, else a line now and then, both on stderr. Yields `on_progress(done, total)`."""
    if not Console(stderr=True).is_terminal:
        yield _Lines().tell
        return
    with progress("indexing", 0) as advance:
        last = 0

        def tell(done: int, total: int) -> None:
            nonlocal last
            advance(max(0, done - last), total)
            last = max(last, done)

        yield tell


class _Lines:
    """Says how far it is, every few seconds."""

    def __init__(self) -> None:
        self._begun = self._told = time.monotonic()

    def tell(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told < LINE_SECONDS or not done:
            return
        self._told, rate = now, done / (now - self._begun)
        left = (total - done) / rate
        print_note(
            f"indexed {done:,} of {total:,} objects and lines, {rate:,.0f} a second, {left:,.0f} s left"
        )


def _print(report: IndexReport) -> None:
    facts = report.as_json()
    shown = {
        name: facts[name] for name in ("objects", "parts", "written", "kept", "rows", "images", "image_bytes")
    }
    if report.undecodable_images is not None:
        shown["images that do not decode"] = report.undecodable_images
    print_facts(f"index {report.uri}", {name.replace("_", " "): value for name, value in shown.items()})
    if report.drops:
        print_table("Unusable rows", ("reason", "rows"), sorted(report.drops.items()))
        print_reasons(reason for reason in DropReason if reason in report.drops)
    if report.missing:
        who = "could not be written" if report.problems else "are left to the other shards"
        print_line(f"{report.missing:,} of {report.parts:,} parts {who}")
    print_line(f"done in {report.seconds:.1f} s")
