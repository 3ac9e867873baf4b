"""`bagelplane snapshots`: what states are stored, and whether they can be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from bagelplane.errors import SnapshotError, SpecError
from bagelplane.sidecar.snapshots import Manifest, SnapshotEntry, SnapshotStore
from bagelplane.sidecar.store import open_snapshot_store
from bagelplane.spec import load_dataset
from bagelplane.storage import StorageSettings, open_storage

app = typer.Typer(help="Look at the snapshots of a run.", no_args_is_help=True)

Output = Literal["table", "json"]
Target = Annotated[
    str, typer.Argument(help="The resource file, or the URI of the snapshots.", show_default=False)
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="table, or json for programs.")]
EndpointOption = Annotated[
    str | None, typer.Option("--endpoint-url", help="Address of an S3-compatible server, with a URI.")
]


@app.command("list")
def list_snapshots(
    target: Target, output: OutputOption = "table", endpoint_url: EndpointOption = None
) -> None:
    """List all snapshots: step, ranks, spec, and what is wrong with those that cannot be used.

    With a resource file, snapshots of another spec are unusable; with a URI any spec will do.

    Example: bagelplane snapshots list dataset.yaml
    """
    store = open_store(target, endpoint_url)
    entries = store.entries()
    if output == "json":
        body = {"uri": store.uri, "snapshots": [entry_as_json(entry) for entry in entries]}
        typer.echo(json.dumps(body, indent=2))
        return
    if not entries:
        typer.echo(f"no snapshots below {store.uri}")
        return
    table = Table("STEP", "CONDITION", "RANKS", "WORKERS", "BYTES", "SPEC", "PROBLEM", box=None)
    for entry in entries:
        table.add_row(str(entry.step), entry.condition, *_columns(entry.manifest), entry.problem)
    _console().print(table)


@app.command("show")
def show_snapshot(
    target: Target,
    step: Annotated[str, typer.Argument(help="A step, or latest.")] = "latest",
    output: OutputOption = "table",
    endpoint_url: EndpointOption = None,
) -> None:
    """Show one snapshot, and read and check every rank's state in it.

    Ends with exit code 8 if there is none, or if a state is missing or damaged.

    Example: bagelplane snapshots show s3://bucket/snapshots/ 1200 -o json
    """
    store = open_store(target, endpoint_url)
    manifest = store.load("latest" if step == "latest" else _parse_step(step))
    if manifest is None:
        raise SnapshotError(f"no complete snapshot below {store.uri}", fix="check the address")
    states = [store.load_state(manifest, rank) for rank in range(manifest.topology.world_size)]
    if output == "json":
        typer.echo(json.dumps({"uri": manifest.uri, **manifest.as_json(), "states": states}, indent=2))
        return
    typer.echo(f"{manifest.uri}\nstep {manifest.step} of dataset {manifest.dataset}, {manifest.topology}")
    typer.echo(f"spec hash {manifest.spec_hash}")
    typer.echo(", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    table = Table("RANK", "STORED BYTES", "STATE BYTES", "DROPPED", "SHA-256", box=None)
    for rank, (file, state) in enumerate(zip(manifest.ranks, states, strict=True)):
        size = len(json.dumps(state, separators=(",", ":")))
        table.add_row(str(rank), str(file.size_bytes), str(size), str(_count_drops(state)), file.sha256[:16])
    _console().print(table)


def open_store(target: str, endpoint_url: str | None = None) -> SnapshotStore:
    """The store that a resource file names, bound to its spec; or the one at a URI, for any spec."""
    if not Path(target).is_file():
        return SnapshotStore(open_storage(StorageSettings(endpoint_url=endpoint_url)), target, "")
    if endpoint_url is not None:
        raise SpecError("--endpoint-url goes with a URI", fix="the resource's spec.storage says it already")
    store = open_snapshot_store(load_dataset(target))
    if store is None:
        raise SpecError(f"{target} names no place for snapshots", fix="set spec.snapshots.uri")
    return store


def entry_as_json(entry: SnapshotEntry) -> dict[str, Any]:
    """A listing's line for programs."""
    body: dict[str, Any] = {"step": entry.step, "uri": entry.uri, "condition": entry.condition}
    if entry.problem:
        body["problem"] = entry.problem
    if entry.manifest is not None:
        manifest = entry.manifest
        body |= {
            "dataset": manifest.dataset,
            "spec_hash": manifest.spec_hash,
            "world_size": manifest.topology.world_size,
            "num_workers": manifest.topology.num_workers,
            "size_bytes": sum(file.size_bytes for file in manifest.ranks),
        }
    return body


def _columns(manifest: Manifest | None) -> tuple[str, str, str, str]:
    if manifest is None:
        return "", "", "", ""
    size = sum(file.size_bytes for file in manifest.ranks)
    topology = manifest.topology
    return str(topology.world_size), str(topology.num_workers), str(size), manifest.spec_hash[:12]


def _count_drops(state: dict[str, Any]) -> int:
    drops = state.get("drops", {})
    return sum(count for reasons in drops.values() for count in reasons.values())


def _parse_step(text: str) -> int:
    if text.isascii() and text.isdecimal():
        return int(text)
    raise SpecError("a step is a number", got=repr(text), expected="latest or a number, as `list` shows them")


def _console() -> Console:
    """As wide as the terminal, but never cutting a problem's text where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=200)
