"""All fields of the resource, one after the other, for tables and schemas that are made from the models."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from annotated_types import Ge, Le
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from bagelplane.spec import BagelDataset
from bagelplane.spec_errors import SpecModel, child_model
from bagelplane.spec_values import parse_quantity

_SHOWN_LIMIT = 100_000  # larger ones only keep numbers within 64 bits and would fill the table with digits
_PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """What a person must know of one field. `path` is as in `spec.groups[].weight`."""

    path: str
    kind: str
    default: str
    """As written in YAML; "required" where there is none, "" where the parts have defaults of their own."""
    unit: str
    description: str
    limits: str
    model: type[SpecModel] | None
    """The model of a field that has fields of its own."""


def iter_fields(root: type[SpecModel] = BagelDataset, prefix: str = "") -> Iterator[FieldDoc]:
    """Every field below `root`, parents before their parts, in the order of the models."""
    for name, info in root.model_fields.items():
        child = child_model(info.annotation)
        kind = _type_text(info.annotation, info.metadata)
        path = f"{prefix}.{info.alias or name}".lstrip(".") + ("[]" if kind.startswith("list") else "")
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        yield FieldDoc(
            path=path,
            kind=kind,
            default=_default_text(info),
            unit=str(extra.get("x-unit", "")),
            description=info.description or "",
            limits=_limits_text(info.metadata),
            model=child,
        )
        if child is not None:
            yield from iter_fields(child, path)


def _type_text(annotation: Any, metadata: Sequence[object]) -> str:
    if any(isinstance(item, BeforeValidator) and item.func is parse_quantity for item in metadata):
        return "quantity"
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _type_text(arguments[0], annotation.__metadata__)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_text(part, ()) for part in arguments if part is not type(None))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple and child_model(arguments[0]) is None:
        plural = f"{_PLAIN[arguments[0]]}s" if arguments[0] in _PLAIN else _type_text(arguments[0], ())
        return f"list of {plural}"
    return {tuple: "list of mappings", dict: "mapping"}.get(origin) or _PLAIN.get(annotation, "mapping")


def _default_text(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=False)
    if info.default_factory is not None:
        return ""
    if default is None:
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _limits_text(metadata: Sequence[object]) -> str:
    low = next((item.ge for item in metadata if isinstance(item, Ge)), None)
    high = next((item.le for item in metadata if isinstance(item, Le)), None)
    if low is None:
        return ""
    if isinstance(high, (int, float)) and high <= _SHOWN_LIMIT:
        return f"{low} to {high}"
    return f"at least {low}"
