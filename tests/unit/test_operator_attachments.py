"""Attachments: what sidecars say becomes figures, and nothing that a pod says can do harm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagelplane.spec_status import MAX_ATTACHMENTS, DatasetStatus
from bagelplane_operator import polling
from bagelplane_operator.attachments import (
    MIN_RATE_SECONDS,
    Attachments,
    Memory,
    Poll,
    TrainerPod,
    fold,
    parse_status,
    read_pod,
)
from bagelplane_operator.polling import MAX_ANSWER_BYTES, Poller
from tests.unit.operator_world import World, build_trainer_pod, trainer_pod

NOW = "2026-11-30T12:00:00Z"


def build_rank(rank: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "local_rank": rank,
        "phase": "ready",
        "problem": "",
        "attached": True,
        "next_step": 10,
        "packs_published": 12,
        "packs_acknowledged": 10,
        "fill": 0.9,
        **changes,
    }


def build_answer(*ranks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "dataset": "bagel-sft",
        "started_unix_seconds": 1000.5,
        "world_size": 4,
        "ready": True,
        "ranks": list(ranks),
        "snapshots": {"last_step": 8, "problem": ""},
        **changes,
    }


def poll(*ranks: dict[str, Any], **changes: Any) -> Poll:
    return Poll(parse_status(json.dumps(build_answer(*ranks, **changes)).encode()))


def fold_one(answer: Poll, memory: dict[str, Memory] | None = None, at: float = 0.0) -> Attachments:
    pod = trainer_pod()
    return fold([pod], {pod.uid: answer}, memory or {}, at, NOW)


# --- figures --------------------------------------------------------------------------------------


def test_ranks_of_all_pods_are_summed_and_the_slowest_gives_the_step() -> None:
    pods = [trainer_pod("a"), trainer_pod("b")]
    polls = {
        pods[0].uid: poll(build_rank(0, next_step=12), build_rank(1, next_step=11)),
        pods[1].uid: poll(build_rank(2, next_step=10), build_rank(3, attached=False, next_step=3)),
    }
    folded = fold(pods, polls, {}, 0.0, NOW)
    assert (folded.attached, folded.step, folded.fill_ratio) == (3, 10, 0.9)
    first, second = folded.entries
    assert first == {
        "pod": "a",
        "job": "sft",
        "ready": True,
        "worldSize": 4,
        "step": 11,
        "attachedRanks": 2,
        "fillRatio": 0.9,
        "lastSnapshotStep": 8,
    }
    assert (second["attachedRanks"], second["step"]) == (1, 10)


def test_the_rate_is_the_difference_of_two_polls_in_two_digits() -> None:
    first = fold_one(poll(build_rank(packs_acknowledged=10)))
    assert first.packs_per_second is None
    second = fold_one(poll(build_rank(packs_acknowledged=33)), dict(first.memory), 7.0)
    assert second.packs_per_second == 3.3
    assert second.entries[0]["packsPerSecond"] == 3.3


def test_polls_that_follow_at_once_leave_the_rate_as_it_is() -> None:
    memory = fold_one(poll(build_rank(packs_acknowledged=10))).memory
    memory = fold_one(poll(build_rank(packs_acknowledged=20)), dict(memory), 10.0).memory
    soon = fold_one(poll(build_rank(packs_acknowledged=21)), dict(memory), 10.0 + MIN_RATE_SECONDS / 2)
    assert soon.packs_per_second == 1.0
    later = fold_one(poll(build_rank(packs_acknowledged=30)), dict(soon.memory), 20.0)
    assert later.packs_per_second == 1.0, "counted from the poll that the rate was made at"


@pytest.mark.parametrize("change", [{"started_unix_seconds": 2000.0}, {}])
def test_a_sidecar_that_began_anew_has_no_rate_yet(change: dict[str, Any]) -> None:
    memory = fold_one(poll(build_rank(packs_acknowledged=100))).memory
    again = fold_one(poll(build_rank(packs_acknowledged=5), **change), dict(memory), 10.0)
    assert again.packs_per_second is None
    assert fold_one(poll(build_rank(packs_acknowledged=25), **change), dict(again.memory), 20.0)


def test_the_fill_is_the_mean_over_packs_and_not_over_ranks() -> None:
    ranks = build_rank(0, fill=1.0, packs_published=30), build_rank(1, fill=0.5, packs_published=10)
    assert fold_one(poll(*ranks)).fill_ratio == pytest.approx(0.88, abs=0.006)
    assert fold_one(poll(build_rank(fill=None, packs_published=0))).fill_ratio is None


# --- pods and their problems ----------------------------------------------------------------------


def test_a_silent_sidecar_is_named_with_the_time_since_when() -> None:
    pod = trainer_pod()
    first = fold([pod], {pod.uid: Poll(None, "nothing within 2 s")}, {}, 0.0, NOW)
    second = fold([pod], {pod.uid: Poll(None, "connection refused")}, first.memory, 9.0, "later")
    (entry,) = second.entries
    assert entry["problem"] == f"no answer from the sidecar since {NOW}: connection refused"
    assert entry["ready"] is False
    third = fold([pod], {pod.uid: poll(build_rank())}, second.memory, 20.0, "later still")
    assert "problem" not in third.entries[0]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"initContainerStatuses": []}, None),
        (
            {
                "initContainerStatuses": [
                    {
                        "name": "bagelplane",
                        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
                    }
                ]
            },
            "the sidecar does not run: CrashLoopBackOff back-off 10s",
        ),
        (
            {
                "initContainerStatuses": [
                    {"name": "bagelplane", "state": {"waiting": {"reason": "PodInitializing"}}}
                ]
            },
            None,
        ),
        (
            {
                "initContainerStatuses": [
                    {"name": "bagelplane", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}}
                ]
            },
            "the sidecar ended with exit code 3",
        ),
        (
            {
                "initContainerStatuses": [
                    {
                        "name": "bagelplane",
                        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
                        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                    }
                ]
            },
            "the sidecar ended with exit code 137 (OOMKilled); CrashLoopBackOff back-off 10s",
        ),
        (
            {
                "initContainerStatuses": [
                    {
                        "name": "bagelplane",
                        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
                        "lastState": {
                            "terminated": {
                                "exitCode": 4,
                                "reason": "Error",
                                "message": "INFO begins\nerror: there is no such  bucket\n",
                            }
                        },
                    }
                ]
            },
            "the sidecar ended with exit code 4: error: there is no such bucket; CrashLoopBackOff back-off 10s",
        ),
    ],
)
def test_a_pod_whose_sidecar_does_not_run_says_so_and_is_not_asked(
    changes: dict[str, Any], problem: str | None
) -> None:
    pod = trainer_pod(phase="Pending", **changes)
    assert pod.address == ""
    (entry,) = fold([pod], {}, {}, 0.0, NOW).entries
    assert entry.get("problem") == problem


def test_a_labelled_pod_without_a_sidecar_says_so() -> None:
    manifest = build_trainer_pod()
    manifest["spec"] = {"containers": [{"name": "pytorch"}]}
    (entry,) = fold([read_pod(manifest)], {}, {}, 0.0, NOW).entries
    assert "has no sidecar. Fix: create it again" in entry["problem"]


def test_a_job_whose_pods_were_made_from_different_specs_says_so_on_each() -> None:
    def problems(*pods: TrainerPod) -> list[str | None]:
        polls = {pod.uid: poll(build_rank()) for pod in pods}
        return [entry.get("problem") for entry in fold(pods, polls, {}, 0.0, NOW).entries]

    master, worker = trainer_pod("a-master"), trainer_pod("b-worker")
    assert problems(master, replace(worker, revision="another storage")) == [None, None]
    newer = replace(worker, spec_hash="f2454063f950")
    first, second = problems(master, newer)
    assert first is not None
    assert "made from different specs, this one from ee64fc869117. Fix: start the job anew" in first
    assert second is not None
    assert "this one from f2454063f950" in second
    assert problems(master, replace(newer, job="another")) == [None, None]
    assert problems(master, replace(newer, job="")) == [None, None]
    assert problems(master, replace(newer, active=False)) == [None]


def test_pods_that_ended_are_being_deleted_or_opted_out_are_no_attachments() -> None:
    deleted, opted_out = build_trainer_pod("deleted"), build_trainer_pod("opted-out")
    deleted["metadata"]["deletionTimestamp"] = NOW
    opted_out["metadata"]["annotations"]["bagelplane.io/inject"] = "false"
    pods = [trainer_pod("ended", phase="Succeeded"), read_pod(deleted), read_pod(opted_out)]
    assert fold(pods, {}, {}, 0.0, NOW).entries == ()
    assert read_pod(deleted).holds_config


def test_a_rank_that_failed_and_a_snapshot_that_was_not_written_are_named() -> None:
    (entry,) = fold_one(poll(build_rank(problem="the ring is too small"))).entries
    assert entry["problem"] == "the ring is too small"
    (entry,) = fold_one(poll(build_rank(problem="of a rank"), problem="nobody can attach")).entries
    assert entry["problem"] == "nobody can attach"
    (entry,) = fold_one(poll(build_rank(problem="half a \ud83d pair"))).entries
    assert entry["problem"] == "half a ? pair"
    (entry,) = fold_one(poll(build_rank(), snapshots={"problem": "denied"})).entries
    assert entry["problem"] == "denied"


def test_a_sidecar_of_another_data_set_is_named() -> None:
    (entry,) = fold_one(poll(build_rank(), dataset="other")).entries
    assert "'other'" in entry["problem"]


def test_of_too_many_pods_those_with_problems_are_kept() -> None:
    pods = [trainer_pod(f"t-{number:05}") for number in range(MAX_ATTACHMENTS + 10)]
    polls = {pod.uid: poll(build_rank()) for pod in pods}
    polls[pods[-1].uid] = Poll(None, "connection refused")
    folded = fold(pods, polls, {}, 0.0, NOW)
    assert len(folded.entries) == MAX_ATTACHMENTS
    assert folded.entries[-1]["pod"] == pods[-1].name
    assert folded.attached == len(pods) - 1


# --- hostile answers ------------------------------------------------------------------------------

VALUES: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=400)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
)
RANKS = st.dictionaries(st.sampled_from(sorted(build_rank())), VALUES)
ANSWERS = st.one_of(
    st.fixed_dictionaries({"version": st.just(1), "ranks": st.lists(RANKS | VALUES, max_size=3)}).flatmap(
        lambda sound: st.dictionaries(
            st.sampled_from(["dataset", "started_unix_seconds", "world_size", "ready", "snapshots"]), VALUES
        ).map(lambda odd: sound | odd)
    ),
    VALUES,
)


@given(st.lists(ANSWERS, min_size=1, max_size=3))
def test_whatever_a_pod_says_the_status_is_one_that_the_schema_takes(answers: list[Any]) -> None:
    world, pod, memory = World(), trainer_pod(), {}
    for second, answer in enumerate(answers):
        try:
            heard = Poll(parse_status(json.dumps(answer).encode()))
        except ValueError as error:
            heard = Poll(None, str(error))
        world.attachments = fold([pod], {pod.uid: heard}, memory, second * 10.0, NOW)
        memory = dict(world.attachments.memory)
        world.look(10)
        DatasetStatus.model_validate(world.resource["status"], by_alias=True)
        json.dumps(world.resource["status"], allow_nan=False)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"[" * 200_000,
        b'{"version":1}',
        b'{"version":1,"ranks":7}',
        b"9" * 9000,
    ],
)
def test_what_is_no_status_is_refused_with_a_reason(body: bytes) -> None:
    with pytest.raises(ValueError, match="its answer"):
        parse_status(body)


def test_more_ranks_than_a_pod_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match="no list of ranks"):
        parse_status(json.dumps(build_answer(*[{}] * 5000)).encode())


# --- polling real sockets -------------------------------------------------------------------------

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def poll_server(serve: Serve) -> Poll:
    """What came of polling a server that answers each connection by `serve`."""

    async def run() -> Poll:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pod = trainer_pod(podIP="127.0.0.1")
        async with server, Poller(port) as poller:
            return (await poller.poll([pod]))[pod.uid]

    return asyncio.run(asyncio.wait_for(run(), 30))


def answering(*parts: bytes, hang: bool = False) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await writer.drain()
            if hang:
                await reader.read()
        except OSError:
            pass
        finally:
            writer.close()

    return serve


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def test_a_sound_answer_is_read() -> None:
    body = json.dumps(build_answer(build_rank())).encode()
    found = poll_server(answering(OK + b"Content-Length: %d\r\n\r\n" % len(body), body))
    assert found.status is not None
    assert found.status.ranks[0].next_step == 10


@pytest.mark.parametrize(
    ("serve", "problem"),
    [
        (answering(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"), "status 503"),
        (answering(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n"), "status 302"),
        (answering(b"SSH-2.0-OpenSSH\r\n"), "no HTTP answer"),
        (answering(), "no HTTP answer"),
        (answering(OK + b"Content-Length: 100\r\n\r\n{"), "no HTTP answer"),
        (answering(OK + b"Content-Length: 2\r\n\r\n[]"), "not the status of a sidecar"),
        (answering(OK + b"\r\n", *[b"x" * 65536] * 17), f"longer than {MAX_ANSWER_BYTES} bytes"),
    ],
)
def test_odd_answers_become_a_problem(serve: Serve, problem: str) -> None:
    found = poll_server(serve)
    assert found.status is None
    assert problem in found.problem


def test_a_sidecar_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "POLL_SECONDS", 0.2)
    assert poll_server(answering(OK, hang=True)).problem == "nothing within 0.2 s"


def test_a_closed_port_is_named() -> None:
    async def run() -> dict[str, Poll]:
        pod = trainer_pod(podIP="127.0.0.1")
        async with Poller(1) as poller:
            return await poller.poll([pod])

    (found,) = asyncio.run(run()).values()
    assert "Connect call failed" in found.problem or "refused" in found.problem


def test_pods_without_an_address_are_not_asked() -> None:
    async def run(pods: list[TrainerPod]) -> dict[str, Poll]:
        async with Poller(1) as poller:
            return await poller.poll(pods)

    waiting = trainer_pod(phase="Pending", initContainerStatuses=[])
    assert asyncio.run(run([waiting, trainer_pod(phase="Failed")])) == {}
