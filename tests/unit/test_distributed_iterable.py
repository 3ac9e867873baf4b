"""`DistributedIterableDataset` shares paths out as Automodel's does, and keeps positions and counts by worker."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from bagelplane.distributed_iterable import DistributedIterableDataset

FIXTURE = json.loads((Path(__file__).parents[1] / "fixtures/peer/distributed_iterable.json").read_text())
IDS = [f"{case['kind']}{len(case['paths'])}-{case['rank']}of{case['world_size']}" for case in FIXTURE]


class Paths(DistributedIterableDataset):
    """Yields its worker's paths once, with the worker's id."""

    def __init__(self, paths: list[Any] | None, **place: int) -> None:
        super().__init__("made", **place)
        self.data_paths = paths

    def get_data_paths(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self.data_paths or []

    def __iter__(self) -> Iterator[Any]:
        found = self.get_data_paths_per_worker()
        assert found is not None
        paths, worker_id = found
        yield from ((worker_id, path) for path in paths)


def as_lists(value: Any) -> Any:
    return json.loads(json.dumps(value))


def of_case(case: dict[str, Any]) -> Paths:
    paths = [tuple(path) if case["kind"] == "tuple" else path for path in case["paths"]]
    dataset = Paths(
        paths, local_rank=case["rank"], world_size=case["world_size"], num_workers=case["num_workers"]
    )
    dataset.set_epoch(case["seed"])
    return dataset


@pytest.mark.parametrize("case", FIXTURE, ids=IDS)
def test_each_rank_gets_the_paths_that_automodel_gives_it(case: dict[str, Any]) -> None:
    dataset = of_case(case)
    assert as_lists(dataset.data_paths_per_rank) == case["data_paths_per_rank"]
    assert dataset.num_files_per_rank == case["num_files_per_rank"]
    assert as_lists(dataset.get_data_paths_per_worker()) == case["in_process"]


@pytest.mark.parametrize("case", FIXTURE, ids=IDS)
def test_each_worker_gets_the_paths_that_automodel_gives_it(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, workers = of_case(case), []
    for worker_id in range(case["num_workers"]):
        info = SimpleNamespace(id=worker_id, num_workers=case["num_workers"])
        monkeypatch.setattr("bagelplane.distributed_iterable.get_worker_info", lambda info=info: info)
        workers.append(list(dataset))
    in_turn = [row for turn in zip(*workers, strict=True) for row in turn]
    assert as_lists(in_turn) == case["by_workers"]


def test_a_data_loader_gives_its_workers_their_paths() -> None:
    [case] = [
        case for case in FIXTURE if (case["world_size"], case["num_workers"], case["rank"]) == (2, 3, 1)
    ]
    loader = DataLoader(of_case(case), batch_size=None, num_workers=1, timeout=300)
    assert sorted(path for _, path in loader) == sorted(case["data_paths_per_rank"])


def test_defaults_and_attributes_are_the_documented_ones() -> None:
    dataset = DistributedIterableDataset("name")
    assert isinstance(dataset, IterableDataset)
    assert (dataset.dataset_name, dataset.local_rank, dataset.world_size, dataset.num_workers) == (
        "name",
        0,
        1,
        8,
    )
    assert (dataset.data_paths, dataset.data_status) == (None, None)
    assert (dataset.data_paths_per_rank, dataset.num_files_per_rank) == ([], 0)
    assert isinstance(dataset.rng, random.Random)


def test_the_base_class_leaves_paths_and_samples_to_subclasses() -> None:
    dataset = DistributedIterableDataset("name")
    with pytest.raises(NotImplementedError):
        dataset.get_data_paths()
    with pytest.raises(NotImplementedError):
        iter(dataset)


def test_without_paths_nothing_is_shared_out() -> None:
    dataset = Paths(None)
    dataset.set_epoch()
    assert dataset.get_data_paths_per_worker() is None


def test_the_epochs_default_seed_is_42() -> None:
    paths = [f"p{number}" for number in range(20)]
    first, second = Paths(list(paths)), Paths(list(paths))
    first.set_epoch()
    second.set_epoch(42)
    assert first.data_paths_per_rank == second.data_paths_per_rank != paths


def test_each_epoch_begins_again_from_the_sorted_paths() -> None:
    paths = [f"p{number}" for number in range(20)]
    once, often = Paths(list(paths)), Paths(list(reversed(paths)))
    once.set_epoch(3)
    for seed in (1, 2, 3):
        often.set_epoch(seed)
    assert once.data_paths_per_rank == often.data_paths_per_rank
    assert once.data_paths == paths, "the list that was given stays as it is"


def test_no_paths_are_a_value_error_that_names_the_group() -> None:
    with pytest.raises(ValueError, match="made"):
        Paths([]).set_epoch()


def test_fewer_paths_than_ranks_are_a_value_error_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"made.*3.*4"):
        Paths(["a", "b", "c"], world_size=4).set_epoch()


def test_fewer_paths_than_workers_are_a_value_error_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = Paths(["a", "b"])
    dataset.set_epoch()
    monkeypatch.setattr(
        "bagelplane.distributed_iterable.get_worker_info", lambda: SimpleNamespace(id=0, num_workers=3)
    )
    with pytest.raises(ValueError, match=r"made.*2.*3"):
        dataset.get_data_paths_per_worker()


def test_a_dropped_tail_is_a_warning_with_its_size(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Paths(list("abcdefg"), world_size=3).set_epoch()
    assert "made: 1 paths" in caplog.text
    assert caplog.records[0].name == Paths.__module__, "the logger of the subclass's module"


def test_positions_are_copied() -> None:
    status = [[1, 2], [3, 4]]
    dataset = Paths(None)
    dataset.set_data_status(status)
    status[0].append(9)
    assert dataset._get_worker_data_status(0) == [1, 2]
    given = [5, 6]
    dataset._set_worker_resume_data_status(1, given)
    given.append(9)
    saved = dataset.state_dict()
    saved["data_status"][1].append(9)
    assert dataset.state_dict() == {"data_status": [[1, 2], [5, 6]]}


def test_the_list_of_positions_grows_to_the_worker() -> None:
    dataset = Paths(None)
    assert dataset.state_dict() == {"data_status": None}
    dataset._set_worker_resume_data_status(2, [7])
    assert dataset.state_dict() == {"data_status": [None, None, [7]]}
    assert dataset._get_worker_data_status(0) is None, "positions to report are not positions to start from"


def test_a_worker_beyond_the_list_starts_from_the_beginning() -> None:
    dataset = Paths(None)
    dataset.set_data_status([[1]])
    assert dataset._get_worker_data_status(5) is None


@pytest.mark.parametrize("state", [None, {}, {"data_status": None}])
def test_loading_nothing_clears_the_positions(state: Any) -> None:
    dataset = Paths(None)
    dataset.set_data_status([[1]])
    dataset.load_state_dict(state)
    assert dataset.data_status is None
    assert dataset.state_dict() == {"data_status": None}


def test_a_state_survives_json_and_loading() -> None:
    first, second = Paths(None), Paths(None)
    first._set_worker_resume_data_status(1, [4, 2])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second._get_worker_data_status(1) == [4, 2]
    assert second.state_dict() == first.state_dict()


def test_drops_are_logged_three_times_and_then_every_nth(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Paths(None)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 7):
            dataset._log_drop("odd", "row %d of %s", number, "a file", every=2)
    expected = [f"made drop[odd]={count}: row {count} of a file" for count in (1, 2, 3, 4, 6)]
    assert [record.getMessage() for record in caplog.records] == expected


def test_a_drop_may_show_the_exception_at_hand(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Paths(None)
    try:
        raise OSError("the cause")
    except OSError:
        dataset._log_drop("odd", "100% of it", exc_info=True)
    dataset._log_drop("odd", "no exception here", exc_info=True)
    assert "the cause" in caplog.text
    assert caplog.records[1].exc_info in (None, False)
