"""Where `Automodel` and `Strict` part: each line of STREAM's table as a named policy, both profiles in one place.

Planner, sources and stream have one code path and ask the profile at the points where the two differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Profile:
    """The decisions that differ. Every default is Automodel's."""

    name: Literal["Automodel", "Strict"]

    # Packing.
    keeps_what_does_not_fit: bool = False
    """A sample that does not fit while the buffer is full opens the next pack; otherwise it is lost."""
    mandatory_may_overflow: bool = True
    """Mandatory samples are put in whatever the pack's length; otherwise one that does not fit has to wait."""
    mandatory_below_limit: bool = True
    """Mandatory samples have to be smaller than `maxTokensPerSample`; otherwise that size itself is allowed."""
    always_all_keys: bool = False
    """Keys of which a pack has nothing are there and empty; otherwise they are absent."""

    # Images.
    plan_is_pure: bool = False
    """An image that does not decode takes its sample out of its pack; otherwise its row is dropped as it is
    drawn, and all that follows moves."""
    mends_pictures: bool = False
    """Orientation applied, deep greys scaled, alpha on white, truncated pixels refused."""
    limits_pixels: bool = False
    """Images above `images.maxPixels` are refused from their header."""

    # Rows.
    reads_other_shapes: bool = False
    """Captions as a list or one text, images as {bytes, path}, one instruction a step, lines that say "None" for
    no image; counts of row groups come from footers alone."""
    images_match_text: bool = False
    """Turns have to place every image of their line, and no more; names have to stay below the image folder."""

    def fits_sample_budget(self, size: int, limit: int, *, mandatory: bool) -> bool:
        """Whether a sample of `size` tokens may be packed at all under `maxTokensPerSample`."""
        return size < limit if mandatory and self.mandatory_below_limit else size <= limit


AUTOMODEL = Profile("Automodel")
"""What NVIDIA NeMo Automodel's packer does, faults included."""

STRICT = Profile(
    "Strict",
    keeps_what_does_not_fit=True,
    mandatory_may_overflow=False,
    mandatory_below_limit=False,
    always_all_keys=True,
    plan_is_pure=True,
    mends_pictures=True,
    limits_pixels=True,
    reads_other_shapes=True,
    images_match_text=True,
)
"""The same idea with those faults mended: nothing lost without a count, nothing wrong trained on."""

PROFILES = {profile.name: profile for profile in (AUTOMODEL, STRICT)}
