"""`bagelplane inject`: the sidecar into manifests, by the webhook's own function, for clusters without the webhook."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

import bagelplane
from bagelplane.cli.output import print_note
from bagelplane.errors import SpecError
from bagelplane.spec import BUILT_IN_TYPES, BagelDataset, config_hash, load_dataset, refuse_unsupported
from bagelplane_operator import naming
from bagelplane_operator.injection import (
    InjectionDefaults,
    Object,
    dataset_asked_for,
    inject,
    is_injected,
    mend,
)


def inject_command(
    files: Annotated[
        list[str],
        typer.Option(
            "--filename", "-f", help="Manifests; - reads stdin. May be repeated.", show_default=False
        ),
    ],
    dataset_files: Annotated[
        list[Path],
        typer.Option(
            "--dataset-file", help="A BagelDataset that pods ask for. May be repeated.", show_default=False
        ),
    ],
    image: Annotated[
        str, typer.Option(envvar=naming.IMAGE_ENV, help="Image of the sidecar, unless the dataset names one.")
    ] = f"bagelplane/dataplane:{bagelplane.__version__}",
    with_config_map: Annotated[
        bool,
        typer.Option("--with-config-map", help="Print the ConfigMaps too, which the operator would make."),
    ] = False,
) -> None:
    """Print manifests with the sidecar in every pod that asks for it.

    A pod, or the pod template of any kind (Job, StatefulSet, PyTorchJob, JobSet, TrainingRuntime, ...), asks by
    the label `bagelplane.io/dataset`. All else is printed as it was read. What is injected already stays.

    Example: bagelplane inject -f job.yaml --dataset-file dataset.yaml --with-config-map | kubectl apply -f -
    """
    datasets = {dataset.metadata.name: dataset for dataset in map(_load, dataset_files)}
    injector = Injector(datasets, InjectionDefaults(image))
    printed = [document for file in files for document in injector.documents(_read(file), _shown(file))]
    if not injector.touched:
        label = naming.DATASET_LABEL
        print_note(
            f"note: nothing was injected, no pod or pod template has the label {label} in its own metadata"
        )
    if with_config_map:
        used = [dataset for dataset in datasets.values() if dataset.metadata.name in injector.used]
        printed = [*(_dump(build_config_map(dataset)) for dataset in used), *printed]
    for number, text in enumerate(printed):
        separator = "---\n" if number and not text.startswith("---") else ""
        sys.stdout.write(separator + text + ("" if text.endswith("\n") else "\n"))


class Injector:
    """Puts sidecars into documents; remembers for which datasets."""

    def __init__(self, datasets: Mapping[str, BagelDataset], defaults: InjectionDefaults) -> None:
        self._datasets = datasets
        self._defaults = defaults
        self.used: set[str] = set()
        self.touched = False

    def documents(self, text: str, source: str) -> Iterator[str]:
        """Every document of `text`, those without a pod that asks exactly as they were. Raises SpecError."""
        line = 0
        for part in _DOCUMENT_START.split(text):
            # Blank lines ahead, so that messages have the lines of the file.
            document = _parse("\n" * line + part, source)
            try:
                new = self._visit(copy.deepcopy(document), _hints(document), source)
            except RecursionError:
                raise SpecError(f"{source} refers to itself", fix="remove the alias") from None
            yield part if new == document else _comments_before(part) + _dump(new)
            line += part.count("\n")

    def _visit(self, node: Any, hints: Mapping[str, str], path: str) -> Any:
        if isinstance(node, list):
            return [
                self._visit(entry, _hints(entry) or hints, f"{path}[{n}]") for n, entry in enumerate(node)
            ]
        if not isinstance(node, dict):
            return node
        if _is_pod(node):
            return self._inject(node, hints, path)
        named = _described(node, path)
        return {key: self._visit(value, hints, f"{named}.{key}") for key, value in node.items()}

    def _inject(self, pod: Object, hints: Mapping[str, str], path: str) -> Object:
        self.touched = True
        try:
            name = dataset_asked_for(pod)
            if name is None:
                return pod
            if is_injected(pod):
                return mend(pod)
            dataset = self._datasets.get(name)
            if dataset is None:
                raise SpecError(
                    f"there is no BagelDataset {name} among the --dataset-file",
                    expected=f"one of {', '.join(self._datasets)}",
                    fix=f"give its file too, or correct the label {naming.DATASET_LABEL}",
                )
            self.used.add(name)
            return inject(pod, dataset, self._defaults, hints=hints)
        except SpecError as error:
            what = f"{_described(pod, path)}: {error.what}"
            raise SpecError(what, got=error.got, expected=error.expected, fix=error.fix) from None


def build_config_map(dataset: BagelDataset) -> Object:
    """The dataset as sidecars read it, under the name that injected pods mount."""
    document = dataset.to_mapping()
    metadata = {key: value for key, value in document["metadata"].items() if key in ("name", "namespace")}
    name = naming.config_map_name(dataset.metadata.name, config_hash(dataset))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata, "name": name},
        "immutable": True,
        "data": {naming.DATASET_FILE: _dump({**document, "metadata": metadata})},
    }


def _is_pod(node: Mapping[str, Any]) -> bool:
    """A pod or a pod template with our label, of whatever kind the object around it is."""
    metadata, spec = node.get("metadata"), node.get("spec")
    if not isinstance(metadata, dict) or not isinstance(spec, dict) or "containers" not in spec:
        return False
    labels = metadata.get("labels")
    return isinstance(labels, dict) and naming.DATASET_LABEL in labels


def _hints(document: Any) -> dict[str, str]:
    """What a training controller will tell the trainers of its pods, as far as the object says it."""
    if not isinstance(document, dict) or not isinstance(document.get("spec"), dict):
        return {}
    spec = document["spec"]
    nodes: Any = None
    ranks: Any = None
    if document.get("kind") == "PyTorchJob":
        ranks = spec.get("nprocPerNode")
        replicas = spec.get("pytorchReplicaSpecs")
        if isinstance(replicas, dict) and "elasticPolicy" not in spec:
            counts = [
                replica.get("replicas", 1) for replica in replicas.values() if isinstance(replica, dict)
            ]
            nodes = sum(count for count in counts if isinstance(count, int))
    elif document.get("kind") in ("TrainingRuntime", "ClusterTrainingRuntime"):
        policy = spec.get("mlPolicy")
        policy = policy if isinstance(policy, dict) else {}
        torch = policy.get("torch")
        nodes, ranks = (
            policy.get("numNodes"),
            torch.get("numProcPerNode") if isinstance(torch, dict) else None,
        )
    hints = {naming.NODES_ENV: nodes, naming.RANKS_ENV: ranks}
    return {name: str(value) for name, value in hints.items() if isinstance(value, (int, str))}


def _described(node: Mapping[str, Any], path: str) -> str:
    metadata = node.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{path}: {node['kind']} {name}" if "kind" in node and name else path


# --- YAML -----------------------------------------------------------------------------------------

_DOCUMENT_START = re.compile(r"^(?=---(?:\s|$))", re.MULTILINE)


class _Loader(yaml.SafeLoader):
    """As kubectl reads: dates and sexagesimal numbers are text. Keys that stand twice are errors, as there."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if (
                isinstance(key, yaml.ScalarNode)
                and key.value in seen
                and key.tag != "tag:yaml.org,2002:merge"
            ):
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} stands twice", key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)


_TAG = "tag:yaml.org,2002:"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (f"{_TAG}timestamp", f"{_TAG}int")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    f"{_TAG}int", re.compile(r"^[-+]?(?:0|0[0-7]+|[1-9][0-9]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)


class _Dumper(yaml.SafeDumper):
    """Anchors are written out: what is injected under one alias may differ from what is under another."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{_TAG}str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # noqa: S506  (a SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        what = " ".join(str(error).replace('in "<unicode string>", ', "").split())
        raise SpecError(f"{source} is no YAML: {what}", fix="correct it there") from None


def _dump(document: Any) -> str:
    return str(yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000))


def _comments_before(part: str) -> str:
    """The document's marker and the comments above its first line."""
    match = re.match(r"(?:---[ \t]*(?:#[^\n]*)?\n)?(?:[ \t]*(?:#[^\n]*)?\n)*", part)
    assert match is not None  # it matches nothing too
    return match[0]


# --- files ----------------------------------------------------------------------------------------


def _load(path: Path) -> BagelDataset:
    dataset = load_dataset(path)
    refuse_unsupported(dataset, str(path), BUILT_IN_TYPES)
    return dataset


def _shown(file: str) -> str:
    return "stdin" if file == "-" else file


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{_shown(file)} is no UTF-8 text (byte {error.start})", fix="save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SpecError(
            f"{file} cannot be read: {reason}", fix="check the path and its permissions"
        ) from None
