"""The loop that makes the cluster as it should be: observe, plan, act, again.

It owns the schedule (which resource is due when) and what is remembered between polls of sidecars. Watches only
make a resource due earlier: what is done rests on lists made in the same round, so a lost event costs time, not
truth. Faults of the cluster are logged once and tried again after growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from bagelplane_operator import checks, naming
from bagelplane_operator.attachments import Memory, TrainerPod, fold, read_pod
from bagelplane_operator.cluster import (
    CONFIG_MAPS,
    DATASETS,
    JOBS,
    PODS,
    Cluster,
    ClusterError,
    Resource,
)
from bagelplane_operator.manifests import Image, Manifest
from bagelplane_operator.planning import (
    IDLE_SECONDS,
    Create,
    Observed,
    build_status_patch,
    format_time,
    plan,
)
from bagelplane_operator.polling import Poller

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""Namespace and name of a resource."""

DEBOUNCE_SECONDS = 0.1
"""Changes come in bursts; one round serves them all."""

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_RECONCILED_AT_ONCE = 8
_LISTED_ONE_BY_ONE = 4
"""So many namespaces are listed each for itself; for more it is quicker to list all."""


@dataclass(slots=True)
class Schedule:
    """When each resource is looked at next, on the monotonic clock."""

    due: dict[Key, float] = field(default_factory=dict)
    failures: dict[Key, int] = field(default_factory=dict)

    def at(self, key: Key, moment: float) -> None:
        """At that moment, or earlier if it is due earlier already."""
        self.due[key] = min(moment, self.due.get(key, moment))

    def take(self, now: float) -> set[Key]:
        taken = {key for key, moment in self.due.items() if moment <= now}
        for key in taken:
            del self.due[key]
        return taken

    def failed(self, key: Key, now: float) -> None:
        count = self.failures[key] = self.failures.get(key, 0) + 1
        self.at(key, now + pause_seconds(count))

    def succeeded(self, key: Key) -> None:
        self.failures.pop(key, None)

    def next_moment(self, otherwise: float) -> float:
        return min(self.due.values(), default=otherwise)


def pause_seconds(failures: int) -> float:
    return min(_FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE_SECONDS)


@dataclass(slots=True)
class Complaints:
    """Says a fault once, and once that it is over."""

    open: dict[str, object] = field(default_factory=dict)

    def raise_(self, about: str, text: str, kind: object = None) -> None:
        """Faults of one `kind` are one fault; without it, those of one text."""
        kind = text if kind is None else kind
        if self.open.get(about) != kind:
            self.open[about] = kind
            log.warning("%s", text)

    def settle(self, about: str) -> None:
        if self.open.pop(about, None) is not None:
            log.info("%s: in order again", about)


@dataclass(frozen=True, slots=True)
class Sight:
    """What one round saw: everything that may belong to the resources that are due."""

    datasets: Mapping[Key, Manifest]
    config_maps: Mapping[Key, list[Manifest]]
    jobs: Mapping[Key, list[Manifest]]
    check_pods: Mapping[Key, list[Manifest]]
    pods: Mapping[Key, list[TrainerPod]]


class Reconciler:
    def __init__(self, cluster: Cluster, poller: Poller, image: Image, namespaces: tuple[str, ...]) -> None:
        self._cluster, self._poller, self._image, self._namespaces = cluster, poller, image, namespaces
        self._schedule, self._complaints = Schedule(), Complaints()
        self._memory: dict[Key, Mapping[str, Memory]] = {}
        self._wake = asyncio.Event()
        self._round_failures = 0
        self.turned = time.monotonic()
        """When the loop last came round, with or without success: what liveness looks at."""
        self.on_listing: Callable[[Mapping[str, str]], None] = lambda versions: None
        """Called after each full listing with the resource versions by uid."""

    def notice(self, namespace: str, name: str, within_seconds: float = 0.0) -> None:
        """A resource, or something that belongs to it, has changed. Call it in the loop's thread."""
        self._schedule.at((namespace, name), time.monotonic() + within_seconds)
        self._wake.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. A round that the cluster fails is made again after a pause."""
        listing_due = time.monotonic()
        while not stop.is_set():
            now = self.turned = time.monotonic()
            moment = min(self._schedule.next_moment(listing_due), listing_due)
            if self._round_failures:
                moment = max(moment, now + pause_seconds(self._round_failures))
            await self._sleep(stop, moment - now)
            now = time.monotonic()
            everything = now >= listing_due
            taken = self._schedule.take(now)
            if not (everything or taken):
                continue
            try:
                await self._round(None if everything else taken)
            except ClusterError as error:
                self._round_failures += 1
                self._complaints.raise_("the cluster", str(error), error.code)
                for key in taken:
                    self._schedule.at(key, now)
            else:
                self._round_failures = 0
                self._complaints.settle("the cluster")
                if everything:
                    listing_due = time.monotonic() + IDLE_SECONDS

    async def _sleep(self, stop: asyncio.Event, seconds: float) -> None:
        """Until something is noticed, `stop` is set or the time is over; faults are not cut short by notices."""
        waits = [asyncio.ensure_future(stop.wait())]
        if not self._round_failures:
            waits.append(asyncio.ensure_future(self._wake.wait()))
        try:
            await asyncio.wait(waits, timeout=max(seconds, 0.0), return_when=asyncio.FIRST_COMPLETED)
            if self._wake.is_set() and not stop.is_set():
                await asyncio.sleep(DEBOUNCE_SECONDS)
        finally:
            self._wake.clear()
            for wait in waits:
                wait.cancel()

    async def _round(self, due: set[Key] | None) -> None:
        """Looks at the resources that are due, or at all for None."""
        sight = await self._look(due)
        if due is None:
            metadata = [dataset["metadata"] for dataset in sight.datasets.values()]
            self.on_listing({each["uid"]: each["resourceVersion"] for each in metadata})
            self._forget_all_but(sight.datasets)
        keys = [key for key in sight.datasets if due is None or key in due]
        at_once = asyncio.Semaphore(_RECONCILED_AT_ONCE)

        async def reconcile(key: Key) -> None:
            async with at_once:
                await self._reconcile_safely(key, sight)

        await asyncio.gather(*(reconcile(key) for key in keys))

    async def _look(self, due: set[Key] | None) -> Sight:
        scopes: Iterable[str | None] = self._namespaces or (None,)
        if due is not None:
            wanted = {namespace for namespace, _ in due}
            if self._namespaces or len(wanted) <= _LISTED_ONE_BY_ONE:
                scopes = sorted(wanted)

        async def gather(resource: Resource, labels: str = "") -> list[Manifest]:
            lists = [await self._cluster.list(resource, scope, labels=labels) for scope in scopes]
            return [manifest for found in lists for manifest in found]

        datasets = await gather(DATASETS)
        if not datasets:
            return Sight({}, {}, {}, {}, {})
        config_maps = await gather(CONFIG_MAPS, f"{naming.ROLE_LABEL}={naming.ROLE_CONFIG}")
        jobs = await gather(JOBS, f"{naming.ROLE_LABEL}={naming.ROLE_CHECK}")
        check_pods = await gather(PODS, f"{naming.ROLE_LABEL}={naming.ROLE_CHECK}")
        pods = [read_pod(pod) for pod in await gather(PODS, naming.DATASET_LABEL)]
        by_dataset: dict[Key, list[TrainerPod]] = {}
        for pod in pods:
            by_dataset.setdefault((pod.namespace, pod.dataset), []).append(pod)
        return Sight(
            {_key(dataset["metadata"], "name"): dataset for dataset in datasets},
            _by_owner(config_maps),
            _by_owner(jobs),
            _by_owner(check_pods),
            by_dataset,
        )

    async def _reconcile_safely(self, key: Key, sight: Sight) -> None:
        """One resource's faults are its own: the others are looked after all the same."""
        about = f"BagelDataset {'/'.join(key)}"
        try:
            await self._reconcile(key, sight)
        except ClusterError as error:
            if error.code == 403 and "being terminated" in str(error):
                return  # with its namespace the resource goes too
            self._complaints.raise_(about, f"{about}: {error}", error.code)
            self._schedule.failed(key, time.monotonic())
        except Exception:
            # A fault of ours; without this it would end the care for every resource of the cluster.
            if about not in self._complaints.open:
                log.exception("%s: something unexpected happened", about)
            self._complaints.open[about] = "unexpected"
            self._schedule.failed(key, time.monotonic())
        else:
            self._complaints.settle(about)
            self._schedule.succeeded(key)

    async def _reconcile(self, key: Key, sight: Sight) -> None:
        resource = sight.datasets[key]
        if resource["metadata"].get("deletionTimestamp"):
            return
        pods = sight.pods.get(key, [])
        polls = await self._poller.poll(pods)
        now = datetime.now(UTC)
        folded = fold(pods, polls, self._memory.get(key, {}), time.monotonic(), format_time(now))
        self._memory[key] = folded.memory
        jobs, check_pods = sight.jobs.get(key, []), sight.check_pods.get(key, [])
        observed = Observed(
            config_maps=sight.config_maps.get(key, []),
            check_jobs=jobs,
            check_pods=check_pods,
            warnings=await self._warnings(key[0], jobs, check_pods),
            pods=pods,
            attachments=folded,
        )
        planned = plan(resource, observed, self._image, now)
        for action in planned.actions:
            if isinstance(action, Create):
                title = _title(action.manifest)
                if await self._cluster.create(action):
                    log.info("%s/%s: made %s", *key, title)
                else:
                    # Mostly one that is about to go; one that stays was not made by us, and pods would mount it.
                    text = f"{'/'.join(key)}: {title} is in the way. Fix: delete it if it stays"
                    self._complaints.raise_(f"{key}{title}", text)
            else:
                await self._cluster.delete(action)
                log.info("%s/%s: deleted %s %s", *key, action.kind, action.name)
        changes = build_status_patch(resource.get("status") or {}, planned.status)
        if changes is None or await self._cluster.patch_status(resource, changes):
            # After the status: an event that is lost in a crash is better than one that is told twice.
            for event in planned.events:
                log.info("%s/%s: %s: %s", *key, event.reason, event.message)
                await self._cluster.tell(resource, event)
            self._schedule.at(key, time.monotonic() + planned.again_seconds)
        else:
            self._schedule.at(key, time.monotonic() + _FIRST_PAUSE_SECONDS)

    async def _warnings(
        self, namespace: str, jobs: list[Manifest], check_pods: list[Manifest]
    ) -> dict[str, str]:
        """What Events say about checks that do not get on; best effort, a status without it is right too."""
        newest = checks.newest_attempt(jobs)
        uid = checks.needs_explanation(newest, check_pods) if newest is not None else ""
        if not uid:
            return {}
        with suppress(ClusterError):
            return {uid: await self._cluster.newest_warning(namespace, uid)}
        return {}

    def _forget_all_but(self, present: Mapping[Key, Manifest]) -> None:
        self._memory = {key: memory for key, memory in self._memory.items() if key in present}
        for key in [key for key in self._schedule.due if key not in present]:
            del self._schedule.due[key]
        for key in [key for key in self._schedule.failures if key not in present]:
            self._schedule.succeeded(key)
            self._complaints.open.pop(f"BagelDataset {'/'.join(key)}", None)


def _key(metadata: Mapping[str, str], name: str) -> Key:
    return metadata["namespace"], metadata[name]


def _by_owner(manifests: Iterable[Manifest]) -> dict[Key, list[Manifest]]:
    found: dict[Key, list[Manifest]] = {}
    for manifest in manifests:
        metadata = manifest["metadata"]
        owner = (metadata.get("labels") or {}).get(naming.OWNER_LABEL, "")
        found.setdefault((metadata["namespace"], owner), []).append(manifest)
    return found


def _title(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"
