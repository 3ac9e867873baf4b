"""Where `Automodel` and `Strict` part, as one policy object that the planner asks."""

from __future__ import annotations

from typing import Protocol


class Profile(Protocol):
    """The decisions of packing that differ between profiles."""

    name: str

    def fits_sample_budget(self, size: int, limit: int, *, mandatory: bool) -> bool:
        """Whether a sample of `size` tokens may be packed at all under `maxTokensPerSample`."""
        ...


class AutomodelProfile:
    """What NVIDIA NeMo Automodel's packer does, faults included."""

    name = "Automodel"

    def fits_sample_budget(self, size: int, limit: int, *, mandatory: bool) -> bool:
        return size < limit if mandatory else size <= limit


AUTOMODEL = AutomodelProfile()
