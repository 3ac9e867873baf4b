"""What may differ between a snapshot and the run that goes on from it; `snapshots diff`, `prune` and `verify`."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bagelplane.cli.app import main
from bagelplane.errors import SnapshotError
from bagelplane.shm.protocol import Attach, Resume
from bagelplane.sidecar.changes import spec_changes
from bagelplane.sidecar.elastic import ElasticRun
from bagelplane.sidecar.fingerprint import Fingerprint, take_fingerprint
from bagelplane.sidecar.lease import LeaseTimes
from bagelplane.sidecar.rundir import RunDirectory
from bagelplane.sidecar.snapshots import SnapshotStore, StreamTopology
from bagelplane.sidecar.store import begin_run, open_snapshot_store
from bagelplane.sidecar.supervisor import SidecarSettings, Supervisor
from bagelplane.spec import BagelDataset, spec_hash, stream_spec
from bagelplane.storage import StorageSettings, open_storage

TOPOLOGY = StreamTopology(2, 0, 4)
TRANSFORM = {"stride": 16, "maxSize": 64, "minSize": 32}
Spec = dict[str, Any]


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a", "b", "c"):
        (data / f"{name}.parquet").write_bytes(name.encode() * 200_000)
    (tmp_path / "tokenizer.json").write_text("{}")
    dataset = {"name": "t2i", "uri": str(data)}
    return {
        "tokenizer": {"uri": str(tmp_path / "tokenizer.json")},
        "groups": [
            {"name": "t2i", "type": "t2i_pretrain", "datasets": [dataset], "imageTransform": TRANSFORM},
            {
                "name": "more",
                "type": "t2i_pretrain",
                "weight": 2,
                "datasets": [dataset],
                "imageTransform": TRANSFORM,
            },
        ],
        "sharding": {"streams": 4},
        "snapshots": {"uri": str(tmp_path / "snapshots"), "everySteps": 10},
    }


def resource(spec: Spec) -> BagelDataset:
    body = {"apiVersion": "bagelplane.io/v1alpha1", "kind": "BagelDataset", "metadata": {"name": "demo"}}
    return BagelDataset.from_mapping({**body, "spec": spec})


def begin(spec: Spec, resume: Any = "latest") -> SnapshotStore:
    """The store of a sidecar whose run has begun; the data as they are."""
    dataset = resource(spec)
    store = open_snapshot_store(dataset)
    assert store is not None
    store.data = take_fingerprint(dataset, open_storage(StorageSettings()))
    begin_run(store, job="", lock="", resume=resume, world_size=2, ranks_in_use=tuple, times=LeaseTimes(0.2))
    return store


def end(store: SnapshotStore) -> None:
    assert store.lease is not None
    store.lease.end()


def write(store: SnapshotStore, *positions: int) -> None:
    for position in positions:
        for rank in (0, 1):
            store.write_rank(position, rank, TOPOLOGY, {"position": position, "drops": {}})


def test_a_snapshot_says_what_it_is_of(spec: Spec) -> None:
    store = begin(spec)
    write(store, 8)
    end(store)
    manifest = store.load(8)
    assert manifest is not None
    dataset = resource(spec)
    assert (manifest.spec_hash, dict(manifest.spec)) == (spec_hash(dataset), stream_spec(dataset))
    assert manifest.run == store.lease.run.id if store.lease else None
    names = sorted(Path(uri).name for uri in store.read_data(manifest).objects)
    assert names == ["a.parquet", "b.parquet", "c.parquet", "tokenizer.json"]


def test_the_place_of_data_storage_and_serving_may_change(spec: Spec) -> None:
    store = begin(spec)
    write(store, 8)
    end(store)
    spec["storage"] = {"endpointURL": "https://elsewhere.example.com", "region": "eu"}
    spec["snapshots"] |= {"everySteps": 3, "keepLast": 1, "keepEvery": 50}
    spec["dataplane"] = {"decodeThreads": 3, "ring": {"packs": 2}}
    spec["drops"] = {"maxConsecutive": 3}
    again = begin(spec)
    assert again.lineage().floor == 0
    end(again)


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        (
            "groups",
            lambda spec: spec["groups"][1].update(weight=3),
            r"groups\[more\]\.weight: 2\.0 became 3\.0",
        ),
        (
            "budgets",
            lambda spec: spec.update(budgets={"maxBufferSize": 9}),
            r"budgets\.maxBufferSize: the default",
        ),
    ],
)
def test_what_decides_the_packs_may_change_only_by_name_and_only_at_a_snapshot(
    spec: Spec, part: str, change: Callable[[Spec], None], named: str
) -> None:
    old = begin(spec)
    write(old, 8, 16)
    end(old)
    changed = copy.deepcopy(spec)
    change(changed)
    with pytest.raises(SnapshotError, match=rf"another dataset spec.*{named}.*name {part} in spec\.resume"):
        begin(changed)
    hash_before = spec_hash(resource(changed))
    changed["resume"] = {"allowSpecChange": [part]}
    assert spec_hash(resource(changed)) == hash_before
    with pytest.raises(SnapshotError, match=r"step 12 .* cannot be reached.*the snapshot of 8"):
        begin(changed, resume=6)  # position 12
    new = begin(changed)
    manifest = new.nearest(None)
    assert manifest is not None
    assert (manifest.step, new.lineage().floor) == (16, 16)
    beyond = new.nearest(20)
    assert beyond is not None
    assert beyond.step == 16, "planned forward from where the change was made"
    with pytest.raises(SnapshotError, match="spec or data were changed there"):
        new.nearest(12)
    write(new, 24)
    end(new)
    del changed["resume"]
    later = begin(changed)  # its own snapshots are all that it needs
    assert [entry.step for entry in later.entries() if entry.condition == "complete"] == [24]
    end(later)


@pytest.mark.parametrize(
    ("position", "theirs", "refusal"),
    [
        (16, "of the run before", None),
        (12, "of the run before", "spec or data were changed there"),
        (20, "of the run before", "no snapshot says what changed since step 20"),
        (16, "of another run", "no snapshot says what changed since step 16"),
    ],
)
def test_a_trainer_s_state_of_another_spec_is_a_place_to_resume_at_where_a_snapshot_is(
    spec: Spec, tmp_path: Path, position: int, theirs: str, refusal: str | None
) -> None:
    old = begin(spec)
    write(old, 8, 16)
    end(old)
    spec["groups"][1]["weight"] = 3
    spec["resume"] = {"allowSpecChange": ["groups"]}
    spec_of = {"of the run before": old.spec_hash, "of another run": "b" * 64}
    state = {"sharding": "Elastic", "streams": 4, "position": position, "states": {}}
    attach = Attach(0, 0, 2, 0, Resume("state", position // 2, state), spec_hash=spec_of[theirs])
    with RunDirectory(tmp_path / "run") as directory:
        supervisor = Supervisor(resource(spec), SidecarSettings(directory.path), directory)
        supervisor._store = store = begin(spec)
        supervisor._run = ElasticRun(4, store, "latest")
        try:
            if refusal is not None:
                with pytest.raises(SnapshotError, match=refusal):
                    asyncio.run(supervisor._check_spec(attach))
            else:
                found = asyncio.run(supervisor._check_spec(attach))
                assert (found.resume, found.spec_hash) == (Resume("position", 8, position=16), "")
        finally:
            end(store)


def test_sharding_and_profile_never_change(spec: Spec) -> None:
    before = {"profile": "Strict", "sharding": {"streams": 4}}
    after = {"profile": "Automodel", "sharding": {"streams": 8}}
    changes = spec_changes(before, after, ["profile", "sharding", "groups"])
    assert [change.verdict for change in changes] == ["refused", "refused"]


def test_objects_that_were_replaced_are_named_and_refused(spec: Spec, tmp_path: Path) -> None:
    store = begin(spec)
    write(store, 8)
    end(store)
    (tmp_path / "data" / "b.parquet").write_bytes(b"x" * 200_000)
    (tmp_path / "data" / "c.parquet").unlink()
    (tmp_path / "data" / "d.parquet").write_bytes(b"new")
    with pytest.raises(SnapshotError) as caught:
        begin(spec)
    message = str(caught.value)
    assert "the data were changed since the snapshot" in message
    for part in ("b.parquet: 200000 bytes", "c.parquet: 200000 bytes", "removed", "d.parquet: not there"):
        assert part in message, part
    assert "a.parquet" not in message
    spec["resume"] = {"allowSpecChange": ["data"]}
    again = begin(spec)
    assert again.lineage().floor == 8
    end(again)


def test_copies_with_other_times_are_the_same_data(spec: Spec, tmp_path: Path) -> None:
    before = take_fingerprint(resource(spec), open_storage(StorageSettings()))
    for path in list((tmp_path / "data").iterdir()):
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").replace(path)
    assert take_fingerprint(resource(spec), open_storage(StorageSettings())) == before


def test_a_manifest_of_64_ranks_stays_small(tmp_path: Path, spec: Spec) -> None:
    store = SnapshotStore(open_storage(StorageSettings()), str(tmp_path / "many"), "a" * 64, dataset="demo")
    store.spec = stream_spec(resource(spec))
    store.data = Fingerprint(
        {f"s3://bucket/data/part-{n:06d}.parquet": (10**9, "e" * 32) for n in range(50_000)}
    )
    topology = StreamTopology(64, 1)
    for rank in range(64):
        store.write_rank(10, rank, topology, {"rank": rank})
    assert (tmp_path / "many" / "step-000000000010" / "manifest.json").stat().st_size < 64 * 1024


# ---- the command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["snapshots", *arguments, "-o", "json"])
    output = capsys.readouterr()
    return int(ended.value.code or 0), json.loads(output.out) if output.out else output.err


@pytest.fixture
def file(spec: Spec, tmp_path: Path) -> Path:
    store = begin(spec)
    write(store, 8, 16, 24)
    end(store)
    return write_resource(spec, tmp_path)


def write_resource(spec: Spec, tmp_path: Path) -> Path:
    path = tmp_path / "dataset.yaml"
    path.write_text(yaml.safe_dump(resource(spec).to_mapping()))
    return path


def test_diff_names_what_differs_and_whether_a_resume_is_allowed(
    file: Path, spec: Spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(capsys, "diff", str(file), "8", "24")
    assert (code, found["resume_allowed"]) == (0, True)
    assert [(c["kind"], c["before"], c["after"]) for c in found["changes"]] == [("step", "8", "24")]
    spec["groups"][0]["weight"] = 5
    (tmp_path / "data" / "a.parquet").write_bytes(b"other")
    code, found = run(capsys, "diff", str(write_resource(spec, tmp_path)), "latest")
    assert (code, found["resume_allowed"]) == (8, False)
    assert [(c["kind"], Path(c["name"]).name, c["verdict"]) for c in found["changes"]] == [
        ("spec", "groups[t2i].weight", "refused"),
        ("data", "a.parquet", "refused"),
    ]
    spec["resume"] = {"allowSpecChange": ["groups", "data"]}
    code, found = run(capsys, "diff", str(write_resource(spec, tmp_path)), "latest")
    assert (code, found["resume_allowed"]) == (0, True)


def test_what_people_read_of_one_snapshot_and_of_no_difference(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["snapshots", *arguments])
        output = capsys.readouterr()
        assert (ended.value.code or 0) == code, output.err
        return output.out + output.err

    told = printed("diff", str(file), "24", "24")
    assert told == "24 against 24: nothing differs\na resume across this is allowed\n"
    absent = printed("show", str(file), "9", code=8)
    assert "got steps 8, 16, 24. Fix: name one of those" in absent
    printed("prune", str(file), "--keep-last", "1")
    for command in ("list", "verify"):
        assert printed(command, str(file)).startswith("1 snapshot below")
    assert "import" in printed("--help")


def test_prune_says_what_it_would_delete_and_deletes_that(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for dry in (["--dry-run"], []):
        code, found = run(capsys, "prune", str(file), "--keep-last", "1", *dry)
        assert (code, found["deleted"]) == (0, not dry)
        assert [entry["step"] for entry in found["snapshots"]] == [8, 16]
    code, found = run(capsys, "list", str(file))
    assert [entry["step"] for entry in found["snapshots"]] == [24]


def test_prune_takes_what_other_runs_left_only_when_asked(
    file: Path, spec: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = begin(spec, resume="none")
    write(fresh, 4)
    end(fresh)
    assert run(capsys, "prune", str(file))[1]["snapshots"] == []
    code, found = run(capsys, "prune", str(file), "--other-runs")
    assert (code, [entry["step"] for entry in found["snapshots"]]) == (0, [8, 16, 24])
    code, found = run(capsys, "list", str(file))
    assert [(entry["step"], entry["condition"]) for entry in found["snapshots"]] == [(4, "complete")]


def test_verify_reads_every_state(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", str(file))[0] == 0
    [state] = (tmp_path / "snapshots").glob("position-000000000016-*/rank-00001-of-00002.json.zst")
    whole = state.read_bytes()
    state.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    code, found = run(capsys, "verify", str(file))
    assert code == 8
    assert [(entry["step"], len(entry["problems"])) for entry in found["snapshots"]] == [
        (8, 0),
        (16, 1),
        (24, 0),
    ]
    assert "is damaged" in found["snapshots"][1]["problems"][0]
