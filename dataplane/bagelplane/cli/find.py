"""`bagelplane find`: at which steps one row is trained on, or why it is not."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bagelplane.cli.explain import (
    NOT_SURE,
    FromStartOption,
    PlanOption,
    ResourceArgument,
    VerifyOption,
    WorldSizeOption,
    open_row_log,
    print_reasons,
)
from bagelplane.cli.output import (
    DecodeThreadsOption,
    Format,
    FormatOption,
    print_json,
    print_line,
    print_table,
    progress,
)
from bagelplane.errors import SpecError
from bagelplane.lineage.explanation import place_as_json
from bagelplane.lineage.replay import stored_world_size
from bagelplane.lineage.search import Found, Search, Sighting, search_row, start_search
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.sidecar.store import open_snapshot_store
from bagelplane.spec import BagelDataset, load_dataset, refuse_unsupported


def find(
    resource: ResourceArgument,
    object_uri: Annotated[
        str, typer.Option("--object", help="The Parquet or JSONL file of the row.", show_default=False)
    ],
    row: Annotated[
        int,
        typer.Option(
            help="The row, counted from 0: in its row group, without --row-group in the whole file; a line of JSONL.",
            min=0,
            show_default=False,
        ),
    ],
    row_group: Annotated[
        int | None, typer.Option(help="The row group of a Parquet file.", min=0, show_default=False)
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="How many steps to look at; without it those up to the newest snapshot.",
            min=1,
            show_default=False,
        ),
    ] = None,
    world_size: WorldSizeOption = None,
    verify: VerifyOption = False,
    plan: PlanOption = False,
    from_start: FromStartOption = False,
    threads: DecodeThreadsOption = 2,
    output: FormatOption = Format.TABLE,
) -> None:
    """Tell at which steps, and by which ranks, one row was or will be trained on; where it was dropped, and why; and
    whether it still waits in a buffer.

    Looks at the packs of those ranks (or streams) that have the row's file in their share of the data: reads them in
    the run's log of rows (snapshots.lineage), and plans those that it does not have.

    Examples:

        bagelplane find dataset.yaml --object s3://bucket/t2i/part-00017.parquet --row 17
        bagelplane find dataset.yaml --object s3://bucket/vlm/train.jsonl --row 1203 --steps 5000 --world-size 8
    """
    dataset = load_dataset(resource)
    refuse_unsupported(dataset, str(resource))
    store = None if from_start else open_snapshot_store(dataset)
    world_size = world_size or stored_world_size(store) or 1
    until = _until(dataset, store, steps, world_size)
    search = start_search(dataset, object_uri, row, row_group, world_size)
    with progress("planning", search.packs(until)) as advance:
        found = search_row(
            dataset,
            search,
            until,
            store=store,
            row_log=None if plan else open_row_log(store),
            verify=verify,
            decode_threads=threads,
            on_progress=advance,
        )
    if output is Format.JSON:
        print_json(_as_json(dataset, search, until, found))
        return
    sightings = found.sightings
    print_line(f"{search.place}: {_summary(search, sightings)}, {_range(dataset, until)}")
    if found.logged_packs:
        print_line(
            f"{found.logged_packs:,} packs from the log of rows, {found.planned_packs:,} planned again"
        )
    if sightings:
        elastic = ("pack", "stream") if sightings[0].pack.streams else ()
        columns = ("step", "rank", *elastic, "group", "fate", "sample", "tokens", "why")
        print_table("", columns, [_columns(one) for one in sightings])
        print_reasons(one.reason for one in sightings)
    if not found.is_sure:
        print_line(NOT_SURE)


def _until(dataset: BagelDataset, store: SnapshotStore | None, steps: int | None, world_size: int) -> int:
    """The step, with elastic sharding the position, before which is looked."""
    elastic = dataset.spec.sharding.mode == "Elastic"
    if steps is not None:
        return steps * world_size if elastic else steps
    newest = None if store is None else store.nearest(None)
    if newest is None:
        raise SpecError(
            "there is no snapshot that says how far the run has come",
            expected="a number of steps",
            fix="give --steps",
        )
    return newest.step


def _range(dataset: BagelDataset, until: int) -> str:
    elastic = dataset.spec.sharding.mode == "Elastic"
    return f"before position {until} of the run" if elastic else f"before step {until} of each rank"


def _summary(search: Search, found: list[Sighting]) -> str:
    counts = {fate: sum(one.fate == fate for one in found) for fate in ("trained", "dropped", "buffered")}
    if not search.readers:
        return "no rank reads it: it lies beyond numUsedData, or in the rest that cannot be shared out evenly"
    if not found:
        return "not reached"
    told = [f"trained on {_times(counts['trained'])}" if counts["trained"] else "never trained on"]
    told += [f"dropped {_times(counts['dropped'])}"] * bool(counts["dropped"])
    return ", ".join(told + ["waiting in a buffer"] * bool(counts["buffered"]))


def _times(count: int) -> str:
    return "1 time" if count == 1 else f"{count:,} times"


def _columns(one: Sighting) -> tuple[object, ...]:
    pack = one.pack
    elastic = (pack.number, pack.number % pack.streams) if pack.streams else ()
    why = ": ".join(filter(None, (str(one.reason), one.message)))
    return (pack.step, pack.rank, *elastic, one.group, one.fate, one.sample, one.tokens, why)


def _as_json(dataset: BagelDataset, search: Search, until: int, found: Found) -> dict[str, Any]:
    elastic = dataset.spec.sharding.mode == "Elastic"
    return {
        "version": 1,
        "dataset": dataset.metadata.name,
        "profile": dataset.spec.profile,
        **place_as_json(search.place),
        "world_size": search.world_size,
        "before_position" if elastic else "before_step": until,
        "is_read": bool(search.readers),
        "is_sure": found.is_sure,
        "logged_packs": found.logged_packs,
        "planned_packs": found.planned_packs,
        "sightings": [one.as_json() for one in found.sightings],
    }
