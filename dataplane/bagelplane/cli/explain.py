"""`bagelplane explain`: which rows went into one pack, and what was dropped on the way to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from bagelplane.cli.output import (
    DecodeThreadsOption,
    Format,
    FormatOption,
    check_output,
    print_json,
    print_line,
    print_note,
    print_table,
    progress,
)
from bagelplane.cli.preview import cards_of_plan, write_sheet
from bagelplane.engine.planner import PackPlan
from bagelplane.engine.rows import RowPlace
from bagelplane.figures.contact_sheet import Fonts
from bagelplane.lineage.explanation import (
    ItemTold,
    PackTold,
    SampleTold,
    describe_reason,
    tell_logged,
    tell_pack,
)
from bagelplane.lineage.log import RowLog
from bagelplane.lineage.replay import PackAddress, Replay, address_of, stored_world_size
from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.sidecar.store import open_snapshot_store
from bagelplane.spec import BagelDataset, load_dataset, refuse_unsupported

_KINDS = {"text": "text", "vit_image": "ViT", "vae_image": "VAE"}
NOT_SURE = (
    "Images are taken to decode once their headers are good. One that does not was dropped in the run, and moved the "
    "packs after it: --verify decodes them on the way and is exact."
)

ResourceArgument = Annotated[
    Path, typer.Argument(help="The resource file (kind: BagelDataset).", show_default=False)
]
WorldSizeOption = Annotated[
    int | None,
    typer.Option(
        help="How many ranks train; without it as many as wrote the newest snapshot, else 1.",
        min=1,
        show_default=False,
    ),
]
FromStartOption = Annotated[
    bool, typer.Option("--from-start", help="Plan from the start; do not look at snapshots.")
]
PlanOption = Annotated[
    bool, typer.Option("--plan", help="Plan again, though the run's log of rows may have the answer.")
]
VerifyOption = Annotated[
    bool,
    typer.Option("--verify", help="Decode the images on the way: exact where some do not decode, and slow."),
]


def explain(
    resource: ResourceArgument,
    step: Annotated[
        int | None, typer.Option(help="The pack's step, counted from 0.", min=0, show_default=False)
    ] = None,
    rank: Annotated[int, typer.Option(help="The rank that takes it.", min=0)] = 0,
    world_size: WorldSizeOption = None,
    position: Annotated[
        int | None,
        typer.Option(
            help="Elastic sharding: the pack's number in the run, instead of step and rank.",
            min=0,
            show_default=False,
        ),
    ] = None,
    verify: VerifyOption = False,
    plan: PlanOption = False,
    from_start: FromStartOption = False,
    threads: DecodeThreadsOption = 2,
    output: FormatOption = Format.TABLE,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw the pack into this PNG, as preview does. Verifies.", show_default=False),
    ] = None,
    font: Annotated[
        Path | None,
        typer.Option(help="A font file, for captions in scripts that DejaVu lacks.", show_default=False),
    ] = None,
) -> None:
    """Tell which rows are in one pack: where each is stored, its tokens, splits and pictures, what conditioning
    dropout left out of it; and which rows were dropped on the way from the pack before, and why.

    Reads the run's log of rows if it has that pack (snapshots.lineage), which tells no splits and pictures. Else, and
    with --plan, plans forward from the nearest snapshot of the resource or from the start; no sidecar has to run.

    Examples:

        bagelplane explain dataset.yaml --step 1234 --rank 3 --world-size 8
        bagelplane explain dataset.yaml --position 9875 --picture pack.png
        bagelplane explain dataset.yaml --step 1234 -o json | jq '.samples[].object'
    """
    check_output(picture)
    fonts = Fonts.load(font) if picture is not None else None
    dataset = load_dataset(resource)
    refuse_unsupported(dataset, str(resource))
    store = None if from_start else open_snapshot_store(dataset)
    world_size = world_size or stored_world_size(store) or 1
    address = address_of(dataset, rank=rank, world_size=world_size, step=step, position=position)
    row_log = None if plan or picture is not None else open_row_log(store)
    explained = explain_pack(
        dataset,
        address,
        store,
        row_log=row_log,
        # A picture of what is not sure would show a pack that the run never gave.
        verify=verify or picture is not None,
        decode_threads=threads,
    )
    if output is Format.JSON:
        print_json(explained.as_json())
    else:
        explained.print_tables()
    if picture is not None and fonts is not None:
        assert explained.plan is not None
        shown = cards_of_plan(dataset, explained.plan, address.step)
        title = f"{dataset.metadata.name}: {address}"
        write_sheet([shown], picture, title=title, fonts=fonts)
        print_note(f"wrote {picture}")


def open_row_log(store: SnapshotStore | None) -> RowLog | None:
    """What the run logged beside its snapshots; None without snapshots."""
    return None if store is None else RowLog(store)


@dataclass(frozen=True, slots=True)
class Explained:
    """One pack as logged or planned again, and how to show it."""

    dataset: BagelDataset
    address: PackAddress
    told: PackTold
    is_sure: bool
    logged_run: str | None = None
    """Id of the run whose log told it; None for one that was planned."""
    plan: PackPlan | None = None
    planned_from: int | None = None
    """Number of the pack that planning began with, among those of the same rank or stream."""
    known_from: str = ""
    """Where planning knew rows from, in words."""

    @property
    def source(self) -> str:
        """Where it comes from, in words."""
        if self.logged_run is not None:
            return f"from the log of rows of run {self.logged_run} (--plan tells splits and pictures too)"
        began = f"from pack {self.planned_from}, of a snapshot" if self.planned_from else "from the start"
        return f"{self.told.buffered} wait in the buffer; planned {began}, {self.known_from}"

    def as_json(self) -> dict[str, Any]:
        budgets = self.dataset.spec.budgets
        return {
            "version": 1,
            "dataset": self.dataset.metadata.name,
            "profile": self.dataset.spec.profile,
            **self.address.as_json(),
            "source": "log" if self.logged_run is not None else "plan",
            "logged_run": self.logged_run,
            "planned_from": self.planned_from,
            "is_sure": self.is_sure,
            "expected_tokens": budgets.expected_tokens,
            "max_tokens": budgets.max_tokens,
            **self.told.as_json(),
        }

    def print_tables(self) -> None:
        """On stdout, for people."""
        told, most = self.told, self.dataset.spec.budgets.max_tokens
        print_line(f"{self.dataset.metadata.name}, {self.address}")
        print_line(f"{told.tokens:,} of {most:,} tokens, {len(told.samples)} samples; {self.source}")
        places = [*(sample.place for sample in told.samples), *(drop.place for drop in told.drops)]
        files = _short_names(place.object for place in places if place is not None)
        parts = ("splits", "pictures", "left out") if self.plan is not None else ()
        columns: tuple[str, ...] = ("", "group", "file", "row", "tokens", *parts)
        rows = [(number, *_sample_row(sample, files)) for number, sample in enumerate(told.samples)]
        print_table("", columns, rows)
        if told.drops:
            drops = [
                (drop.group, str(drop.reason), *_where(drop.place, files), drop.message)
                for drop in told.drops
            ]
            columns = ("group", "reason", "file", "row", "what was found")
            print_table("Dropped on the way from the pack before", columns, drops)
            print_reasons(drop.reason for drop in told.drops)
        else:
            print_line("No row was dropped on the way from the pack before.")
        if files:
            print_line("Files; a row is row group/row, or the line of JSONL, all counted from 0:")
            for uri, name in sorted(files.items()):
                print_line(f"  {uri}" if uri == name else f"  {name}: {uri}")
        if not self.is_sure:
            print_line(NOT_SURE)


def explain_pack(
    dataset: BagelDataset, address: PackAddress, store: SnapshotStore | None, *, row_log: RowLog | None = None,
    verify: bool = False, decode_threads: int = 1,
) -> Explained:  # fmt: skip
    """Look a pack up in the log of rows, else plan up to it; and tell of it.

    Raises what opening and planning a stream raises.
    """
    logged = row_log.pack(address) if row_log is not None else None
    if logged is not None:
        told = tell_logged(logged.rows, dataset)
        return Explained(dataset, address, told, is_sure=True, logged_run=logged.run)
    replay = Replay(
        dataset,
        address.reader,
        address.own_number,
        store=store,
        verify=verify,
        decode_threads=decode_threads,
    )
    with closing(replay):
        began = replay.number
        with progress("planning", address.own_number + 1 - began) as advance:
            replay.skip_to(address.own_number, advance)
            plan = replay.plan(whole=True)
            advance(1)
        is_sure, known_from = replay.is_sure(address.own_number), replay.known_from
    told = tell_pack(plan, dataset)
    return Explained(dataset, address, told, is_sure, plan=plan, planned_from=began, known_from=known_from)


def print_reasons(reasons: Iterable[str]) -> None:
    """What the reasons of a table mean, a line for each."""
    for reason in dict.fromkeys(reasons):
        if meaning := describe_reason(reason):
            print_line(f"{reason}: {meaning}")


def _short_names(uris: Iterable[str]) -> dict[str, str]:
    """By URI the file's name, for tables that fit a terminal; the URI where two files have one name."""
    all_of = set(uris)
    counts = Counter(uri.rpartition("/")[2] for uri in all_of)
    return {uri: name if counts[name := uri.rpartition("/")[2]] == 1 else uri for uri in all_of}


def _where(place: RowPlace | None, files: Mapping[str, str]) -> tuple[object, ...]:
    if place is None:
        return None, None
    return files[place.object], str(
        place.row
    ) if place.row_group is None else f"{place.row_group}/{place.row}"


def _splits(splits: Iterable[tuple[int, str]]) -> str:
    """Neighbours of one mode of attention together."""
    runs = groupby(splits, key=itemgetter(1))
    return ", ".join(f"{' + '.join(str(tokens) for tokens, _ in run)} {mode}" for mode, run in runs)


def _sample_row(sample: SampleTold, files: Mapping[str, str]) -> tuple[object, ...]:
    row = (sample.group, *_where(sample.place, files), sample.tokens)
    if sample.splits is None or sample.items is None:
        return row
    return (
        *row,
        _splits(sample.splits),
        ", ".join(_picture(item) for item in sample.items if item.size is not None and not item.left_out),
        ", ".join(_picture(item) for item in sample.items if item.left_out),
    )


def _picture(item: ItemTold) -> str:
    return _KINDS[item.kind] + (f" {item.size[0]}x{item.size[1]}" if item.size else "")
