"""The group types that exist: three of our own, and those that users register.

A type of the user's own is a class with the constructor `(dataset_name, *, tokenizer, local_rank, world_size,
num_workers, **options)` whose iterator yields finished samples (docs/guides/custom-groups.md). It is found by
`register_group_type` or by the entry point group `bagelplane.groups`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from bagelplane.errors import SpecError
from bagelplane.sources import conversation, edit, text_to_image
from bagelplane.sources.config import DatasetConfig, GroupConfig
from bagelplane.sources.group import UnitReader
from bagelplane.sources.index import DatasetIndex
from bagelplane.storage import Storage

ENTRY_POINT_GROUP = "bagelplane.groups"


@dataclass(frozen=True, slots=True)
class StoredType:
    """A group type whose rows are planned first and decoded later."""

    list_units: Callable[[GroupConfig, Storage, random.Random, DatasetIndex | None], list[Any]]
    open_reader: Callable[[GroupConfig, Storage, DatasetIndex | None], UnitReader]
    """Both take the index where there is one: it is told of the objects, and asked for what it knows of them."""
    look: Callable[[DatasetConfig, Storage, int], int]
    """Opens a data set's first file and raises DataError if it is of another kind: each of its rows would be
    dropped. Gives the number of units, exact below the number that is enough."""


STORED_TYPES = {
    "t2i_pretrain": StoredType(text_to_image.list_units, text_to_image.TextToImageReader, text_to_image.look),
    "unified_edit": StoredType(edit.list_units, edit.EditReader, edit.look),
    "vlm_sft": StoredType(conversation.list_units, conversation.ConversationReader, conversation.look),
}
_registered: dict[str, type] = {}


def register_group_type(name: str, group_class: type) -> None:
    """Make a class known as group type `name`. Raises SpecError for a name that is taken."""
    if name in STORED_TYPES or _registered.get(name, group_class) is not group_class:
        raise SpecError(f"group type {name} exists already", fix="register the class under another name")
    _registered[name] = group_class


def registered_types() -> tuple[str, ...]:
    """All names that a group's `type` may have, sorted."""
    installed = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted({*STORED_TYPES, *_registered, *installed}))


def custom_type(name: str) -> type:
    """The class of a registered type. Raises SpecError with the names that exist."""
    if name in _registered:
        return _registered[name]
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            loaded: type = point.load()
            return loaded
    raise SpecError(
        f"unknown group type {name}",
        expected=f"one of {', '.join(registered_types())}",
        fix="correct the name, or register the type",
    )
