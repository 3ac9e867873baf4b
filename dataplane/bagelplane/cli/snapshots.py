"""`bagelplane snapshots`: what states are stored, and whether they can be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from bagelplane.cli.import_checkpoint import import_checkpoint
from bagelplane.cli.output import Format, FormatOption, print_json, print_line, print_table
from bagelplane.errors import SnapshotError, SpecError
from bagelplane.sidecar.snapshots import Manifest, SnapshotEntry, SnapshotStore
from bagelplane.sidecar.store import open_snapshot_store
from bagelplane.spec import load_dataset
from bagelplane.storage import StorageSettings, open_storage

app = typer.Typer(help="Look at the snapshots of a run.", no_args_is_help=True)

app.command("import")(import_checkpoint)

Target = Annotated[
    str, typer.Argument(help="The resource file, or the URI of the snapshots.", show_default=False)
]
EndpointOption = Annotated[
    str | None, typer.Option("--endpoint-url", help="Address of an S3-compatible server, with a URI.")
]


@app.command("list")
def list_snapshots(
    target: Target, output: FormatOption = Format.TABLE, endpoint_url: EndpointOption = None
) -> None:
    """List all snapshots: step (with elastic sharding position), ranks, spec, and what is wrong with those that
    cannot be used.

    With a resource file, snapshots of another spec are unusable; with a URI any spec will do.

    Example: bagelplane snapshots list dataset.yaml
    """
    store = open_store(target, endpoint_url)
    entries = store.entries()
    if output is Format.JSON:
        print_json({"uri": store.uri, "snapshots": [entry_as_json(entry) for entry in entries]})
        return
    rows = [(entry.step, entry.condition, *_columns(entry.manifest), entry.problem) for entry in entries]
    columns = ("step", "condition", "ranks", "workers", "bytes", "spec hash", "problem")
    print_table(f"{len(entries)} snapshots below {store.uri}", columns, rows)


@app.command("show")
def show_snapshot(
    target: Target,
    step: Annotated[str, typer.Argument(help="A step, or latest.")] = "latest",
    output: FormatOption = Format.TABLE,
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
    if output is Format.JSON:
        print_json({"uri": manifest.uri, **manifest.as_json(), "states": states})
        return
    topology = manifest.topology
    print_line(f"{manifest.uri}\n{topology.unit} {manifest.step} of dataset {manifest.dataset}, {topology}")
    print_line(f"spec hash {manifest.spec_hash}")
    print_line(", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    rows = [
        (
            rank,
            file.size_bytes,
            len(json.dumps(state, separators=(",", ":"))),
            _count_drops(state),
            file.sha256[:16],
        )
        for rank, (file, state) in enumerate(zip(manifest.ranks, states, strict=True))
    ]
    print_table("", ("rank", "stored bytes", "state bytes", "dropped rows", "sha256"), rows)


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
            **({"streams": manifest.topology.streams} if manifest.topology.streams else {}),
            "size_bytes": sum(file.size_bytes for file in manifest.ranks),
        }
    return body


def _columns(manifest: Manifest | None) -> tuple[object, ...]:
    if manifest is None:
        return None, None, None, None
    size = sum(file.size_bytes for file in manifest.ranks)
    topology = manifest.topology
    return topology.world_size, topology.num_workers, size, manifest.spec_hash[:12]


def _count_drops(state: dict[str, Any]) -> int:
    drops = state.get("drops", {})
    return sum(count for reasons in drops.values() for count in reasons.values())


def _parse_step(text: str) -> int:
    if text.isascii() and text.isdecimal():
        return int(text)
    raise SpecError("a step is a number", got=repr(text), expected="latest or a number, as `list` shows them")
