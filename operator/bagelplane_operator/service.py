"""The operator as a process: puts client, poller, reconciler, watches and the liveness probe together."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from bagelplane.errors import SpecError
from bagelplane_operator import naming
from bagelplane_operator.cluster import Cluster, load_configuration
from bagelplane_operator.handlers import Watcher, WatchGuard, build_registry
from bagelplane_operator.manifests import Image
from bagelplane_operator.polling import Poller
from bagelplane_operator.reconciler import Reconciler

log = logging.getLogger(__name__)

STUCK_SECONDS = 180.0
"""A turn of the loop takes 30 s at rest, and a few times the request's limit when the API server hangs."""

_PULL_POLICIES = ("Always", "IfNotPresent", "Never")


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    image: Image
    namespaces: tuple[str, ...] = ()
    """Served namespaces; all of them when there are none."""
    health_port: int = 8080


def read_settings(environment: Mapping[str, str], health_port: int) -> OperatorSettings:
    """From the environment that the chart writes. Raises SpecError."""
    image = environment.get(naming.IMAGE_ENV, "")
    policy = environment.get(naming.PULL_POLICY_ENV) or "IfNotPresent"
    if not image:
        raise SpecError(
            f"{naming.IMAGE_ENV} is not set", fix="set it to the image of the data plane; the chart does"
        )
    if policy not in _PULL_POLICIES:
        raise SpecError(
            f"{naming.PULL_POLICY_ENV} is no pull policy", got=policy, expected=" or ".join(_PULL_POLICIES)
        )
    names = environment.get(naming.NAMESPACES_ENV, "").split(",")
    namespaces = tuple(sorted({name.strip() for name in names if name.strip()}))
    return OperatorSettings(Image(image, policy), namespaces, health_port)


async def run_operator(settings: OperatorSettings) -> None:
    """Until SIGTERM or SIGINT. Raises SpecError when no cluster is configured."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    configuration = await load_configuration()
    async with Cluster(configuration) as cluster, Poller() as poller:
        reconciler = Reconciler(cluster, poller, settings.image, settings.namespaces)
        guard = WatchGuard()

        def notice(namespace: str, name: str, within_seconds: float) -> None:
            loop.call_soon_threadsafe(reconciler.notice, namespace, name, within_seconds)

        watcher = Watcher(build_registry(notice, guard, configuration), settings.namespaces)

        def compare(versions: Mapping[str, str]) -> None:
            if guard.is_silent(versions):
                watcher.restart()

        reconciler.on_listing = compare
        async with _health_server(reconciler, settings.health_port):
            where = ", ".join(settings.namespaces) or "all namespaces"
            log.info("serving %s, data plane %s", where, settings.image.name)
            watcher.start()
            try:
                await reconciler.run(stop)
            finally:
                await asyncio.to_thread(watcher.stop)
    log.info("ended")


@asynccontextmanager
async def _health_server(reconciler: Reconciler, port: int) -> AsyncIterator[None]:
    """/healthz answers 200 while the loop turns. An API server that is away is no reason for a restart."""

    async def healthz(_: web.Request) -> web.Response:
        seconds = time.monotonic() - reconciler.turned
        if seconds < STUCK_SECONDS:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=f"no turn of the loop for {seconds:.0f} s\n")

    application = web.Application()
    application.add_routes([web.get("/healthz", healthz)])
    runner = web.AppRunner(application, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", port).start()  # noqa: S104  (the kubelet asks from outside the pod)
        yield
    except OSError as error:
        raise SpecError(
            f"cannot listen on port {port}: {error.strerror}", fix="choose another --health-port"
        ) from None
    finally:
        await runner.cleanup()


def run(health_port: int) -> None:
    """The command `operator`: settings from the environment, then until a signal."""
    asyncio.run(run_operator(read_settings(os.environ, health_port)))
