"""kopf as the watcher, and nothing more: its handlers make resources due in the reconciler's schedule.

Only `on.event` is used. kopf's other handlers leave finalizers or annotations on objects, and a resource with our
finalizer could not be deleted while no operator runs. kopf runs in a thread and a loop of its own, so that it may
fail, or fall silent, and be started anew while the reconciler goes on with its own listings.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import kopf
from kubernetes.aio import client

from bagelplane.errors import BagelplaneError
from bagelplane_operator import naming

log = logging.getLogger(__name__)

Notice = Callable[[str, str, float], None]
"""Takes namespace and name of a resource and how many seconds may pass until it is looked at; thread-safe."""

POD_NOTICE_SECONDS = 1.0
"""Pods of a job change together and often; one look serves them all."""

_SERVER_SECONDS = 300.0
_CLIENT_SECONDS = 330.0
_INACTIVE_SECONDS = 90.0  # the API server sends a bookmark every minute
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
_STOP_SECONDS = 10.0
# Of a type that kopf does not export. kopf's own guess asks for the user's name, and in the image the user has none.
_IDENTITY: Any = "bagelplane-operator"


class WatchGuard:
    """Notices a watch that died silently: resources change from listing to listing, and nothing was heard."""

    def __init__(self) -> None:
        self._heard: set[str] = set()
        self._versions: Mapping[str, str] = {}
        self._suspects: set[str] = set()

    def hear(self, uid: str) -> None:
        self._heard.add(uid)

    def is_silent(self, versions: Mapping[str, str]) -> bool:
        """Call it after each full listing, with resource versions by uid; True once for each silence.

        What changed lately may still be on its way, so a resource is suspected first, and the watch is called
        silent when nothing is heard of it up to the listing after that.
        """
        heard, self._heard = self._heard, set()
        silent = bool(self._suspects - heard)
        changed = {uid for uid, version in versions.items() if self._versions.get(uid) != version}
        self._suspects = set() if silent else changed - heard
        self._versions = dict(versions)
        return silent


def build_registry(notice: Notice, guard: WatchGuard, login: client.Configuration) -> kopf.OperatorRegistry:
    """The handlers: resources, labelled pods, and our Jobs."""
    registry = kopf.OperatorRegistry()
    generations: dict[str, int] = {}

    async def connect(**_: Any) -> kopf.ConnectionInfo:
        return await build_connection(login)

    async def dataset_changed(event: Mapping[str, Any], **_: Any) -> None:
        metadata = event["object"]["metadata"]
        uid = metadata["uid"]
        guard.hear(uid)
        if event["type"] == "DELETED":
            generations.pop(uid, None)
        elif generations.get(uid) != metadata.get("generation"):  # not for each status that we write
            generations[uid] = metadata.get("generation", 0)
            notice(metadata["namespace"], metadata["name"], 0.0)

    async def pod_changed(event: Mapping[str, Any], **_: Any) -> None:
        metadata = event["object"]["metadata"]
        notice(metadata["namespace"], metadata["labels"][naming.DATASET_LABEL], POD_NOTICE_SECONDS)

    async def job_changed(event: Mapping[str, Any], **_: Any) -> None:
        metadata = event["object"]["metadata"]
        notice(metadata["namespace"], metadata["labels"].get(naming.OWNER_LABEL, ""), 0.0)

    labelled, checks = {naming.DATASET_LABEL: kopf.PRESENT}, {naming.ROLE_LABEL: naming.ROLE_CHECK}
    kopf.on.login(registry=registry)(connect)
    kopf.on.event(naming.GROUP, naming.VERSION, naming.PLURAL, registry=registry)(dataset_changed)
    kopf.on.event("", "v1", "pods", labels=labelled, registry=registry)(pod_changed)
    kopf.on.event("batch", "v1", "jobs", labels=checks, registry=registry)(job_changed)
    return registry


async def build_connection(configuration: client.Configuration) -> kopf.ConnectionInfo:
    """The same credentials as the operator's own client has; called again when they are refused."""
    header = await configuration.get_api_key_with_prefix("BearerToken") or ""
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        scheme="Bearer" if header else None,
        token=header.split()[-1] if header else None,
    )


def build_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True  # on kopf's default peering, other operators could pause this one
    settings.posting.enabled = False
    settings.scanning.disabled = True  # would ask for rights on all definitions and namespaces
    settings.process.ultimate_exiting_timeout = None  # it would end the whole process, not the thread
    settings.watching.server_timeout = int(_SERVER_SECONDS)
    settings.watching.client_timeout = _CLIENT_SECONDS
    settings.watching.inactivity_timeout = _INACTIVE_SECONDS
    # Filtered by the server: a cluster has many pods, few of them ours.
    settings.watching.label_selectors["v1", "pods"] = naming.DATASET_LABEL
    settings.watching.label_selectors["batch/v1", "jobs"] = f"{naming.ROLE_LABEL}={naming.ROLE_CHECK}"
    return settings


class Watcher:
    """Keeps kopf running in its thread until it is stopped."""

    def __init__(self, registry: kopf.OperatorRegistry, namespaces: Collection[str]) -> None:
        self._registry, self._namespaces = registry, namespaces
        self._stopping = threading.Event()
        self._stop_kopf = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def restart(self) -> None:
        """Ends the present run; the thread begins the next."""
        log.warning("the watches are silent: they are started anew")
        self._stop_kopf.set()

    def stop(self) -> None:
        self._stopping.set()
        self._stop_kopf.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            self._stop_kopf.clear()
            try:
                asyncio.run(self._watch())
            except Exception as error:  # noqa: BLE001  (whatever kopf stumbles over, it is to run again)
                fault = (
                    str(error) if isinstance(error, BagelplaneError) else f"{type(error).__name__}: {error}"
                )
                log.warning("the watches ended and start anew in %.0f s: %s", pause, fault)
                self._stopping.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                pause = _FIRST_PAUSE_SECONDS
                self._stopping.wait(pause)

    async def _watch(self) -> None:
        await kopf.operator(
            registry=self._registry,
            settings=build_settings(),
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._stop_kopf,
            identity=_IDENTITY,
        )
