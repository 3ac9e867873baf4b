"""The short form of `python -m tests.soak.memory`; `make soak` takes 200,000 packs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.memory import Figures, Soak, run_soak, write_chart


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_descriptors_and_threads_stay_what_they_are_over_many_packs(tmp_path: Path) -> None:
    soak = run_soak(tmp_path, packs=5000)
    print(f"\n{soak}")
    assert soak.faults() == []


def test_growth_of_any_kind_is_a_fault_and_the_curve_a_picture(tmp_path: Path) -> None:
    packs = list(range(100, 10_100, 100))
    flat = [Figures(100 << 20, 50 << 20, 10, 3)] * 100
    grows = [Figures((100 << 20) + number * 2**17, 50 << 20, 10, 3) for number in range(100)]
    leaks = [Figures(100 << 20, 50 << 20, 10 + number // 30, 3) for number in range(100)]
    soak = Soak(packs, {"flat": flat, "grows": grows, "leaks": leaks}, 60.0)
    assert soak.faults() == [
        f"grows: resident memory grew by {soak.growth('grows'):.1%}", "leaks: descriptors grew from 10 to 11"
    ]  # fmt: skip
    assert "10000 packs in 60 s" in str(soak)
    write_chart(soak, tmp_path / "out" / "memory.png")
    assert (tmp_path / "out" / "memory.png").read_bytes().startswith(b"\x89PNG")
