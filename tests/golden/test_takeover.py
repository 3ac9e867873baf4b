"""A run that Automodel began continues here from its checkpoint files, pack for pack."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torchdata.stateful_dataloader import StatefulDataLoader

from bagelplane.cli.app import main
from bagelplane.errors import SnapshotError, SpecError
from bagelplane.packing.checkpoint import read_checkpoint
from bagelplane.packing.takeover import states_of_ranks
from bagelplane.sidecar.snapshot_format import StreamTopology
from bagelplane.sidecar.store import open_snapshot_store
from bagelplane.spec import BagelDataset, load_dataset
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology
from tests.golden.recordings import Recording, load_recording, next_batch, packed_dataset, resource_of

PEER = Path(__file__).parents[1] / "fixtures" / "peer"
COMPARED = 10
SAVED = sorted(path.stem for path in PEER.glob("*.pt"))

pytestmark = [pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")]


def load_peer_state(name: str) -> Any:
    # Made by the peer, kept in this repository: no stranger's pickle.
    return torch.load(PEER / f"{name}.pt", weights_only=False)


def own_state(recording: Recording, rank: int, taken: int, scratch: Path) -> dict[str, Any]:
    """What the drop-in class saves for a rank of which the peer's state is not at hand."""
    dataset = packed_dataset(recording, rank, scratch)
    workers = recording.num_workers
    if not workers:
        list(itertools.islice(iter(dataset), taken))
        state: dict[str, Any] = dataset.state_dict()
        return state
    loader = StatefulDataLoader(dataset, batch_size=None, num_workers=workers, timeout=300)
    list(itertools.islice(iter(loader), taken))
    saved: dict[str, Any] = loader.state_dict()
    return saved


def checkpoint(name: str, folder: Path, scratch: Path) -> tuple[Recording, int, list[Path]]:
    """The recording that a saved state of the peer is of, its step, and a file for each rank."""
    match = re.fullmatch(r"(?:state|loader)_(.+)_rank(\d+)_after(\d+)", name)
    assert match is not None
    recording, peers_rank, taken = load_recording(match[1]), int(match[2]), int(match[3])
    files = []
    for rank in range(len(recording.ranks)):
        files.append(folder / f"dataloader_dp_rank_{rank}.pt")
        state = load_peer_state(name) if rank == peers_rank else own_state(recording, rank, taken, scratch)
        torch.save(state, files[-1])
    return recording, taken, files


def write_resource(recording: Recording, folder: Path, **parts: Any) -> Path:
    dataset = resource_of(recording, snapshots={"uri": str(folder / "snapshots")}, **parts)
    path = folder / "dataset.yaml"
    path.write_text(yaml.safe_dump(dataset.to_mapping()))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["snapshots", "import", *map(str, arguments)])
    printed = capsys.readouterr()
    assert (ended.value.code or 0) == code, printed.err
    return printed.err if code else printed.out + printed.err


def check_rest(dataset: BagelDataset, recording: Recording, step: int) -> None:
    """All ranks continue from the snapshot of that step."""
    store = open_snapshot_store(dataset)
    assert store is not None
    world_size = len(recording.ranks)
    manifest = store.load("latest", StreamTopology(world_size, recording.num_workers))
    assert manifest is not None
    assert manifest.step == step
    for rank, packs in enumerate(recording.ranks):
        topology = Topology(rank, world_size, recording.num_workers)
        state = store.load_state(manifest, rank)
        with closing(open_rank_stream(dataset, topology, state=state, decode_threads=0)) as stream:
            for number in range(step, min(step + COMPARED, len(packs))):
                recording.check(rank, number, next_batch(stream)[1])


@pytest.mark.parametrize("name", SAVED)
def test_every_rank_continues_with_the_very_next_recorded_pack(
    name: str, tmp_path: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording, taken, files = checkpoint(name, tmp_path, scratch)
    resource = write_resource(recording, tmp_path)
    # In the order of a shell's pattern, which is not that of the ranks from ten on: names tell.
    text = run(capsys, *reversed(files), resource)
    assert f"step {taken} of {len(files)} ranks" in text
    assert "kept with their pixels" not in text
    check_rest(load_dataset(resource), recording, taken)


@pytest.mark.parametrize("name", [name for name in SAVED if load_peer_state(name).get("buffer")])
def test_buffered_samples_become_rows_and_the_state_stays_small(
    name: str, tmp_path: Path, scratch: Path
) -> None:
    recording, _, files = checkpoint(name, tmp_path, scratch)
    _, states = states_of_ranks(resource_of(recording), files)
    buffers = [entry for state in states for worker in state["workers"] for entry in worker["buffer"]]
    assert len(buffers) >= len(load_peer_state(name)["buffer"])
    assert all(set(entry) == {"group", "row"} for entry in buffers)
    assert all(len(json.dumps(state)) < 64 * 1024 for state in states)


def test_a_buffered_sample_whose_pixels_no_row_gives_is_kept_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = load_recording("e_tight")
    state = load_peer_state("state_e_tight_rank0_after2")
    state["buffer"][0]["image_tensor_list"][0][0, 0, 0] += 0.25
    torch.save(state, tmp_path / "rank0.pt")
    resource = write_resource(recording, tmp_path)
    assert "1 buffered samples are kept with their pixels" in run(capsys, tmp_path / "rank0.pt", resource)
    store = open_snapshot_store(load_dataset(resource))
    assert store is not None
    manifest = store.load("latest")
    assert manifest is not None
    with closing(
        open_rank_stream(load_dataset(resource), Topology(0, 1, 0), state=store.load_state(manifest, 0))
    ) as stream:
        packs = [next_batch(stream)[1] for _ in range(3)]
    wanted = [recording.ranks[0][step]["batch_data_indexes"] for step in (2, 3, 4)]
    assert [pack["batch_data_indexes"] for pack in packs] == wanted


def test_packs_that_the_loader_would_go_past_anew_are_gone_past(
    tmp_path: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A StatefulDataLoader may take its workers' states every few steps only."""
    recording, taken, files = checkpoint("loader_d_workers_rank0_after3", tmp_path, scratch)
    for file in files:
        state = torch.load(file, weights_only=False)
        state["_steps_since_snapshot"] = 2
        torch.save(state, file)
    resource = write_resource(recording, tmp_path)
    assert f"step {taken + 2}" in run(capsys, *files, resource)
    check_rest(load_dataset(resource), recording, taken + 2)


def test_a_file_that_would_run_something_is_refused_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    resource = write_resource(load_recording("e_tight"), tmp_path)
    torch.save({"grouped_dataset_states": [Evil()]}, tmp_path / "rank0.pt")
    (tmp_path / "bare").write_bytes(pickle.dumps(Evil()))
    text = run(capsys, tmp_path / "rank0.pt", resource, code=8)
    assert re.search(r"asks for more than values; got a pickle that calls \w+.mkdir;.* Fix: ", text), text
    run(capsys, tmp_path / "bare", resource, code=8)
    assert not (tmp_path / "ran").exists()


OTHER_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a text": (lambda path: path.write_text("no checkpoint"), "cannot be read as a checkpoint"),
    "nothing": (lambda path: path.write_bytes(b""), "cannot be read as a checkpoint"),
    "a model": (lambda path: torch.save({"model": {"w": torch.zeros(2)}}, path), "holds no state of a data loader"),
    "a tensor": (lambda path: torch.save(torch.zeros(2), path), "holds no state of a data loader"),
    "an empty loader": (lambda path: torch.save({"_snapshot": {}}, path), "cannot be read; got KeyError"),
    "before the first pack": (
        lambda path: torch.save({"grouped_dataset_states": [], "rng": {}, "yielded_batches": 0}, path),
        "has no generators",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_another_kind_of_file_is_refused_in_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write, message = OTHER_FILES[kind]
    write(tmp_path / "rank0.pt")
    resource = write_resource(load_recording("e_tight"), tmp_path)
    text = run(capsys, tmp_path / "rank0.pt", resource, code=8)
    assert text.count("\n") == 1
    assert re.search(message, text), text
    assert "Fix: " in text


def saved(folder: Path, name: str, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
    state = load_peer_state(name)
    change(state)
    path = folder / f"{name}.pt"
    torch.save(state, path)
    return path


def test_files_that_do_not_fit_the_resource_are_refused_with_both_sides(
    tmp_path: Path, scratch: Path
) -> None:
    recording, _, files = checkpoint("state_a_default_rank0_after3", tmp_path, scratch)
    dataset = resource_of(recording)
    swapped = [files[1].rename(tmp_path / "b"), files[0].rename(tmp_path / "a")]
    with pytest.raises(
        SnapshotError, match=r"is of another place|generators in .* are not those of rank 0 of 2"
    ):
        states_of_ranks(dataset, swapped)
    with pytest.raises(SnapshotError, match=r"not those of rank 0 of 1"):
        states_of_ranks(dataset, [tmp_path / "a"])
    with pytest.raises(SnapshotError, match=r"0 workers; expected 2 .sharding.workersPerRank.*to 0"):
        states_of_ranks(resource_of(load_recording("d_workers")), [tmp_path / "a", tmp_path / "b"])
    other = load_recording("c_dropout")
    with pytest.raises(SnapshotError, match="not those of rank 0"):
        states_of_ranks(
            resource_of(load_recording("e_tight")), [PEER / "state_a_default_rank0_after3.pt"] * 1
        )
    assert states_of_ranks(resource_of(other), [PEER / "state_c_dropout_rank0_after3.pt"])[0] == 3


def test_files_of_two_steps_or_ranks_that_are_missing_are_refused(tmp_path: Path, scratch: Path) -> None:
    recording, _, files = checkpoint("state_a_default_rank0_after3", tmp_path, scratch)
    torch.save(own_state(recording, 1, 2, scratch), files[1])
    with pytest.raises(
        SpecError, match=r"of different steps; got dataloader_dp_rank_0.pt: 3, .*rank_1.pt: 2"
    ):
        states_of_ranks(resource_of(recording), files)
    with pytest.raises(SpecError, match=r"not one of each rank; got rank 0, 3; expected one .* 0 to 1"):
        states_of_ranks(resource_of(recording), [files[0], files[1].rename(tmp_path / "rank3.pt")])


def test_a_state_with_its_groups_in_another_order_is_refused(tmp_path: Path) -> None:
    path = saved(
        tmp_path, "state_e_tight_rank0_after13", lambda state: state["grouped_dataset_states"].reverse()
    )
    with pytest.raises(SnapshotError, match=r"has its groups in another order.*list the groups"):
        states_of_ranks(resource_of(load_recording("e_tight")), [path])


def test_a_state_of_workers_that_did_not_take_turns_is_refused(tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["_snapshot"]["_last_yielded_worker_id"] = 1

    path = saved(tmp_path, "loader_d_workers_rank0_after3", change)
    with pytest.raises(SnapshotError, match="did not take turns"):
        states_of_ranks(resource_of(load_recording("d_workers")), [path], check_seeds=False)


def test_another_seed_is_taken_when_asked_for(tmp_path: Path) -> None:
    recording = load_recording("e_tight")
    sharding = {**resource_of(recording).to_mapping()["spec"]["sharding"], "globalSeed": 99}
    dataset = resource_of(recording, sharding=sharding)
    path = PEER / "state_e_tight_rank0_after13.pt"
    with pytest.raises(SnapshotError, match=r"the seed 99.*--no-seed-check"):
        states_of_ranks(dataset, [path])
    step, [state] = states_of_ranks(dataset, [path], check_seeds=False)
    assert (step, state["step"]) == (13, 13)


def test_a_place_with_snapshots_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resource = write_resource(load_recording("e_tight"), tmp_path)
    run(capsys, PEER / "state_e_tight_rank0_after13.pt", resource)
    text = run(capsys, PEER / "state_e_tight_rank0_after32.pt", resource, code=8)
    assert "there are snapshots already" in text
    assert "Fix: give the resource a snapshots.uri of its own" in text


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"profile": "Strict"}, "does not continue a run of Automodel; got profile Strict"),
        ({"sharding": {"mode": "Elastic", "streams": 1}}, "does not continue .* sharding Elastic"),
    ],
)
def test_a_resource_of_another_kind_of_run_is_refused(
    parts: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resource = write_resource(load_recording("e_tight"), tmp_path, **parts)
    text = run(capsys, PEER / "state_e_tight_rank0_after13.pt", resource, code=2)
    assert re.search(message, text), text


def test_a_state_inside_a_mapping_of_its_own_is_found(tmp_path: Path) -> None:
    state = copy.deepcopy(load_peer_state("state_e_tight_rank0_after13"))
    torch.save({"dataloader": state}, tmp_path / "rank0.pt")
    assert read_checkpoint(tmp_path / "rank0.pt").workers[0]["yielded_batches"] == 13
