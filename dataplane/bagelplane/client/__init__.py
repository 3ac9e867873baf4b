"""The trainer's side: takes packs out of shared memory and hands them over as the model's batches.

- `PackedLoader`: torch tensors, with `state_dict` and `load_state_dict`.
- `NumpyReader`: the same as NumPy arrays, and raw packs; no torch. `Conversion` says in which form.

What must not happen here: no Pillow, pyarrow, fsspec or pydantic, directly or indirectly (a trainer's image
has NumPy, msgpack and torch), and no decoding. Torch is imported by `loader` and what that alone imports
(`agreement`, `devices`, `tensors`), so the names below load when first asked for.

The trainer's thread that iterates owns everything: the socket, the mapping of the ring and the state. Where packs are
prefetched, one more thread converts what that one has read, and touches nothing else (`ahead`). What was handed over
belongs to the caller and refers to nothing of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagelplane.client.conversion import Conversion
from bagelplane.client.reader import NumpyReader

if TYPE_CHECKING:
    from bagelplane.client.loader import PackedLoader

__all__ = ["Conversion", "NumpyReader", "PackedLoader"]


def __getattr__(name: str) -> Any:
    if name == "PackedLoader":
        try:
            from bagelplane.client.loader import PackedLoader  # noqa: PLC0415  (loads torch)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(
                "PackedLoader needs torch, which is not installed here. Fix: install torch, or use "
                "bagelplane.client.NumpyReader, which gives the same as NumPy arrays",
                name="torch",
            ) from None
        return PackedLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
