"""What operators and monitoring read over HTTP: /healthz, /readyz, /v1/status, /metrics.

Runs in the supervisor's loop, reads its bookkeeping and changes nothing. A client that hangs costs a socket.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from bagelplane.errors import SpecError

if TYPE_CHECKING:
    from bagelplane.sidecar.supervisor import Supervisor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MetricDoc:
    """One metric of /metrics; docs/reference/metrics.md is written from these. Counters end in `_total` there."""

    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    text: str


METRICS = {
    "bagelplane_packs_published": MetricDoc("counter", ("rank",), "Packs that were finished."),
    "bagelplane_packs_acknowledged": MetricDoc("counter", ("rank",), "Packs that the trainer took."),
    "bagelplane_tokens": MetricDoc("counter", ("rank",), "Tokens in finished packs."),
    "bagelplane_images": MetricDoc("counter", ("rank",), "Images in finished packs."),
    "bagelplane_work_seconds": MetricDoc(
        "counter", ("rank",), "Time spent on planning, reading and decoding."
    ),
    "bagelplane_ring_wait_seconds": MetricDoc(
        "counter", ("rank",), "Time that producers waited for room in the ring."
    ),
    "bagelplane_trainer_wait_seconds": MetricDoc(
        "counter", ("rank",), "Time that trainers had no pack to take."
    ),
    "bagelplane_restarts": MetricDoc("counter", ("rank",), "Restarts of the producer."),
    "bagelplane_drops": MetricDoc("counter", ("rank", "group", "reason"), "Rows not trained on."),
    "bagelplane_next_step": MetricDoc("gauge", ("rank",), "First pack that was not acknowledged."),
    "bagelplane_fill_ratio": MetricDoc("gauge", ("rank",), "Tokens of a pack against maxTokens, mean."),
    "bagelplane_ring_used_bytes": MetricDoc("gauge", ("rank",), "Bytes of the ring that are not freed yet."),
    "bagelplane_snapshots_completed": MetricDoc("counter", (), "Snapshots completed."),
    "bagelplane_snapshots_failed": MetricDoc("counter", (), "States that could not be written."),
    "bagelplane_snapshots_given_up": MetricDoc(
        "counter", (), "Snapshots given up because the store was behind."
    ),
    "bagelplane_snapshot_timestamp_seconds": MetricDoc(
        "gauge", (), "When the last complete snapshot was written."
    ),
    "bagelplane_ready": MetricDoc("gauge", (), "1 when packs can be taken."),
}


class _SupervisorCollector(Collector):
    """Metrics from the status, at the moment that they are asked for: one bookkeeping, not two."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def collect(self) -> Iterator[Metric]:
        values = dict(_samples(self._supervisor.status()))
        for name, doc in METRICS.items():
            family = CounterMetricFamily if doc.kind == "counter" else GaugeMetricFamily
            metric = family(name, doc.text, labels=doc.labels)
            for labels, value in values.get(name, []):
                metric.add_metric(labels, value)
            yield metric


def _samples(status: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[list[str], float]]]]:
    """(metric, [(label values, value)]) of a status."""
    ranks = [([str(rank["rank"])], rank) for rank in status["ranks"]]
    for name, doc in METRICS.items():
        key = name.removeprefix("bagelplane_")
        if doc.labels == ("rank",) and doc.kind == "counter":
            yield name, [(label, rank[key]) for label, rank in ranks]
    yield (
        "bagelplane_drops",
        [
            ([*label, group, reason], count)
            for label, rank in ranks
            for group, reasons in rank["drops"].items()
            for reason, count in reasons.items()
        ],
    )
    yield "bagelplane_next_step", [(label, rank["next_step"]) for label, rank in ranks]
    yield "bagelplane_fill_ratio", [(label, rank["fill"] or 0.0) for label, rank in ranks]
    yield "bagelplane_ring_used_bytes", [(label, rank["ring"]["used_bytes"]) for label, rank in ranks]
    snapshots = status["snapshots"]
    for key in ("completed", "failed", "given_up"):
        yield f"bagelplane_snapshots_{key}", [([], snapshots[key])]
    if snapshots["last_unix_seconds"] is not None:
        yield "bagelplane_snapshot_timestamp_seconds", [([], snapshots["last_unix_seconds"])]
    yield "bagelplane_ready", [([], float(status["ready"]))]


class StatusServer:
    """The HTTP server; does nothing when its port is 0."""

    def __init__(self, supervisor: Supervisor, host: str, port: int) -> None:
        self._supervisor = supervisor
        self._host = host
        self._port = port
        self._registry = CollectorRegistry()
        self._registry.register(_SupervisorCollector(supervisor))
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """SpecError when the address is taken."""
        if not self._port:
            return
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/v1/status", self._status),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            raise SpecError(
                f"the status server cannot listen on {self._host}:{self._port}: {error.strerror}",
                fix="give another --status-port, or 0 for none",
            ) from None
        log.info("status at http://%s:%d/v1/status", self._host, self._port)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"alive": True})

    async def _readyz(self, _: web.Request) -> web.Response:
        status = self._supervisor.status()
        waiting = [rank["rank"] for rank in status["ranks"] if not rank["packs_published"]]
        body = {"ready": status["ready"], "ranks_without_a_pack": waiting}
        return web.json_response(body, status=200 if status["ready"] else 503)

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(self._supervisor.status())

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )
