"""Writes what is in the repository and made of code: reference pages, the CRD, the chart's copy of it, its values.

`python -m bagelplane.cli.reference` writes them, with `--check` it only tells whether they are as written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bagelplane import errors
from bagelplane.cli.app import EXIT_INTERRUPTED, EXIT_UNEXPECTED
from bagelplane.cli.output import print_line, print_note
from bagelplane.cli.reference_chart import VALUES_SCHEMA, build_chart_files, value_rows
from bagelplane.engine.drops import DropReason
from bagelplane.sidecar.lineage_format import (
    COLUMNS,
    LINEAGE_FORMAT,
    LINEAGE_VERSION,
    PART_STEPS,
    PartKey,
)
from bagelplane.sidecar.metrics import METRICS, exposed_names
from bagelplane.sidecar.report import STATUS_VERSION, SidecarStatus
from bagelplane.spec import API_VERSION, KIND
from bagelplane.spec_fields import FieldDoc, iter_fields
from bagelplane.spec_status import DatasetStatus
from bagelplane_operator.conditions import ConditionType, Reason

ROOT = Path(__file__).resolve().parents[3]
_ORIGIN = "<!-- Written by `python -m bagelplane.cli.reference` from the code; do not edit. -->\n"


def reference(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; fail when a file is stale.")
    ] = False,
    root: Annotated[Path, typer.Option(help="The repository.")] = ROOT,
) -> None:
    """Write the generated files, or check that they are what the code says."""
    stale = stale_files(root)
    for name, text in stale.items():
        if not check:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
            print_line(f"wrote {name}")
    if check and stale:
        print_note(f"stale: {', '.join(stale)}. Fix: run python -m bagelplane.cli.reference")
        raise typer.Exit(1)


def stale_files(root: Path = ROOT) -> dict[str, str]:
    """Those of the generated files that differ from what they should be, with their text."""
    return {
        name: text
        for name, text in build_files(root).items()
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != text
    }


def build_files(root: Path = ROOT) -> dict[str, str]:
    """Path below the repository to text of each file."""
    values = json.loads((root / VALUES_SCHEMA).read_text(encoding="utf-8"))
    pages = {
        "resource": _resource_page(),
        "exit-codes": _exit_code_page(),
        "drop-reasons": _drop_page(),
        "metrics": _metric_page(),
        "status": _status_page(),
        "lineage": _lineage_page(),
        "conditions": _condition_page(),
        "chart-values": _chart_page(values),
    }
    documents = {f"docs/reference/{name}.md": "\n".join(lines) for name, lines in pages.items()}
    return documents | build_chart_files(values)


def _resource_page() -> Iterator[str]:
    yield f"{_ORIGIN}# The resource: {KIND}\n"
    yield (
        f'All fields of `{API_VERSION}`. Unknown fields are errors, and so is a value of another type (`"1"` is '
        "no number); a field with nothing behind it (`region:`) is one left out. `bagelplane validate FILE` names "
        "every fault with its line. Quantities are as in Kubernetes: `512Mi`, `10Gi` or a number of bytes. "
        "Addresses are `s3://`, `gs://`, `az://`, `file:///` or local paths; "
        "relative paths start from the folder that the program runs in.\n"
    )
    yield (
        "This release runs [both profiles](../concepts/profiles.md) and both kinds of sharding, "
        "without storage cache. `gs://` needs the package gcsfs, `az://` adlfs; neither is tested yet.\n"
    )
    yield "Examples: [dataset.yaml](../examples/dataset.yaml), [minimal.yaml](../examples/minimal.yaml),"
    yield "[from-automodel.yaml](../examples/from-automodel.yaml).\n"
    fields = list(iter_fields())
    yield from _field_table("The object", [field for field in fields if "." not in field.path])
    yield from _part_tables(fields)
    status = list(iter_fields(DatasetStatus, "status"))
    text = "What the operator reports: `kubectl get bgds -o yaml`. A field that is not known is absent."
    yield from _field_table("`status`", [field for field in status if field.path.count(".") == 1], text)
    yield from _part_tables(status)


def _part_tables(fields: Sequence[FieldDoc]) -> Iterator[str]:
    for parent in fields:
        if parent.model is None:
            continue
        children = [field for field in fields if field.path.rpartition(".")[0] == parent.path]
        yield from _field_table(f"`{parent.path}`", children, parent.description)


def _field_table(title: str, fields: Sequence[FieldDoc], text: str = "") -> Iterator[str]:
    yield f"## {title}\n"
    if text:
        yield f"{text}\n"
    rows = []
    for field in fields:
        name = field.path.rpartition(".")[2].removesuffix("[]")
        default = f"`{field.default}`" if field.default not in ("", "required", "none") else field.default
        kind = f"{field.kind}, {field.limits}" if field.limits else field.kind
        rows.append((f"`{name}`", kind, default, field.unit, field.description))
    yield from _table(("Field", "Type", "Default", "Unit", "Meaning"), rows)


def _exit_code_page() -> Iterator[str]:
    yield f"{_ORIGIN}# Exit codes\n"
    yield "What `bagelplane` ends with. An error is one message on stderr: what, got, expected, fix.\n"
    rows = [(0, "", "All is well.", "")]
    for kind in vars(errors).values():
        if not (isinstance(kind, type) and issubclass(kind, errors.BagelplaneError)):
            continue
        if kind is errors.BagelplaneError:
            rows.append((kind.exit_code, "", "Any other error that the message explains.", kind.reaction))
        else:
            summary = (kind.__doc__ or "").splitlines()[0]
            rows.append((kind.exit_code, f"`{kind.__name__}`", summary, kind.reaction))
    debug = "Run it again with `--debug` and report what it prints."
    rows.append((EXIT_UNEXPECTED, "", "A fault of Bagelplane's own.", debug))
    rows.append(
        (EXIT_INTERRUPTED, "", "Interrupted with Ctrl-C. (`run` ends with 0 then: it was asked to.)", "")
    )
    rows.sort(key=lambda row: row[0])
    yield from _table(("Code", "Error", "Meaning", "What to do"), rows)
    yield "Wrong arguments end with 2 as well.\n"


def _drop_page() -> Iterator[str]:
    yield f"{_ORIGIN}# Why rows are dropped\n"
    yield (
        "Every row that is drawn and not packed is counted under one of these reasons (`bagelplane plan`, the "
        "sidecar's status, and the log: the first three of each and every hundredth).\n"
    )
    yield from _table(("Reason", "Meaning"), [(f"`{reason}`", reason.description) for reason in DropReason])


def _metric_page() -> Iterator[str]:
    yield f"{_ORIGIN}# Metrics\n"
    yield (
        "What the sidecar shows at `/metrics` in Prometheus' format (`bagelplane run --status-port`). Counts are of "
        "this sidecar's life: they survive producers that die and trainers that come back, and begin at 0 when the "
        "sidecar does. [How to watch a run](../guides/observe.md).\n"
    )
    rows = [
        (
            ", ".join(f"`{each}`" for each in exposed_names(name, doc)),
            doc.kind,
            ", ".join(doc.labels),
            doc.text,
        )
        for name, doc in METRICS.items()
    ]
    yield from _table(("Metric", "Kind", "Labels", "Meaning"), rows)


def _status_page() -> Iterator[str]:
    yield f"{_ORIGIN}# The sidecar's status\n"
    yield (
        "One JSON object: at `/v1/status` of `bagelplane run --status-port`, and by `status()` of reader and loader. "
        f"This is version {STATUS_VERSION}: it changes when a field goes or means something else, not when one comes. "
        "Counts and times are since the rank was first served by this sidecar.\n"
    )
    fields = list(iter_fields(SidecarStatus))
    top = [field for field in fields if "." not in field.path]
    yield from _status_table("The object", top)
    for parent in fields:
        if parent.model is not None:
            children = [field for field in fields if field.path.rpartition(".")[0] == parent.path]
            yield from _status_table(f"`{parent.path}`", children)


def _status_table(title: str, fields: Sequence[FieldDoc]) -> Iterator[str]:
    yield f"## {title}\n"
    rows = [
        (
            f"`{field.path.rpartition('.')[2].removesuffix('[]')}`",
            f"{field.kind} or null" if field.default == "none" else field.kind,
            field.unit,
            field.description,
        )
        for field in fields
    ]
    yield from _table(("Field", "Type", "Unit", "Meaning"), rows)


def _lineage_page() -> Iterator[str]:
    yield f"{_ORIGIN}# The log of rows\n"
    yield (
        "What a sidecar writes below `snapshots.uri` with `snapshots.lineage: true`: one line for each row of each "
        "pack that was trained on, and for each row that was dropped on the way to it. Parquet with zstd, for anything "
        "that reads it. [explain and find](../guides/explain.md) read it.\n"
    )
    yield f"    {PartKey('<run>', 3, 8, 12 * PART_STEPS).uri('<snapshots.uri>')}\n"
    yield (
        f"A file holds {PART_STEPS:,} steps of one rank of a world, from the step in its name on; the last one as many "
        "as there are. It is replaced as a whole each time that it grows: there is never half of one. The run's id is "
        "that of its snapshots' folders; which runs are the history, the records in `runs/` say. With elastic "
        "sharding, worlds of several sizes have files of their own, and where one took up in mid-round what another "
        "had begun, both may hold a pack: with the same rows.\n"
    )
    yield from _table(
        ("Column", "Type", "Meaning"), [(f"`{name}`", kind, text) for name, kind, text in COLUMNS]
    )
    yield (
        f"Lines are in the order of the steps; in a step first the rows of the pack, in its order. Texts that are no "
        "UTF-8 have `\\udc80` and the like in place of what is none. The file's metadata have one key of ours, "
        f"`bagelplane`: JSON with `format` (`{LINEAGE_FORMAT}`), `version` ({LINEAGE_VERSION}; another one when a "
        "column goes or means something else), `run`, `rank`, `world_size`, `first_step`, `streams` (0 under Bagel "
        "sharding), `dataset` and `spec_hash`.\n"
    )


def _condition_page() -> Iterator[str]:
    yield f"{_ORIGIN}# Conditions\n"
    yield (
        "What the operator says of a resource in `status.conditions`; `kubectl describe bgds NAME` shows them with "
        "the Events of their changes. The message names what is wrong and what to do.\n"
    )
    yield from _table(("Condition", "True when"), [(f"`{kind}`", kind.description) for kind in ConditionType])
    rows = [(f"`{reason}`", reason.state, reason.description) for reason in Reason]
    yield from _table(("Reason", "Status", "Meaning"), rows)


def _chart_page(schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"{_ORIGIN}# Values of the chart\n"
    yield (
        "What `helm install bagelplane charts/bagelplane --set NAME=VALUE` takes. Helm refuses unknown names and "
        "values of another kind.\n"
    )
    yield from _table(("Value", "Type", "Default", "Meaning"), list(value_rows(schema)))


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


if __name__ == "__main__":
    try:
        typer.run(reference)
    except errors.BagelplaneError as error:
        print_note(f"error: {error}")
        sys.exit(error.exit_code)
