"""End to end: the chart installed on a real cluster, and what users do with it."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.training import EXAMPLES


def trainer_files() -> list[Path]:
    """What the trainer's ConfigMap holds: the example's script, and what tells a test of its packs."""
    tests = Path(__file__).parents[1]
    return [EXAMPLES / "train.py", tests / "e2e" / "watch.py", tests / "golden" / "hashing.py"]
