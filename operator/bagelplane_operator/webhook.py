"""The admission webhooks as a process: an HTTPS server that keeps no state.

Any number of replicas may run. One asyncio loop owns everything; checks of large resources run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from bagelplane.errors import SpecError
from bagelplane.spec import KIND
from bagelplane_operator import naming
from bagelplane_operator.admission import (
    Datasets,
    Review,
    Verdict,
    admit_dataset,
    admit_pod,
    build_answer,
    parse_review,
)
from bagelplane_operator.cluster import DATASETS, Cluster, ClusterError, load_configuration
from bagelplane_operator.injection import InjectionDefaults

log = logging.getLogger(__name__)

_LOG_FORMATS = ("", "text", "json")

MAX_BODY_BYTES = 3 * 2**20
"""The API server takes objects of 3 MiB at most."""
LOOKUP_SECONDS = 2.0
"""Twice of it, for a dataset and then for the names of others, is well below the configuration's 5 s."""
BODY_SECONDS = 4.0
DRAIN_SECONDS = 5.0
"""How long a replica that is asked to stop still takes requests: until the Service has heard of it."""
FINISH_SECONDS = 10.0
KEEPALIVE_SECONDS = 120.0
"""Longer than the 90 s after which the API server itself closes a connection that is idle: closed from this side, one
could end under a request that is on its way, and a POST is not sent again."""
CERTIFICATE_SECONDS = 5.0

Answer = Callable[[Review], Awaitable[Verdict]]


class Certificates:
    """tls.crt and tls.key of a folder, always the pair that was last whole."""

    def __init__(self, folder: Path) -> None:
        """SpecError: there is no pair that works."""
        self._folder = folder
        self._signature = self._look()
        try:
            self._current = self._load()
            # What the server holds on to. Each connection is moved to the newest pair before it is served, so
            # that a new one is taken whole or not at all, and connections that are open notice nothing.
            self.context = self._load()
        except OSError as error:  # ssl.SSLError is one
            raise SpecError(
                f"there is no usable pair tls.crt and tls.key in {folder}: {error.strerror or error}",
                fix="mount the Secret with the webhook's certificate there",
            ) from None
        self.context.sni_callback = self._move

    def refresh(self) -> bool:
        """Whether a new pair was taken. One that is half written or does not match is left for the next time."""
        signature = self._look()
        if signature == self._signature:
            return False
        try:
            self._current = self._load()
        except OSError as error:
            log.warning("the new certificate in %s cannot be used yet: %s", self._folder, error)
            return False
        self._signature = signature
        log.info("took the new certificate in %s", self._folder)
        return True

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # With a password, an encrypted key is an error; without one, openssl would ask the terminal for it.
        context.load_cert_chain(self._folder / "tls.crt", self._folder / "tls.key", password="")
        return context

    def _look(self) -> list[tuple[int, int, int]]:
        signature = []
        for name in ("tls.crt", "tls.key"):
            with contextlib.suppress(OSError):
                status = (self._folder / name).stat()
                signature.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return signature

    def _move(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._current


class ClusterDatasets:
    """Datasets of the API server, each asked for when it is needed."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def find(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        # A list of one: a name that is none is then not there, instead of being an error of its own.
        found = await self._ask(namespace, f"metadata.name={name}")
        return next((resource for resource in found if resource["metadata"]["name"] == name), None)

    async def names(self, namespace: str) -> Sequence[str]:
        return [str(resource["metadata"]["name"]) for resource in await self._ask(namespace, "")]

    async def _ask(self, namespace: str, fields: str) -> Sequence[Mapping[str, Any]]:
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                return await self._cluster.list(DATASETS, namespace, fields=fields)
        except TimeoutError:
            what = f"the API server did not answer within {LOOKUP_SECONDS:g} s"
            raise ClusterError(what, fix="see whether it runs and can be reached from here") from None


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    cert_dir: Path
    port: int = 8443
    drain_seconds: float = DRAIN_SECONDS
    certificate_seconds: float = CERTIFICATE_SECONDS
    """Between two looks at the certificate's files."""


class WebhookServer:
    """The server; an asynchronous context. Leaving it finishes the requests that are being answered."""

    def __init__(self, settings: WebhookSettings, datasets: Datasets, defaults: InjectionDefaults) -> None:
        self._settings = settings
        self._datasets = datasets
        self._defaults = defaults
        self._draining = False
        self._certificates = Certificates(settings.cert_dir)
        self._runner: web.AppRunner
        self._watching: asyncio.Task[None]
        self.port = settings.port

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.post("/inject-pods", self._inject_pods),
                web.post("/check-datasets", self._check_datasets),
            ]
        )
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=KEEPALIVE_SECONDS,
            shutdown_timeout=FINISH_SECONDS,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, None, self._settings.port, ssl_context=self._certificates.context)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise SpecError(
                f"cannot listen on port {self._settings.port}: {error.strerror}", fix="choose another --port"
            ) from None
        self._watching = asyncio.create_task(self._watch_certificates())
        log.info("serving on port %d, data plane %s", self.port, self._defaults.image)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()
        await self._runner.cleanup()

    async def drain(self) -> None:
        """Takes requests as before, but is not ready, and ends each connection with its answer."""
        self._draining = True
        await asyncio.sleep(self._settings.drain_seconds)

    async def _watch_certificates(self) -> None:
        while True:
            await asyncio.sleep(self._settings.certificate_seconds)
            self._certificates.refresh()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        # Not whether the API server answers: without a ready replica nobody could say that it does not.
        return web.Response(status=503, text="stopping\n") if self._draining else web.Response(text="ok\n")

    async def _inject_pods(self, request: web.Request) -> web.Response:
        return await self._answer(
            request, "Pod", lambda review: admit_pod(review, self._datasets, self._defaults)
        )

    async def _check_datasets(self, request: web.Request) -> web.Response:
        return await self._answer(request, KIND, lambda review: asyncio.to_thread(admit_dataset, review))

    async def _answer(self, request: web.Request, kind: str, answer: Answer) -> web.Response:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                review = parse_review(await request.read(), kind)
        except TimeoutError:
            return web.Response(status=408, text="the body did not arrive in time\n")
        except SpecError as error:
            log.warning("refused a request to %s: %s", request.path, error)
            return web.Response(status=400, text=f"{error}\n")
        verdict = await answer(review)
        outcome = "patched" if verdict.patch else "left alone" if verdict.allowed else verdict.message
        log.info("%s %s: %s", review.kind, review.name, outcome)
        response = web.json_response(build_answer(review.uid, verdict))
        if self._draining:
            response.force_close()
        return response


def read_defaults(environment: Mapping[str, str]) -> InjectionDefaults:
    """From the environment that the chart writes. Raises SpecError."""
    image = environment.get(naming.IMAGE_ENV, "")
    if not image:
        raise SpecError(
            f"{naming.IMAGE_ENV} is not set", fix="set it to the image of the data plane; the chart does"
        )
    log_format = environment.get(naming.SIDECAR_LOG_FORMAT_ENV, "")
    if log_format not in _LOG_FORMATS:
        raise SpecError(
            f"{naming.SIDECAR_LOG_FORMAT_ENV} is not known", got=repr(log_format), expected="text or json"
        )
    return InjectionDefaults(image, environment.get(naming.PULL_POLICY_ENV, ""), log_format)


async def serve_webhook(settings: WebhookSettings, defaults: InjectionDefaults) -> None:
    """Until SIGTERM or SIGINT. Raises SpecError for what makes serving impossible."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with (
        Cluster(await load_configuration()) as cluster,
        WebhookServer(settings, ClusterDatasets(cluster), defaults) as server,
    ):
        await stop.wait()
        log.info("asked to stop")
        await server.drain()
    log.info("ended")


def run(cert_dir: Path, port: int) -> None:
    """The command `webhook`: settings from the environment, then until a signal."""
    asyncio.run(serve_webhook(WebhookSettings(cert_dir, port), read_defaults(os.environ)))
