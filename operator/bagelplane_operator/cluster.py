"""The Kubernetes API as the operator uses it: lists, creations, deletions, the status, events.

Manifests are plain data, as the API server gives them: models of a client library would lose what they don't know.
Every fault becomes a ClusterError; whether to try again is for the caller to say.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import aiohttp
from kubernetes.aio import client, config

from bagelplane.errors import BagelplaneError, SpecError
from bagelplane.spec import API_VERSION, KIND
from bagelplane_operator import naming
from bagelplane_operator.manifests import Manifest
from bagelplane_operator.planning import Create, Delete, Event, build_event

_REQUEST_SECONDS = 15.0
_PAGE_OBJECTS = 500


class ClusterError(BagelplaneError):
    """The API server refused a request, or did not answer."""

    reaction = "Look at the API server and at the operator's rights."

    def __init__(self, what: str, *, code: int = 0, reason: str = "", fix: str = "") -> None:
        self.code, self.reason = code, reason
        super().__init__(what, fix=fix)


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object and where the API server keeps it."""

    api_version: str
    plural: str

    def path(self, namespace: str | None, name: str = "") -> str:
        root = "api" if "/" not in self.api_version else "apis"
        parts = [root, self.api_version]
        if namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        return "/" + "/".join([*parts, self.plural, *([quote(name, safe="")] if name else [])])


DATASETS = Resource(API_VERSION, naming.PLURAL)
CONFIG_MAPS = Resource("v1", "configmaps")
JOBS = Resource("batch/v1", "jobs")
PODS = Resource("v1", "pods")
CORE_EVENTS = Resource("v1", "events")
EVENTS = Resource("events.k8s.io/v1", "events")

_BY_KIND = {KIND: DATASETS, "ConfigMap": CONFIG_MAPS, "Job": JOBS, "Event": EVENTS}


async def load_configuration() -> client.Configuration:
    """From KUBECONFIG if it is set, else from the pod's service account, else from ~/.kube/config."""
    configuration = client.Configuration()
    try:
        if not os.environ.get("KUBECONFIG"):
            try:
                config.load_incluster_config(configuration)
            except config.ConfigException:
                await config.load_kube_config(client_configuration=configuration)
        else:
            await config.load_kube_config(os.environ["KUBECONFIG"], client_configuration=configuration)
    except (config.ConfigException, OSError, TypeError) as error:
        raise SpecError(
            f"no Kubernetes cluster is configured: {error}",
            fix="set KUBECONFIG to a file that names one, or run in a pod with a service account token",
        ) from None
    return configuration


class Cluster:
    """A connection; use it as an asynchronous context manager."""

    def __init__(self, configuration: client.Configuration) -> None:
        self._client = client.ApiClient(configuration)
        self._client.user_agent = naming.MANAGER
        self._instance = socket.gethostname()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def list(
        self, resource: Resource, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> list[Manifest]:
        """All objects of a namespace, or of all namespaces for None, by label and field selectors."""
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(_PAGE_OBJECTS)}
        found: list[Manifest] = []
        token = ""
        while True:
            page = await self._request("GET", resource.path(namespace), query={**query, "continue": token})
            found += page.get("items") or []
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return found

    async def create(self, action: Create) -> bool:
        """False if there is an object of that name already."""
        manifest = action.manifest
        path = _BY_KIND[manifest["kind"]].path(manifest["metadata"]["namespace"])
        try:
            await self._request("POST", path, body=manifest)
        except ClusterError as error:
            if error.reason == "AlreadyExists":
                return False
            raise
        return True

    async def delete(self, action: Delete) -> None:
        """What hangs on the object goes after it. An object that is gone, or is another by now, is no fault."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": action.uid},
        }
        try:
            await self._request(
                "DELETE", _BY_KIND[action.kind].path(action.namespace, action.name), body=body
            )
        except ClusterError as error:
            if error.code not in (404, 409):
                raise

    async def patch_status(self, resource: Manifest, changes: Mapping[str, Any]) -> bool:
        """Merge `changes` into the status; False if the resource has changed since it was read, or is gone."""
        metadata = resource["metadata"]
        body = {
            "metadata": {"resourceVersion": metadata["resourceVersion"], "uid": metadata["uid"]},
            "status": changes,
        }
        path = DATASETS.path(metadata["namespace"], metadata["name"]) + "/status"
        try:
            await self._request("PATCH", path, body=body, content_type="application/merge-patch+json")
        except ClusterError as error:
            if error.code in (404, 409):
                return False
            raise
        return True

    async def tell(self, resource: Manifest, event: Event) -> None:
        await self.create(Create(build_event(resource, event, self._instance)))

    async def newest_warning(self, namespace: str, uid: str) -> str:
        """What the newest Event about an object says, if that is a warning."""
        events = await self.list(CORE_EVENTS, namespace, fields=f"involvedObject.uid={uid}")
        newest = max(events, key=_event_time, default={})
        return str(newest.get("message") or "") if newest.get("type") == "Warning" else ""

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> Manifest:
        try:
            arguments = await self._client.param_serialize(
                method=method,
                resource_path=path,
                query_params=[(key, value) for key, value in (query or {}).items() if value],
                header_params={"Accept": "application/json", "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await self._client.call_api(
                *arguments, _request_timeout=aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
            )
            text = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            what = f"the API server did not answer {method} {path}: {str(error) or type(error).__name__}"
            raise ClusterError(what, fix="see whether it runs and can be reached from here") from None
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or response.status >= 400:
            raise _refusal(method, path, response.status, answer)
        return answer


def _refusal(method: str, path: str, code: int, answer: object) -> ClusterError:
    details: Mapping[str, Any] = answer if isinstance(answer, dict) else {}
    message = details.get("message") or "no reason given"
    what = f"the API server answered {method} {path} with {code}: {message}"
    fix = ""
    if code in (401, 403):
        fix = "give the operator's service account this right"
    elif code == 404 and path.startswith(f"/apis/{naming.GROUP}/"):
        fix = "install the CustomResourceDefinition (it comes with the chart)"
    return ClusterError(what, code=code, reason=str(details.get("reason") or ""), fix=fix)


def _event_time(event: Manifest) -> str:
    """Times of one format sort as text; which field holds the time depends on who wrote the Event."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return str(next((time for time in times if time), ""))[:19]
