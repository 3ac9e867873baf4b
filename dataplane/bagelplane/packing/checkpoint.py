"""Checkpoint files of Automodel: what its `PackedDataset` said of itself, bare or inside a StatefulDataLoader's state.

Such files are pickles. They are read by torch with `weights_only`, which builds nothing but tensors, plain values and
(allowed here by name) NumPy arrays; a file that asks for more is refused.
"""

from __future__ import annotations

import codecs
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core import multiarray

from bagelplane.packing.state import StateError

_ALLOWED: list[Any] = [
    np.ndarray,
    np.dtype,
    np.dtypes.UInt32DType,
    codecs.encode,
    multiarray._reconstruct,  # no public name; what pickles of arrays ask for
    (multiarray._reconstruct, "numpy.core.multiarray._reconstruct"),  # as NumPy 1 called it
]
_FORBIDDEN = re.compile(r"GLOBAL ([\w.]+)")


@dataclass(frozen=True, slots=True)
class RankCheckpoint:
    """One rank's states: of its iterator in the process, or of each worker of its DataLoader."""

    path: Path
    num_workers: int
    """As the DataLoader counts them; 0: read in the process."""
    workers: tuple[Mapping[str, Any], ...]
    """`PackedDataset.state_dict()` of each."""
    next_worker: int
    """Whose pack comes next."""
    steps_since: int
    """Packs that the trainer has taken since these states were: torchdata goes past them anew."""


def read_checkpoint(path: Path) -> RankCheckpoint:
    """Read and take apart one rank's file. Raises StateError for a file that is none, or not to be trusted."""
    return take_apart(_load(path), path)


def _load(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_ALLOWED), warnings.catch_warnings():
            # Of other protocols than its own torch says that it may not read them: then it raises.
            warnings.simplefilter("ignore", UserWarning)
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked = _FORBIDDEN.search(str(error))
        if asked is None:
            raise _unreadable(path, "no pickle of values alone") from None
        raise StateError(
            f"{path} is not read: it asks for more than values",
            got=f"a pickle that calls {asked[1]}",
            expected="tensors, NumPy arrays, numbers, texts, lists and mappings",
            fix="use the file that the trainer saved of its data loader; do not load it by other means",
        ) from None
    except (
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
        IndexError,
        AttributeError,
        TypeError,
    ) as error:
        raise _unreadable(path, str(error).partition("\n")[0] or type(error).__name__) from None


def _unreadable(path: Path, cause: str) -> StateError:
    return StateError(
        f"{path} cannot be read as a checkpoint",
        got=cause[:200],
        expected="what torch.save wrote",
        fix="give the file that the trainer saved of its data loader, one for each rank",
    )


def take_apart(state: Any, path: Path) -> RankCheckpoint:
    """The states in one rank's checkpoint: `_snapshot` is of a loader with workers, `dataset_state` of one without."""
    if not isinstance(state, Mapping):
        raise _no_state(path, f"a {type(state).__name__}")
    try:
        if "_snapshot" in state:
            return _of_workers(state, path)
        if "dataset_state" in state:
            return RankCheckpoint(path, 0, (_dataset_state(state),), 0, 0)
        if "grouped_dataset_states" in state:
            return RankCheckpoint(path, 0, (state,), 0, 0)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(
            f"the loader's state in {path} cannot be read",
            got=f"{type(error).__name__}: {error}",
            expected="what torchdata's StatefulDataLoader gave",
            fix="use another checkpoint",
        ) from None
    inner = list(state.values())
    if len(inner) == 1 and isinstance(inner[0], Mapping):
        return take_apart(inner[0], path)
    raise _no_state(path, ", ".join(map(repr, state))[:200] or "an empty mapping")


def _no_state(path: Path, got: str) -> StateError:
    return StateError(
        f"{path} holds no state of a data loader",
        got=got,
        expected="the state of a PackedDataset, or of a StatefulDataLoader around one",
        fix="give the data loader's file, not the model's or the optimizer's",
    )


def _of_workers(state: Mapping[str, Any], path: Path) -> RankCheckpoint:
    snapshot = state["_snapshot"]
    count = int(snapshot["_main_snapshot"]["_num_workers"])
    workers: Sequence[Mapping[str, Any]] = [
        _dataset_state(snapshot["_worker_snapshots"][f"worker_{number}"]) for number in range(count)
    ]
    next_worker = (int(snapshot["_last_yielded_worker_id"]) + 1) % count
    return RankCheckpoint(path, count, tuple(workers), next_worker, int(state["_steps_since_snapshot"]))


def _dataset_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    found = state["dataset_state"]
    if not isinstance(found, Mapping):
        raise TypeError("the data set gave no state")
    return found
