"""The Pod Security level `restricted`, as its definition lists it, for pods that tests hold to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

VOLUME_KINDS = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
VOLUME_KINDS |= {"projected", "secret"}


def violations(pod: Mapping[str, Any]) -> list[str]:
    """What a namespace that enforces `restricted` would refuse the pod for."""
    spec = pod["spec"]
    found = [f"{name} is set" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    for volume in spec.get("volumes", []):
        found += [f"volume {volume['name']}: {kind}" for kind in set(volume) - {"name"} - VOLUME_KINDS]
    for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
        found += [f"{container['name']}: {what}" for what in container_violations(container, spec)]
    return found


def container_violations(container: Mapping[str, Any], pod_spec: Mapping[str, Any]) -> Iterator[str]:
    of_pod = pod_spec.get("securityContext") or {}
    own = container.get("securityContext") or {}
    both = {**of_pod, **own}
    capabilities = own.get("capabilities", {})
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities are not dropped"
    if set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "capabilities are added"
    if both.get("runAsNonRoot") is not True:
        yield "runAsNonRoot is not true"
    if both.get("runAsUser") == 0:
        yield "runs as root"
    if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "no seccomp profile"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "hostPort"
