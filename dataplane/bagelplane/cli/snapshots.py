"""`bagelplane snapshots`: what states are stored, whether they can be used, and what differs between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bagelplane.cli.import_checkpoint import import_checkpoint
from bagelplane.cli.output import (
    Format,
    FormatOption,
    print_json,
    print_line,
    print_note,
    print_table,
    progress,
)
from bagelplane.errors import SnapshotError, SpecError, StorageError
from bagelplane.settings import storage_settings
from bagelplane.sidecar.changes import data_changes, manifest_changes, spec_changes
from bagelplane.sidecar.fingerprint import Fingerprint, take_fingerprint
from bagelplane.sidecar.retention import Retention
from bagelplane.sidecar.runs import DamagedRun
from bagelplane.sidecar.snapshots import Manifest, SnapshotEntry, SnapshotStore, deletable
from bagelplane.sidecar.store import open_snapshot_store, retention_of
from bagelplane.spec import load_dataset
from bagelplane.storage import StorageSettings, open_storage
from bagelplane.storage.uris import parse_uri

app = typer.Typer(
    help="Look at the snapshots of a run, compare, check and prune them; import what Automodel saved.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

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
    entries, damaged = store.entries(), store.runs.look().damaged
    if output is Format.JSON:
        lines = [entry_as_json(entry) for entry in entries]
        print_json({"uri": store.uri, "snapshots": lines, **_damaged_as_json(damaged)})
        return
    rows = [
        (entry.step, entry.condition, entry.run, *_columns(entry.manifest), entry.problem)
        for entry in entries
    ]
    columns = ("step", "condition", "run", "ranks", "workers", "bytes", "spec hash", "problem")
    print_table(f"{_count(len(entries))} below {store.uri}", columns, rows)
    _print_damaged(damaged)


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
    wanted: int | Literal["latest"] = "latest" if step == "latest" else _parse_step(step)
    store = open_store(target, endpoint_url)
    manifest = store.load(wanted)
    if manifest is None:
        raise SnapshotError(f"no complete snapshot below {store.uri}", fix="check the address")
    states = [store.load_state(manifest, rank) for rank in range(manifest.topology.world_size)]
    if output is Format.JSON:
        print_json({"uri": manifest.uri, **manifest.as_json(), "states": states})
        return
    topology = manifest.topology
    print_line(f"{manifest.uri}\n{topology.unit} {manifest.step} of dataset {manifest.dataset}, {topology}")
    print_line(f"spec hash {manifest.spec_hash}, run {manifest.run or 'unknown'}")
    if manifest.data:
        data = store.read_data(manifest)
        print_line(f"data {manifest.data[:12]}: {len(data.objects)} objects, {data.size_bytes} bytes")
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


@app.command("diff")
def diff_snapshots(
    target: Target,
    before: Annotated[str, typer.Argument(help="A step, or latest.")],
    after: Annotated[
        str, typer.Argument(help="A step, latest, or now: the resource and its data as they are.")
    ] = "now",
    output: FormatOption = Format.TABLE,
    endpoint_url: EndpointOption = None,
) -> None:
    """Tell what differs between two snapshots: spec, data, topology, step, versions; and whether a run may resume
    across it.

    With a resource file, what its `resume.allowSpecChange` names may differ. Ends with exit code 8 if a resume is
    refused.

    Example: bagelplane snapshots diff dataset.yaml latest
    """
    for which in (before, after):
        _check_side(target, which)
    store = open_store(target, endpoint_url)
    old, new = _side(store, target, before), _side(store, target, after)
    changes = [
        *spec_changes(old.spec, new.spec, store.allowed),
        *(data_changes(old.data, new.data, store.allowed) if old.data and new.data else ()),
        *(manifest_changes(old.manifest, new.manifest) if old.manifest and new.manifest else ()),
    ]
    refused = [change for change in changes if change.verdict == "refused"]
    unknown = [
        name
        for name, known in (("spec", old.spec and new.spec), ("data", old.data and new.data))
        if not known
    ]
    if output is Format.JSON:
        found = [asdict(change) for change in changes]
        print_json({"changes": found, "unknown": unknown, "resume_allowed": not refused})
    else:
        rows = [(c.kind, c.name, c.before, c.after, c.verdict) for c in changes]
        if rows:
            print_table(f"{before} against {after}", ("what", "name", before, after, "resume"), rows)
        else:
            print_line(f"{before} against {after}: nothing differs")
        if unknown:
            print_note(f"not compared, since a side does not say it: {', '.join(unknown)}")
        print_line("a resume across this is refused" if refused else "a resume across this is allowed")
    if refused:
        raise typer.Exit(SnapshotError.exit_code)


@app.command("prune")
def prune_snapshots(
    target: Target,
    keep_last: Annotated[
        int | None,
        typer.Option(min=1, help="Newest snapshots to keep.", show_default="the resource's keepLast"),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(
            min=1, help="Keep one of each stretch of so many steps.", show_default="the resource's keepEvery"
        ),
    ] = None,
    other_runs: Annotated[
        bool, typer.Option("--other-runs", help="Also those that are not of the present run's history.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    output: FormatOption = Format.TABLE,
    endpoint_url: EndpointOption = None,
) -> None:
    """Delete old snapshots, by the rule that a sidecar follows: never the newest, nothing that keepEvery keeps.

    Example: bagelplane snapshots prune dataset.yaml --keep-last 1 --dry-run
    """
    store = open_store(target, endpoint_url)
    retention = retention_of(load_dataset(target)) if Path(target).is_file() else None
    if retention is None and keep_last is None:
        raise SpecError("--keep-last is needed with a URI", fix="say how many of the newest are to be kept")
    if keep_last is not None:
        retention = Retention(keep_last, retention.keep_every if retention else None)
    assert retention is not None
    retention = replace(retention, keep_every=keep_every or retention.keep_every)
    entries, damaged = store.entries(), store.runs.look().damaged
    if other_runs and damaged:
        raise SnapshotError(
            "--other-runs is refused: what belongs to the history is not known",
            got=damaged[-1].problem,
            fix=f"restore {damaged[-1].uri}, or leave --other-runs out",
        )
    doomed = retention.doomed(entries)
    if other_runs:
        doomed += [entry for entry in entries if entry.condition == "superseded"]
    doomed = deletable(doomed)
    for entry in doomed if not dry_run else ():
        store.delete(entry)
    if output is Format.JSON:
        print_json(
            {
                "uri": store.uri,
                "deleted": not dry_run,
                "snapshots": [entry_as_json(e) for e in doomed],
                **_damaged_as_json(damaged),
            }
        )
        return
    rows = [(entry.step, entry.condition, entry.run, entry.uri) for entry in doomed]
    done = "would be deleted" if dry_run else "deleted"
    print_table(
        f"{len(doomed)} of {_count(len(entries))} {done}", ("step", "condition", "run", "folder"), rows
    )
    _print_damaged(damaged)


@app.command("verify")
def verify_snapshots(
    target: Target, output: FormatOption = Format.TABLE, endpoint_url: EndpointOption = None
) -> None:
    """Read every state of every snapshot and check all checksums.

    Ends with exit code 8 if one is missing or damaged. One that was never finished is none.

    Example: bagelplane snapshots verify s3://bucket/snapshots/
    """
    store = open_store(target, endpoint_url).for_any_spec()
    entries = store.entries()
    found: list[tuple[SnapshotEntry, list[str]]] = []
    with progress("snapshots", len(entries)) as advance:
        for entry in entries:
            found.append((entry, _problems(store, entry)))
            advance(1)
    damaged, runs = [entry for entry, problems in found if problems], store.runs.look().damaged
    if output is Format.JSON:
        lines = [{**entry_as_json(entry), "problems": problems} for entry, problems in found]
        print_json({"uri": store.uri, "snapshots": lines, **_damaged_as_json(runs)})
    else:
        rows = [(entry.step, entry.condition, "; ".join(problems) or "in order") for entry, problems in found]
        title = f"{_count(len(entries))} below {store.uri}, {len(damaged)} damaged"
        print_table(title, ("step", "condition", "what was found"), rows)
        _print_damaged(runs)
    if damaged or runs:
        raise typer.Exit(SnapshotError.exit_code)


def _print_damaged(runs: Sequence[DamagedRun]) -> None:
    for run in runs:
        print_note(
            f"the record of run {run.number} is damaged; what it continued is not known: {run.problem}"
        )


def _damaged_as_json(runs: Sequence[DamagedRun]) -> dict[str, Any]:
    return {"damaged_runs": [asdict(run) for run in runs]} if runs else {}


def _problems(store: SnapshotStore, entry: SnapshotEntry) -> list[str]:
    """What is wrong with the objects of one snapshot."""
    if entry.manifest is None:
        return [entry.problem] if entry.condition == "unusable" else []
    looks: list[Callable[[], object]] = [
        partial(store.load_state, entry.manifest, rank) for rank in range(len(entry.manifest.ranks))
    ]
    looks += [partial(store.read_data, entry.manifest)] if entry.manifest.data else []
    problems = []
    for look in looks:
        try:
            look()
        except (SnapshotError, StorageError) as error:
            problems.append(str(error))
    return problems


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a comparison; what is empty or None is not known."""

    spec: Mapping[str, Any]
    data: Fingerprint | None
    manifest: Manifest | None


def _check_side(target: str, which: str) -> None:
    if which == "now" and not Path(target).is_file():
        raise SpecError("now is the resource as it is", got=f"the URI {target}", fix="give the resource file")
    if which not in ("now", "latest"):
        _parse_step(which)


def _side(store: SnapshotStore, target: str, which: str) -> _Side:
    if which == "now":
        dataset = load_dataset(target)
        return _Side(store.spec, take_fingerprint(dataset, open_storage(storage_settings(dataset))), None)
    reader = store.for_any_spec()
    manifest = reader.load("latest" if which == "latest" else _parse_step(which))
    if manifest is None:
        raise SnapshotError(f"no complete snapshot below {store.uri}", fix="check the address")
    return _Side(manifest.spec, reader.read_data(manifest) if manifest.data else None, manifest)


def open_store(target: str, endpoint_url: str | None = None) -> SnapshotStore:
    """The store that a resource file names, bound to its spec; or the one at a URI, for any spec."""
    if not Path(target).is_file():
        if target.endswith((".yaml", ".yml", ".json")):
            raise SpecError(f"there is no resource file {target}", fix="correct its name; or give a URI")
        _check_uri(target)
        return SnapshotStore(open_storage(StorageSettings(endpoint_url=endpoint_url)), target, "")
    if endpoint_url is not None:
        raise SpecError("--endpoint-url goes with a URI", fix="the resource's spec.storage says it already")
    store = open_snapshot_store(load_dataset(target))
    if store is None:
        raise SpecError(f"{target} names no place for snapshots", fix="set spec.snapshots.uri")
    return store


def _check_uri(uri: str) -> None:
    try:
        parse_uri(uri)
    except StorageError as error:
        raise SpecError(str(error)) from None


def entry_as_json(entry: SnapshotEntry) -> dict[str, Any]:
    """A listing's line for programs."""
    body: dict[str, Any] = {
        "step": entry.step,
        "uri": entry.uri,
        "condition": entry.condition,
        "run": entry.run,
    }
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


def _count(snapshots: int) -> str:
    return "1 snapshot" if snapshots == 1 else f"{snapshots} snapshots"


def _count_drops(state: dict[str, Any]) -> int:
    drops = state.get("drops", {})
    return sum(count for reasons in drops.values() for count in reasons.values())


def _parse_step(text: str) -> int:
    if text.isascii() and text.isdecimal():
        return int(text)
    raise SpecError("a step is a number", got=repr(text), expected="latest or a number, as `list` shows them")
