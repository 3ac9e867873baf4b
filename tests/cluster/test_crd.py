"""The CRD in a real API server: what it stores, refuses, explains and prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bagelplane.spec import BagelDataset, config_hash, load_dataset, spec_hash
from bagelplane.spec_schema import CRD_NAME
from tests.cluster.control_plane import control_plane
from tests.cluster.kubectl import Kubectl, KubectlError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
CRD = ROOT / "crds" / f"{CRD_NAME}.yaml"
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.yaml"))

MINIMAL = """
apiVersion: bagelplane.io/v1alpha1
kind: BagelDataset
metadata: {name: minimal}
spec:
  tokenizer: {uri: s3://bucket/tokenizer.json}
  groups:
  - name: t2i
    type: t2i_pretrain
    datasets: [{name: t2i, uri: s3://bucket/t2i/}]
    imageTransform: {stride: 16, maxSize: 512, minSize: 256}
"""


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    with control_plane(tmp_path_factory.mktemp("plane"), advertise_address="127.0.0.1") as plane:
        kubectl = Kubectl(plane.kubeconfig)
        kubectl.apply(CRD)
        kubectl.wait_established(CRD_NAME)
        yield kubectl


def minimal() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(MINIMAL)
    return data


def changed(**spec: Any) -> str:
    data = minimal()
    data["spec"] |= spec
    return json.dumps(data)


def refusal(kubectl: Kubectl, resource: str) -> str:
    with pytest.raises(KubectlError) as caught:
        kubectl.apply(resource, "--dry-run=server")
    return caught.value.text


def stored(kubectl: Kubectl, resource: str | Path, *arguments: str) -> dict[str, Any]:
    answer = kubectl.apply(resource, "--dry-run=server", "--output=json", *arguments)
    parsed: dict[str, Any] = json.loads(answer)
    return parsed


def test_the_api_server_has_nothing_against_the_schema(kubectl: Kubectl) -> None:
    crd = kubectl.get_json("crd", CRD_NAME)
    conditions = {condition["type"]: condition["status"] for condition in crd["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_stored_as_it_reads_here(kubectl: Kubectl, example: Path) -> None:
    here, there = load_dataset(example), BagelDataset.from_mapping(stored(kubectl, example))
    assert there.spec == here.spec
    assert (spec_hash(there), config_hash(there)) == (spec_hash(here), config_hash(here))


def test_defaults_are_spelt_out(kubectl: Kubectl) -> None:
    data = stored(kubectl, MINIMAL)
    assert data["spec"]["budgets"]["maxTokens"] == 36_864
    assert data["spec"]["groups"][0]["weight"] == 1
    assert BagelDataset.from_mapping(data).spec == BagelDataset.from_mapping(minimal()).spec


@pytest.mark.parametrize("mode", ["--server-side=false", "--server-side"])
def test_a_field_with_nothing_behind_it_is_left_out(kubectl: Kubectl, mode: str) -> None:
    empty = changed(storage={"region": None, "secretRef": None}, budgets=None, snapshots={"uri": None})
    data = stored(kubectl, empty, mode)
    assert BagelDataset.from_mapping(data).spec == BagelDataset.from_mapping(minimal()).spec


FAULTS = [
    ({"profile": "strict"}, 'spec.profile: Unsupported value: "strict": supported values: "Strict", "Automodel"'),
    ({"budgets": {"maxTokens": "5"}}, "spec.budgets.maxTokens in body must be of type integer"),
    ({"budgets": {"maxTokens": 0}}, "spec.budgets.maxTokens in body should be greater than or equal to 1"),
    ({"sharding": {"dataSeed": 2**63}}, "spec.sharding.dataSeed in body must be of type integer"),
    ({"conditioning": {"vitDropout": 1.5}}, "spec.conditioning.vitDropout in body should be less than or equal"),
    ({"dataplane": {"ring": {"size": 0}}}, "spec.dataplane.ring.size in body should be greater than or equal to 1"),
    ({"dataplane": {"ring": {"size": "2GB"}}}, "spec.dataplane.ring.size in body should match"),
    ({"dataplane": {"resources": {"limits": {"cpu": 0.5}}}}, "limits.cpu in body must be of type integer,string"),
    ({"storage": {"endpointURL": "s3.example.com"}}, "spec.storage.endpointURL in body should match"),
    ({"groups": []}, "spec.groups in body should have at least 1 items"),
    ({"groups": minimal()["spec"]["groups"] * 2}, 'spec.groups[1]: Duplicate value: {"name":"t2i"}'),
    ({"tokenizer": {"uri": None}}, "spec.tokenizer.uri: Required value"),
    ({"tokenizers": {}}, 'unknown field "spec.tokenizers"'),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), FAULTS, ids=[fault[1][:40] for fault in FAULTS])
def test_what_the_models_refuse_is_refused(kubectl: Kubectl, change: dict[str, Any], message: str) -> None:
    assert message in refusal(kubectl, changed(**change))


def test_a_name_that_is_no_label_value_is_refused(kubectl: Kubectl) -> None:
    data = minimal()
    data["metadata"]["name"] = "a.b"
    assert "metadata.name in body should match" in refusal(kubectl, json.dumps(data))


@pytest.mark.parametrize("mode", ["--server-side=false", "--server-side"])
def test_groups_keep_the_order_of_the_file(kubectl: Kubectl, mode: str) -> None:
    name = f"order{mode.removeprefix('--').replace('=', '-')}"
    try:
        for order in ("abc", "cab", "cdab", "dcba", "bxa"):
            data = minimal()
            data["metadata"]["name"] = name
            group = data["spec"]["groups"][0]
            data["spec"]["groups"] = [group | {"name": f"group-{letter}"} for letter in order]
            kubectl.apply(json.dumps(data), mode)
            groups = kubectl.get_json("bgds", name)["spec"]["groups"]
            assert "".join(group["name"][-1] for group in groups) == order
    finally:
        kubectl("delete", "bgds", name, "--ignore-not-found")


def test_columns_show_the_status(kubectl: Kubectl) -> None:
    kubectl.apply(MINIMAL)
    try:
        condition = {
            "type": "Ready",
            "status": "True",
            "reason": "Ready",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        numbers = {"groups": 1, "attached": 4, "step": 12, "packsPerSecond": 3.25, "fillRatio": 0.97}
        patch = json.dumps({"status": {**numbers, "conditions": [condition]}})
        kubectl("patch", "bgds", "minimal", "--subresource=status", "--type=merge", "--patch", patch)
        header, row = kubectl("get", "bgds").splitlines()
        assert header.split() == ["NAME", "READY", "GROUPS", "ATTACHED", "STEP", "PACKS/S", "FILL", "AGE"]
        assert row.split()[:-1] == ["minimal", "True", "1", "4", "12", "3.25", "0.97"]
        assert "minimal" in kubectl("get", "bagelplane")
        kubectl("wait", "bgds/minimal", "--for=condition=Ready", "--timeout=5s")
    finally:
        kubectl("delete", "bgds", "minimal")


def test_a_status_can_only_be_written_as_one(kubectl: Kubectl) -> None:
    data = minimal()
    data["status"] = {"groups": 7}
    assert "status" not in stored(kubectl, json.dumps(data))


def test_explain_tells_meaning_and_unit(kubectl: Kubectl) -> None:
    told = " ".join(kubectl("explain", "bgds.spec.budgets").split())
    assert "maxTokens <integer> Length that no drawn sample may exceed. Unit: tokens." in told
    assert "attention <string> enum: DenseMasks, Flex" in told
    assert "-required-" in kubectl("explain", "bgds.spec.groups")
