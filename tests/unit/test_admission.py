"""Verdicts: what the webhook answers to whatever it is asked."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bagelplane.cli.app import main
from bagelplane.errors import SpecError, TransientStorageError
from bagelplane_operator.admission import Verdict, admit_dataset, admit_pod, build_answer, parse_review
from bagelplane_operator.injection import InjectionDefaults

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
DEFAULTS = InjectionDefaults("registry.example.com/bagelplane:1")

Object = dict[str, Any]


def example(**changes: object) -> Object:
    """The example resource as the API server hands it over, with parts of its spec replaced."""
    resource: Object = yaml.safe_load((EXAMPLES / "dataset.yaml").read_text())
    resource["metadata"] |= {"namespace": "training", "generation": 7, "uid": "u", "managedFields": [{}]}
    resource["spec"] |= changes
    return resource


def pod(**annotations: str) -> Object:
    metadata: Object = {"generateName": "train-", "labels": {"bagelplane.io/dataset": "bagel-sft"}}
    metadata["annotations"] = {
        f"bagelplane.io/{name.replace('_', '-')}": text for name, text in annotations.items()
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [{"name": "main"}]},
    }


def review(kind: str, new: object, old: object = None, operation: str = "CREATE") -> Object:
    request = {"uid": "u1", "kind": {"kind": kind}, "operation": operation, "namespace": "training"}
    request |= {"object": new, "oldObject": old}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


class FakeDatasets:
    def __init__(self, *resources: Object, failure: Exception | None = None) -> None:
        self.resources = {resource["metadata"]["name"]: resource for resource in resources}
        self.failure = failure

    async def find(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        await self.names(namespace)
        return self.resources.get(name)

    async def names(self, namespace: str) -> Sequence[str]:
        assert namespace == "training", "the request's, whatever the pod says"
        if self.failure is not None:
            raise self.failure
        return list(self.resources)


def verdict_on_dataset(new: object, old: object = None, operation: str = "CREATE") -> Verdict:
    question = review("BagelDataset", new, old, operation)
    return admit_dataset(parse_review(json.dumps(question).encode(), "BagelDataset"))


def verdict_on_pod(new: Object, datasets: FakeDatasets, operation: str = "CREATE") -> Verdict:
    question = parse_review(json.dumps(review("Pod", new, None, operation)).encode(), "Pod")
    return asyncio.run(admit_pod(question, datasets, DEFAULTS))


# --- datasets -------------------------------------------------------------------------------------


def test_a_good_dataset_passes_with_advice_as_warnings() -> None:
    assert verdict_on_dataset(example()) == Verdict(True)
    (warning,) = verdict_on_dataset(example(snapshots={})).warnings
    assert warning.startswith("spec.snapshots.uri: is not set: no snapshots are written")


def test_a_wrong_field_is_refused_in_the_words_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = example(budgets={"expectedTokens": 2**20}, conditioning={"textDropout": 2, "vitdropout": 0.5})
    path = tmp_path / "wrong.yaml"
    path.write_text(json.dumps(wrong))  # JSON is YAML, and has all in one line
    with pytest.raises(SystemExit):
        main(["validate", str(path)])
    printed = capsys.readouterr().err.strip().removeprefix(f"error: {path}: ")
    verdict = verdict_on_dataset(wrong)
    assert not verdict.allowed
    assert verdict.message == "BagelDataset bagel-sft: " + printed.replace(", line 1)", ")").replace(
        " (line 1)", ""
    )
    assert "did you mean `vitDropout`?" in verdict.message


def test_what_this_release_does_not_run_is_refused() -> None:
    message = verdict_on_dataset(example(storage={"cache": {"sizeLimit": "1Gi"}})).message
    assert "spec.storage.cache: is set, this release keeps no cache yet" in message
    groups = example()["spec"]["groups"]
    groups[0]["type"] = "t2i_pretraining"
    assert "is no registered type" in verdict_on_dataset(example(groups=groups)).message


def test_what_is_stored_already_may_be_deleted_and_relabelled() -> None:
    wrong = example(storage={"cache": {"sizeLimit": "1Gi"}})
    labelled = json.loads(json.dumps(wrong))
    labelled["metadata"]["labels"] = {"team": "a"}
    leaving = json.loads(json.dumps(wrong))
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert verdict_on_dataset(None, wrong, "DELETE").allowed
    assert verdict_on_dataset(labelled, wrong, "UPDATE").allowed
    assert verdict_on_dataset(leaving, example(), "UPDATE").allowed
    assert not verdict_on_dataset(wrong, example(), "UPDATE").allowed


# --- pods -----------------------------------------------------------------------------------------


def test_a_pod_gets_a_patch_that_makes_it_whole() -> None:
    verdict = verdict_on_pod(pod(), FakeDatasets(example()))
    answer = build_answer("u1", verdict)["response"]
    assert (answer["uid"], answer["allowed"], answer["patchType"]) == ("u1", True, "JSONPatch")
    patched = jsonpatch.apply_patch(pod(), json.loads(base64.b64decode(answer["patch"])))
    assert patched["spec"]["initContainers"][0]["name"] == "bagelplane"
    assert {"name": "BAGELPLANE_GENERATION", "value": "7"} in patched["spec"]["containers"][0]["env"]


def test_a_second_pass_asks_nobody_and_patches_nothing() -> None:
    first = verdict_on_pod(pod(), FakeDatasets(example()))
    injected = jsonpatch.apply_patch(pod(), list(first.patch))
    assert verdict_on_pod(injected, FakeDatasets(failure=AssertionError("asked"))) == Verdict(True)


def test_pods_that_do_not_ask_are_left_alone_without_a_look_up() -> None:
    unlabelled = pod()
    del unlabelled["metadata"]["labels"]
    nobody = FakeDatasets(failure=AssertionError("asked"))
    assert verdict_on_pod(unlabelled, nobody) == Verdict(True)
    assert verdict_on_pod(pod(inject="false"), nobody) == Verdict(True)
    assert verdict_on_pod(pod(), nobody, "UPDATE") == Verdict(True)


def test_a_missing_dataset_is_refused_with_those_that_are_there() -> None:
    other, another = example(), example()
    other["metadata"]["name"], another["metadata"]["name"] = "b", "a"
    verdict = verdict_on_pod(pod(), FakeDatasets(other, another))
    assert (verdict.allowed, verdict.code) == (False, 403)
    assert verdict.message == (
        "there is no BagelDataset bagel-sft in namespace training; expected one of a, b. Fix: apply it there, or "
        "correct the pod's label bagelplane.io/dataset"
    )
    nothing = verdict_on_pod(pod(), FakeDatasets()).message
    assert nothing.startswith("there is no BagelDataset bagel-sft in namespace training. Fix: apply it there")


def test_an_api_server_that_does_not_answer_is_said_so() -> None:
    verdict = verdict_on_pod(pod(), FakeDatasets(failure=TransientStorageError("no answer", fix="look")))
    assert (verdict.allowed, verdict.code) == (False, 503)
    assert verdict.message == (
        "BagelDataset bagel-sft could not be looked up in namespace training: no answer. Fix: look"
    )
    assert build_answer("u", verdict)["response"]["status"]["reason"] == "ServiceUnavailable"


def test_a_dataset_that_cannot_be_run_is_refused_in_the_words_of_the_command_line() -> None:
    verdict = verdict_on_pod(pod(), FakeDatasets(example(storage={"cache": {"sizeLimit": "1Gi"}})))
    assert not verdict.allowed
    assert verdict.message.startswith("BagelDataset bagel-sft: spec.storage.cache: is set, this release")


def test_what_is_wrong_with_the_pod_is_said() -> None:
    verdict = verdict_on_pod(pod(resume_step="newest"), FakeDatasets(example()))
    assert not verdict.allowed
    assert "bagelplane.io/resume-step is not understood; got 'newest'" in verdict.message


def test_values_of_the_pods_environment_are_in_no_message() -> None:
    asked = pod()
    secret = [
        {"name": name, "value": "hunter2"} for name in ("BAGELPLANE_DIR", "PET_NPROC_PER_NODE", "TOKEN")
    ]
    asked["spec"]["containers"] = [{"name": "main", "env": secret}]
    verdict = verdict_on_pod(asked, FakeDatasets(example()))
    assert not verdict.allowed
    assert "hunter2" not in verdict.message


# --- hostile questions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        b"null",
        b"[]",
        b'"text"',
        b'{"a": NaN}',
        json.dumps({"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview"}).encode(),
        json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "Status"}).encode(),
        json.dumps({**review("Pod", {}), "request": None}).encode(),
        json.dumps({**review("Pod", {}), "request": []}).encode(),
        json.dumps(review("Deployment", {})).encode(),
        json.dumps(review("Pod", [])).encode(),
        json.dumps(review("Pod", {}, "old")).encode(),
        json.dumps({**review("Pod", {}), "request": {**review("Pod", {})["request"], "uid": 1}}).encode(),
        json.dumps(
            {**review("Pod", {}), "request": {**review("Pod", {})["request"], "namespace": ""}}
        ).encode(),
    ],
)
def test_what_is_no_question_about_that_kind_is_refused(body: bytes) -> None:
    with pytest.raises(SpecError) as caught:
        parse_review(body, "Pod")
    assert len(str(caught.value)) < 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
places = st.sampled_from(
    [
        ("metadata",),
        ("metadata", "labels"),
        ("metadata", "annotations"),
        ("metadata", "name"),
        ("spec",),
        ("spec", "containers"),
        ("spec", "initContainers"),
        ("spec", "volumes"),
        ("spec", "securityContext"),
        ("spec", "groups"),
        ("spec", "dataplane"),
    ]
)


@settings(max_examples=30)
@given(places, json_values)
def test_any_object_gets_a_verdict(place: tuple[str, ...], value: object) -> None:
    for asked in (pod(), example()):
        target = asked
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = value
        verdict_on_pod(asked, FakeDatasets(example()))
        verdict_on_dataset(asked)
        verdict_on_pod(pod(), FakeDatasets(example(groups=value)))
