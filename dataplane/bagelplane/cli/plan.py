"""`bagelplane plan`: what packs will hold, from image headers and text alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from bagelplane.cli.output import Format, FormatOption, check_output, print_json, print_note, progress
from bagelplane.engine.elastic import check_world_size
from bagelplane.engine.planner import PackPlan
from bagelplane.errors import SpecError
from bagelplane.figures.tally import GroupShare, PlanTally
from bagelplane.settings import StreamSettings
from bagelplane.sources.index import describe
from bagelplane.spec import BagelDataset, load_dataset, refuse_unsupported
from bagelplane.stream import check_sources, open_rank_stream
from bagelplane.topology import Topology

_MEGABYTE = 1e6
FORECAST_NOTES = {
    "Automodel": "A forecast: images are taken to decode once their headers are good. One that does not decode is "
    "dropped in the run, and moves the packs after it. --verify decodes them all and is exact.",
    "Strict": "Images are taken to decode once their headers are good. One that does not takes its sample out of its "
    "pack in the run, and moves nothing else. --verify decodes the images of these packs and leaves those samples out.",
}
_KIND_NAMES = {"text": "text", "vit_image": "ViT image", "vae_image": "VAE image"}


def plan(
    resource: Annotated[
        Path, typer.Argument(help="The resource file (kind: BagelDataset).", show_default=False)
    ],
    packs: Annotated[int, typer.Option(help="How many packs to plan.", min=1)] = 1000,
    rank: Annotated[int, typer.Option(help="The rank whose packs are planned.", min=0)] = 0,
    world_size: Annotated[int, typer.Option(help="How many ranks train.", min=1)] = 1,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Decode the images too: exact where some do not decode, and slow."),
    ] = False,
    threads: Annotated[int, typer.Option(help="Decode threads for --verify.", min=1)] = 2,
    output: FormatOption = Format.TABLE,
    png: Annotated[
        Path | None, typer.Option(help="Draw the forecast into this PNG.", show_default=False)
    ] = None,
) -> None:
    """Forecast the packs of one rank: how full they get, the mix by group, what is dropped and why.

    Reads headers and texts, no pixels, so a thousand packs take seconds. Use it before a run, to set
    weights and budgets, and to see how soon a group's data repeat.

    Examples:

        bagelplane plan dataset.yaml
        bagelplane plan dataset.yaml --packs 5000 --rank 3 --world-size 8 --png plan.png
        bagelplane plan dataset.yaml -o json | jq .fill
    """
    check_output(png)
    dataset = load_dataset(resource)
    refuse_unsupported(dataset, str(resource))
    topology = checked_topology(dataset, rank, world_size)
    forecast = make_forecast(dataset, topology, packs=packs, decode_threads=threads if verify else 0)
    if output is Format.JSON:
        print_json(forecast.as_json())
    else:
        forecast.print_tables()
    if png is not None:
        forecast.write_png(png)
        print_note(f"wrote {png}")


def checked_topology(dataset: BagelDataset, rank: int, world_size: int) -> Topology:
    """Raises SpecError for a rank outside of its world, and for a world size that the streams do not fit."""
    if rank >= world_size:
        raise SpecError(
            "the rank is outside its world",
            got=f"--rank {rank} --world-size {world_size}",
            expected=f"a rank from 0 to {world_size - 1}",
            fix="ranks count from 0; give --world-size as the run will have it",
        )
    sharding = dataset.spec.sharding
    if sharding.mode == "Elastic":
        check_world_size(sharding.streams, world_size)
        return Topology(rank, world_size, 0)
    return Topology(rank, world_size, sharding.workers_per_rank)


class Forecast:
    """Counts of planned packs, and how to show them."""

    def __init__(self, dataset: BagelDataset, topology: Topology, *, verified: bool) -> None:
        self.name, self.profile = dataset.metadata.name, dataset.spec.profile
        self.topology, self.verified = topology, verified
        sharding = dataset.spec.sharding
        self.streams = sharding.streams if sharding.mode == "Elastic" else 0
        readers = self.streams // topology.world_size or max(1, topology.num_workers)
        settings = StreamSettings.from_resource(dataset)
        units = check_sources(dataset, topology.world_size, settings)
        shares = [
            GroupShare(
                group.name,
                group.type,
                group.weight,
                group.mandatory,
                units=units[group.name] // topology.world_size // readers,
            )
            for group in dataset.spec.groups
        ]
        self.tally = PlanTally(settings.packing, shares, readers, is_pure=settings.profile.plan_is_pure)
        self.seconds = 0.0
        self.index = settings.index
        """What the rows were known from, beside the data."""

    @property
    def is_sure(self) -> bool:
        """Whether images that do not decode were left out."""
        is_known = self.index is not None and self.index.coverage.knows_pixels
        return self.verified or (self.profile == "Automodel" and is_known)

    @property
    def packs_per_second(self) -> float:
        return self.tally.packs / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        place = {
            "rank": self.topology.rank,
            "world_size": self.topology.world_size,
            "workers_per_rank": self.topology.num_workers,
            **({"streams": self.streams} if self.streams else {}),
        }
        return {
            "version": 1,
            "dataset": self.name,
            **place,
            "verified": self.verified,
            "planning_seconds": round(self.seconds, 3),
            "planned_packs_per_second": round(self.packs_per_second, 1),
            **self.tally.as_json(),
        }

    def headline(self) -> str:
        place = f"rank {self.topology.rank} of {self.topology.world_size}"
        return f"{self.name}: {self.tally.packs:,} packs of {place}"

    def how(self) -> str:
        source = "with every image decoded" if self.verified else describe(self.index)
        return f"planned {source} in {self.seconds:.1f} s ({self.packs_per_second:,.0f} packs/s)"

    def print_tables(self) -> None:
        """On stdout, for people."""
        report = self.tally.as_json()
        console = Console(highlight=False)
        tables = (
            _packs_table(report),
            _mix_table(report),
            _content_table(report),
            _conditioning_table(report),
            _drops_table(self.tally),
        )
        parts: list[Any] = [f"[bold]{escape(self.headline())}[/], {self.how()}"]
        for table in tables:
            parts += ["", table]
        if not self.is_sure:
            parts += ["", f"[dim]{FORECAST_NOTES[self.profile]}[/]"]
        console.print(Group(*parts), soft_wrap=not console.is_terminal)

    def write_png(self, path: Path) -> None:
        """Raises SpecError when matplotlib is missing or the file cannot be written."""
        from bagelplane.figures.plan_chart import write_plan_chart

        subtitle = self.how() + (
            "" if self.is_sure else "; images whose headers are good are taken to decode"
        )
        write_plan_chart(path, self.tally, title=self.headline(), subtitle=subtitle)


def make_forecast(
    dataset: BagelDataset, topology: Topology, *, packs: int, decode_threads: int = 0
) -> Forecast:
    """Plan and count. With decode threads images are decoded, so that the plan is what a run gives."""
    forecast = Forecast(dataset, topology, verified=decode_threads > 0)
    started = time.monotonic()
    for plan in plans(dataset, topology, packs=packs, decode_threads=decode_threads):
        forecast.tally.add(plan)
    forecast.seconds = time.monotonic() - started
    return forecast


def plans(
    dataset: BagelDataset, topology: Topology, *, packs: int, start: int = 0, decode_threads: int = 0
) -> Iterator[PackPlan]:
    """Plans of the packs `start`, `start + 1`, ..., `packs` many, with a progress bar on a terminal."""
    stream = open_rank_stream(dataset, topology, decode_threads=decode_threads)
    try:
        with progress("planning", start + packs) as advance:
            for number in range(start + packs):
                plan = stream.plan_pack(verify=decode_threads > 0)
                advance(1)
                if number >= start:
                    yield plan
    finally:
        stream.close()


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", header_style="dim")
    return table


def _packs_table(report: dict[str, Any]) -> Table:
    budgets = report["budgets"]
    title = (
        f"Fill {report['fill']:.1%} of {budgets['max_tokens']:,} tokens; "
        f"{report['reached_expected']:.1%} of packs reached the expected {budgets['expected_tokens']:,}"
    )
    table = _table(title, "in a pack", "mean", "smallest", "5 %", "median", "95 %", "largest")
    rows = (
        ("tokens", "sequence_length", 1.0),
        ("samples", "samples_a_pack", 1.0),
        ("VAE images", "vae_images_a_pack", 1.0),
        ("ViT images", "vit_images_a_pack", 1.0),
        ("pixels in the ring, MB", "pixel_bytes_a_pack", 1 / _MEGABYTE),
        ("samples buffered", "buffered_samples", 1.0),
    )
    for label, key, scale in rows:
        spread = report[key]
        values = [scale * spread[name] for name in ("mean", "min", "p05", "median", "p95", "max")]
        table.add_row(label, *(_number(value) for value in values))
    table.add_row("megapixels to decode", _number(report["decoded_megapixels_a_pack"]))
    return table


def _mix_table(report: dict[str, Any]) -> Table:
    table = _table(
        "Mix", "group", "each pack", "weight", "of samples", "of tokens", "dropped", "repeats after"
    )
    for group in report["groups"]:
        packs_a_pass = group["packs_a_pass"]
        table.add_row(
            escape(group["name"]),
            "yes" if group["mandatory"] else "",
            f"{group['weight_share']:.1%}",
            f"{group['sample_share']:.1%}",
            f"{group['token_share']:.1%}",
            f"{group['dropped_rows']:,}",
            "later" if packs_a_pass is None else f"~{math.ceil(packs_a_pass):,} packs",
        )
    return table


def _content_table(report: dict[str, Any]) -> Table:
    table = _table("Content", "group", "samples", "images", "tokens", "text loss", "image loss")
    for group in report["groups"]:
        counts = ("samples", "images", "tokens", "text_loss_tokens", "image_loss_tokens")
        table.add_row(escape(group["name"]), *(f"{group[name]:,}" for name in counts))
    return table


def _conditioning_table(report: dict[str, Any]) -> Table:
    table = _table("Conditions left out", "kind", "offered", "left out", "share", "asked for")
    for kind, row in report["conditioning"].items():
        if row["offered"]:
            table.add_row(
                _KIND_NAMES[kind],
                f"{row['offered']:,}",
                f"{row['left_out']:,}",
                f"{row['share']:.1%}",
                f"{row['dropout']:.1%}",
            )
    return table


def _drops_table(tally: PlanTally) -> Table:
    drops = tally.drops()
    total = sum(count for row in drops.values() for count in row.values())
    samples = sum(group.samples for group in tally.groups)
    if not total:
        return _table("No sample is dropped")
    share = total / (total + samples)
    table = _table(
        f"Drops: {total:,} of {total + samples:,} samples ({share:.1%})", "group", "reason", "samples"
    )
    table.columns[1].justify = "left"
    for group, row in drops.items():
        for reason, count in row.items():
            table.add_row(escape(group), escape(reason), f"{count:,}")
    lost = sum(row.get("buffer_full", 0) for row in drops.values())
    if lost:
        table.caption = (
            f"Lost to a full buffer: {lost:,}. Fix: raise budgets.maxBufferSize or budgets.maxTokens"
        )
        table.caption_justify, table.caption_style = "left", "yellow"
    return table


def _number(value: float) -> str:
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.1f}"
