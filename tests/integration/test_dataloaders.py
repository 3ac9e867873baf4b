"""Trainers that insist on a DataLoader, and checkpoints that they write, get the loader's own packs and place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from bagelplane.client import PackedLoader
from bagelplane.engine.layout import assemble
from bagelplane.errors import SpecError
from tests.integration.fake_sidecar import FakeSidecar, make_pack, same

# torchdata asks torch for something that torch has come to call deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
TIMEOUT_SECONDS = 30.0
PACKS = 5


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "BAGELPLANE_GENERATION"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as stack:
        sidecar = FakeSidecar(tmp_path)
        stack.callback(sidecar.crash)

        def connect() -> PackedLoader:
            return stack.enter_context(PackedLoader(tmp_path, timeout_seconds=TIMEOUT_SECONDS))

        yield connect


def first_of(packs: list[Any]) -> Any:
    """A collate function of one pack a batch."""
    [pack] = packs
    return pack


def is_pack(batch: dict[str, Any], step: int) -> bool:
    return same(batch, assemble(*make_pack(step)))


@pytest.mark.parametrize("wrapped", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize(
    "options",
    [{"batch_size": None}, {"batch_size": 1, "collate_fn": first_of}],
    ids=["no batches", "batches of one"],
)
def test_a_dataloader_without_workers_gives_the_packs_as_they_are(
    connect: Any, wrapped: Any, options: dict[str, Any]
) -> None:
    packs = iter(wrapped(connect(), **options))
    assert [is_pack(next(packs), step) for step in range(PACKS)] == [True] * PACKS


def test_each_state_of_a_stateful_dataloader_continues_with_the_pack_after_it(connect: Any) -> None:
    loader = StatefulDataLoader(connect(), batch_size=None)
    packs, states = iter(loader), []
    for step in range(PACKS):
        assert is_pack(next(packs), step)
        states.append(loader.state_dict())
    loader.dataset.close()
    for step, state in enumerate(states):
        restored = StatefulDataLoader(connect(), batch_size=None)
        restored.load_state_dict(state)
        packs = iter(restored)
        assert [is_pack(next(packs), step + 1 + more) for more in range(2)] == [True, True]
        restored.dataset.close()


def test_a_state_goes_through_torch_save_and_a_load_of_weights_only(connect: Any, tmp_path: Path) -> None:
    loader = connect()
    for _ in range(3):
        next(loader)
    torch.save({"step": 3, "data": loader.state_dict()}, tmp_path / "checkpoint.pt")
    loader.close()
    restored = connect()
    restored.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["data"])
    assert is_pack(next(restored), 3)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_dataloader_with_workers_is_told_to_have_none(connect: Any) -> None:
    loader = DataLoader(connect(), batch_size=None, num_workers=1)
    with pytest.raises(SpecError, match="num_workers=0"):
        next(iter(loader))
