"""`bagelplane run`: the sidecar on this machine, for any trainer on it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from bagelplane.errors import BagelplaneError, SpecError
from bagelplane.logs import FORMAT_VARIABLE, LogFormat, configure_logs
from bagelplane.shm.protocol import PLACE_LIMIT
from bagelplane.sidecar.producer import DEFAULT_STREAM_FACTORY
from bagelplane.sidecar.rundir import DIRECTORY_VARIABLE, default_directory
from bagelplane.sidecar.supervisor import SidecarSettings, run_sidecar
from bagelplane.spec import load_dataset, refuse_unsupported

LogLevel = Literal["debug", "info", "warning", "error"]

log = logging.getLogger(__name__)


def run(
    dataset: Annotated[
        Path, typer.Argument(help="The resource file (kind: BagelDataset).", show_default=False)
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            envvar=DIRECTORY_VARIABLE,
            help="Run directory for socket and rings, on a memory volume. Trainers find it in BAGELPLANE_DIR.",
            show_default="/dev/shm/bagelplane-<uid>",
        ),
    ] = None,
    resume: Annotated[
        str,
        typer.Option(
            help="Where ranks begin that do not say it themselves: latest (newest snapshot), none (the start), "
            "or the number of the next step."
        ),
    ] = "latest",
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Data-parallel ranks expected on this machine, for memory and threads. The trainers say what they "
            "are.",
            show_default="PET_NPROC_PER_NODE, else 1",
        ),
    ] = None,
    status_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of /healthz, /readyz, /v1/status and /metrics; 0: none."),
    ] = 0,
    status_host: Annotated[str, typer.Option(help="Address that the status port is bound to.")] = "127.0.0.1",
    grace: Annotated[
        float, typer.Option(min=1.0, help="Seconds from SIGTERM to the end; the last snapshot takes most.")
    ] = 25.0,
    run_id: Annotated[
        str,
        typer.Option(
            "--run-id",
            envvar="BAGELPLANE_RUN_ID",
            help="The same text for all sidecars of one job: they write one run's snapshots, and another job is kept "
            "off. In Kubernetes the webhook sets it.",
            show_default="PET_RDZV_ID or TORCHELASTIC_RUN_ID, else none: ranks tell runs apart",
        ),
    ] = "",
    any_user: Annotated[
        bool,
        typer.Option(
            "--any-user",
            help="Let trainers of any user attach: socket and rings get mode 0666, the directory stays as it is. "
            "For a volume that only the containers of one pod reach.",
        ),
    ] = False,
    log_level: Annotated[
        LogLevel, typer.Option(help="Least level of the log, which goes to stderr.")
    ] = "info",
    log_format: Annotated[
        LogFormat,
        typer.Option(
            envvar=FORMAT_VARIABLE,
            help="text for people; json for programs: one object a line, with rank and step where it is about one.",
        ),
    ] = "text",
    stream_factory: Annotated[str, typer.Option(hidden=True)] = DEFAULT_STREAM_FACTORY,
) -> None:
    """Serve packs of a dataset to the trainers on this machine, until SIGTERM or Ctrl-C.

    Checks the resource, the data, the tokenizer, the snapshots and the memory first: what is wrong there ends
    it at once, with the exit code of the error. Then it waits; each rank's packs are made when its trainer
    attaches. Asked to end by SIGTERM or Ctrl-C it writes a snapshot of what the trainers took, and ends with 0.

    Example: bagelplane run dataset.yaml --ranks 2 --status-port 8090
    """
    level = getattr(logging, log_level.upper())
    configure_logs(level, log_format)
    local_ranks, world_size = expected_ranks(os.environ, ranks)
    settings = SidecarSettings(
        directory=directory or default_directory(),
        resume=parse_resume(resume),
        local_ranks=local_ranks,
        world_size=world_size,
        status_host=status_host,
        status_port=status_port,
        grace_seconds=grace,
        run_id=run_id or rendezvous_id(os.environ),
        generation=_number(os.environ, "BAGELPLANE_GENERATION") or 0,
        any_user=any_user,
        stream_factory=stream_factory,
        log_level=level,
        log_format=log_format,
    )
    with _last_words(log_format):
        resource = load_dataset(dataset)
        refuse_unsupported(resource, str(dataset))
        raise typer.Exit(run_sidecar(resource, settings))


@contextlib.contextmanager
def _last_words(log_format: LogFormat) -> Iterator[None]:
    """With a log of JSON, what ends the sidecar is a line of it, and not one for people."""
    try:
        yield
    except BagelplaneError as error:
        if log_format != "json":
            raise
        log.critical("%s", error)
        raise typer.Exit(error.exit_code) from None


def parse_resume(text: str) -> Literal["latest", "none"] | int:
    """`latest`, `none` or a step. SpecError for anything else."""
    if text == "latest":
        return "latest"
    if text == "none":
        return "none"
    if text.isascii() and text.isdecimal() and len(text.lstrip("0")) < len(str(PLACE_LIMIT)):
        return int(text)
    raise SpecError(
        "--resume is not understood",
        got=repr(text),
        expected=f"latest, none or a step's number, below {PLACE_LIMIT}",
    )


def expected_ranks(environment: Mapping[str, str], ranks: int | None = None) -> tuple[int, int]:
    """(data-parallel ranks on this machine, in all) as torchrun's and the training operators' variables hint at them.

    `ranks`: those on this machine, where that is known. Fewer than processes are: so it is on the other machines.
    """
    local = _number(environment, "PET_NPROC_PER_NODE") or _number(environment, "LOCAL_WORLD_SIZE") or 1
    nodes = _number(environment, "PET_NNODES") or 1
    world_size = max(local * nodes, _number(environment, "WORLD_SIZE") or 1)
    if ranks is None:
        return local, world_size
    return ranks, max(ranks, world_size * ranks // local if ranks < local else world_size)


def rendezvous_id(environment: Mapping[str, str]) -> str:
    """What torchrun calls the job; empty where nobody named it."""
    names = ("PET_RDZV_ID", "TORCHELASTIC_RUN_ID")
    return next((environment[name] for name in names if environment.get(name) not in (None, "", "none")), "")


def _number(environment: Mapping[str, str], name: str) -> int | None:
    # Only hints: `auto` and `1:4` are legal there, and no reason to stop.
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None
