"""Two sidecars at one place for snapshots: one run writes its history, whoever else comes or comes back."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bagelplane.sidecar.store import open_snapshot_store
from tests.integration.sidecar_harness import Sidecar, digest, make_dataset, undisturbed, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Start = Callable[..., Sidecar]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Sidecars of one resource, each with a directory of its own, as on several machines."""
    dataset = make_dataset(snapshots=tmp_path / "snapshots", every=5)
    running: list[Sidecar] = []

    def begin(name: str, **settings: Any) -> Sidecar:
        running.append(Sidecar(tmp_path / name, dataset, **settings))
        return running[-1]

    yield begin
    for sidecar in running:
        sidecar.popen.send_signal(signal.SIGCONT)
        sidecar.kill()


def test_a_second_job_is_refused_by_name_and_the_first_goes_on(start: Start, tmp_path: Path) -> None:
    first = start("first", run_id="job-1")
    first.wait_serving()
    second = start("second", run_id="job-2")
    assert second.wait() == 8
    said = second.log.read_text().strip().splitlines()[-1]
    assert said.startswith("error: another run writes its snapshots to")
    for part in (
        "of job job-1",
        "of dataset fake",
        f"process {first.pid}",
        "job-2",
        "Fix: end the other run first",
    ):
        assert part in said, part
    with first.reader() as reader:
        for _ in range(6):
            reader.next_pack()
        wait_for(lambda: reader.status()["snapshots"]["last_step"] == 5, "the first job's snapshot")
        run = reader.status()["snapshots"]["run"]
    assert (run["job"], run["number"], run["continues"]) == ("job-1", 1, None)
    assert first.terminate() == 0, first.tail()
    third = start("third", run_id="job-2")  # an orderly end: nothing is waited for
    third.wait_serving()
    with third.reader() as reader:
        assert reader.next_pack()[0].step == 6
        present = reader.status()["snapshots"]["run"]
    assert (present["continues"], present["continues_from"]) == (run["id"], 6)
    assert f"continues run 1 ({run['id']}) of job job-1 from 6" in third.log.read_text()


def test_two_sidecars_of_one_job_write_one_history_and_neither_may_serve_the_others_rank(
    start: Start, tmp_path: Path
) -> None:
    from bagelplane.errors import SnapshotError

    first, second = (start(name, lease_seconds=4.0) for name in ("first", "second"))
    for sidecar in (first, second):
        sidecar.wait_serving()
    dataset = make_dataset(snapshots=tmp_path / "snapshots", every=5)
    with first.reader(0, 2) as one, second.reader(1, 2) as other:
        for rank, reader in enumerate((one, other)):
            taken = [digest(*reader.next_pack()) for _ in range(6)]
            assert taken == undisturbed(dataset, rank, 2, 6)
        store = open_snapshot_store(dataset)
        assert store is not None
        wait_for(lambda: store.nearest(None) is not None, "the snapshot of both")
        assert one.status()["snapshots"]["run"] == other.status()["snapshots"]["run"]
        with (
            pytest.raises(SnapshotError, match="rank 0 of this run is served by another sidecar"),
            second.reader(0, 2, local_rank=1) as third,
        ):
            third.next_pack()


def test_a_sidecar_that_was_stopped_and_replaced_writes_no_more(start: Start, tmp_path: Path) -> None:
    dataset = make_dataset(snapshots=tmp_path / "snapshots", every=5)
    stale = start("stale", run_id="job-1", lease_seconds=4.0)
    stale.wait_serving()
    with stale.reader() as old:
        for _ in range(8):
            old.next_pack()
        wait_for(lambda: old.status()["snapshots"]["last_step"] == 5, "the first snapshot")
        stale.popen.send_signal(signal.SIGSTOP)
        fresh = start("fresh", run_id="job-2", lease_seconds=4.0)
        fresh.wait_serving()  # a lease later
        with fresh.reader() as new:
            assert [digest(*new.next_pack()) for _ in range(4)] == undisturbed(dataset, 0, 1, 9)[5:]
            stale.popen.send_signal(signal.SIGCONT)
            while old.step < 12:  # training goes on, its snapshot of step 10 is refused
                old.next_pack()
            said = wait_for(lambda: old.status()["snapshots"]["problem"], "its status to say so")
            assert "another run has taken over" in said
            assert "job job-2" in said
            assert old.status()["snapshots"]["last_step"] == 5
            for _ in range(3):
                new.next_pack()
            wait_for(lambda: new.status()["snapshots"]["last_step"] == 10, "the new run's snapshot")
    assert stale.terminate() == 0, stale.tail()
    assert fresh.terminate() == 0, fresh.tail()
    store = open_snapshot_store(dataset)
    assert store is not None
    history = [(entry.step, entry.condition) for entry in store.entries()]
    assert history == [(5, "complete"), (10, "complete"), (12, "complete")]
    runs = [
        json.loads(path.read_text())
        for path in sorted((tmp_path / "snapshots" / "runs").glob("run-??????.json"))
    ]
    assert [(run["job"], run["origin"] and run["origin"]["step"]) for run in runs] == [
        ("job-1", None),
        ("job-2", 5),
    ]
