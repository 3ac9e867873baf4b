"""`bagelplane snapshots import`: continue here what Automodel began."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bagelplane.cli.output import print_line, print_note
from bagelplane.errors import SpecError
from bagelplane.sidecar.store import open_snapshot_store
from bagelplane.spec import load_dataset, refuse_unsupported


def import_checkpoint(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="The data loader's checkpoint file of each rank (.pt), of one step.", show_default=False
        ),
    ],
    resource: Annotated[Path, typer.Argument(help="The resource file of that very run.", show_default=False)],
    seed_check: Annotated[
        bool,
        typer.Option(
            "--seed-check/--no-seed-check",
            help="Whether each file's generators have to be what the resource's seeds lead to for its rank.",
        ),
    ] = True,
) -> None:
    """Write a snapshot from a checkpoint of NeMo Automodel's PackedDataset, so that the run continues here pack for
    pack.

    Takes the states of PackedDataset, bare or inside of a torchdata StatefulDataLoader's. Ranks are told from the
    names of the files (rank_3, rank3), else from their order. The resource has to declare the same stream: profile
    Automodel, sharding Bagel, the same groups, data, budgets and seeds. Files are pickles: they are read as values,
    and one that asks for more is refused. Needs torch.

    Example: bagelplane snapshots import checkpoint/dataloader_rank_*.pt dataset.yaml
    """
    dataset = load_dataset(resource)
    refuse_unsupported(dataset, str(resource))
    store = open_snapshot_store(dataset)
    if store is None:
        raise SpecError(f"{resource} names no place for snapshots", fix="set spec.snapshots.uri")
    try:
        from bagelplane.packing.takeover import check_empty, states_of_ranks, write_snapshot
    except ModuleNotFoundError as error:
        raise SpecError(
            f"checkpoints of Automodel are read with {error.name}, which is not installed here",
            fix="install bagelplane[torch], or run this where the trainer runs",
        ) from None
    check_empty(store)
    step, states = states_of_ranks(dataset, files, check_seeds=seed_check)
    uri = write_snapshot(store, dataset, step, states)
    kept = sum(
        "sample" in entry for state in states for worker in state["workers"] for entry in worker["buffer"]
    )
    if kept:
        print_note(
            f"{kept} buffered samples are kept with their pixels: no way to draw their rows gives the same bits"
        )
    print_line(
        f"wrote {uri}: step {step} of {len(states)} ranks; `bagelplane run {resource}` continues there"
    )
