"""The short form of `python -m tests.soak.kills`; `make soak` has 200 rounds of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.kills import run_kills


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "rounds"), [(2, 20), (8, 6)])
def test_kills_at_random_moments_leave_the_streams_as_they_are(
    tmp_path: Path, ranks: int, rounds: int
) -> None:
    print(f"\n{run_kills(tmp_path, ranks=ranks, rounds=rounds)}")
