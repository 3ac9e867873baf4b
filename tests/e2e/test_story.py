"""The mission in one run: apply a dataset, train on it in two pods, lose the job, go on where its snapshot is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from bagelplane.sidecar.snapshots import SnapshotStore
from bagelplane.spec import load_dataset, spec_hash
from bagelplane.storage import open_storage
from tests.cluster.fixtures import Cluster
from tests.cluster.training import EXAMPLES, create_namespace, example, localise, remove_namespace
from tests.e2e import trainer_files
from tests.golden.hashing import digest
from tests.golden.recordings import load_recording

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1500)]

NAMESPACE = "training"
DATASET = "bagel-sft"
JOB = "bagel-sft"
STEPS = 24  # of docs/examples/kubernetes/train.py
RANKS = 4
_TOLD_PACK = re.compile(r'\{"rank": \d+, "step": \d+, "pack": "[0-9a-f]+"\}')  # a line of watch.py


@pytest.fixture
def training(installed: Cluster) -> Iterator[Cluster]:
    """The namespace with the trainer's files in it, and no snapshot of an earlier run."""
    storage = open_storage(installed.s3.settings)
    snapshots = str(example("dataset.yaml")["spec"]["snapshots"]["uri"])
    for folder in storage.list_folders(snapshots, missing_ok=True):
        for file in storage.list_files(folder):
            storage.delete(file.uri)
    create_namespace(
        installed.kubectl,
        NAMESPACE,
        trainer_environment=installed.trainer_environment,
        server=installed.s3,
    )
    files = {path.name: path.read_text() for path in trainer_files()}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "trainer", "namespace": NAMESPACE},
        "data": files,
    }
    installed.kubectl.apply(json.dumps(config_map))
    yield installed
    remove_namespace(installed.kubectl, NAMESPACE)


def test_a_job_trains_from_s3_and_the_next_one_goes_on_at_its_last_snapshot(training: Cluster) -> None:
    kubectl = training.kubectl
    kubectl.run("apply", "--namespace", NAMESPACE, "--filename", str(EXAMPLES / "dataset.yaml"))
    wait_until_ready(training)

    start_job(training)
    first = training.kubectl.wait_for(
        "nine packs of every rank",
        lambda: packs if enough(packs := packs_in_logs(training), steps=9) else None,
        480,
        last_seen=lambda: describe_pods(training),
    )
    shown = kubectl.wait_for(
        "the operator to see four attached ranks",
        lambda: status if (status := dataset_status(training)).get("attached") == RANKS else None,
        90,
        last_seen=lambda: dataset_status(training),
    )
    table = kubectl.run("get", "bgds", "--namespace", NAMESPACE)
    print(table)
    assert shown["step"] >= 1, shown
    assert {item["worldSize"] for item in shown["attachments"]} == {RANKS}, shown
    delete_job(training)
    check_packs(first, first_step=0)

    resumed_at = last_snapshot_step(training)
    assert 4 <= resumed_at < STEPS, resumed_at
    start_job(training)
    wait_until_succeeded(training)
    second = packs_in_logs(training)
    check_packs(second, first_step=resumed_at)
    assert {step for _, step in second} == set(range(resumed_at, STEPS))
    check_sidecars_ended_well(training)
    after = kubectl.wait_for(
        "the operator to see them leave",
        lambda: status if (status := dataset_status(training)).get("attached") == 0 else None,
        90,
        last_seen=lambda: dataset_status(training),
    )
    # What the last poll saw: the end of a job this quick comes between two.
    assert resumed_at <= after["step"] <= STEPS, after


def test_after_a_pod_is_lost_without_a_word_all_ranks_go_on_at_one_step(training: Cluster) -> None:
    kubectl = training.kubectl
    kubectl.run("apply", "--namespace", NAMESPACE, "--filename", str(EXAMPLES / "dataset.yaml"))
    wait_until_ready(training)
    start_job(training)
    kubectl.wait_for(
        "six packs of every rank",
        lambda: enough(packs_in_logs(training), steps=6),
        480,
        last_seen=lambda: describe_pods(training),
    )
    lost = f"{JOB}-worker-0"
    # At once, so that its sidecar writes no last snapshot, while the master's stands further on.
    kubectl.run("delete", "pod", lost, "--namespace", NAMESPACE, "--grace-period=0", "--force")
    wait_until_succeeded(training)
    again = packs_in_logs(training)
    first_steps = {rank: min(step for owner, step in again if owner == rank) for rank in range(RANKS)}
    assert len(set(first_steps.values())) == 1, first_steps
    check_packs(again, first_step=first_steps[0])
    assert {step for _, step in again} == set(range(first_steps[0], STEPS))


# --- what is done ---------------------------------------------------------------------------------


def start_job(cluster: Cluster) -> None:
    job = localise(example("pytorchjob.yaml"))
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        command = replica["template"]["spec"]["containers"][0]["command"]
        command.insert(command.index("/trainer/train.py"), "/trainer/watch.py")
    job["metadata"]["namespace"] = NAMESPACE
    cluster.kubectl.apply(json.dumps(job))


def delete_job(cluster: Cluster) -> None:
    cluster.kubectl.run("delete", "pytorchjob", JOB, "--namespace", NAMESPACE, "--timeout=60s")
    cluster.kubectl.wait_for(
        "the job's pods to be gone",
        lambda: not pods(cluster),
        90,
        last_seen=lambda: describe_pods(cluster),
    )


# --- what is waited for ---------------------------------------------------------------------------


def wait_until_ready(cluster: Cluster) -> None:
    cluster.kubectl.wait_for(
        "the dataset to be Ready",
        lambda: condition(dataset_status(cluster), "Ready") == "True",
        120,
        last_seen=lambda: dataset_status(cluster),
    )


def wait_until_succeeded(cluster: Cluster) -> None:
    def finished() -> bool:
        status = cluster.kubectl.get_json("pytorchjob", JOB, namespace=NAMESPACE).get("status", {})
        assert condition(status, "Failed") != "True", f"{status}\n{describe_pods(cluster)}"
        return condition(status, "Succeeded") == "True"

    cluster.kubectl.wait_for("the job to succeed", finished, 240, last_seen=lambda: describe_pods(cluster))


def condition(status: dict[str, Any], kind: str) -> str:
    return next((item["status"] for item in status.get("conditions") or [] if item["type"] == kind), "")


def enough(packs: dict[tuple[int, int], str], *, steps: int) -> bool:
    return all((rank, step) in packs for rank in range(RANKS) for step in range(steps))


# --- what is seen ---------------------------------------------------------------------------------


def dataset_status(cluster: Cluster) -> dict[str, Any]:
    found = cluster.kubectl.get_json("bageldataset", DATASET, namespace=NAMESPACE)
    status = found.get("status") or {}
    assert isinstance(status, dict)
    return status


def pods(cluster: Cluster) -> list[dict[str, Any]]:
    found = cluster.kubectl.get_json(
        "pods", namespace=NAMESPACE, selector=f"training.kubeflow.org/job-name={JOB}"
    )
    return list(found["items"])


def packs_in_logs(cluster: Cluster) -> dict[tuple[int, int], str]:
    """(rank, step) to digest of every pack that the trainers' logs tell of."""
    packs: dict[tuple[int, int], str] = {}
    for pod in pods(cluster):
        log = cluster.kubectl.try_run(
            "logs", pod["metadata"]["name"], "--namespace", NAMESPACE, "--container", "pytorch"
        )
        # Not line by line: what the script prints comes in several writes, and another rank's may come between.
        for text in _TOLD_PACK.findall(log):
            entry = json.loads(text)
            place = entry["rank"], entry["step"]
            assert packs.setdefault(place, entry["pack"]) == entry["pack"], place
    return packs


def describe_pods(cluster: Cluster) -> str:
    """What a person would look at."""
    shown = [cluster.kubectl.try_run("get", "pods,pytorchjobs,bgds", "--namespace", NAMESPACE, "-o", "wide")]
    for pod in pods(cluster):
        name = pod["metadata"]["name"]
        for container in ("bagelplane", "pytorch"):
            log = cluster.kubectl.try_run(
                "logs", name, "--namespace", NAMESPACE, "--container", container, "--tail", "15"
            )
            shown.append(f"-- {name} {container}\n{log}")
    shown.append(cluster.kubectl.try_run("get", "events", "--namespace", NAMESPACE))
    return "\n".join(shown)


def last_snapshot_step(cluster: Cluster) -> int:
    dataset = load_dataset(EXAMPLES / "dataset.yaml")
    uri = dataset.spec.snapshots.uri
    assert uri is not None
    manifest = SnapshotStore(open_storage(cluster.s3.settings), uri, spec_hash(dataset)).nearest(None)
    assert manifest is not None, "no complete snapshot"
    return manifest.step


# --- what must hold -------------------------------------------------------------------------------


def check_packs(packs: dict[tuple[int, int], str], *, first_step: int) -> None:
    recording = load_recording("four_ranks")
    assert {rank for rank, _ in packs} == set(range(RANKS))
    assert min(step for _, step in packs) == first_step
    expected = {place: digest(recording.ranks[place[0]][place[1]]) for place in packs}
    wrong = sorted(place for place in packs if packs[place] != expected[place])
    assert not wrong, f"(rank, step) of packs that differ from the recorded stream: {wrong}"


def check_sidecars_ended_well(cluster: Cluster) -> None:
    """They ran when the trainers ended, were told to stop, and stopped in order."""

    def ended_pods() -> list[dict[str, Any]]:
        # The job has succeeded with its master; the worker may still be ending.
        seen = pods(cluster)
        return seen if all(pod["status"]["phase"] == "Succeeded" for pod in seen) else []

    for pod in cluster.kubectl.wait_for(
        "all pods to end", ended_pods, 60, last_seen=lambda: describe_pods(cluster)
    ):
        (sidecar,) = [
            status for status in pod["status"]["initContainerStatuses"] if status["name"] == "bagelplane"
        ]
        (trainer,) = pod["status"]["containerStatuses"]
        ended = sidecar["state"]["terminated"]
        assert (ended["exitCode"], sidecar["restartCount"]) == (0, 0), sidecar
        assert ended["finishedAt"] >= trainer["state"]["terminated"]["finishedAt"]
