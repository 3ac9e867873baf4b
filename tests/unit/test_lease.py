"""Runs and leases: one run at a time writes a history, whatever dies, pauses or loses the time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bagelplane.errors import SnapshotError
from bagelplane.sidecar.lease import Identity, LeaseTimes, RunLease, RunTakenError
from bagelplane.sidecar.retention import Retention
from bagelplane.sidecar.runs import Lineage, RunFolder
from bagelplane.sidecar.snapshots import SnapshotStore, StreamTopology
from bagelplane.sidecar.whereabouts import Whereabouts
from bagelplane.storage import StorageSettings, open_storage

TIMES = LeaseTimes(20.0)
ONE_RANK = StreamTopology(1, 1)
TWO_RANKS = StreamTopology(2, 1)


@dataclass
class World:
    """Sidecars on hosts of their own at one place, in a time that only waiting moves."""

    folder: Path
    now: float = 0.0
    meanwhile: list[Callable[[], object]] = field(default_factory=list)
    """What others do whenever somebody waits."""

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for act in self.meanwhile:
            act()

    def store(self) -> SnapshotStore:
        return SnapshotStore(open_storage(StorageSettings()), str(self.folder), "a" * 64, dataset="demo")

    def lease(self, host: str, **settings: Any) -> RunLease:
        where = settings.pop("where", Whereabouts(host, boot_id=f"boot of {host}", pid=1, start_ticks=1))
        identity = Identity(
            "demo", "a" * 64, where, **{k: settings.pop(k) for k in ("job",) if k in settings}
        )
        chosen = {"times": TIMES, "clock": lambda: self.now, "wait": self.wait, **settings}
        return RunLease(self.store().runs, identity, **chosen)

    def begin(
        self, host: str, resume: int | str = "latest", ranks: Iterable[int] = (), **settings: Any
    ) -> SnapshotStore:
        """A store that writes for the run that this sidecar began or joined."""
        in_use = list(ranks)
        lease, store = self.lease(host, ranks_in_use=lambda: in_use, **settings), self.store()

        def find_origin(lineage: Lineage) -> int | None:
            nearest = None if resume == "none" else store.nearest(None, lineage=lineage)
            return nearest.step if nearest is not None else None

        lease.acquire(find_origin, may_join=resume == "latest")
        store.lease = lease
        for rank in in_use:
            lease.claim(rank)
        return store


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def lease_of(store: SnapshotStore) -> RunLease:
    assert store.lease is not None
    return store.lease


def write(store: SnapshotStore, *steps: int, topology: StreamTopology = ONE_RANK) -> None:
    for step in steps:
        for rank in range(topology.world_size):
            store.write_rank(step, rank, topology, {"step": step, "by": lease_of(store).run.id})


def complete(store: SnapshotStore) -> list[int]:
    return [entry.step for entry in store.entries() if entry.condition == "complete"]


# ---- two runs at once


def test_a_second_job_is_refused_and_the_first_is_named(world: World) -> None:
    first = world.begin("host-a", job="job-1")
    world.meanwhile = [lease_of(first).renew]
    with pytest.raises(RunTakenError) as caught:
        world.begin("host-b", job="job-2")
    message = str(caught.value)
    run = lease_of(first).run
    for part in (
        str(world.folder),
        run.id,
        "job-1",
        "dataset demo",
        "host-a",
        run.began,
        "job-2",
        "--run-id",
    ):
        assert part in message, part
    assert world.now <= TIMES.lease, "one renewal is enough to know"
    write(first, 10)
    assert complete(world.store()) == [10]


def test_pods_of_one_job_are_one_run_and_wait_for_nothing(world: World) -> None:
    first = world.begin("pod-0", ranks=[0], job="job-1")
    second = world.begin("pod-1", ranks=[1], job="job-1")
    assert lease_of(second).run == lease_of(first).run
    assert world.now == 0
    first.write_rank(10, 0, TWO_RANKS, {})
    second.write_rank(10, 1, TWO_RANKS, {})
    assert complete(world.store()) == [10]


def test_a_snapshot_costs_two_listings_of_runs_however_many_ranks_it_has(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, looks = world.begin("host-a", ranks=range(8)), []
    look = RunFolder.look
    monkeypatch.setattr(RunFolder, "look", lambda folder: looks.append(folder) or look(folder))
    for count, step in enumerate((10, 20), 1):
        write(store, step, topology=StreamTopology(8, 1))
        assert len(looks) == 2 * count, "one before the states, one before the manifest"
    assert complete(world.store()) == [10, 20]


def test_without_a_name_for_the_job_sidecars_are_one_run_as_long_as_their_ranks_differ(world: World) -> None:
    first = world.begin("host-a", ranks=[0])
    world.meanwhile = [lease_of(first).renew]
    second = world.begin("host-b", ranks=[1])
    assert lease_of(second).run == lease_of(first).run
    world.meanwhile = [lease_of(first).renew, lease_of(second).renew]
    with pytest.raises(RunTakenError, match=r"rank 1 of this run is served by another.*run 1 .*host-b"):
        world.begin("host-c", ranks=[1])


def test_of_sidecars_that_begin_at_one_instant_one_wins(world: World) -> None:
    begun: list[str] = []
    refused: list[SnapshotError] = []
    barrier = threading.Barrier(6)

    def begin(number: int) -> None:
        renewing = threading.Event()
        lease = world.lease(
            f"host-{number}",
            job=f"job-{number}",
            times=LeaseTimes(12.0),
            clock=time.monotonic,
            wait=time.sleep,
        )
        barrier.wait()
        try:
            lease.acquire(lambda lineage: None)
        except SnapshotError as error:
            refused.append(error)
            return
        lease.keep()
        begun.append(lease.run.id)
        renewing.wait(15.0)
        lease.end()

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert (len(begun), len(refused)) == (1, 5)
    assert [run.id for run in world.store().runs.look().runs][-1] == begun[0]


def test_a_rank_that_its_sidecar_lets_go_is_served_by_another_one(world: World) -> None:
    in_use = [0, 1]
    first = world.lease("pod-0", ranks_in_use=lambda: in_use)
    first.acquire(lambda lineage: None)
    for rank in in_use:
        first.claim(rank)
    in_use.remove(1)  # torchrun began anew and gave the ranks out otherwise
    first.renew()
    world.meanwhile = [first.renew]
    second = world.begin("pod-1", ranks=[1])
    assert world.now < TIMES.renew
    assert lease_of(second).holds(1)
    first.renew()
    assert (first.holds(0), first.holds(1)) == (True, False)
    with pytest.raises(SnapshotError, match="rank 1 is served by another sidecar now"):
        first.verify(1)


def test_pods_of_a_named_job_may_share_a_data_parallel_rank(world: World) -> None:
    stores = [world.begin(f"pod-{number}", ranks=[0], job="job-1") for number in (0, 1)]
    for store in stores:
        store.write_rank(10, 0, ONE_RANK, {"the same": "state"})
    assert world.now == 0
    assert complete(world.store()) == [10]


# ---- taking over


def test_after_an_orderly_end_nobody_waits_and_the_history_goes_on(world: World) -> None:
    first = world.begin("host-a")
    write(first, 10, 20)
    lease_of(first).end()
    second = world.begin("host-b")
    assert world.now == 0
    run = lease_of(second).run
    assert run.origin is not None
    assert (run.origin.run, run.origin.step) == (lease_of(first).run.id, 20)
    assert complete(second) == [10, 20]


def test_after_a_crash_elsewhere_one_lease_is_waited_for(world: World) -> None:
    write(world.begin("host-a", job="job-1"), 10)
    second = world.begin("host-b", job="job-2")
    assert world.now == pytest.approx(TIMES.lease, abs=2 * TIMES.poll)
    assert complete(second) == [10]


def test_a_pod_that_comes_back_joins_its_job_and_waits_for_nothing(world: World) -> None:
    first = world.begin("pod-0", ranks=[0], job="job-1")
    again = world.begin("pod-0-again", ranks=[0], job="job-1")
    assert lease_of(again).run == lease_of(first).run
    assert world.now == 0


def test_where_the_holder_of_our_lock_wrote_it_is_dead(world: World) -> None:
    before = Whereabouts("pod", "boot", "namespace-1", 1, 77, lock="8:15")
    write(world.begin("pod", ranks=[0], where=before), 10)
    world.begin("pod", ranks=[0], where=replace(before, pid_namespace="namespace-2", start_ticks=99))
    assert world.now == 0


def test_a_process_that_is_gone_from_this_machine_is_dead(world: World) -> None:
    script = (
        "from bagelplane.sidecar.whereabouts import Whereabouts; import json;"
        "print(json.dumps(Whereabouts.of_this_process().as_json()))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    before, here = Whereabouts.from_json(json.loads(ended.stdout)), Whereabouts.of_this_process()
    assert (here.is_alive(before), here.is_alive(here)) == (False, True)
    assert here.is_alive(replace(here, start_ticks=here.start_ticks + 1)) is False, (
        "its number was given anew"
    )
    assert here.is_alive(replace(before, boot_id="another")) is None
    assert here.is_alive(replace(before, pid_namespace="another")) is None
    world.begin("this", ranks=[0], where=before)
    world.begin("this", ranks=[0], where=here)
    assert world.now == 0


@pytest.mark.parametrize("resume", ["latest", "none"])
def test_a_new_run_has_of_the_history_what_it_continues(world: World, resume: str) -> None:
    first = world.begin("host-a")
    write(first, 10, 20)
    lease_of(first).end()
    second = world.begin("host-b", resume)
    write(second, 5)
    # Crash, and whoever comes next goes on where *this* run was, not where an older one had come to.
    manifest = world.begin("host-c", where=replace(lease_of(second)._identity.where)).nearest(None)
    assert manifest is not None
    assert manifest.step == (20 if resume == "latest" else 5)


# ---- a stale writer


def test_a_writer_that_was_replaced_while_it_was_paused_is_refused(world: World) -> None:
    stale = world.begin("host-a", ranks=[0])
    write(stale, 10)
    fresh = world.begin("host-b", ranks=[0])
    for attempt in (
        lambda: write(stale, 20),
        lambda: stale.prune(Retention(1)),
        lambda: lease_of(stale).renew(),
    ):
        with pytest.raises(SnapshotError) as caught:
            attempt()
        assert f"{lease_of(stale).run} writes no more" in str(caught.value)
        assert str(lease_of(fresh).run) in str(caught.value)
    assert complete(world.store()) == [10]


def test_what_a_stale_writer_had_under_way_is_not_of_the_history(world: World) -> None:
    stale = world.begin("host-a", ranks=[0])
    write(stale, 10)
    looked = lease_of(stale).verify
    lease_of(stale).verify = lambda rank=None, step=None: None  # type: ignore[method-assign]  # it looked, and was paused then
    fresh = world.begin("host-b", ranks=[0])
    write(stale, 20)
    assert world.store().nearest(None) == fresh.load(10)
    assert [(entry.step, entry.condition) for entry in fresh.entries()] == [
        (10, "complete"),
        (20, "superseded"),
    ]
    write(fresh, 20)
    manifest = world.store().load("latest")
    assert manifest is not None
    assert world.store().load_state(manifest, 0)["by"] == lease_of(fresh).run.id
    lease_of(stale).verify = looked  # type: ignore[method-assign]
    assert fresh.prune(Retention(1)) == [10], "what another run left is not this one's to delete"


def test_a_snapshot_written_while_another_takes_over_is_continued_from(world: World) -> None:
    first = world.begin("host-a")
    write(first, 10)
    lease, store, steps = world.lease("host-b"), world.store(), [20]

    def find_origin(lineage: Lineage) -> int | None:
        nearest = store.nearest(None, lineage=lineage)
        if steps:
            write(first, steps.pop())  # after the look, before the new run stands
        return nearest.step if nearest is not None else None

    lease.acquire(find_origin)
    assert lease.run.origin is not None
    assert (lease.run.origin.run, lease.run.origin.step) == (lease_of(first).run.id, 20)


# ---- clocks


@pytest.mark.parametrize("jump", [-1e6, -30.0, 30.0, 1e6])
def test_clocks_that_jump_cost_nobody_the_lease(
    world: World, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.begin("host-a", job="job-1")
    looks = iter(range(1000))

    def live() -> None:
        number = next(looks)
        world.now += jump if number % 3 == 0 else 0.0
        monkeypatch.setattr(time, "time", lambda: world.now)
        if number % 10 == 9:  # five seconds of looks
            lease_of(first).renew()

    world.meanwhile = [live]
    with pytest.raises(RunTakenError):
        world.begin("host-b", job="job-2")
    write(first, 10)


def test_a_pause_of_the_one_who_watches_does_not_make_the_other_one_dead(world: World) -> None:
    first = world.begin("host-a", job="job-1")
    looks = iter(range(1000))

    def pause() -> None:
        number = next(looks)
        if number == 0:
            world.now += 3600  # this machine slept, and so did the other one: it had no chance to renew
        elif number > 5:
            lease_of(first).renew()

    world.meanwhile = [pause]
    with pytest.raises(RunTakenError):
        world.begin("host-b", job="job-2")


# ---- snapshots from before there were runs


def test_snapshots_of_an_earlier_release_are_continued(world: World) -> None:
    old = world.store()
    old.write_rank(10, 0, ONE_RANK, {"step": 10})
    assert (world.folder / "step-000000000010" / "manifest.json").exists()
    new = world.begin("host-a")
    run = lease_of(new).run
    assert run.origin is not None
    assert (run.origin.run, run.origin.step) == ("", 10)
    write(new, 20)
    assert complete(world.store()) == [10, 20]
    assert new.prune(Retention(1)) == [10]


def test_what_dead_runs_left_is_cleared_but_not_the_runs_themselves(world: World) -> None:
    for number in range(4):
        store = world.begin(f"host-{number}", ranks=[0])
        write(store, 10 + number)
        lease_of(store).end()
    names = sorted(path.name for path in (world.folder / "runs").iterdir())
    assert [name for name in names if name.count(".") == 1] == [
        f"run-{number:06d}.json" for number in range(1, 5)
    ]
    assert all(name.startswith("run-000004") for name in names if name.count(".") > 1)


# ---- damaged records


def _three_runs(world: World) -> list[Path]:
    """Each with a snapshot and each continuing the one before. Their records, by number."""
    for number, step in enumerate((10, 20, 30)):
        store = world.begin(f"host-{number}", ranks=[0], job=f"job-{number}")
        write(store, step)
        lease_of(store).end()
    return sorted(path for path in (world.folder / "runs").iterdir() if path.name.count(".") == 1)


@pytest.mark.parametrize("damage", [b"", b"garbage", b"{}"])
def test_the_damaged_record_of_an_old_run_keeps_nobody_from_running(
    world: World, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    oldest, *_ = _three_runs(world)
    oldest.write_bytes(damage)
    store = world.begin("host-3", ranks=[0], job="job-3")
    write(store, 40)
    store.prune(Retention(1))
    assert str(oldest) in caplog.text
    assert oldest.read_bytes() == damage
    assert complete(world.store()) == [40]


def test_what_a_damaged_record_continued_is_not_of_the_history(world: World) -> None:
    _, middle, _ = _three_runs(world)
    middle.write_bytes(b"")
    assert complete(world.store()) == [20, 30], (
        "run 3 says that it continues run 2; run 1 is not known any more"
    )


def test_a_run_whose_record_is_damaged_may_be_alive_and_the_error_says_the_way_on(world: World) -> None:
    *_, newest = _three_runs(world)
    newest.write_bytes(b"garbage")
    with pytest.raises(SnapshotError, match=rf"whether that run is alive.*move {newest} to another place"):
        world.begin("host-3", ranks=[0], job="job-3")
    assert complete(world.store()) == [10, 20], "people may still look"
    newest.rename(world.folder / newest.name)
    assert complete(world.begin("host-3", ranks=[0], job="job-3")) == [10, 20]


def test_a_run_goes_on_when_its_own_record_is_damaged_and_stops_at_a_newer_one(world: World) -> None:
    store = world.begin("host-0", ranks=[0], job="job-0")
    (record,) = [path for path in (world.folder / "runs").iterdir() if path.name.count(".") == 1]
    record.write_bytes(b"")
    write(store, 10)
    newer = record.with_name("run-000002.json")
    newer.write_bytes(b"")
    with pytest.raises(SnapshotError, match=r"run-000002\.json, is damaged"):
        write(store, 20)
    newer.unlink()
    write(store, 20)
    assert complete(store) == [10, 20]
