"""What the installed webhook and the operator say to people who apply things, right and wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from bagelplane.spec import BagelDataset, InvalidDatasetError
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import KubectlError
from tests.cluster.training import create_namespace, example, remove_namespace

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

NAMESPACE = "admission"
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "trainer", "namespace": NAMESPACE, "labels": {"bagelplane.io/dataset": "bagel-sft"}},
    "spec": {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "pytorch",
                "image": "localhost/bagelplane/base:test",
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
    },
}


@pytest.fixture(scope="module")
def cluster_with_dataset(installed: Cluster) -> Iterator[Cluster]:
    create_namespace(
        installed.kubectl,
        NAMESPACE,
        trainer_environment=installed.trainer_environment,
        server=installed.s3,
    )
    apply(installed, example("dataset.yaml"))
    yield installed
    remove_namespace(installed.kubectl, NAMESPACE)


def apply(cluster: Cluster, dataset: dict[str, Any]) -> None:
    dataset["metadata"]["namespace"] = NAMESPACE
    cluster.kubectl.apply(json.dumps(dataset))


def admitted(cluster: Cluster, pod: dict[str, Any]) -> dict[str, Any]:
    """The pod as the API server would store it."""
    answer = cluster.kubectl.run(
        "create", "--dry-run=server", "--output=json", "--filename=-", input=json.dumps(pod)
    )
    loaded = json.loads(answer)
    assert isinstance(loaded, dict)
    return loaded


def refusal(cluster: Cluster, thing: dict[str, Any]) -> str:
    with pytest.raises(KubectlError) as refused:
        cluster.kubectl.apply(json.dumps(thing))
    return refused.value.text


def test_a_labelled_pod_gets_the_sidecar_first_in_a_namespace_that_enforces_restricted(
    cluster_with_dataset: Cluster,
) -> None:
    pod = admitted(cluster_with_dataset, POD)
    sidecar = pod["spec"]["initContainers"][0]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("bagelplane", "Always")
    (trainer,) = pod["spec"]["containers"]
    mounts = {mount["name"] for mount in trainer["volumeMounts"] if mount["name"].startswith("bagelplane")}
    assert mounts == {"bagelplane-ring"}, "the trainer gets the ring alone, never the credentials"


def test_a_second_pass_over_an_injected_pod_changes_nothing(cluster_with_dataset: Cluster) -> None:
    once = admitted(cluster_with_dataset, POD)
    again = {"apiVersion": "v1", "kind": "Pod", "metadata": once["metadata"], "spec": once["spec"]}
    # What the API server gives to each new object is no part of the question.
    for name in ("uid", "resourceVersion", "creationTimestamp", "managedFields"):
        again["metadata"].pop(name, None)
    twice = admitted(cluster_with_dataset, again)
    assert twice["spec"] == once["spec"]
    for name in ("labels", "annotations"):
        assert twice["metadata"][name] == once["metadata"][name]


def test_a_pod_without_the_label_is_not_touched(cluster_with_dataset: Cluster) -> None:
    pod = copy.deepcopy(POD)
    del pod["metadata"]["labels"]  # type: ignore[attr-defined]
    stored = admitted(cluster_with_dataset, pod)
    assert "bagelplane" not in json.dumps(stored["spec"]).replace("localhost/bagelplane/base", "")
    assert not any("bagelplane" in name for name in stored["metadata"].get("annotations", {}))


def test_a_pod_that_names_a_missing_dataset_is_refused_and_told_which_there_are(
    cluster_with_dataset: Cluster,
) -> None:
    pod = copy.deepcopy(POD)
    pod["metadata"]["labels"]["bagelplane.io/dataset"] = "bagel-sfd"  # type: ignore[index]
    text = refusal(cluster_with_dataset, pod)
    for part in ("bagel-sfd", NAMESPACE, "bagel-sft", "Fix:"):
        assert part in text, text


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("budgets", "maxTokens"), 0),
        (("budgets", "maxTokensPerSample"), 4096),
        (("groups", 0, "imageTransform", "stride"), 7),
        (("groups", 0, "type"), "T2I"),
        (("storage", "cache"), {"sizeLimit": "1Gi"}),
        (("storage", "endpointURL"), "s3.storage.svc"),
    ],
)
def test_a_wrong_field_is_refused_at_apply_with_the_message_of_the_command_line(
    cluster_with_dataset: Cluster, path: tuple[str | int, ...], value: object
) -> None:
    dataset = example("dataset.yaml")
    dataset["metadata"] |= {"namespace": NAMESPACE, "name": "wrong"}
    place: Any = dataset["spec"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    text = refusal(cluster_with_dataset, dataset)
    for problem in command_line_problems(dataset):
        assert problem in text, text


def command_line_problems(dataset: dict[str, Any]) -> list[str]:
    from bagelplane.spec import refuse_unsupported

    try:
        refuse_unsupported(BagelDataset.from_mapping(dataset))
    except InvalidDatasetError as error:
        return [str(problem) for problem in error.problems]
    raise AssertionError("the command line finds nothing wrong with it")


def test_an_unknown_field_is_refused_at_apply_by_its_name(cluster_with_dataset: Cluster) -> None:
    dataset = example("dataset.yaml")
    dataset["metadata"] |= {"namespace": NAMESPACE, "name": "wrong"}
    dataset["spec"]["budgets"]["expectedToken"] = 1024
    assert "spec.budgets.expectedToken" in refusal(cluster_with_dataset, dataset)


def test_a_wrong_bucket_shows_in_the_conditions_with_bucket_endpoint_and_fix(
    cluster_with_dataset: Cluster,
) -> None:
    dataset = example("dataset.yaml")
    dataset["metadata"]["name"] = "wrong-bucket"
    dataset["spec"]["groups"][0]["datasets"][0]["uri"] = "s3://trainnig/t2i/"
    apply(cluster_with_dataset, dataset)

    def conditions() -> dict[str, Any]:
        found = cluster_with_dataset.kubectl.get_json("bgds", "wrong-bucket", namespace=NAMESPACE)
        return {item["type"]: item for item in found.get("status", {}).get("conditions", [])}

    seen = cluster_with_dataset.kubectl.wait_for(
        "the check to fail",
        lambda: (
            found if (found := conditions()).get("SourcesReachable", {}).get("status") == "False" else None
        ),
        90,
        last_seen=lambda: (
            conditions(),
            cluster_with_dataset.kubectl.describe("jobs,pods", namespace=NAMESPACE),
        ),
    )
    assert seen["Ready"]["status"] == "False"
    message = seen["SourcesReachable"]["message"]
    for part in ("trainnig", "s3.storage.svc", "Fix:"):
        assert part in message, message
