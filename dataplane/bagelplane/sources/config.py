"""A group as both faces of the project describe it: the resource and the documented classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bagelplane.engine.profile import AUTOMODEL, Profile
from bagelplane.engine.samples import FrameSampler, ImageTransform


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """One data set of a group.

    `uri` is the folder of Parquet files; `jsonl_uri` and `images_uri` the file of conversations and the folder
    that its image names are joined to. `row_groups` gives the number of row groups by file (unified_edit);
    None: the files' own footers are asked. `num_used` files or lines are used; None: all.
    """

    name: str
    uri: str = ""
    jsonl_uri: str = ""
    images_uri: str = ""
    row_groups: dict[str, int] | None = None
    num_used: int | None = None
    profile: Profile = AUTOMODEL


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """One weighted group. `type` names its source; `options` are those of a registered type of the user's own."""

    name: str
    type: str
    weight: float
    mandatory: bool
    datasets: tuple[DatasetConfig, ...]
    image_transform: ImageTransform | None = None
    vit_image_transform: ImageTransform | None = None
    frames: FrameSampler = field(default_factory=FrameSampler)
    shuffle_lines: bool = False
    shuffle_seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    profile: Profile = AUTOMODEL
