"""Plans from an index are those from the data, to the bit, for all recorded data and in both profiles."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bagelplane.settings import StreamSettings
from bagelplane.sources.facts import StoredFacts
from bagelplane.spec import BagelDataset
from bagelplane.storage import Storage
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology
from tests.golden.broken_images import make_data
from tests.golden.odd_rows import cases
from tests.golden.recordings import DECLARABLE, load_recording, next_batch, resource_of
from tests.golden.strict_streams import STREAMS
from tests.row_facts import GROUPS, answers, make_index, one_group, told_plan

PROFILES = pytest.mark.parametrize("profile", ["Automodel", "Strict"])
PACKS = 12
Indexed = Callable[..., BagelDataset]


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Indexed:
    """The resource of a recording whose data have an index; made once for each folder of data and profile."""
    made: dict[Any, str] = {}

    def resource(
        name: str, profile: str, root: Path | None = None, *, verify: bool = False, **parts: Any
    ) -> BagelDataset:
        recording = load_recording(name)
        data = root or recording.data
        key = (data, profile, verify, name == "frames")
        if key not in made:
            made[key] = str(tmp_path_factory.mktemp("index"))
            dataset = resource_of(recording, str(data), profile=profile, snapshots={"uri": made[key]})
            report = make_index(dataset, verify=verify)
            assert not report.problems
        return resource_of(recording, str(data), profile=profile, snapshots={"uri": made[key]}, **parts)

    return resource


def plans(
    dataset: BagelDataset, topology: Topology, count: int, *, verify: bool = False
) -> tuple[list[Any], Any]:
    stream = open_rank_stream(dataset, topology, decode_threads=0)
    with contextlib.closing(stream):
        assert stream.index is None or stream.index.coverage.is_whole
        return [told_plan(stream.plan_pack(verify=verify)) for _ in range(count)], stream.state()


def without_index(dataset: BagelDataset) -> BagelDataset:
    return dataset.model_copy(
        update={"spec": dataset.spec.model_copy(update={"snapshots": type(dataset.spec.snapshots)()})}
    )


@PROFILES
@pytest.mark.parametrize("name", DECLARABLE)
def test_plans_and_states_are_the_same_with_an_index(name: str, profile: str, indexed: Indexed) -> None:
    recording, dataset = load_recording(name), indexed(name, profile)
    topology = Topology(0, len(recording.ranks), recording.num_workers)
    expected, state = plans(without_index(dataset), topology, PACKS)
    found, found_state = plans(dataset, topology, PACKS)
    assert found == expected
    assert found_state == state


@pytest.mark.parametrize("name", ["a_default", "d_workers", "odd_tight", "frames"])
def test_packs_made_from_an_index_are_the_recorded_ones(name: str, indexed: Indexed) -> None:
    recording = load_recording(name)
    topology = Topology(0, len(recording.ranks), recording.num_workers)
    with contextlib.closing(
        open_rank_stream(indexed(name, "Automodel"), topology, decode_threads=2)
    ) as stream:
        for step in range(PACKS):
            recording.check(0, step, next_batch(stream)[1])


@PROFILES
@pytest.mark.parametrize("name", ["a_default", "odd_default", "frames"])
def test_no_data_object_is_touched(
    name: str, profile: str, indexed: Indexed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning, and the replay of a buffer, read the index and the tokenizer: folders of data are listed, no more."""
    recording, dataset = load_recording(name), indexed(name, profile)
    touched: list[str] = []
    for method in ("open_binary", "read_bytes"):
        original = getattr(Storage, method)

        def noting(self: Storage, uri: str, *rest: Any, original: Any = original, **options: Any) -> Any:
            touched.append(uri)
            return original(self, uri, *rest, **options)

        monkeypatch.setattr(Storage, method, noting)
    topology = Topology(0, len(recording.ranks), recording.num_workers)
    _, state = plans(dataset, topology, PACKS)
    with contextlib.closing(open_rank_stream(dataset, topology, state=state, decode_threads=0)) as stream:
        stream.skip_to(PACKS + 4, verify=False)
    data = [uri for uri in touched if uri.startswith(str(recording.data))]
    assert set(data) <= {f"{recording.data}/tokenizer.json", f"{recording.data}/edit_info.rel.json"}
    assert touched != data, "the index was read"


@pytest.mark.parametrize("with_index", [True, False])
def test_a_state_goes_on_with_an_index_and_without(with_index: bool, indexed: Indexed) -> None:
    dataset, topology = indexed("odd_tight", "Strict"), Topology(0, 2, 0)
    expected, _ = plans(without_index(dataset), topology, PACKS)
    first, second = (dataset, without_index(dataset)) if with_index else (without_index(dataset), dataset)
    _, state = plans(first, topology, PACKS // 2)
    with contextlib.closing(
        open_rank_stream(second, topology, state=json.loads(json.dumps(state)), decode_threads=0)
    ) as stream:
        assert [told_plan(stream.plan_pack()) for _ in range(PACKS // 2)] == expected[PACKS // 2 :]


@pytest.mark.parametrize("name", ["odd_default", "odd_tight", "frames"])
def test_a_verified_index_knows_the_bad_images_beforehand(
    name: str, indexed: Indexed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Automodel profile plans what decoding on the way would give, and decodes nothing."""
    data = make_data(tmp_path / "damaged")
    dataset, topology = indexed(name, "Automodel", data, verify=True), Topology(0, 2, 0)
    expected, _ = plans(without_index(dataset), topology, PACKS, verify=True)
    unaware, _ = plans(without_index(dataset), topology, PACKS)
    assert [plan[:3] for plan in unaware] != [plan[:3] for plan in expected], "no image matters"
    with monkeypatch.context() as patch:
        patch.setattr("bagelplane.stream.decode_failure", lambda *_: pytest.fail("an image was decoded"))
        found, _ = plans(dataset, topology, PACKS, verify=True)
    assert [plan[:3] for plan in found] == [plan[:3] for plan in expected]
    assert all(opened == [] for *_, opened in found)


def test_bad_images_that_an_index_tells_of_are_written_down_as_if_they_had_been_met(
    indexed: Indexed, tmp_path: Path
) -> None:
    """The index may be gone when a run is planned again: what its packs rest on is the run's own to keep."""
    data = make_data(tmp_path / "damaged")
    dataset, topology = indexed("odd_default", "Automodel", data, verify=True), Topology(0, 2, 0)
    told: dict[str, str] = {}
    with contextlib.closing(
        open_rank_stream(dataset, topology, decode_threads=1, on_bad_images=told.update)
    ) as stream:
        for _ in range(PACKS):
            pack, _ = next_batch(stream)
            assert pack.state["known_bad"].items() <= told.items()
    assert told
    expected, _ = plans(without_index(dataset), topology, PACKS, verify=True)
    stream = open_rank_stream(without_index(dataset), topology, known_bad=told, decode_threads=0)
    with contextlib.closing(stream):
        found = [told_plan(stream.plan_pack()) for _ in range(PACKS)]
    assert [plan[:3] for plan in found] == [plan[:3] for plan in expected]


def test_elastic_streams_are_planned_from_an_index(indexed: Indexed) -> None:
    dataset = indexed("a_default", "Strict", sharding={"mode": "Elastic", "streams": 4})
    topology = Topology(1, 2, 0)
    assert plans(dataset, topology, PACKS) == plans(without_index(dataset), topology, PACKS)


@pytest.mark.parametrize("name", ["odd_default"])
def test_a_strict_run_meets_departures_with_an_index_as_without(
    name: str, indexed: Indexed, tmp_path: Path
) -> None:
    assert name in STREAMS
    data = make_data(tmp_path / "damaged")
    dataset, topology = indexed(name, "Strict", data, verify=True), Topology(0, 2, 0)
    made = []
    for one in (dataset, without_index(dataset)):
        with contextlib.closing(open_rank_stream(one, topology, decode_threads=2)) as stream:
            made.append(
                [json.dumps(next_batch(stream)[0].scalars) for _ in range(PACKS)] + [stream.state()["drops"]]
            )
    assert made[0] == made[1]
    assert {"image_truncated", "image_undecodable"} & {
        reason for row in made[0][-1].values() for reason in row
    }


# --- row by row -----------------------------------------------------------------------------------------


@PROFILES
@pytest.mark.parametrize("name", ["a_default", "odd_default", "frames"])
def test_every_row_answers_every_draw_the_same(name: str, profile: str, indexed: Indexed) -> None:
    settings = StreamSettings.from_resource(indexed(name, profile))
    assert settings.index is not None
    for config in settings.groups:
        expected = list(answers(settings, config, None))
        assert list(answers(settings, config, settings.index)) == expected
        assert len(expected) > 50
    assert settings.index.coverage.is_whole


class RowsInMemory(StoredFacts):
    """RowFacts over Python values, without Arrow."""

    def __init__(self, rows: Any, name: str, columns: Any, profile: Any) -> None:
        super().__init__(rows, name, columns, profile)
        self._images, self._texts = (_Values(rows, column) for column in columns.names)


class _Values:
    def __init__(self, rows: Any, column: str) -> None:
        self._values: list[Any] = []
        for number in range(rows.num_rows):
            batch, first = rows.slice_with(number)
            try:
                self._values.append(batch.column(column)[number - first].as_py())
            except UnicodeDecodeError as error:
                self._values.append(ValueError(f"{type(error).__name__}: {error}"))

    def __getitem__(self, row: int) -> Any:
        if isinstance(self._values[row], ValueError):
            raise self._values[row]
        return self._values[row]


def test_rows_in_memory_answer_as_rows_of_a_file(indexed: Indexed, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(StreamSettings.from_resource(indexed("odd_default", "Strict")), index=None)
    configs = [config for config in settings.groups if config.type != "vlm_sft"]
    expected = [list(answers(settings, config, None)) for config in configs]
    monkeypatch.setattr("bagelplane.sources.blocks.StoredFacts", RowsInMemory)
    assert [list(answers(settings, config, None)) for config in configs] == expected


@PROFILES
@pytest.mark.parametrize("kind", list(GROUPS))
def test_rows_as_no_one_should_write_them_answer_the_same(kind: str, profile: str, tmp_path: Path) -> None:
    different = []
    for number, (name, (row_kind, write)) in enumerate(cases().items()):
        if row_kind != kind:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        dataset = one_group(kind, write(folder), profile, folder / "snapshots")
        report = make_index(dataset)
        assert (report.problems, report.missing) == ([], 0), name
        settings = StreamSettings.from_resource(dataset)
        assert settings.index is not None
        [config] = settings.groups
        expected = list(answers(settings, config, None))
        assert expected
        found = list(answers(settings, config, settings.index))
        if found != expected:
            different.append(
                (name, [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]][:1])
            )
        shutil.rmtree(folder)
    assert different == []


def test_the_index_is_told_of_in_one_line(indexed: Indexed, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bagelplane.sources.index"):
        plans(indexed("d_workers", "Automodel"), Topology(0, 2, 2), 2)
    [line] = [record.getMessage() for record in caplog.records if record.name == "bagelplane.sources.index"]
    assert "17 of 17 objects are planned from the index" in line
