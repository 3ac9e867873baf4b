"""What tests are given: S3 under a name that pods know, and the same one from here."""

from __future__ import annotations

import json

import pytest

from bagelplane.storage import open_storage
from tests.cluster import sample_data
from tests.cluster.fixtures import Cluster
from tests.cluster.images import image_tag

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

ASK_S3 = f"""
import urllib.error, urllib.request
try:
    urllib.request.urlopen("{sample_data.ENDPOINT}/{sample_data.BUCKET}/tokenizer.json", timeout=10)
except urllib.error.HTTPError as answer:
    print(answer.code, answer.read().decode())
"""


def test_pods_reach_the_s3_server_that_was_filled_from_here(cluster: Cluster) -> None:
    storage = open_storage(cluster.s3.settings)
    assert storage.read_bytes(f"s3://{sample_data.BUCKET}/tokenizer.json")
    cluster.load_images("base")
    kubectl = cluster.kubectl
    container = {"name": "ask", "image": image_tag("base"), "command": ["python3", "-c", ASK_S3]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "asks-s3"},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }
    kubectl.apply(json.dumps(pod))
    try:
        kubectl.wait_for(
            "the pod to end",
            lambda: kubectl.get_json("pod", "asks-s3")["status"]["phase"] == "Succeeded",
            60,
            last_seen=lambda: kubectl.describe("pod", "asks-s3") + kubectl.try_run("logs", "asks-s3"),
        )
        said = kubectl.run("logs", "asks-s3")
        assert said.startswith("403 ")  # it has no key
        assert "AccessDenied" in said
    finally:
        kubectl.run("delete", "pod", "asks-s3", "--wait=false")


def test_a_cluster_that_stands_is_used_as_it_is(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What BAGELPLANE_TEST_KUBECONFIG is for."""
    from tests.cluster.assembly import running_cluster

    monkeypatch.setenv("BAGELPLANE_TEST_KUBECONFIG", str(cluster.kubeconfig))
    port_before = published_port(cluster)
    with running_cluster(cluster.say) as given:
        assert given.node is None
        nodes = ("get", "nodes", "--output=name")
        assert given.kubectl(*nodes) == cluster.kubectl(*nodes)
        assert published_port(given) != port_before
    assert published_port(cluster) == port_before
    assert not given.work_dir.exists()


def published_port(cluster: Cluster) -> int:
    found = cluster.kubectl.get_json("endpointslice", "s3", namespace=sample_data.NAMESPACE)
    return int(found["ports"][0]["port"])
