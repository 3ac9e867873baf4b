"""What operators and monitoring read over HTTP: /healthz, /readyz, /v1/status, /metrics.

Runs in the supervisor's loop, reads its bookkeeping and changes nothing. A client that hangs costs a socket.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from bagelplane.errors import SpecError

if TYPE_CHECKING:
    from bagelplane.sidecar.supervisor import Supervisor

log = logging.getLogger(__name__)

_RANK_COUNTERS = {
    "packs_published": "Packs that were finished.",
    "packs_acknowledged": "Packs that the trainer took.",
    "tokens": "Tokens in finished packs.",
    "images": "Images in finished packs.",
    "work_seconds": "Time spent on planning, reading and decoding.",
    "ring_wait_seconds": "Time that a producer waited for room in its ring.",
    "trainer_wait_seconds": "Time that an attached trainer had no pack to take.",
    "restarts": "Restarts of the producer.",
}
_SNAPSHOT_COUNTERS = {
    "completed": "Snapshots completed.",
    "failed": "States that could not be written.",
    "given_up": "Snapshots given up because the store was behind.",
}


class _SupervisorCollector(Collector):
    """Metrics from the status, at the moment that they are asked for: one bookkeeping, not two."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def collect(self) -> Iterator[Metric]:
        status = self._supervisor.status()
        for name, text in _RANK_COUNTERS.items():
            counter = CounterMetricFamily(f"bagelplane_{name}", text, labels=["rank"])
            for rank in status["ranks"]:
                counter.add_metric([str(rank["rank"])], rank[name])
            yield counter
        drops = CounterMetricFamily(
            "bagelplane_drops", "Rows not trained on.", labels=["rank", "group", "reason"]
        )
        gauges = {
            "next_step": GaugeMetricFamily(
                "bagelplane_next_step", "First pack that was not acknowledged.", labels=["rank"]
            ),
            "fill": GaugeMetricFamily(
                "bagelplane_fill_ratio", "Tokens of a pack against maxTokens, mean.", labels=["rank"]
            ),
            "used_bytes": GaugeMetricFamily(
                "bagelplane_ring_used_bytes",
                "Bytes of the ring that are not freed yet.",
                labels=["rank"],
            ),
        }
        for rank in status["ranks"]:
            label = str(rank["rank"])
            for group, reasons in rank["drops"].items():
                for reason, count in reasons.items():
                    drops.add_metric([label, group, reason], count)
            gauges["next_step"].add_metric([label], rank["next_step"])
            gauges["fill"].add_metric([label], rank["fill"] or 0.0)
            gauges["used_bytes"].add_metric([label], rank["ring"]["used_bytes"])
        yield drops
        yield from gauges.values()
        snapshots = status["snapshots"]
        for name, text in _SNAPSHOT_COUNTERS.items():
            yield CounterMetricFamily(f"bagelplane_snapshots_{name}", text, value=snapshots[name])
        if snapshots["last_unix_seconds"] is not None:
            yield GaugeMetricFamily(
                "bagelplane_snapshot_timestamp_seconds",
                "When the last complete snapshot was written.",
                value=snapshots["last_unix_seconds"],
            )
        yield GaugeMetricFamily(
            "bagelplane_ready", "1 when packs can be taken.", value=float(status["ready"])
        )


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
