"""The resource: what a team declares, as pydantic models.

The one source of the CRD schema, the reference table and the command line's checks.

Reads no storage, imports nothing of the data plane but errors (the operator imports it too).
Whether a group type is registered, a bucket exists or a file has rows is found out where those are at hand.
Names are camelCase in YAML and snake_case here. Models are frozen; a change is a new resource.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError, model_validator

from bagelplane.spec_errors import (
    InvalidDatasetError,
    Problem,
    SpecModel,
    nearest,
    problems_of,
    read_yaml,
    show,
)
from bagelplane.spec_parts import (
    BUILT_IN_TYPES,
    Budgets,
    Cache,
    Conditioning,
    Dataplane,
    Dataset,
    Drops,
    FrameSampler,
    Group,
    Images,
    ImageTransform,
    Model,
    ReadAhead,
    Resources,
    Resume,
    Ring,
    SecretRef,
    Sharding,
    Snapshots,
    SpecialTokens,
    Storage,
    Tokenizer,
    field,
    repeated_names,
)
from bagelplane.spec_values import ObjectName

__all__ = [
    "API_VERSION",
    "BUILT_IN_TYPES",
    "KIND",
    "BagelDataset",
    "Budgets",
    "Cache",
    "Conditioning",
    "Dataplane",
    "Dataset",
    "DatasetSpec",
    "Drops",
    "FrameSampler",
    "Group",
    "ImageTransform",
    "Images",
    "InvalidDatasetError",
    "Metadata",
    "Model",
    "ReadAhead",
    "Resources",
    "Resume",
    "Ring",
    "SecretRef",
    "Sharding",
    "Snapshots",
    "SpecialTokens",
    "Storage",
    "Tokenizer",
    "config_hash",
    "load_dataset",
    "refuse_unsupported",
    "spec_hash",
    "stream_spec",
]

API_VERSION = "bagelplane.io/v1alpha1"
KIND = "BagelDataset"


class DatasetSpec(SpecModel):
    profile: Literal["Strict", "Automodel"] = field(
        "Strict: faults of NeMo Automodel mended. Automodel: bit for bit what it yields.", "Strict"
    )
    storage: Storage = field("How the object store is reached.", factory=Storage)
    tokenizer: Tokenizer = field("What turns text into tokens.")
    groups: tuple[Group, ...] = field("The mix of data.", min_length=1, max_length=64, strict=False)
    budgets: Budgets = field("How long packs become.", factory=Budgets)
    conditioning: Conditioning = field("How often conditions are left out.", factory=Conditioning)
    model: Model = field("What the stream must know of the model.", factory=Model)
    sharding: Sharding = field("Who reads which part of the data.", factory=Sharding)
    snapshots: Snapshots = field("Where the stream's state is kept.", factory=Snapshots)
    resume: Resume = field("What may change when a run goes on.", factory=Resume)
    drops: Drops = field("When too many rows are dropped.", factory=Drops)
    images: Images = field("Limits on images.", factory=Images)
    dataplane: Dataplane = field("How the sidecar runs.", factory=Dataplane)

    def rule_problems(self) -> Iterator[Problem]:
        yield from repeated_names(("groups",), [group.name for group in self.groups])
        if not sum(group.weight for group in self.groups) > 0:
            fix = "set a group's weight to 1"
            yield Problem(("groups",), "must have weights with a sum above 0", fix=fix)
        for index, group in enumerate(self.groups):
            yield from self._stride_problems(index, group)

    def _stride_problems(self, index: int, group: Group) -> Iterator[Problem]:
        """Images whose sides are no multiple of the model's patch cannot be cut into patches."""
        vae = ("vaeImageDownsample", self.model.vae_image_downsample)
        vit = ("vitPatchSize", self.model.vit_patch_size)
        rules = {
            "t2i_pretrain": [("imageTransform", group.image_transform, vae)],
            "unified_edit": [
                ("imageTransform", group.image_transform, vae),
                ("vitImageTransform", group.vit_image_transform, vit),
            ],
            "vlm_sft": [("imageTransform", group.image_transform, vit)],
        }
        for rule_name, transform, (name, patch) in rules.get(group.type, []):
            if transform is not None and transform.stride % patch:
                loc = ("groups", index, rule_name, "stride")
                what = f"must be a multiple of model.{name}, {patch}"
                yield Problem(loc, what, show(transform.stride), f"set it to {patch}")


class Metadata(SpecModel):
    """Of the object's metadata only what matters here; what the API server adds is accepted and left out."""

    name: ObjectName = field("Name of the resource, also the value of the pod label.", example="bagel-sft")
    namespace: ObjectName | None = field("Namespace of the resource.", None, example="training")
    labels: dict[str, str] = field("Kubernetes labels.", factory=dict)
    annotations: dict[str, str] = field("Kubernetes annotations.", factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_server_fields(cls, data: object) -> object:
        return _without(data, _SERVER_FIELDS)


_SERVER_FIELDS = frozenset(
    {
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generateName",
        "generation",
        "managedFields",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
        "uid",
    }
)


class BagelDataset(SpecModel):
    """One resource, checked. Make it with `from_yaml`, `from_mapping` or `load_dataset`."""

    api_version: Literal["bagelplane.io/v1alpha1"] = field("Version of the API.", example=API_VERSION)
    kind: Literal["BagelDataset"] = field("Kind of the resource.", example=KIND)
    metadata: Metadata = field("Name and labels.")
    spec: DatasetSpec = field("What to train on.")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_status(cls, data: object) -> object:
        return _without(data, frozenset({"status"}))

    @classmethod
    def from_yaml(cls, text: str, source: str = "resource") -> Self:
        """Parse one YAML document, called `source` in messages. Raises SpecError that lists every problem."""
        data, lines = read_yaml(text, source)
        return cls._checked(data, source, lines)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], source: str = "resource") -> Self:
        """The same from parsed data, as an API server gives it. Raises SpecError."""
        return cls._checked(data, source, {})

    @classmethod
    def _checked(cls, data: object, source: str, lines: Mapping[tuple[str | int, ...], int]) -> Self:
        try:
            return cls.model_validate(data, by_alias=True, by_name=False)
        except ValidationError as error:
            raise InvalidDatasetError(source, problems_of(error, cls, lines)) from None

    def to_mapping(self) -> dict[str, Any]:
        """Plain data as in YAML, defaults spelt out; `from_mapping` gives an equal resource back."""
        return self.model_dump(mode="json", exclude_none=True)


def load_dataset(path: str | Path) -> BagelDataset:
    """Read and check one resource file. Raises SpecError, also for a file that cannot be read."""
    source = str(path)
    try:
        if Path(path).is_dir():
            fix = "give the path of the resource file"
            raise InvalidDatasetError(source, [Problem((), "is a folder", fix=fix)])
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        problem = Problem((), f"is no UTF-8 text (byte {error.start})", fix="save it as UTF-8")
        raise InvalidDatasetError(source, [problem]) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        problem = Problem((), f"cannot be read: {reason}", fix="check the path and its permissions")
        raise InvalidDatasetError(source, [problem]) from None
    return BagelDataset.from_yaml(text, source)


# --- what is asked of a checked resource ----------------------------------------------------------


def refuse_unsupported(
    dataset: BagelDataset, source: str = "resource", types: Sequence[str] | None = None
) -> None:
    """Raise SpecError for what the model has and this release does not run yet, one line each.

    `types`: the group types there are, where that is known.
    """
    spec = dataset.spec
    problems = []
    if spec.storage.cache is not None:
        loc = ("spec", "storage", "cache")
        problems.append(Problem(loc, "is set, this release keeps no cache yet", fix="remove it"))
    for index, group in enumerate(spec.groups):
        if types is not None and group.type not in types:
            near = nearest(group.type, types)
            fix = f"did you mean `{near}`?" if near else "install the package that registers it"
            what = f"is no registered type ({', '.join(types)})"
            problems.append(Problem(("spec", "groups", index, "type"), what, show(group.type), fix))
    if problems:
        raise InvalidDatasetError(source, problems)


def stream_spec(dataset: BagelDataset) -> dict[str, Any]:
    """All of a resource that determines the stream, as in YAML.

    Where things are stored and how the sidecar runs are left out. So are values equal to their default, so
    that a field added in a later release leaves old hashes as they are; defaults therefore never change
    within a version of the API (a test holds them).
    """
    return dataset.spec.model_dump(
        mode="json",
        include={
            "profile": True,
            "tokenizer": True,
            "groups": True,
            "budgets": True,
            "conditioning": True,
            "model": True,
            "sharding": True,
            "images": True,
        },
        exclude={"budgets": {"flex_block_size"}},
        exclude_defaults=True,
    )


def spec_hash(dataset: BagelDataset) -> str:
    """SHA-256 (64 hex digits) of all that determines the stream; a snapshot belongs to one such hash."""
    return _digest(stream_spec(dataset))


def config_hash(dataset: BagelDataset) -> str:
    """SHA-256 (64 hex digits) of the whole spec, defaults spelt out: what a sidecar was configured with.

    Unlike `spec_hash` it tells apart where things are stored and how the sidecar runs.
    """
    return _digest(dataset.spec.model_dump(mode="json", exclude_none=True))


def _digest(data: object) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _without(data: object, names: frozenset[str]) -> object:
    if not isinstance(data, Mapping):
        return data
    return {key: value for key, value in data.items() if key not in names}
