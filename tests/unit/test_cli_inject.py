"""`bagelplane inject`: the webhook's pods from the command line, and all else as it was."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml

import bagelplane
from bagelplane.cli.app import main
from bagelplane.spec import BagelDataset, config_hash, load_dataset
from bagelplane_operator.injection import InjectionDefaults, inject, is_injected

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples" / "kubernetes"
DATASET = EXAMPLES / "dataset.yaml"
JOB = EXAMPLES / "pytorchjob.yaml"
IMAGE = f"bagelplane/dataplane:{bagelplane.__version__}"

POD = {
    "metadata": {"labels": {"bagelplane.io/dataset": "bagel-sft"}},
    "spec": {"containers": [{"name": "main", "image": "trainer"}]},
}
SERVICE = """\
# A comment   that stays.
apiVersion: v1
kind: Service
metadata: {name: s, labels: {on: "yes", from: 2026-01-01}}   # as written
spec: {ports: [{port: 0o17}]}
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["inject", *(str(argument) for argument in arguments), "--dataset-file", str(DATASET)])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def injected(capsys: pytest.CaptureFixture[str], path: Path, document: object, *options: str) -> Any:
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False))
    code, out, err = run(capsys, "-f", path, *options)
    assert (code, err) == (0, "")
    documents = list(yaml.safe_load_all(out))
    return documents[0] if len(documents) == 1 else documents


def test_a_pod_is_what_the_webhook_would_make_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    new = injected(capsys, tmp_path / "pod.yaml", POD, "--image", "own:1")
    assert new == inject(POD, load_dataset(DATASET), InjectionDefaults("own:1"))


def wrapped(kind: str, *path: str | int) -> Any:
    """An object of that kind with the pod template at `path`."""
    node: Any = POD
    for key in reversed(path):
        node = [{"name": "node", "first": True}, node] if isinstance(key, int) else {"name": "x", key: node}
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": "a"}, "spec": node}


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("Job", ("template",)),
        ("CronJob", ("jobTemplate", "spec", "template")),
        ("StatefulSet", ("template",)),
        ("Deployment", ("template",)),
        ("PyTorchJob", ("pytorchReplicaSpecs", "Worker", "template")),
        ("JobSet", ("replicatedJobs", 1, "template", "spec", "template")),
        ("ClusterTrainingRuntime", ("template", "spec", "replicatedJobs", 1, "template", "spec", "template")),
    ],
)
def test_pod_templates_of_all_kinds_are_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, path: tuple[str | int, ...]
) -> None:
    node = injected(capsys, tmp_path / "object.yaml", wrapped(kind, *path))["spec"]
    for key in path:
        node = node[key]
    hints = {"PET_NNODES": "1"} if kind == "PyTorchJob" else {}
    assert node == inject(POD, load_dataset(DATASET), InjectionDefaults(IMAGE), hints=hints)


def test_a_list_of_objects_is_gone_through(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    items = [wrapped("Job", "template"), yaml.safe_load(JOB.read_text())]
    new = injected(capsys, tmp_path / "list.yaml", {"kind": "List", "items": items})["items"]
    assert is_injected(new[0]["spec"]["template"])
    assert ranks(new[0]["spec"]["template"]) == "1"
    assert ranks(new[1]["spec"]["pytorchReplicaSpecs"]["Master"]["template"]) == "2"


def ranks(template: Any) -> str:
    args = template["spec"]["initContainers"][0]["args"]
    return str(args[args.index("--ranks") + 1])


def test_the_example_job_gets_its_sidecars_and_their_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "-f", JOB, "--with-config-map")
    assert (code, err) == (0, "")
    config_map, job = yaml.safe_load_all(out)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        assert is_injected(replica["template"])
        assert ranks(replica["template"]) == "2"
        env = replica["template"]["spec"]["initContainers"][0]["env"]
        assert {"name": "PET_NNODES", "value": "2"} in env
        volumes = replica["template"]["spec"]["volumes"]
        assert {
            "name": "bagelplane-dataset",
            "configMap": {"name": config_map["metadata"]["name"]},
        } in volumes
    resource = load_dataset(DATASET)
    assert config_map["immutable"] is True
    stored = BagelDataset.from_yaml(config_map["data"]["dataset.yaml"])
    assert stored.spec == resource.spec
    assert config_map["metadata"]["name"] == f"bagelplane-bagel-sft-{config_hash(stored)[:12]}"


def test_training_runtimes_say_how_many_ranks_there_will_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runtime = wrapped("TrainingRuntime", "template")
    runtime["spec"]["mlPolicy"] = {"numNodes": 3, "torch": {"numProcPerNode": 4}}
    template = injected(capsys, tmp_path / "runtime.yaml", runtime)["spec"]["template"]
    assert ranks(template) == "4"
    assert {"name": "PET_NNODES", "value": "3"} in template["spec"]["initContainers"][0]["env"]


def test_documents_without_a_pod_that_asks_are_not_touched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(f"{SERVICE}---\n# about the pod\n{yaml.safe_dump(POD)}---\n{SERVICE}")
    opted_out = yaml.safe_dump(
        {**POD, "metadata": {**POD["metadata"], "annotations": {"bagelplane.io/inject": "false"}}}
    )
    second.write_text(opted_out.rstrip("\n"))
    code, out, err = run(capsys, "-f", first, "-f", second)
    assert (code, err) == (0, "")
    assert out.startswith(f"{SERVICE}---\n# about the pod\nmetadata:\n  labels:")
    assert out.endswith(f"---\n{SERVICE}---\n{opted_out}")


def test_what_was_printed_is_printed_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, once, _ = run(capsys, "-f", JOB)
    path = tmp_path / "once.yaml"
    path.write_text(once)
    assert run(capsys, "-f", path) == (0, once, "")


def test_values_keep_their_meaning(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = (
        yaml.safe_dump(POD)
        + 'a: {day: 2026-01-01, port: 22:22, mode: 0644, "on": yes, "no": "yes", e: 1e3}\n'
    )
    code, out, _ = run(capsys, "-f", write(tmp_path, text))
    assert code == 0
    tail = out[out.index("\na:") :]
    assert (
        tail
        == "\na:\n  day: '2026-01-01'\n  port: '22:22'\n  mode: 420\n  'on': true\n  'no': 'yes'\n  e: 1e3\n"
    )


def test_stdin_is_read_for_a_dash(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(yaml.safe_dump(POD)))
    code, out, _ = run(capsys, "-f", "-")
    assert code == 0
    assert is_injected(yaml.safe_load(out))


def test_a_label_in_the_wrong_place_is_noticed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = wrapped("Job", "template")
    job["metadata"]["labels"] = job["spec"]["template"]["metadata"].copy()["labels"]
    job["spec"]["template"] = {"metadata": {}, "spec": POD["spec"]}
    code, _, err = run(capsys, "-f", write(tmp_path, yaml.safe_dump(job)))
    assert code == 0
    assert err.startswith(
        "note: nothing was injected, no pod or pod template has the label bagelplane.io/dataset"
    )


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "manifest.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            yaml.safe_dump(wrapped("Job", "template")).replace("bagel-sft", "bagel-stf"),
            ".spec.template: there is no BagelDataset bagel-stf among the --dataset-file; expected one of bagel-sft",
        ),
        ("a: [", "is no YAML: while parsing a flow node"),
        ("a: 1\n---\nb: 1\nb: 2\n", "is no YAML: b stands twice line 4, column 1"),
        ("a: &a [*a]\n", "refers to itself. Fix: remove the alias"),
        (
            yaml.safe_dump({**POD, "kind": "Pod", "spec": {"containers": []}}),
            "the pod has no containers. Fix: ",
        ),
        (
            yaml.safe_dump({**POD, "spec": {"containers": [1]}}),
            "spec.containers of the pod is not what a pod has",
        ),
    ],
)
def test_what_cannot_be_injected_is_one_message(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    path = write(tmp_path, text)
    code, out, err = run(capsys, "-f", path)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {path}")
    assert message in err
    assert err.count("\n") == 1


def test_a_file_that_is_not_there_is_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "-f", tmp_path / "none.yaml")
    assert code == 2
    assert "none.yaml cannot be read: No such file or directory. Fix: " in err
