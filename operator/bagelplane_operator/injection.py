"""From a pod that asks for a dataset to the same pod with the sidecar in it: a pure function.

The webhook and `bagelplane inject` call it. It knows no client and reads nothing; what it changes is the list
of known places in `inject`, all else of the pod stays as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from bagelplane.errors import SpecError
from bagelplane.spec import BagelDataset, config_hash, spec_hash
from bagelplane.spec_errors import FieldValueError
from bagelplane.spec_memory import ring_bytes
from bagelplane.spec_values import MAX_INT64, parse_quantity
from bagelplane_operator import naming

Object = dict[str, Any]
"""A Kubernetes object or a part of one, as JSON gives it."""

NO_HINTS: Mapping[str, str] = MappingProxyType({})

MEBIBYTE = 2**20
HEAP_BYTES = 256 * MEBIBYTE
HEAP_BYTES_A_RANK = 1024 * MEBIBYTE
"""Interpreter and libraries (115 MiB were seen), the row groups being read, the images being decoded."""
RING_MARGIN_BYTES = MEBIBYTE
"""Of each ring: its header, its rounding to pages; lock and socket."""
MAX_RANKS = 1024  # as `bagelplane run --ranks`
STARTUP_SECONDS = 900
_PROBE_PERIOD_SECONDS = 2


@dataclass(frozen=True, slots=True)
class InjectionDefaults:
    """What the installation says about sidecars; a dataset's `dataplane.image` goes before `image`."""

    image: str
    image_pull_policy: str = ""
    """As in a container; empty leaves it to Kubernetes."""
    log_format: str = ""
    """Of the sidecar, `text` or `json`; empty leaves it to the sidecar."""


def dataset_asked_for(pod: Mapping[str, Any]) -> str | None:
    """The dataset that a pod or pod template asks for; None for one that is to be left alone. SpecError."""
    metadata = _part(pod, "metadata", "")
    name = _texts(metadata, "labels", "metadata").get(naming.DATASET_LABEL)
    annotations = _texts(metadata, "annotations", "metadata")
    wish = annotations.get(naming.INJECT_ANNOTATION, "true")
    if name is None or wish == "false":
        return None
    if wish != "true":
        raise SpecError(
            f"the annotation {naming.INJECT_ANNOTATION} is not understood",
            got=repr(wish),
            expected="true or false",
            fix=f'write "false" to leave the pod alone, or remove the label {naming.DATASET_LABEL}',
        )
    if not name:
        raise SpecError(
            f"the label {naming.DATASET_LABEL} is empty",
            fix="write the name of a BagelDataset of the pod's namespace",
        )
    return name


def is_injected(pod: Mapping[str, Any]) -> bool:
    """Whether a pod has its sidecar already."""
    annotations = _texts(_part(pod, "metadata", ""), "annotations", "metadata")
    return naming.INJECTED_ANNOTATION in annotations and _own_sidecar(pod) is not None


def inject(
    pod: Mapping[str, Any],
    dataset: BagelDataset,
    defaults: InjectionDefaults,
    generation: int = 0,
    *,
    hints: Mapping[str, str] = NO_HINTS,
) -> Object:
    """The whole new pod, the old one untouched. Raises SpecError for a pod that cannot be served.

    `generation`: the resource's, 0 where it is not known. `hints`: environment variables that a training
    controller will give the trainer's container later; for templates.

    A pod that has its sidecar comes back as `mend` leaves it.
    """
    new = copy.deepcopy(dict(pod))
    if dataset_asked_for(new) is None:
        return new
    if is_injected(new):
        return mend(new)
    spec = _part(new, "spec", "")
    containers = _entries(spec, "containers", "spec")
    _refuse_clashes(spec)
    trainer = _find_trainer(new, containers)
    where = f"container {trainer['name']}"
    hinted = dict(hints) | _literal_environment(trainer, where)
    ranks = _data_parallel_ranks(new, _local_ranks(trainer, hinted, where), where)
    resume = _resume_step(new)
    sidecar = _build_sidecar(dataset, defaults, generation, hinted, ranks, resume)
    sidecar["securityContext"] = _build_security_context(spec, trainer, where)
    identity_env, identity_mounts = _identity(trainer, where)
    sidecar["env"] += [*_run_id(new), *identity_env]
    sidecar["volumeMounts"] += identity_mounts
    _enter_trainer(trainer, generation, where)
    # First: init containers after it, and all others, start when packs can be served.
    spec["initContainers"] = [sidecar, *_entries(spec, "initContainers", "spec")]
    spec["volumes"] = [*_entries(spec, "volumes", "spec"), *_build_volumes(dataset, ranks)]
    annotations = dict(_texts(_part(new, "metadata", ""), "annotations", "metadata"))
    annotations[naming.INJECTED_ANNOTATION] = naming.short_hash(config_hash(dataset))
    annotations[naming.SPEC_HASH_ANNOTATION] = spec_hash(dataset)
    new["metadata"]["annotations"] = annotations
    return new


def mend(pod: Mapping[str, Any]) -> Object:
    """An injected pod as it must be. It keeps whatever has been added or moved since, and its revision.

    Other webhooks know init containers without `restartPolicy` and drop it: such a pod would wait forever.
    """
    new = copy.deepcopy(dict(pod))
    sidecar = _own_sidecar(new)
    if sidecar is not None:
        sidecar.setdefault("restartPolicy", "Always")
    return new


def build_patch(old: object, new: object, path: str = "") -> list[Object]:
    """A JSON patch (RFC 6902) that turns `old` into `new`; a list that differs is replaced as a whole."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return [] if old == new else [{"op": "replace", "path": path, "value": new}]
    patch: list[Object] = []
    for key in [*old, *(key for key in new if key not in old)]:
        place = f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"
        if key not in new:
            patch.append({"op": "remove", "path": place})
        elif key not in old:
            patch.append({"op": "add", "path": place, "value": new[key]})
        else:
            patch += build_patch(old[key], new[key], place)
    return patch


# --- the sidecar ----------------------------------------------------------------------------------


def _build_sidecar(
    dataset: BagelDataset,
    defaults: InjectionDefaults,
    generation: int,
    hinted: Mapping[str, str],
    ranks: int,
    resume: str | None,
) -> Object:
    env = [
        {"name": name, "value": hinted[name]}
        for name in (naming.NODES_ENV, naming.RANKS_ENV)
        if name in hinted
    ]
    env.append({"name": naming.GENERATION_ENV, "value": str(generation)})
    if defaults.log_format:
        env.append({"name": naming.LOG_FORMAT_ENV, "value": defaults.log_format})
    mounts: list[Object] = [
        {"name": naming.RING_VOLUME, "mountPath": naming.RUN_DIR},
        {"name": naming.DATASET_VOLUME, "mountPath": naming.DATASET_DIR, "readOnly": True},
        # The sidecar has no business with the API server. Whether tokens are mounted is said for a whole pod,
        # and the trainer may need its own; but nothing is mounted where a container has a mount already.
        {"name": naming.NO_TOKEN_VOLUME, "mountPath": naming.TOKEN_DIR, "readOnly": True},
    ]
    if dataset.spec.storage.secret_ref is not None:
        env.append({"name": naming.CREDENTIALS_DIR_ENV, "value": naming.CREDENTIALS_DIR})
        mounts.append(
            {"name": naming.CREDENTIALS_VOLUME, "mountPath": naming.CREDENTIALS_DIR, "readOnly": True}
        )
    args = ["run", naming.DATASET_PATH, "--dir", naming.RUN_DIR, "--any-user", "--ranks", str(ranks)]
    args += ["--status-host", "0.0.0.0", "--status-port", str(naming.STATUS_PORT)]  # noqa: S104 (the operator asks from outside the pod)
    sidecar: Object = {
        "name": naming.SIDECAR_CONTAINER,
        "image": dataset.spec.dataplane.image or defaults.image,
        "restartPolicy": "Always",
        "args": [*args, "--resume", resume] if resume is not None else args,
        "env": env,
        "ports": [{"name": naming.STATUS_PORT_NAME, "containerPort": naming.STATUS_PORT, "protocol": "TCP"}],
        # Ready only after resource, data, tokenizer and snapshots were looked at, which takes minutes on a
        # large bucket. No liveness probe: the supervisor replaces producers itself, a node short of CPU would
        # kill sidecars that are well, and the trainer's client has a deadline of its own.
        "startupProbe": {
            "httpGet": {"path": naming.READY_PATH, "port": naming.STATUS_PORT_NAME},
            "periodSeconds": _PROBE_PERIOD_SECONDS,
            "timeoutSeconds": 5,
            "failureThreshold": STARTUP_SECONDS // _PROBE_PERIOD_SECONDS,
        },
        "resources": _build_resources(dataset, ranks),
        "terminationMessagePolicy": "FallbackToLogsOnError",  # its last words are then in the pod's status
        "volumeMounts": mounts,
    }
    if defaults.image_pull_policy:
        sidecar["imagePullPolicy"] = defaults.image_pull_policy
    return sidecar


def _build_resources(dataset: BagelDataset, ranks: int) -> Object:
    """What the resource says; for memory and CPU of which it says nothing, what is known to be needed.

    Pages of a memory volume count for the container that writes them, so the rings are the sidecar's. The
    limit leaves room for twice the heap: when memory runs out, the sidecar shall be the one that is killed,
    because it comes back and repeats the same packs, and a trainer does not. A limit also keeps a namespace's
    default limit away, which knows nothing of rings. The CPUs asked for are a share under contention, no
    more: a request of what decoding could use would keep pods off nodes that serve them well.
    """
    given = dataset.spec.dataplane.resources
    requests, limits = dict(given.requests), dict(given.limits)
    rings = ranks * ring_bytes(dataset)
    if "memory" not in requests and "memory" not in limits:
        heap = HEAP_BYTES + ranks * HEAP_BYTES_A_RANK
        requests["memory"] = format_bytes(rings + heap)
        limits["memory"] = format_bytes(rings + 2 * heap)
    if "cpu" not in requests and "cpu" not in limits:
        requests["cpu"] = f"{250 * ranks}m"
    limit_bytes = _bytes_of(limits.get("memory", ""))
    if limit_bytes is not None and limit_bytes <= rings:
        raise SpecError(
            f"BagelDataset {dataset.metadata.name}: spec.dataplane.resources.limits.memory does not hold the rings",
            got=f"{limits['memory']} for {ranks} ranks with rings of {format_bytes(ring_bytes(dataset))} each",
            expected=f"more than {format_bytes(rings)}, and memory to work with",
            fix="raise the limit, lower spec.dataplane.ring, or leave the limit out to have one computed",
        )
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


def _build_security_context(spec: Object, trainer: Object, where: str) -> Object:
    """All that the level `restricted` asks for, whatever the pod's own context is.

    The trainer's user where one is given, so that files belong to both; root is never taken over.
    """
    of_pod = _part(spec, "securityContext", "spec", optional=True)
    of_trainer = _part(trainer, "securityContext", where, optional=True)
    user = of_trainer.get("runAsUser", of_pod.get("runAsUser"))
    group = of_trainer.get("runAsGroup", of_pod.get("runAsGroup"))
    context: Object = {"runAsNonRoot": True, "runAsUser": naming.USER_ID, "runAsGroup": naming.USER_ID}
    if isinstance(user, int) and user > 0:
        context["runAsUser"] = user
        # Without a group the trainer has its image's, which is not known here, so the sidecar keeps its own.
        context["runAsGroup"] = group if isinstance(group, int) and group > 0 else naming.USER_ID
    context["allowPrivilegeEscalation"] = False
    context["capabilities"] = {"drop": ["ALL"]}
    context["readOnlyRootFilesystem"] = True
    context["seccompProfile"] = {"type": "RuntimeDefault"}
    return context


def _build_volumes(dataset: BagelDataset, ranks: int) -> list[Object]:
    size = format_bytes(ranks * (ring_bytes(dataset) + RING_MARGIN_BYTES))
    config_map = naming.config_map_name(dataset.metadata.name, config_hash(dataset))
    volumes: list[Object] = [
        {"name": naming.RING_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": size}},
        {"name": naming.DATASET_VOLUME, "configMap": {"name": config_map}},
        {"name": naming.NO_TOKEN_VOLUME, "emptyDir": {}},
    ]
    secret = dataset.spec.storage.secret_ref
    if secret is not None:
        # With the mode that Secrets have by default: the sidecar need be neither root nor in fsGroup to read it.
        volumes.append({"name": naming.CREDENTIALS_VOLUME, "secret": {"secretName": secret.name}})
    return volumes


def format_bytes(size_bytes: int) -> str:
    """A quantity of at least that many bytes, in whole MiB."""
    return f"{-(-size_bytes // MEBIBYTE)}Mi"


def _bytes_of(quantity: str) -> int | None:
    try:
        return parse_quantity(quantity)
    except FieldValueError:
        return None  # the API server's affair


# --- the trainer ----------------------------------------------------------------------------------


def _find_trainer(pod: Object, containers: Sequence[Object]) -> Object:
    by_name = {_name(container, "spec.containers"): container for container in containers}
    if not by_name:
        raise SpecError("the pod has no containers", fix="add the trainer's to spec.containers")
    annotations = _texts(_part(pod, "metadata", ""), "annotations", "metadata")
    named = annotations.get(naming.TRAINER_CONTAINER_ANNOTATION)
    names = ", ".join(by_name)
    if named is not None:
        if named not in by_name:
            raise SpecError(
                f"the annotation {naming.TRAINER_CONTAINER_ANNOTATION} names no container of the pod",
                got=repr(named),
                expected=f"one of {names}",
                fix="write the name of the container that trains",
            )
        return by_name[named]
    for name in naming.TRAINER_CONTAINERS:
        if name in by_name:
            return by_name[name]
    if len(by_name) > 1:
        raise SpecError(
            "which of the pod's containers trains is not known",
            got=f"containers {names}",
            expected=f"one called {' or '.join(naming.TRAINER_CONTAINERS)}, or a single one",
            fix=f"name it in the annotation {naming.TRAINER_CONTAINER_ANNOTATION}",
        )
    return containers[0]


def _enter_trainer(trainer: Object, generation: int, where: str) -> None:
    """Rings and where they are; all else of the container stays."""
    mounts = _entries(trainer, "volumeMounts", where)
    for mount in mounts:
        path = str(mount.get("mountPath", ""))
        if f"{path.rstrip('/')}/".startswith(f"{naming.RUN_DIR}/"):
            raise SpecError(
                f"{where} has a mount of its own where the rings go",
                got=path,
                fix=f"mount it outside {naming.RUN_DIR}",
            )
    env = _entries(trainer, "env", where)
    ours = {naming.RUN_DIR_ENV: naming.RUN_DIR, naming.GENERATION_ENV: str(generation)}
    for variable in env:
        name = variable.get("name")
        if name in ours and variable.get("value") != ours.pop(name):
            raise SpecError(
                f"{where} sets {name} itself, which the sidecar's place in the pod decides",
                fix=f"remove {name} from its env",
            )
    trainer["env"] = [*env, *({"name": name, "value": value} for name, value in ours.items())]
    trainer["volumeMounts"] = [*mounts, {"name": naming.RING_VOLUME, "mountPath": naming.RUN_DIR}]


def _local_ranks(trainer: Object, hinted: Mapping[str, str], where: str) -> int:
    """How many processes train in the pod: what torchrun is told, else one for each GPU, else one."""
    text = hinted.get(naming.RANKS_ENV, "")
    if not (text.isascii() and text.isdecimal()):
        resources = _part(trainer, "resources", where, optional=True)
        gpus = (
            _part(resources, kind, f"{where}.resources", optional=True).get(naming.GPU_RESOURCE)
            for kind in ("limits", "requests")
        )
        text = next((str(count) for count in gpus if str(count).isdecimal() and str(count) != "0"), "1")
    digits = text.lstrip("0")
    if not digits or len(digits) > len(str(MAX_RANKS)) or int(digits) > MAX_RANKS:
        raise SpecError(
            f"{where} is to run a number of ranks that no sidecar serves",
            got=f"{naming.RANKS_ENV}={text[:20]}",
            expected=f"1 to {MAX_RANKS}",
            fix="correct nprocPerNode",
        )
    return int(digits)


def _data_parallel_ranks(pod: Object, local_ranks: int, where: str) -> int:
    """How many rings the volume must hold: one for each process, unless the pod says that some read the same packs."""
    annotations = _texts(_part(pod, "metadata", ""), "annotations", "metadata")
    text = annotations.get(naming.DATA_PARALLEL_RANKS_ANNOTATION)
    if text is None:
        return local_ranks
    if (
        text.isascii()
        and text.isdecimal()
        and len(text) <= len(str(MAX_RANKS))
        and 1 <= int(text) <= local_ranks
    ):
        return int(text)
    raise SpecError(
        f"the annotation {naming.DATA_PARALLEL_RANKS_ANNOTATION} is no number of data-parallel ranks in this pod",
        got=repr(text[:20]),
        expected=f"1 to {local_ranks}, the processes that {where} runs ({naming.RANKS_ENV}, else its GPUs)",
        fix="write the processes of the pod divided by those that read the same packs (tensor, context and "
        'pipeline parallel in the pod), in quotes, for example "2"; or correct nprocPerNode',
    )


def _literal_environment(trainer: Object, where: str) -> dict[str, str]:
    """Variables whose value stands in the pod; one with `valueFrom` is known to the container alone."""
    values = {}
    for variable in _entries(trainer, "env", where):
        name, value = variable.get("name"), variable.get("value")
        if isinstance(name, str) and isinstance(value, str) and "$(" not in value:
            values[name] = value
    return values


def _run_id(pod: Object) -> list[Object]:
    """The variable that says which job's pod this is: pods of one job write one run's snapshots.

    What the annotation says; else the pod's JobSet, or whoever owns it. A template's owner is not known yet.
    """
    metadata = _part(pod, "metadata", "")
    labels, annotations = (_texts(metadata, part, "metadata") for part in ("labels", "annotations"))
    owners = _entries(metadata, "ownerReferences", "metadata")
    found = [annotations.get(naming.RUN_ID_ANNOTATION), *(labels.get(name) for name in naming.JOBSET_LABELS)]
    found += [owner.get("uid") for owner in owners if owner.get("controller")]
    run_id = next((text for text in found if isinstance(text, str) and text), None)
    return [{"name": naming.RUN_ID_ENV, "value": run_id}] if run_id else []


def _resume_step(pod: Object) -> str | None:
    text = _texts(_part(pod, "metadata", ""), "annotations", "metadata").get(naming.RESUME_STEP_ANNOTATION)
    number = text is not None and text.isascii() and text.isdecimal() and len(text) < 20
    if text is None or text in ("latest", "none") or (number and int(text) <= MAX_INT64):
        return text
    raise SpecError(
        f"the annotation {naming.RESUME_STEP_ANNOTATION} is not understood",
        got=repr(text[:40]),
        expected="latest, none or a step's number",
        fix='write for example "1200", in quotes',
    )


# --- a cloud's identity ---------------------------------------------------------------------------

# What the clouds' webhooks give to containers: (the file with the token, what belongs to it). They may run
# before ours, and then know nothing of the sidecar; when they run after it, they serve it themselves.
_IDENTITIES = (
    (
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        (
            "AWS_ROLE_ARN",
            "AWS_ROLE_SESSION_NAME",
            "AWS_STS_REGIONAL_ENDPOINTS",
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
        ),
    ),
    (
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_REGION", "AWS_DEFAULT_REGION"),
    ),
    ("AZURE_FEDERATED_TOKEN_FILE", ("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_AUTHORITY_HOST")),
)


def _identity(trainer: Object, where: str) -> tuple[list[Object], list[Object]]:
    """(variables, mounts) of the trainer that make it somebody at the object store."""
    literal = _literal_environment(trainer, where)
    names: list[str] = []
    files: list[str] = []
    for token_file, others in _IDENTITIES:
        if token_file in literal:
            names += [name for name in (token_file, *others) if name not in names]
            files.append(literal[token_file])
    env = [copy.deepcopy(item) for item in _entries(trainer, "env", where) if item.get("name") in names]
    mounts = [
        copy.deepcopy(mount)
        for mount in _entries(trainer, "volumeMounts", where)
        if any(file.startswith(f"{str(mount.get('mountPath', '')).rstrip('/')}/") for file in files)
    ]
    return env, mounts


# --- pods that cannot be served --------------------------------------------------------------------


def _refuse_clashes(spec: Object) -> None:
    for kind in ("initContainers", "containers"):
        for container in _entries(spec, kind, "spec"):
            if container.get("name") == naming.SIDECAR_CONTAINER:
                raise SpecError(
                    f"the pod has a container called {naming.SIDECAR_CONTAINER} in spec.{kind} already",
                    fix=f"rename it; or, if it is the sidecar, restore the annotation {naming.INJECTED_ANNOTATION}",
                )
    ours = (naming.RING_VOLUME, naming.DATASET_VOLUME, naming.NO_TOKEN_VOLUME, naming.CREDENTIALS_VOLUME)
    for volume in _entries(spec, "volumes", "spec"):
        if volume.get("name") in ours:
            raise SpecError(f"the pod has a volume called {volume['name']} of its own", fix="rename it")


def _own_sidecar(pod: Mapping[str, Any]) -> Object | None:
    spec = _part(pod, "spec", "")
    found: Iterator[Object] = (
        container
        for container in _entries(spec, "initContainers", "spec")
        if container.get("name") == naming.SIDECAR_CONTAINER
    )
    return next(found, None)


# --- reading what may be anything -----------------------------------------------------------------


def _part(parent: Mapping[str, Any], key: str, path: str, *, optional: bool = False) -> Object:
    value = parent.get(key)
    if value is None and optional:
        return {}
    if not isinstance(value, dict):
        raise _shape_error(path, key, "a mapping")
    return value


def _entries(parent: Mapping[str, Any], key: str, path: str) -> list[Object]:
    value = parent.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise _shape_error(path, key, "a list of mappings")
    return value


def _texts(parent: Mapping[str, Any], key: str, path: str) -> dict[str, str]:
    values = _part(parent, key, path, optional=True)
    if not all(isinstance(name, str) and isinstance(value, str) for name, value in values.items()):
        raise _shape_error(path, key, "texts, numbers and words such as true in quotes")
    return values


def _name(container: Object, path: str) -> str:
    name = container.get("name")
    if not isinstance(name, str) or not name:
        raise _shape_error(path, "name", "text")
    return name


def _shape_error(path: str, key: str, expected: str) -> SpecError:
    return SpecError(f"{f'{path}.' if path else ''}{key} of the pod is not what a pod has", expected=expected)
