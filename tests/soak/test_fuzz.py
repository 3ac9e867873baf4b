"""The short form of `python -m tests.soak.fuzz`; `make soak` has a million inputs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.soak import fuzz
from tests.soak.fuzz import FoundError, Fuzzer


@pytest.mark.timeout(600)
def test_damaged_and_made_up_input_gives_an_error_of_ours_or_a_valid_value() -> None:
    outcome = fuzz.fuzz(50_000)
    print(f"\n{outcome}")
    for name in fuzz.TARGETS:  # of both kinds, or the changes do not reach what they are meant for
        assert outcome.refused[name] > 100, name
        assert outcome.accepted[name] > 10, name


def test_what_is_found_can_be_run_again_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def target(_: Fuzzer, draws: random.Random) -> None:
        seen.append(draws.random())
        if seen[-1] > 0.99:
            raise ZeroDivisionError("made to fail")

    monkeypatch.setattr(fuzz, "TARGETS", dict.fromkeys(fuzz.TARGETS, target))
    with pytest.raises(
        FoundError, match=r"ZeroDivisionError: made to fail; again by: .* --seed 5 --only (\d+)"
    ) as caught:
        Fuzzer(tmp_path).run(10_000, 5)
    number, drawn = len(seen) - 1, seen[-1]
    assert str(caught.value).endswith(f"--only {number}")
    with pytest.raises(FoundError):
        Fuzzer(tmp_path).run(1, 5, first=number)
    assert seen[-1] == drawn
