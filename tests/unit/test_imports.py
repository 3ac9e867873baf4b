"""Streams are made without torch, packs are put together without what a sidecar has: run, not only imported."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import bagelplane
from tests.unit.test_house import NOT_IN_A_TRAINER, import_without

ROOT = Path(__file__).parents[2]
TORCH_FREE = ("engine", "shm", "sidecar", "sources", "storage")

REFUSE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}: taken away by the test", name=name)
absent = set(sys.argv[1].split())
sys.meta_path.insert(0, Absent())
"""
MAKE_PACKS = """
import contextlib
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology
from tests.golden.recordings import load_recording, next_batch, resource_of
for name in ("odd_default", "b_masks_interp"):
    recording = load_recording(name)
    topology = Topology(0, len(recording.ranks), 0)
    with contextlib.closing(open_rank_stream(resource_of(recording), topology, decode_threads=2)) as stream:
        for step in range(3):
            recording.check(0, step, next_batch(stream)[1])
assert "torch" not in sys.modules
"""
ASSEMBLE = """
import numpy as np
from bagelplane.client import NumpyReader
from bagelplane.engine.layout import assemble
from bagelplane.engine.pack import Pack
empty = np.empty(0, np.int64)
names = ("packed_text_ids packed_text_indexes packed_position_ids packed_latent_position_ids packed_timesteps "
         "packed_vae_token_indexes packed_label_ids mse_loss_indexes").split()
scalars = {"sequence_length": 6, "sample_lens": [6], "split_lens": [6], "attn_modes": ["full"], "use_flex": False,
           "sample_split_counts": [1], "max_num_tokens": 8, "patchified_vae_latent_shapes": [(2, 2)],
           "batch_data_indexes": [], "vae_normalisation": None, "vit_normalisation": None}
pack = Pack(0, scalars, {name: empty for name in names}, [(32, 32)], [0], [], 14, {})
batch = assemble(pack, [np.zeros((32, 32, 3), np.uint8)])
assert batch["padded_images"].shape == (1, 3, 32, 32) and (batch["padded_images"] == -1).all()
"""


def run_without(absent: list[str], program: str) -> None:
    command = [sys.executable, "-W", "error", "-c", REFUSE + program, " ".join(absent)]
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=90, check=False, cwd=ROOT, env=_environment()
    )
    assert finished.returncode == 0, finished.stderr


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}


@pytest.mark.parametrize("package", TORCH_FREE)
def test_every_module_of_the_sidecars_side_loads_without_torch(package: str) -> None:
    [root] = bagelplane.__path__
    found = pkgutil.walk_packages([f"{root}/{package}"], f"bagelplane.{package}.")
    import_without([f"bagelplane.{package}", *(module.name for module in found)], ["torch", "torchdata"])


def test_recorded_packs_are_made_without_torch() -> None:
    run_without(["torch", "torchdata"], MAKE_PACKS)


def test_a_pack_is_put_together_with_numpy_and_msgpack_alone() -> None:
    run_without([*NOT_IN_A_TRAINER, "torch"], ASSEMBLE)
