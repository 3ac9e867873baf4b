"""The form in which recorded streams are kept: small values as they are, arrays as shape, dtype and digest.

Both the recorder (which runs in the peer's environment) and every golden test describe a yielded pack with
this one function, so a recording and a test cannot disagree about what is compared. Needs NumPy alone: a torch
tensor is recognised by its `numpy` method, so this module never imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np


def describe(value: object) -> Any:
    """Turn a yielded value into its golden JSON form.

    Arrays and tensors become `{"dtype", "shape", "sha256"}`, the digest being taken over the elements in C
    order. Mappings, lists and tuples are walked (tuples become lists, as JSON has them); NumPy scalars become
    Python ones. Anything else that JSON does not know is a TypeError.
    """
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        contiguous = np.ascontiguousarray(value)
        digest = hashlib.sha256(contiguous.tobytes()).hexdigest()
        return {"dtype": str(value.dtype), "shape": list(value.shape), "sha256": digest}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a pack holds a {type(value).__name__}, which the golden form does not know")


def digest(description: object) -> str:
    """SHA-256 of a described value, as a recording holds it or as `describe` gives it."""
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def differences(got: object, expected: object, where: str = "pack") -> list[str]:
    """Say where two described values differ, one line each, keys in order; empty when they agree."""
    if isinstance(got, dict) and isinstance(expected, dict):
        if set(got) == {"dtype", "shape", "sha256"} == set(expected):
            return [] if got == expected else [f"{where}: got {got}, expected {expected}"]
        lines = []
        if list(got) != list(expected):
            lines.append(f"{where}: got keys {list(got)}, expected {list(expected)}")
        for key in [key for key in expected if key in got]:
            lines += differences(got[key], expected[key], f"{where}.{key}")
        return lines
    if isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        return [
            line
            for index, (left, right) in enumerate(zip(got, expected, strict=True))
            for line in differences(left, right, f"{where}[{index}]")
        ]
    if type(got) is type(expected) and got == expected:
        return []
    return [f"{where}: got {got!r}, expected {expected!r}"]
