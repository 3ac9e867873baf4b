"""The CustomResourceDefinition, from the models of the resource and of its status.

A structural schema of API version v1: every field typed, described and bounded, unknown ones pruned. What the
API server refuses by it the models refuse too, with better words; `rule_problems` hold in the models alone.

Defaults are in the schema, so a stored resource has them spelt out. That moves no hash: both are made of the
checked resource. An empty value (`region:`) is a field left out, there as here.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import AfterValidator, WithJsonSchema
from pydantic.fields import FieldInfo

from bagelplane.spec import API_VERSION, KIND, BagelDataset, Metadata
from bagelplane.spec_errors import SpecModel
from bagelplane.spec_status import DatasetStatus
from bagelplane.spec_values import MAX_INT64, TextPattern

Schema = dict[str, Any]

GROUP, VERSION = API_VERSION.split("/")
PLURAL = "bageldatasets"
CRD_NAME = f"{PLURAL}.{GROUP}"

_KINDS: dict[object, Schema] = {
    int: {"type": "integer", "format": "int64"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
}
_LIST_KEYS = ("name", "type", "pod")
"""Fields that tell the entries of a list apart, so that tools can merge lists entry by entry."""


def build_crd() -> Schema:
    """The CustomResourceDefinition as plain data, keys in the order that people write them."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["bgds"],
                "categories": ["bagelplane"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": _build_columns(),
                    "schema": {"openAPIV3Schema": _build_root()},
                }
            ],
        },
    }


def _build_root() -> Schema:
    """The resource with its status; of the metadata the API server lets a schema restrict the name alone."""
    root = build_object(BagelDataset)
    properties = root["properties"]
    for name in ("apiVersion", "kind"):
        properties[name].pop("enum")
    properties["metadata"] = {
        "type": "object",
        "properties": {"name": build_field(Metadata.model_fields["name"])},
    }
    status = build_object(DatasetStatus)
    properties["status"] = {"description": "What the operator reports.", **status}
    description = "A data set mix for BAGEL-style training, served to pods that carry its label."
    return {"description": description, **root, "required": ["spec"]}


def _build_columns() -> list[Schema]:
    ready = '.status.conditions[?(@.type=="Ready")].status'
    columns = [
        ("Ready", "string", ready, "Whether pods can use it."),
        ("Groups", "integer", ".status.groups", "Number of groups."),
        ("Attached", "integer", ".status.attached", "Ranks that are connected now."),
        ("Step", "integer", ".status.step", "Lowest next step of the connected ranks."),
        ("Packs/s", "number", ".status.packsPerSecond", "Packs taken by all ranks."),
        ("Fill", "number", ".status.fillRatio", "Tokens of a pack against maxTokens."),
        ("Age", "date", ".metadata.creationTimestamp", "Time since it was made."),
    ]
    keys = ("name", "type", "jsonPath", "description")
    return [dict(zip(keys, column, strict=True)) for column in columns]


# --- from models to schemas -----------------------------------------------------------------------


def build_object(model: type[SpecModel]) -> Schema:
    """The schema of a model and of all below it."""
    fields = {info.alias or name: info for name, info in model.model_fields.items()}
    required = [name for name, info in fields.items() if info.is_required()]
    properties = {name: build_field(info) for name, info in fields.items()}
    return {"type": "object", "properties": properties} | ({"required": required} if required else {})


def build_field(info: FieldInfo) -> Schema:
    """The schema of one field: its description with the unit, default, limits."""
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    unit = f" Unit: {extra['x-unit']}." if "x-unit" in extra else ""
    schema = {"description": f"{info.description}{unit}", **_build_type(info.annotation, info.metadata)}
    if info.is_required():
        return schema
    default = _default_of(info, schema)
    return schema | ({"nullable": True} if default is None else {"default": default})


def _default_of(info: FieldInfo, schema: Schema) -> object:
    """A field with parts gets an empty default where that makes the API server fill in the parts' defaults."""
    if info.default_factory is None:
        return info.get_default()
    parts = schema.get("properties", {}).values()
    return {} if any("default" in part for part in parts) else None


def _build_type(annotation: Any, metadata: Sequence[object]) -> Schema:
    for item in metadata:
        if isinstance(item, WithJsonSchema) and item.json_schema is not None:
            return dict(item.json_schema)
        if isinstance(item, AfterValidator) and isinstance(item.func, TextPattern):
            return item.func.json_schema()
    arguments = typing.get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _build_type(arguments[0], annotation.__metadata__)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (part for part in arguments if part is not type(None))
        return _build_type(annotation, metadata)
    schema = _build_plain_type(annotation)
    return schema | _build_limits(schema["type"], metadata)


def _build_plain_type(annotation: Any) -> Schema:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _build_type(arguments[1], ())}
    if origin is tuple and typing.get_origin(arguments[0]) is Literal:
        return {"type": "array", "items": _build_plain_type(arguments[0]), "x-kubernetes-list-type": "atomic"}
    if origin is tuple:
        items = build_object(arguments[0])
        key = next(name for name in _LIST_KEYS if name in items["required"])
        merging = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
        return {"type": "array", "items": items, **merging}
    if annotation in _KINDS:
        return dict(_KINDS[annotation])
    return build_object(annotation)


def _build_limits(kind: str, metadata: Sequence[object]) -> Schema:
    """The bound of 64 bits is the integer format's: as a number in JSON it would not be exact."""
    noun = {"array": "Items", "object": "Properties", "string": "Length"}.get(kind, "")
    limits: Schema = {}
    for item in metadata:
        if isinstance(item, Ge):
            limits["minimum"] = item.ge
        elif isinstance(item, Le) and item.le != MAX_INT64:
            limits["maximum"] = item.le
        elif isinstance(item, MinLen):
            limits[f"min{noun}"] = item.min_length
        elif isinstance(item, MaxLen):
            limits[f"max{noun}"] = item.max_length
    return limits
