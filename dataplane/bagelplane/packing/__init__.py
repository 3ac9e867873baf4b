"""The documented classes `PackedDataset` and `DataConfig`, as drop-in replacements (API.md).

A drop-in replacement of `nemo_automodel.components.datasets.multimodal.packing` on the same engine as the
sidecar, profile `Automodel`. Everything runs in the process and thread that iterates: no pools, no sockets.
The generators are the stream's own; the global ones of `random` and NumPy are lent to group types of the user's
own while these draw, as the peer has it, and are put back as they were. Torch's generator is never used.
"""

from bagelplane.packing.config import DataConfig
from bagelplane.packing.dataset import PackedDataset

__all__ = ["DataConfig", "PackedDataset"]
