"""What operators and monitoring read over HTTP: /healthz, /readyz, /v1/status, /metrics.

Runs in the supervisor's loop, reads its bookkeeping and changes nothing. A client that hangs costs a socket.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from bagelplane.errors import SpecError
from bagelplane.sidecar.metrics import StatusCollector

if TYPE_CHECKING:
    from bagelplane.sidecar.supervisor import Supervisor

log = logging.getLogger(__name__)


class StatusServer:
    """The HTTP server; does nothing when its port is 0."""

    def __init__(self, supervisor: Supervisor, host: str, port: int) -> None:
        self._supervisor = supervisor
        self._host = host
        self._port = port
        self._registry = CollectorRegistry()
        self._registry.register(StatusCollector(supervisor.status))
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
                fix="give another --status-port (0: none) or --status-host",
            ) from None
        log.info("status at http://%s:%d/v1/status", self._host, self._port)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"alive": True})

    async def _readyz(self, _: web.Request) -> web.Response:
        """200 as soon as trainers may start: before one attached, this says that all they need was found."""
        status = self._supervisor.status()
        ranks = status["ranks"]
        body = {
            "ready": status["ready"],
            "expected_ranks": status["expected_ranks"],
            "attached_ranks": sum(rank["attached"] for rank in ranks),
            "ranks_without_a_pack": [rank["rank"] for rank in ranks if not rank["has_pack"]],
            "problems": [text for text in (status["problem"], *(rank["problem"] for rank in ranks)) if text],
        }
        return web.json_response(body, status=200 if status["ready"] else 503)

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(self._supervisor.status())

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )
