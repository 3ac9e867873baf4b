"""Injection: what becomes of a pod that asks for a dataset, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bagelplane.cli.app import load_command
from bagelplane.errors import SpecError
from bagelplane.spec import BagelDataset, config_hash, spec_hash
from bagelplane.spec_memory import ring_bytes
from bagelplane.spec_values import parse_quantity
from bagelplane_operator import naming
from bagelplane_operator.injection import (
    InjectionDefaults,
    build_patch,
    dataset_asked_for,
    inject,
    is_injected,
)
from tests.restricted import container_violations, violations

DATA = Path(__file__).parent / "data" / "injection"
CASES = ("pytorchjob-master", "pytorchjob-worker", "plain", "trainjob-node", "tensor-parallel")
DEFAULTS = InjectionDefaults("registry.example.com/bagelplane:1", "IfNotPresent")

Pod = dict[str, Any]


def dataset(**parts: Any) -> BagelDataset:
    """A small resource, with `parts` of its spec replaced."""
    transform = {"stride": 16, "maxSize": 512, "minSize": 256}
    data = [{"name": "t2i", "uri": "s3://training/t2i/"}]
    spec: dict[str, Any] = {
        "profile": "Automodel",
        "storage": {"secretRef": {"name": "bagel-s3"}},
        "tokenizer": {"uri": "s3://training/tokenizer.json"},
        "groups": [{"name": "t2i", "type": "t2i_pretrain", "datasets": data, "imageTransform": transform}],
        "budgets": {"expectedTokens": 4096, "maxTokens": 4096, "maxTokensPerSample": 2048},
        "sharding": {"mode": "Bagel"},
        "snapshots": {"uri": "s3://training/snapshots/"},
    }
    head = {"apiVersion": "bagelplane.io/v1alpha1", "kind": "BagelDataset", "metadata": {"name": "bagel-sft"}}
    return BagelDataset.from_mapping({**head, "spec": {**spec, **parts}})


DATASET = dataset()


def load(name: str) -> Pod:
    pod: Pod = yaml.safe_load((DATA / f"{name}.pod.yaml").read_text())
    return pod


def plain(**parts: Any) -> Pod:
    """The plain pod, with `parts` of its only container replaced."""
    pod = load("plain")
    pod["spec"]["containers"][0].update(parts)
    return pod


def annotated(pod: Pod, **annotations: str) -> Pod:
    names = {f"bagelplane.io/{name.replace('_', '-')}": text for name, text in annotations.items()}
    pod["metadata"].setdefault("annotations", {}).update(names)
    return pod


def injected(pod: Pod, resource: BagelDataset = DATASET, **settings: Any) -> Pod:
    before = copy.deepcopy(pod)
    after = inject(pod, resource, DEFAULTS, 3, **settings)
    assert pod == before, "the pod that is given stays as it is"
    return after


def sidecar_of(pod: Pod) -> Pod:
    first: Pod = pod["spec"]["initContainers"][0]
    assert first["name"] == "bagelplane"
    return first


def trainer_of(pod: Pod, name: str) -> Pod:
    (found,) = (container for container in pod["spec"]["containers"] if container["name"] == name)
    return dict(found)


def environment(container: Pod) -> dict[str, str]:
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def ranks_of(pod: Pod) -> str:
    args = sidecar_of(pod)["args"]
    return str(args[args.index("--ranks") + 1])


# --- whole pods -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_patches_are_the_recorded_ones(case: str, update_golden: bool) -> None:
    pod = load(case)
    patch = build_patch(pod, injected(pod))
    path = DATA / f"{case}.patch.yaml"
    if update_golden:
        path.write_text(yaml.safe_dump(patch, sort_keys=False, width=110))
    assert patch == yaml.safe_load(path.read_text()), "Fix: pytest --update-golden, if the change is meant"


@pytest.mark.parametrize("case", CASES)
def test_the_patch_makes_the_new_pod_of_the_old_one(case: str) -> None:
    pod = load(case)
    assert jsonpatch.apply_patch(pod, build_patch(pod, injected(pod))) == injected(pod)


@pytest.mark.parametrize("case", CASES)
def test_the_sidecar_is_first_native_and_restricted(case: str) -> None:
    pod = injected(load(case))
    sidecar = sidecar_of(pod)
    assert sidecar["restartPolicy"] == "Always"
    assert list(container_violations(sidecar, {})) == [], "whatever the pod's own context is"
    assert sidecar["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("case", CASES)
def test_the_sidecars_arguments_are_such_as_the_program_takes(case: str) -> None:
    command, *options = sidecar_of(injected(load(case)))["args"]
    parsed = load_command(command).make_context(command, options).params
    assert str(parsed["dataset"]) == "/etc/bagelplane/dataset/dataset.yaml"
    assert (str(parsed["directory"]), parsed["any_user"]) == ("/run/bagelplane", True)
    assert (parsed["status_host"], parsed["status_port"]) == ("0.0.0.0", 9780)


def test_a_restricted_pod_stays_restricted() -> None:
    pod = load("pytorchjob-master")
    assert violations(pod) == []
    assert violations(injected(pod)) == []


@pytest.mark.parametrize("case", CASES)
def test_credentials_are_the_sidecars_alone(case: str) -> None:
    pod = injected(load(case))
    assert {"name": "bagelplane-credentials", "secret": {"secretName": "bagel-s3"}} in pod["spec"]["volumes"]
    others = [*pod["spec"]["initContainers"][1:], *pod["spec"]["containers"]]
    assert "bagelplane-credentials" not in json.dumps(others)
    assert environment(sidecar_of(pod))["BAGELPLANE_CREDENTIALS_DIR"] == "/etc/bagelplane/credentials"


def test_without_a_secret_there_is_no_trace_of_one() -> None:
    pod = injected(plain(), dataset(storage={}))
    assert "credentials" not in json.dumps(pod).lower()


def test_the_sidecar_gets_no_service_account_token() -> None:
    pod = injected(load("pytorchjob-master"))
    (mount,) = (mount for mount in sidecar_of(pod)["volumeMounts"] if "serviceaccount" in mount["mountPath"])
    assert mount["name"] == "bagelplane-no-token"
    assert {"name": "bagelplane-no-token", "emptyDir": {}} in pod["spec"]["volumes"]
    assert "kube-api-access" in json.dumps(trainer_of(pod, "pytorch")), "the trainer keeps its own"


def test_the_pod_says_which_revision_it_trains_on() -> None:
    pod = injected(plain())
    revision = config_hash(DATASET)[:12]
    assert pod["metadata"]["annotations"] == {
        "bagelplane.io/injected": revision,
        "bagelplane.io/spec-hash": spec_hash(DATASET),
    }
    assert f"bagelplane-bagel-sft-{revision}" in json.dumps(pod["spec"]["volumes"])
    assert environment(pod["spec"]["containers"][0]) == {
        "BAGELPLANE_DIR": "/run/bagelplane",
        "BAGELPLANE_GENERATION": "3",
    }


def test_the_datasets_image_goes_before_the_installations() -> None:
    assert sidecar_of(injected(plain()))["image"] == DEFAULTS.image
    own = dataset(dataplane={"image": "own:2"})
    assert sidecar_of(injected(plain(), own))["image"] == "own:2"
    without_policy = inject(plain(), DATASET, InjectionDefaults("image"))
    assert "imagePullPolicy" not in sidecar_of(without_policy)


def test_the_installation_says_how_sidecars_log() -> None:
    pod = inject(plain(), DATASET, InjectionDefaults("image", log_format="json"))
    assert environment(sidecar_of(pod))["BAGELPLANE_LOG_FORMAT"] == "json"
    assert "BAGELPLANE_LOG_FORMAT" not in environment(sidecar_of(injected(plain())))


# --- who is touched -------------------------------------------------------------------------------


def test_without_the_label_nothing_is_touched() -> None:
    pod = plain()
    del pod["metadata"]["labels"]
    assert dataset_asked_for(pod) is None
    assert injected(pod) == pod


def test_the_annotation_opts_out() -> None:
    pod = annotated(plain(), inject="false")
    assert dataset_asked_for(pod) is None
    assert injected(pod) == pod
    assert is_injected(injected(annotated(plain(), inject="true")))


@pytest.mark.parametrize("wish", ["False", "no", ""])
def test_an_opt_out_in_other_words_is_refused(wish: str) -> None:
    with pytest.raises(SpecError, match=r"bagelplane\.io/inject is not understood"):
        injected(annotated(plain(), inject=wish))


def test_an_empty_label_is_refused() -> None:
    pod = plain()
    pod["metadata"]["labels"]["bagelplane.io/dataset"] = ""
    with pytest.raises(SpecError, match="is empty"):
        dataset_asked_for(pod)


# --- the second pass ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_second_pass_changes_nothing_also_under_a_new_revision(case: str) -> None:
    once = injected(load(case))
    again = injected(once, dataset(budgets={}))
    assert json.dumps(again) == json.dumps(once)
    assert build_patch(once, again) == []


def test_what_other_webhooks_add_and_move_in_between_stays() -> None:
    pod = injected(load("pytorchjob-worker"))
    spec = pod["spec"]
    spec["initContainers"].reverse()
    spec["initContainers"].insert(0, {"name": "mesh-init", "image": "mesh"})
    spec["containers"].insert(0, {"name": "mesh-proxy", "image": "mesh"})
    spec["volumes"].reverse()
    spec["containers"][1]["env"].insert(0, {"name": "ADDED", "value": "1"})
    assert json.dumps(injected(pod)) == json.dumps(pod)


def test_a_restart_policy_that_another_webhook_dropped_is_given_back() -> None:
    whole = injected(plain())
    stripped = copy.deepcopy(whole)
    del sidecar_of(stripped)["restartPolicy"]
    assert build_patch(stripped, injected(stripped)) == [
        {"op": "replace", "path": "/spec/initContainers", "value": whole["spec"]["initContainers"]}
    ]


def test_annotations_of_an_old_pod_do_not_stand_for_a_sidecar() -> None:
    pod = annotated(plain(), injected="0" * 12, spec_hash="0" * 64)
    assert injected(pod)["metadata"]["annotations"] == injected(plain())["metadata"]["annotations"]
    assert sidecar_of(injected(pod))


# --- the trainer's container ----------------------------------------------------------------------


def pod_of(*names: str) -> Pod:
    pod = plain()
    pod["spec"]["containers"] = [{"name": name, "image": "image"} for name in names]
    return pod


@pytest.mark.parametrize(
    ("names", "trainer"),
    [(["a", "pytorch"], "pytorch"), (["node", "a"], "node"), (["node", "pytorch"], "pytorch"), (["a"], "a")],
)
def test_the_trainer_is_found_by_name_or_is_alone(names: list[str], trainer: str) -> None:
    pod = injected(pod_of(*names))
    assert [entry["name"] for entry in pod["spec"]["containers"] if "env" in entry] == [trainer]


def test_the_annotation_names_the_trainer() -> None:
    pod = injected(annotated(pod_of("pytorch", "other"), trainer_container="other"))
    assert "env" in trainer_of(pod, "other")
    assert trainer_of(pod, "pytorch") == {"name": "pytorch", "image": "image"}


def test_a_trainer_that_cannot_be_told_is_an_error_that_names_all() -> None:
    with pytest.raises(
        SpecError, match=r"containers a, b; .*pytorch or node.*bagelplane\.io/trainer-container"
    ):
        injected(pod_of("a", "b"))
    with pytest.raises(SpecError, match=r"names no container.*got 'c'; expected one of a, b"):
        injected(annotated(pod_of("a", "b"), trainer_container="c"))
    with pytest.raises(SpecError, match="has no containers"):
        injected(pod_of())


@pytest.mark.parametrize("path", ["/run/bagelplane", "/run/bagelplane/", "/run/bagelplane/sub"])
def test_a_mount_where_the_rings_go_is_refused(path: str) -> None:
    with pytest.raises(SpecError, match=f"container main has a mount of its own.*got {path}"):
        injected(plain(volumeMounts=[{"name": "own", "mountPath": path}]))


def test_mounts_beside_the_rings_are_fine() -> None:
    for path in ("/run", "/run/bagelplane-data", "/dev/shm"):
        mount = {"name": "own", "mountPath": path}
        mounts = injected(plain(volumeMounts=[mount]))["spec"]["containers"][0]["volumeMounts"]
        assert mounts == [mount, {"name": "bagelplane-ring", "mountPath": "/run/bagelplane"}]


def test_variables_of_ours_are_kept_when_right_and_refused_when_wrong() -> None:
    right = plain(env=[{"name": "BAGELPLANE_DIR", "value": "/run/bagelplane"}])
    assert [variable["name"] for variable in injected(right)["spec"]["containers"][0]["env"]] == [
        "BAGELPLANE_DIR",
        "BAGELPLANE_GENERATION",
    ]
    with pytest.raises(SpecError, match="container main sets BAGELPLANE_DIR itself") as caught:
        injected(plain(env=[{"name": "BAGELPLANE_DIR", "value": "/somewhere/secret"}]))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_a_container_called_as_ours_is_refused(kind: str) -> None:
    pod = pod_of("pytorch")
    pod["spec"].setdefault(kind, []).append({"name": "bagelplane", "image": "image"})
    with pytest.raises(SpecError, match=rf"called bagelplane in spec\.{kind} already"):
        injected(pod)


def test_a_volume_called_as_ours_is_refused() -> None:
    pod = plain()
    pod["spec"]["volumes"] = [{"name": "bagelplane-ring", "emptyDir": {}}]
    with pytest.raises(SpecError, match="a volume called bagelplane-ring of its own"):
        injected(pod)


# --- ranks, memory, resume ------------------------------------------------------------------------

GPUS = {"limits": {"nvidia.com/gpu": 8}}


@pytest.mark.parametrize(
    ("variable", "resources", "ranks"),
    [
        ({"value": "2"}, GPUS, "2"),
        ({"value": "008"}, {}, "8"),
        ({"value": "auto"}, GPUS, "8"),
        ({"value": "gpu"}, {"requests": {"nvidia.com/gpu": "4"}}, "4"),
        ({"value": "cpu"}, {}, "1"),
        ({"value": "auto"}, {"limits": {"nvidia.com/gpu": 0}}, "1"),
        ({"value": "$(PROCESSES)"}, GPUS, "8"),
        ({"valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}, {}, "1"),
        ({}, {"limits": {"cpu": 2}}, "1"),
    ],
)
def test_ranks_are_what_torchrun_is_told_else_the_gpus_else_one(
    variable: Pod, resources: Pod, ranks: str
) -> None:
    env = [{"name": "PET_NPROC_PER_NODE", **variable}, {"name": "PET_NNODES", "value": "1:4"}]
    pod = injected(plain(env=env, resources=resources))
    assert ranks_of(pod) == ranks
    copied = environment(sidecar_of(pod))
    assert copied["PET_NNODES"] == "1:4"
    literal = variable.get("value") if variable.get("value") != "$(PROCESSES)" else None
    assert copied.get("PET_NPROC_PER_NODE") == literal
    (ring,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "bagelplane-ring")
    assert ring["emptyDir"]["medium"] == "Memory"
    size, needed = parse_quantity(ring["emptyDir"]["sizeLimit"]), int(ranks) * (ring_bytes(DATASET) + 8192)
    assert needed <= size <= needed + int(ranks) * 2**20 + 2**20


def test_hints_stand_in_for_what_a_controller_will_add() -> None:
    hints = {"PET_NPROC_PER_NODE": "4", "PET_NNODES": "2"}
    pod = injected(plain(), hints=hints)
    assert ranks_of(pod) == "4"
    assert hints.items() <= environment(sidecar_of(pod)).items()
    literal = plain(env=[{"name": "PET_NPROC_PER_NODE", "value": "2"}])
    assert ranks_of(injected(literal, hints=hints)) == "2"


@pytest.mark.parametrize("number", ["0", "000", "1025", "9" * 5000])
def test_a_number_of_ranks_that_cannot_be_is_refused(number: str) -> None:
    with pytest.raises(SpecError, match="expected 1 to 1024"):
        injected(plain(env=[{"name": "PET_NPROC_PER_NODE", "value": number}]))


def test_memory_covers_the_rings_and_the_heap_of_every_rank() -> None:
    for ranks in (1, 8):
        pod = injected(plain(env=[{"name": "PET_NPROC_PER_NODE", "value": str(ranks)}]))
        resources = sidecar_of(pod)["resources"]
        rings = ranks * ring_bytes(DATASET)
        request = parse_quantity(resources["requests"]["memory"])
        assert request >= rings + ranks * 2**30
        assert parse_quantity(resources["limits"]["memory"]) - rings >= 2 * (request - rings) - 2**21
        assert resources["requests"]["cpu"] == f"{250 * ranks}m"


def test_declared_resources_are_taken_as_they_are() -> None:
    given = {"requests": {"cpu": "4", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}
    assert sidecar_of(injected(plain(), dataset(dataplane={"resources": given})))["resources"] == given
    cpu = {"limits": {"cpu": "4"}}
    resources = sidecar_of(injected(plain(), dataset(dataplane={"resources": cpu})))["resources"]
    assert resources["limits"]["cpu"] == "4"
    assert set(resources["requests"]) == {"memory"}, "the limit is the request, as for any container"


def test_a_memory_limit_below_the_rings_is_refused_with_the_numbers() -> None:
    tight = dataset(dataplane={"resources": {"limits": {"memory": "1Gi"}}, "ring": {"size": "256Mi"}})
    injected(plain(env=[{"name": "PET_NPROC_PER_NODE", "value": "3"}]), tight)
    with pytest.raises(
        SpecError, match="got 1Gi for 4 ranks with rings of 256Mi each; expected more than 1024Mi"
    ):
        injected(plain(env=[{"name": "PET_NPROC_PER_NODE", "value": "4"}]), tight)


def test_a_pod_whose_processes_share_ranks_has_a_ring_for_each_rank() -> None:
    env = [{"name": "PET_NPROC_PER_NODE", "value": "8"}]
    shared = injected(annotated(plain(env=env), data_parallel_ranks="2"))
    two = injected(plain(env=[{"name": "PET_NPROC_PER_NODE", "value": "2"}]))
    assert ranks_of(shared) == "2"
    assert sidecar_of(shared)["resources"] == sidecar_of(two)["resources"]
    assert shared["spec"]["volumes"] == two["spec"]["volumes"]
    assert ranks_of(injected(annotated(plain(env=env), data_parallel_ranks="8"))) == "8"


@pytest.mark.parametrize("number", ["0", "9", "-1", "1.5", "", "two", "١", "9" * 5000])
def test_data_parallel_ranks_that_the_processes_do_not_allow_are_refused(number: str) -> None:
    env = [{"name": "PET_NPROC_PER_NODE", "value": "8"}]
    with pytest.raises(
        SpecError, match=r"bagelplane\.io/data-parallel-ranks .*expected 1 to 8.*Fix: "
    ) as caught:
        injected(annotated(plain(env=env), data_parallel_ranks=number))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("step", ["0", "1200", str(2**63 - 1), "latest", "none"])
def test_the_annotation_says_where_to_resume(step: str) -> None:
    assert sidecar_of(injected(annotated(plain(), resume_step=step)))["args"][-2:] == ["--resume", step]
    assert "--resume" not in sidecar_of(injected(plain()))["args"]


def test_the_sidecar_is_told_which_job_its_pod_is_of() -> None:
    def run_id(pod: Any) -> list[str]:
        return [
            item["value"] for item in sidecar_of(injected(pod))["env"] if item["name"] == "BAGELPLANE_RUN_ID"
        ]

    pod = plain()
    assert run_id(pod) == [], "a template has no owner yet: ranks tell runs apart"
    owners = [{"uid": "other", "kind": "X"}, {"uid": "of-the-job", "controller": True}]
    pod["metadata"]["ownerReferences"] = owners
    assert run_id(pod) == ["of-the-job"]
    pod["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] = "set"
    assert run_id(pod) == ["set"], "pods of a JobSet are owned by several Jobs"
    assert run_id(annotated(pod, run_id="mine")) == ["mine"]


@pytest.mark.parametrize("step", ["-1", "1.5", "", "newest", "١٢", str(2**63), "1 200", "9" * 5000])
def test_a_step_that_is_none_is_refused(step: str) -> None:
    with pytest.raises(SpecError, match=r"bagelplane\.io/resume-step is not understood") as caught:
        injected(annotated(plain(), resume_step=step))
    assert len(str(caught.value)) < 400


# --- users and identities -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_pod", "of_trainer", "user", "group"),
    [
        ({}, {}, 65532, 65532),
        ({"runAsUser": 1000}, {}, 1000, 65532),
        ({"runAsUser": 1000, "runAsGroup": 1000}, {"runAsUser": 2000}, 2000, 1000),
        ({}, {"runAsUser": 2000, "runAsGroup": 3000}, 2000, 3000),
        ({"runAsUser": 1000}, {"runAsUser": 0}, 65532, 65532),
        ({"runAsUser": 0, "runAsGroup": 0}, {}, 65532, 65532),
        ({"runAsUser": 1000, "runAsGroup": 0}, {}, 1000, 65532),
    ],
)
def test_the_sidecar_is_the_trainers_user_but_never_root(
    of_pod: Pod, of_trainer: Pod, user: int, group: int
) -> None:
    pod = plain(securityContext=of_trainer)
    pod["spec"]["securityContext"] = {**of_pod, "fsGroup": 7}
    after = injected(pod)
    context = sidecar_of(after)["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == (user, group)
    assert after["spec"]["securityContext"] == pod["spec"]["securityContext"]


IDENTITIES = {
    "AWS_WEB_IDENTITY_TOKEN_FILE": {"AWS_ROLE_ARN": "role", "AWS_REGION": "r"},
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://169.254.170.23/v1"
    },
    "AZURE_FEDERATED_TOKEN_FILE": {"AZURE_CLIENT_ID": "c", "AZURE_TENANT_ID": "t"},
}


@pytest.mark.parametrize("token_file", IDENTITIES)
def test_an_identity_of_the_trainer_is_the_sidecars_too(token_file: str) -> None:
    variables = {"SECRET": "x", **IDENTITIES[token_file], token_file: "/var/run/secrets/cloud/token"}
    env = [{"name": name, "value": value} for name, value in variables.items()]
    token = {"name": "token", "mountPath": "/var/run/secrets/cloud", "readOnly": True}
    other = {"name": "data", "mountPath": "/var/run/secrets/clouds"}
    sidecar = sidecar_of(injected(plain(env=env, volumeMounts=[other, token])))
    assert {**IDENTITIES[token_file], token_file: "/var/run/secrets/cloud/token"}.items() <= environment(
        sidecar
    ).items()
    assert token in sidecar["volumeMounts"]
    assert other not in sidecar["volumeMounts"]
    assert "SECRET" not in environment(sidecar)


def test_keys_that_are_not_an_identity_stay_the_trainers() -> None:
    env = [{"name": "AWS_ACCESS_KEY_ID", "value": "key"}, {"name": "AWS_REGION", "value": "r"}]
    assert not any(name.startswith("AWS") for name in environment(sidecar_of(injected(plain(env=env)))))


# --- what is no pod -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spec", None),
        ("spec", []),
        ("metadata", None),
        ("metadata", {"labels": []}),
        ("metadata", {"labels": {"bagelplane.io/dataset": 1}}),
        (
            "metadata",
            {"labels": {"bagelplane.io/dataset": "a"}, "annotations": {"bagelplane.io/inject": False}},
        ),
        ("spec", {"containers": {}}),
        ("spec", {"containers": ["main"]}),
        ("spec", {"containers": [{"name": 1}]}),
        ("spec", {"containers": [{"name": "main", "env": {}}]}),
        ("spec", {"containers": [{"name": "main", "volumeMounts": [None]}]}),
        ("spec", {"containers": [{"name": "main", "resources": {"limits": []}}]}),
        ("spec", {"containers": [{"name": "main", "securityContext": 1}]}),
        ("spec", {"containers": [{"name": "main"}], "volumes": 1}),
        ("spec", {"containers": [{"name": "main"}], "initContainers": [1]}),
    ],
)
def test_what_is_no_pod_is_refused_as_such(key: str, value: object) -> None:
    with pytest.raises(SpecError, match="is not what a pod has; expected"):
        injected({**plain(), key: value})


# --- any pod --------------------------------------------------------------------------------------

names = st.sampled_from(["pytorch", "node", "main", "a", "b"])
variables = st.fixed_dictionaries(
    {"name": st.sampled_from(["A", "PET_NPROC_PER_NODE", "PET_NNODES", "AWS_WEB_IDENTITY_TOKEN_FILE"])},
    optional={
        "value": st.sampled_from(["", "1", "2", "auto", "1:2", "/var/token"]),
        "valueFrom": st.just({"fieldRef": {"fieldPath": "metadata.name"}}),
    },
)
mounts = st.fixed_dictionaries(
    {"name": st.sampled_from(["v", "w"]), "mountPath": st.sampled_from(["/data", "/dev/shm", "/var", "/run"])}
)
contexts = st.fixed_dictionaries(
    {},
    optional={
        "runAsUser": st.integers(0, 3),
        "runAsGroup": st.integers(0, 3),
        "privileged": st.booleans(),
        "seccompProfile": st.just({"type": "Unconfined"}),
    },
)
containers = st.fixed_dictionaries(
    {"name": names, "image": st.just("image")},
    optional={
        "env": st.lists(variables, max_size=4) | st.none(),
        "volumeMounts": st.lists(mounts, max_size=3),
        "resources": st.just({"limits": {"nvidia.com/gpu": 2}}) | st.just({}),
        "securityContext": contexts,
    },
)
pods = st.builds(
    lambda annotations, trainers, first, volumes, context, extra: {
        "metadata": {"labels": {naming.DATASET_LABEL: "bagel-sft"}, "annotations": annotations},
        "spec": {
            "containers": trainers,
            "initContainers": first,
            "volumes": volumes,
            "securityContext": context,
            **extra,
        },
    },
    st.dictionaries(st.sampled_from(["x", "y"]), st.text(max_size=3)),
    st.lists(containers, min_size=1, max_size=3, unique_by=lambda container: container["name"]),
    st.lists(containers, max_size=2, unique_by=lambda container: container["name"]),
    st.lists(
        st.fixed_dictionaries({"name": st.sampled_from(["v", "w"]), "emptyDir": st.just({})}), max_size=2
    ),
    contexts,
    st.dictionaries(st.sampled_from(["hostIPC", "serviceAccountName", "nodeSelector"]), st.just("x")),
)


def without_ours(pod: Pod, trainer: str) -> Pod:
    """An injected pod less everything that injection is known to add."""
    pod = copy.deepcopy(pod)
    spec = pod["spec"]
    spec["initContainers"] = spec["initContainers"][1:]
    ours = {"bagelplane-ring", "bagelplane-dataset", "bagelplane-no-token", "bagelplane-credentials"}
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] not in ours]
    for name in ("injected", "spec-hash"):
        del pod["metadata"]["annotations"][f"bagelplane.io/{name}"]
    for container in spec["containers"]:
        if container["name"] == trainer:
            container["env"] = container["env"][:-2]
            container["volumeMounts"] = container["volumeMounts"][:-1]
    return pod


@given(pods)
def test_of_any_pod_nothing_but_the_known_places_changes(pod: Pod) -> None:
    try:
        after = injected(pod)
    except SpecError as error:
        assert "which of the pod's containers trains is not known" in str(error)  # noqa: PT017 (others pass)
        return
    named = [container["name"] for container in pod["spec"]["containers"]]
    trainer = next((name for name in ("pytorch", "node") if name in named), named[0])
    expected = copy.deepcopy(pod)
    for container in expected["spec"]["containers"]:
        if container["name"] == trainer:
            container["env"] = container.get("env") or []
            container.setdefault("volumeMounts", [])
    assert without_ours(after, trainer) == expected
    assert environment(trainer_of(after, trainer))["BAGELPLANE_DIR"] == "/run/bagelplane"
    assert "credentials" not in json.dumps(after["spec"]["containers"])
    assert list(container_violations(sidecar_of(after), pod["spec"])) == []
    assert json.dumps(injected(after)) == json.dumps(after)
    assert jsonpatch.apply_patch(pod, build_patch(pod, after)) == after


@given(pods, pods)
def test_a_patch_leads_from_any_pod_to_any_other(old: Pod, new: Pod) -> None:
    old["metadata"]["annotations"]["a/b~c"] = "1"
    new["metadata"]["annotations"]["d/e~f"] = "1"
    assert jsonpatch.apply_patch(old, build_patch(old, new)) == new
