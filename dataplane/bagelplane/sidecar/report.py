"""What a sidecar tells about itself: the status, of the supervisor's bookkeeping. Changes nothing in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagelplane import jpeg, resampling
from bagelplane.sidecar.rank import RankServer

if TYPE_CHECKING:
    from bagelplane.sidecar.supervisor import Supervisor


def build_status(
    supervisor: Supervisor, *, world_size: int, problem: str, known_bad_images: int
) -> dict[str, Any]:
    """The status at this moment; JSON-able. `world_size` is 0 before a rank attached."""
    max_tokens = supervisor.dataset.spec.budgets.max_tokens
    return {
        "version": 1,
        "dataset": supervisor.dataset.metadata.name,
        "spec_hash": supervisor.spec_hash,
        "started_unix_seconds": supervisor.started,
        "world_size": world_size or None,
        "ready": supervisor.ready,
        "problem": problem,
        "ranks": [_rank_status(server, max_tokens) for _, server in sorted(supervisor.servers.items())],
        "known_bad_images": known_bad_images,
        "resampler": str(resampling.choice()),
        "jpeg_decoder": str(jpeg.choice()),
        "snapshots": _snapshot_status(supervisor, world_size or 1),
    }


def _snapshot_status(supervisor: Supervisor, world_size: int) -> dict[str, Any]:
    health, last, elastic = (
        supervisor.snapshots.health,
        supervisor.snapshots.health.last_step,
        supervisor.streams,
    )
    return {
        "uri": supervisor.snapshots.uri,
        "last_step": last // world_size if last is not None and elastic else last,
        "last_position": last * world_size if last is not None and not elastic else last,
        "last_unix_seconds": health.last_time,
        "completed": health.completed,
        "failed": health.failed,
        "given_up": health.given_up,
        "waiting": supervisor.snapshots.waiting,
        "problem": health.problem,
    }


def _rank_status(server: RankServer, max_tokens: int) -> dict[str, Any]:
    tally = server.tally
    return {
        "rank": server.rank,
        "local_rank": server.local_rank,
        "phase": server.phase,
        "problem": str(server.failure) if server.failure is not None else "",
        "attached": server.listener is not None,
        "producer_pid": server.pid or None,
        "next_step": server.progress.next_step,
        "position": server.progress.position(),
        "packs_published": tally.published,
        "packs_acknowledged": tally.acknowledged,
        "tokens": tally.tokens,
        "fill": tally.tokens / (tally.published * max_tokens) if tally.published else None,
        "images": tally.images,
        "work_seconds": tally.work_seconds,
        "ring_wait_seconds": tally.ring_wait_seconds,
        "trainer_wait_seconds": tally.trainer_wait_seconds,
        "restarts": tally.restarts,
        "ring": {
            "capacity_bytes": server.ring_bytes,
            "used_bytes": tally.used_bytes,
            "epoch": server.epoch,
        },
        "drops": tally.drops,
    }
