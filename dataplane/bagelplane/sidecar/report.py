"""What a sidecar tells about itself: the status, as models, and how it comes out of the supervisor's bookkeeping.

docs/reference/status.md is written from the models. Nothing here changes anything.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict

from bagelplane import jpeg, resampling
from bagelplane.sidecar.lease import RunLease
from bagelplane.sidecar.lineage_writing import LineageWriter
from bagelplane.sidecar.rank import RankServer
from bagelplane.sidecar.tally import Drops
from bagelplane.sidecar.tally import Histogram as Counted
from bagelplane.spec_errors import SpecModel
from bagelplane.spec_parts import field

if TYPE_CHECKING:
    from bagelplane.sidecar.supervisor import Supervisor

STATUS_VERSION = 1
"""Another one when a field goes or means something else; new fields come without."""

Phase = Literal["starting", "ready", "failed", "stopped"]
Counts = dict[str, int]


class StatusModel(SpecModel):
    """Base of the parts of a status: names as in Python. What is not known is null."""

    model_config = ConfigDict(alias_generator=None)


class Histogram(StatusModel):
    upper_bounds: tuple[float, ...] = field(
        "Upper bound of each bucket but the last.", unit="seconds", strict=False
    )
    counts: tuple[int, ...] = field(
        "Packs in each bucket; the last has those above all bounds.", unit="packs", strict=False
    )


class RingStatus(StatusModel):
    number: int = field("Its file is `ring-N.bin`.")
    capacity_bytes: int = field("Size of the ring's data.", unit="bytes")
    used_bytes: int = field("Size of the packs in it that the trainer has not taken.", unit="bytes")
    ready_packs: int = field("Packs in it that the trainer has not taken.", unit="packs")
    epoch: int = field("Grows each time that the ring is begun anew.")


class StorageStatus(StatusModel):
    seconds: float = field("Time that requests and reads took.", unit="seconds")
    read_bytes: int = field("Bytes that came.", unit="bytes")
    requests: Counts = field("Requests by operation: list, look_up, read.")
    retries: Counts = field(
        "Requests made again by cause: store (it said so), connection (lost or slow), unreachable (nobody "
        "answers), credentials (read again), file_system."
    )


class ReaderStatus(StatusModel):
    local_rank: int = field("Rank of the process in its pod.")
    attached: bool = field("Whether it is connected.")
    client: str = field("What it said it is: release and process id, as it knows it.")
    next_step: int = field("First pack that it has not released.", unit="step")
    behind: int = field("What the furthest reader is ahead of it.", unit="packs")


class RankStatus(StatusModel):
    rank: int = field("Data-parallel rank in the whole run.")
    phase: Phase = field(
        "starting: its producer is on its way to the first pack; ready: packs are made; failed: it was given up; "
        "stopped: another topology took over."
    )
    phase_seconds: float = field("How long it has been so.", unit="seconds")
    doing: str = field("What its producer is at, in words.")
    problem: str = field(
        "What it failed with or is held up by (a stopped process, a reader that lags), and what to do; empty while "
        "all is well."
    )
    attached: bool = field("Whether a trainer is connected.")
    readers: tuple[ReaderStatus, ...] = field(
        "Processes of the pod that read this rank's packs, once they have come.", strict=False
    )
    readers_expected: int = field("How many they are to be.", unit="processes")
    producer_pid: int | None = field("Process that makes the packs.", None)
    next_step: int = field("First pack that the trainer, the slowest reader, has not taken.", unit="step")
    position: int = field("Packs of all ranks together behind that step.", unit="packs")
    has_pack: bool = field("Whether a first pack was ready since it was started at its place.")
    packs_published: int = field("Packs finished.", unit="packs")
    packs_acknowledged: int = field("Packs that the trainer took.", unit="packs")
    tokens: int = field("Tokens in finished packs.", unit="tokens")
    fill: float | None = field(
        "Tokens of a finished pack against `budgets.maxTokens`, mean.", None, unit="ratio"
    )
    images: int = field("Images in finished packs.", unit="images")
    pixel_bytes: int = field("Their pixels, as uint8.", unit="bytes")
    work_seconds: float = field("Time the producer worked: planning, reading, decoding.", unit="seconds")
    decode_seconds: float = field("Decoding and resizing, summed over threads.", unit="seconds")
    ring_wait_seconds: float = field("Time the producer waited for room in the ring.", unit="seconds")
    trainer_wait_seconds: float = field(
        "Time that a trainer was connected and the ring was empty.", unit="seconds"
    )
    awaited_seconds: float = field(
        "How long that has been so by now; 0 while a pack is ready, or no trainer connected.", unit="seconds"
    )
    trainer_stall_seconds: float = field(
        "Time that the trainer stood still for packs, as it measured itself: waiting, reading, converting.",
        unit="seconds",
    )
    pack_seconds: Histogram = field("How the packs are spread over `work_seconds`.")
    stall_seconds: Histogram = field("How the packs are spread over `trainer_stall_seconds`.")
    storage: StorageStatus = field("What reading the data took.")
    restarts: int = field("Times that the producer was started again.")
    ring: RingStatus = field("The ring.")
    drops: dict[str, Counts] = field(
        "Rows not trained on since the run began, resumed or not, by group and reason.", unit="rows"
    )
    drops_here: dict[str, Counts] = field("Those since the rank was first served here.", unit="rows")


class RunStatus(StatusModel):
    id: str = field("The run's id; folders of its snapshots end with it.")
    number: int = field("How many runs wrote there, this one included.", unit="runs")
    job: str | None = field("What its sidecars have in common (`--run-id`); null when nobody said.", None)
    began: str = field("When it began, by the clock of the host that began it.")
    began_by: str = field("That host and process.")
    continues: str | None = field(
        "Id of the run that it goes on from; null when it began at the start, empty before there were runs.",
        None,
    )
    continues_from: int | None = field(
        "Packs that lay behind there, as the folders of snapshots count them.", None, unit="packs"
    )


class LineageStatus(StatusModel):
    written_packs: int = field("Packs of which the log has the rows, written by this sidecar.", unit="packs")
    waiting_packs: int = field("Acknowledged packs that are not in the store yet.", unit="packs")
    lost_packs: int = field("Packs that were given up because the store was behind.", unit="packs")
    failed: int = field("Attempts to write that failed; what they held is written later.")
    problem: str = field("What the last attempt failed with; empty while all is well.")


class SnapshotStatus(StatusModel):
    uri: str | None = field("Where snapshots are stored; null when nowhere.", None)
    last_step: int | None = field("Step of the newest complete one of this sidecar's.", None, unit="step")
    last_position: int | None = field("Its position.", None, unit="packs")
    last_unix_seconds: float | None = field("When it was complete, since the epoch.", None, unit="seconds")
    last_write_seconds: float | None = field("How long its last state took to write.", None, unit="seconds")
    completed: int = field("Snapshots completed.")
    failed: int = field("States that could not be written.")
    given_up: int = field("Snapshots given up because the store was behind.")
    waiting: int = field("States that are not written yet.")
    written_bytes: int = field("Size of all that was written to the store.", unit="bytes")
    retries: Counts = field("Requests made again by cause, as in `ranks[].storage`.")
    problem: str = field("What the last attempt failed with; empty while all is well.")
    run: RunStatus | None = field("The run that they are written for; null when nothing is written.", None)
    lineage: LineageStatus | None = field("The log of rows; null when none is kept.", None)


class SidecarStatus(StatusModel):
    """All of it."""

    version: int = field(
        "Of this form, now 1. Another one when a field goes or changes its meaning; new fields come without."
    )
    dataset: str = field("Name of the BagelDataset.")
    spec_hash: str = field("Names all that determines the stream.")
    started_unix_seconds: float = field("When the sidecar started, since the epoch.", unit="seconds")
    uptime_seconds: float = field("How long ago that is.", unit="seconds")
    expected_ranks: int = field("Data-parallel ranks expected on this machine (`--ranks`).", unit="ranks")
    world_size: int | None = field("Ranks of the run; null before one attached.", None, unit="ranks")
    ready: bool = field(
        "Whether packs can be taken: each rank that was started has had a first pack, and none has failed. "
        "True as well before a trainer attached, when all that can be looked at was found in order."
    )
    problem: str = field("What trainers cannot attach for; empty while all is well.")
    ranks: tuple[RankStatus, ...] = field("Data-parallel ranks that were started here.", strict=False)
    known_bad_images: int = field(
        "Images known to open and not to decode (profile Automodel).", unit="images"
    )
    resampler: str = field("What resizes images.")
    jpeg_decoder: str = field("What decodes JPEGs.")
    snapshots: SnapshotStatus = field("Snapshots.")


def build_status(
    supervisor: Supervisor, *, world_size: int, problem: str, known_bad_images: int
) -> SidecarStatus:
    """The status at this moment. `world_size` is 0 before a rank attached."""
    max_tokens = supervisor.dataset.spec.budgets.max_tokens
    return SidecarStatus(
        version=STATUS_VERSION,
        dataset=supervisor.dataset.metadata.name,
        spec_hash=supervisor.spec_hash,
        started_unix_seconds=supervisor.started,
        uptime_seconds=max(0.0, time.time() - supervisor.started),
        expected_ranks=supervisor.settings.local_ranks,
        world_size=world_size or None,
        ready=all(server.has_pack and server.phase == "ready" for server in supervisor.servers.values()),
        problem=problem,
        ranks=tuple(_rank_status(server, max_tokens) for _, server in sorted(supervisor.servers.items())),
        known_bad_images=known_bad_images,
        resampler=str(resampling.choice()),
        jpeg_decoder=str(jpeg.choice()),
        snapshots=_snapshot_status(supervisor, world_size or 1),
    )


def _snapshot_status(supervisor: Supervisor, world_size: int) -> SnapshotStatus:
    writer, elastic = supervisor.snapshots, supervisor.streams
    lease = writer.lease
    health, last, costs = writer.health, writer.health.last_step, writer.costs
    return SnapshotStatus(
        uri=writer.uri,
        last_step=last // world_size if last is not None and elastic else last,
        last_position=last * world_size if last is not None and not elastic else last,
        last_unix_seconds=health.last_time,
        last_write_seconds=health.last_write_seconds,
        completed=health.completed,
        failed=health.failed,
        given_up=health.given_up,
        waiting=writer.waiting,
        written_bytes=costs["written_bytes"],
        retries=costs["retries"],
        problem=health.problem or (str(lease.problem) if lease is not None and lease.problem else ""),
        run=_run_status(lease) if lease is not None else None,
        lineage=_lineage_status(supervisor.lineage) if supervisor.lineage is not None else None,
    )


def _lineage_status(writer: LineageWriter) -> LineageStatus:
    health = writer.health
    return LineageStatus(
        written_packs=health.written_packs,
        waiting_packs=writer.waiting_packs,
        lost_packs=writer.lost_packs,
        failed=health.failed,
        problem=health.problem,
    )


def _run_status(lease: RunLease) -> RunStatus:
    run, origin = lease.run, lease.run.origin
    return RunStatus(
        id=run.id,
        number=run.number,
        job=run.job or None,
        began=run.began,
        began_by=run.began_by,
        continues=origin.run if origin is not None else None,
        continues_from=origin.step if origin is not None else None,
    )


def _rank_status(server: RankServer, max_tokens: int) -> RankStatus:
    tally = server.tally
    return RankStatus(
        rank=server.rank,
        phase=server.phase,
        phase_seconds=time.monotonic() - server.phase_since,
        doing=server.describe(),
        problem=str(server.failure or server.obstacle),
        attached=bool(server.listeners),
        readers=tuple(
            ReaderStatus(
                local_rank=local_rank,
                attached=cursor.attached,
                client=cursor.client,
                next_step=cursor.next_step,
                behind=server.readers.furthest - cursor.next_step,
            )
            for local_rank, cursor in sorted(server.readers.cursors.items())
        ),
        readers_expected=server.readers.expected,
        producer_pid=server.pid or None,
        next_step=server.progress.next_step,
        position=server.progress.position(),
        has_pack=server.has_pack,
        packs_published=tally.published,
        packs_acknowledged=tally.acknowledged,
        tokens=tally.tokens,
        fill=tally.tokens / (tally.published * max_tokens) if tally.published else None,
        images=tally.images,
        pixel_bytes=tally.pixel_bytes,
        work_seconds=tally.work.sum,
        decode_seconds=tally.decode_seconds,
        ring_wait_seconds=tally.ring_wait_seconds,
        trainer_wait_seconds=tally.trainer_wait_seconds,
        awaited_seconds=server.longest_awaited_seconds,
        trainer_stall_seconds=tally.stalls.sum,
        pack_seconds=_histogram(tally.work),
        stall_seconds=_histogram(tally.stalls),
        storage=StorageStatus(
            seconds=tally.storage_seconds,
            read_bytes=tally.read_bytes,
            requests=dict(tally.requests),
            retries=dict(tally.retries),
        ),
        restarts=tally.restarts,
        ring=RingStatus(
            number=server.ring_number,
            capacity_bytes=server.ring_bytes,
            used_bytes=server.used_bytes,
            ready_packs=server.ready_packs,
            epoch=server.epoch,
        ),
        drops=_copy(tally.run_drops),
        drops_here=_nested(tally.drops),
    )


def _histogram(counted: Counted) -> Histogram:
    return Histogram(upper_bounds=counted.bounds, counts=tuple(counted.counts))


def _copy(drops: Drops) -> dict[str, Counts]:
    return {group: {reason: int(count) for reason, count in row.items()} for group, row in drops.items()}


def _nested(drops: dict[tuple[str, str], int]) -> dict[str, Counts]:
    table: dict[str, Counts] = {}
    for (group, reason), count in sorted(drops.items()):
        table.setdefault(group, {})[reason] = count
    return table
