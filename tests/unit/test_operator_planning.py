"""Planning: what a resource and its surroundings come to, and that coming back changes nothing."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bagelplane.spec import BagelDataset, config_hash
from bagelplane.spec_status import DatasetStatus
from bagelplane_operator import naming
from bagelplane_operator.attachments import Attachments
from bagelplane_operator.conditions import Reason
from bagelplane_operator.planning import (
    SUPERSEDED_KEPT_SECONDS,
    Create,
    Delete,
    build_event,
    build_status_patch,
)
from tests.unit.operator_world import (
    BAD_REPORT,
    GOOD_REPORT,
    SPEC,
    World,
    build_check_pod,
    build_resource,
    trainer_pod,
)

OTHER_BUDGETS = {"maxBufferSize": 40}


# --- from nothing to Ready ------------------------------------------------------------------------


def test_a_new_resource_gets_config_map_and_check_and_is_not_called_ready() -> None:
    world = World()
    planned = world.look()
    made = [action.manifest["kind"] for action in planned.actions if isinstance(action, Create)]
    assert made == ["ConfigMap", "Job"]
    assert world.reasons() == ("Checking", "Checking")
    assert world.condition("Ready")["status"] == "Unknown"
    assert not world.events


def test_a_passed_check_makes_it_ready_and_is_told_once() -> None:
    world = World().ready()
    assert world.reasons() == ("Ready", "Reachable")
    assert [event.reason for event in world.events] == ["Ready"]
    assert world.events[0].type == "Normal"
    world.look(60)
    world.look(60)
    assert len(world.events) == 1


def test_the_config_map_is_what_the_webhook_names_and_reads_back_to_the_same_configuration() -> None:
    world = World()
    world.look()
    (config_map,) = world.config_maps
    dataset = BagelDataset.from_mapping(build_resource())
    assert config_map["metadata"]["name"] == naming.config_map_name("bagel-sft", config_hash(dataset))
    assert config_map["immutable"] is True
    read_back = BagelDataset.from_yaml(config_map["data"][naming.DATASET_FILE])
    assert config_hash(read_back) == config_hash(dataset)
    assert read_back.metadata.name == "bagel-sft"


def test_labels_and_annotations_of_the_resource_do_not_reach_the_config_map() -> None:
    world = World()
    world.look()
    before = copy.deepcopy(world.config_maps)
    world.resource["metadata"] |= {"labels": {"team": "a"}, "annotations": {"note": "x" * 1000}}
    world.look()
    assert world.config_maps == before


def test_children_are_owned_and_never_ask_for_a_sidecar() -> None:
    world = World()
    world.look()
    for child in (*world.config_maps, *world.jobs):
        (reference,) = child["metadata"]["ownerReferences"]
        assert (reference["uid"], reference["controller"]) == ("uid-of-the-resource", True)
        assert reference["blockOwnerDeletion"] is False
        assert naming.DATASET_LABEL not in child["metadata"]["labels"]
    assert naming.DATASET_LABEL not in world.jobs[0]["spec"]["template"]["metadata"]["labels"]


def test_the_check_keeps_to_the_restricted_level_and_alone_gets_the_credentials() -> None:
    world = World()
    world.look()
    pod = world.jobs[0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["automountServiceAccountToken"] is False
    assert {"name": "bagelplane-credentials", "secret": {"secretName": "bagel-s3"}} in pod["volumes"]
    world = World(build_resource(storage={"endpointURL": "http://s3:9000"}))
    world.look()
    assert "secretName" not in json.dumps(world.jobs)
    assert naming.CREDENTIALS_DIR_ENV not in json.dumps(world.jobs)


def test_an_image_of_the_resource_goes_before_the_operators() -> None:
    world = World(build_resource(dataplane={"image": "mine:2"}))
    world.look()
    assert world.jobs[0]["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:2"


# --- specs that cannot run ------------------------------------------------------------------------


def test_a_stored_spec_that_the_models_refuse_is_not_ready_in_the_words_of_the_command_line() -> None:
    world = World(build_resource(budgets={"expectedTokens": 10, "maxTokens": 5}))
    planned = world.look()
    assert not planned.actions
    ready = world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    assert "spec.budgets" in ready["message"]
    assert "Fix:" in ready["message"]
    assert world.condition("SourcesReachable")["status"] == "Unknown"
    assert [event.type for event in world.events] == ["Warning"]
    assert world.is_settled()


def test_what_this_release_does_not_run_is_called_unsupported() -> None:
    world = World(build_resource(storage={"cache": {"sizeLimit": "1Gi"}}))
    world.look()
    assert world.condition("Ready")["reason"] == "Unsupported"
    assert "spec.storage.cache" in world.condition("Ready")["message"]


def test_a_spec_that_turns_bad_leaves_the_pods_their_config_map() -> None:
    world = World().ready()
    world.pods = [trainer_pod()]
    world.edit(budgets={"expectedTokens": 10, "maxTokens": 5})
    assert not world.look(1000).actions
    assert len(world.config_maps) == 1


# --- conditions -----------------------------------------------------------------------------------


def test_the_time_of_transition_moves_with_the_status_and_with_nothing_else() -> None:
    world = World().ready()
    first = world.condition("Ready")["lastTransitionTime"]
    world.look(100)
    assert world.condition("Ready")["lastTransitionTime"] == first
    world.edit(budgets=OTHER_BUDGETS)
    world.look(100)
    second = world.condition("Ready")
    assert second["status"] == "Unknown"
    assert second["lastTransitionTime"] > first
    assert second["observedGeneration"] == 2


def test_a_failure_keeps_its_time_while_its_message_changes() -> None:
    world = World()
    world.look()
    world.end_check(BAD_REPORT, exit_code=3)
    world.look(1)
    first = world.condition("SourcesReachable")
    world.check_pods[-1]["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = (
        BAD_REPORT.replace("wrong", "other")
    )
    world.look(1)
    second = world.condition("SourcesReachable")
    assert first["message"] != second["message"]
    assert first["lastTransitionTime"] == second["lastTransitionTime"]
    assert len(world.events) == 1, "a new message under one reason is no news"


def test_an_unreachable_source_is_named_with_endpoint_and_fix() -> None:
    world = World()
    world.look()
    world.end_check(BAD_REPORT, exit_code=3)
    world.look(1)
    assert world.reasons() == ("SourcesUnreachable", "SourcesUnreachable")
    for kind in ("Ready", "SourcesReachable"):
        message = world.condition(kind)["message"]
        assert message == "the bucket wrong does not exist; got 404 from http://s3:9000. Fix: correct the uri"


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_documented(reason: Reason) -> None:
    assert reason.description.endswith(".")
    assert reason.state in ("True", "False", "Unknown")


# --- the check, again and again -------------------------------------------------------------------


def fail_check(world: World) -> None:
    world.end_check(BAD_REPORT, exit_code=3)
    world.look()


def test_a_failed_check_is_made_again_after_growing_pauses_and_without_a_flicker() -> None:
    world = World()
    world.look()
    for attempt, pause in enumerate([30, 60, 120, 240, 300, 300], start=1):
        fail_check(world)
        assert world.look(pause - 1).actions == ()
        (made, *deleted) = world.look(1).actions
        assert isinstance(made, Create)
        assert made.manifest["metadata"]["annotations"][naming.ATTEMPT_ANNOTATION] == str(attempt + 1)
        assert len(deleted) == 1
        assert world.reasons() == ("SourcesUnreachable", "SourcesUnreachable"), "no news until it ends"
    assert len(world.events) == 1
    world.end_check(GOOD_REPORT)
    world.look()
    assert world.reasons() == ("Ready", "Reachable")
    assert [event.reason for event in world.events] == ["SourcesUnreachable", "Ready"]


def test_the_count_of_attempts_survives_a_crash_between_the_new_check_and_the_end_of_the_old() -> None:
    world = World()
    world.look()
    fail_check(world)
    world.pass_time(30)
    planned = world.plan()
    assert [type(action) for action in planned.actions] == [Create, Delete]
    assert isinstance(planned.actions[0], Create)
    world.create(copy.deepcopy(planned.actions[0].manifest))  # and here the operator is killed
    world.look()
    assert [job["metadata"]["annotations"][naming.ATTEMPT_ANNOTATION] for job in world.jobs] == ["2"]
    assert world.is_settled()


def test_a_new_spec_is_checked_at_once_and_from_the_first_attempt() -> None:
    world = World()
    world.look()
    fail_check(world)
    world.edit(budgets=OTHER_BUDGETS)
    world.look(1)
    assert [job["metadata"]["annotations"][naming.ATTEMPT_ANNOTATION] for job in world.jobs] == ["1"]
    assert world.reasons() == ("Checking", "Checking")


def test_the_check_of_a_resource_of_the_same_name_that_is_gone_counts_for_nothing() -> None:
    world = World().ready()
    world.resource["metadata"]["uid"] = "another"
    world.resource.pop("status")
    world.look(60)
    assert world.reasons() == ("Checking", "Checking")
    for child in (*world.config_maps, *world.jobs):
        assert child["metadata"]["ownerReferences"][0]["uid"] == "another"
    assert world.is_settled()


WAITING = [
    ({"waiting": {"reason": "ErrImagePull", "message": "no such image"}}, "ErrImagePull: no such image"),
    ({"waiting": {"reason": "ImagePullBackOff"}}, "ImagePullBackOff"),
    ({"waiting": {"reason": "CreateContainerConfigError", "message": "x"}}, "CreateContainerConfigError: x"),
]


@pytest.mark.parametrize(("state", "said"), WAITING)
def test_a_check_that_cannot_start_says_what_kubernetes_says(state: dict[str, Any], said: str) -> None:
    world = World()
    world.look()
    world.check_pods = [build_check_pod(world.jobs[0], "Pending", state)]
    world.look(1)
    assert world.reasons() == ("Checking", "Checking"), "its first seconds are no news"
    world.look(10)
    assert world.reasons() == ("CheckNotStarting", "CheckNotStarting")
    assert world.condition("Ready")["message"].endswith(said)


def test_a_missing_secret_is_named_from_the_events_and_forgotten_when_it_comes() -> None:
    world = World()
    world.look()
    pod = build_check_pod(world.jobs[0], "Pending", {"waiting": {"reason": "ContainerCreating"}})
    world.check_pods = [pod]
    world.warnings = {pod["metadata"]["uid"]: 'MountVolume.SetUp failed: secret "bagel-s3" not found'}
    world.look(11)
    assert 'secret "bagel-s3" not found' in world.condition("SourcesReachable")["message"]
    world.check_pods = [build_check_pod(world.jobs[0], "Running", {"running": {}})]
    world.look(1)
    assert world.reasons() == ("Checking", "Checking")


def test_a_quota_that_keeps_the_pod_away_is_named_from_the_jobs_events() -> None:
    world = World()
    world.look()
    world.warnings = {world.jobs[0]["metadata"]["uid"]: "exceeded quota"}
    world.look(11)
    assert world.condition("Ready")["message"] == "the check's pod cannot start: exceeded quota"


def test_a_check_that_could_not_start_in_time_keeps_saying_why() -> None:
    world = World()
    world.look()
    state = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    world.check_pods = [build_check_pod(world.jobs[0], "Pending", state)]
    world.look(11)
    world.end_check(None, exit_code=1, reason="DeadlineExceeded")
    world.look(300)
    assert "no such image" in world.condition("Ready")["message"]
    assert len(world.events) == 1


@pytest.mark.parametrize(
    ("report", "ended"),
    [
        (None, "exit code 137"),
        ("", "exit code 137"),
        ("Traceback: MemoryError", "Traceback: MemoryError"),
        ('{"ok": "yes"}', "exit code 137"),
        ("[" * 100_000, "exit code 137"),
    ],
)
def test_a_check_without_a_report_is_a_failure_with_what_is_known(report: str | None, ended: str) -> None:
    world = World()
    world.look()
    world.end_check(report, exit_code=137)
    world.look()
    assert world.reasons() == ("CheckFailed", "CheckFailed")
    assert ended in world.condition("Ready")["message"]
    assert len(world.condition("Ready")["message"]) < 2000


def test_a_complete_job_whose_pod_is_gone_still_counts() -> None:
    world = World().ready()
    world.check_pods.clear()
    world.look(3600)
    assert world.reasons() == ("Ready", "Reachable")


# --- ConfigMaps -----------------------------------------------------------------------------------


def names(world: World) -> list[str]:
    return [config_map["metadata"]["name"] for config_map in world.config_maps]


def test_an_old_config_map_stays_while_a_pod_needs_it_and_then_goes() -> None:
    world = World().ready()
    (old,) = world.config_maps
    revision = old["metadata"]["labels"][naming.CONFIG_HASH_LABEL]
    world.pods = [trainer_pod(revision=revision)]
    world.edit(budgets=OTHER_BUDGETS)
    world.look(1)
    world.look(3600)
    assert len(names(world)) == 2
    world.pods = [trainer_pod(revision=revision, phase="Succeeded")]
    world.look(1)
    assert len(names(world)) == 1
    assert old["metadata"]["name"] not in names(world)


def test_an_unused_config_map_outlives_its_successors_birth_by_a_moment() -> None:
    world = World().ready()
    world.edit(budgets=OTHER_BUDGETS)
    planned = world.look(3600)
    assert len(names(world)) == 2
    assert planned.again_seconds <= SUPERSEDED_KEPT_SECONDS
    world.look(SUPERSEDED_KEPT_SECONDS - 1)
    assert len(names(world)) == 2
    world.look(1)
    assert len(names(world)) == 1


def test_going_back_to_the_spec_before_takes_its_config_map_again() -> None:
    world = World().ready()
    before = names(world)
    world.edit(budgets=OTHER_BUDGETS)
    world.look(1)
    world.resource["spec"].pop("budgets")
    world.edit()
    world.look(1)
    world.look(60)
    assert names(world) == before
    assert world.resource["status"]["configMap"] == before[0]


@pytest.mark.parametrize(
    "harm", [{"immutable": False}, {"data": {"dataset.yaml": "x"}}, {"data": {}}, {"immutable": None}]
)
def test_a_config_map_that_is_not_as_it_should_be_is_replaced(harm: dict[str, Any]) -> None:
    world = World().ready()
    world.config_maps[0] |= harm
    world.look(1)
    (config_map,) = world.config_maps
    assert config_map["immutable"] is True
    assert yaml.safe_load(config_map["data"]["dataset.yaml"])["kind"] == "BagelDataset"


# --- figures --------------------------------------------------------------------------------------


def test_the_step_stays_when_the_ranks_leave() -> None:
    world = World().ready()
    world.attachments = Attachments(attached=4, step=120, packs_per_second=2.0, fill_ratio=0.9)
    world.look(5)
    assert world.resource["status"]["step"] == 120
    world.attachments = Attachments()
    world.look(5)
    status = world.resource["status"]
    assert (status["attached"], status["step"]) == (0, 120)
    assert "packsPerSecond" not in status


def test_resources_with_pods_are_looked_at_often_and_others_seldom() -> None:
    world = World().ready()
    assert world.look(60).again_seconds == 30
    world.pods = [trainer_pod()]
    assert world.look(60).again_seconds == 5


def test_a_status_is_written_only_when_it_changes_and_only_what_changes() -> None:
    before = {"attached": 1, "step": 3, "packsPerSecond": 2.0}
    assert build_status_patch(before, dict(before)) is None
    assert build_status_patch(before, {"attached": 2, "step": 3}) == {"attached": 2, "packsPerSecond": None}


# --- properties -----------------------------------------------------------------------------------

REPORTS = st.sampled_from([GOOD_REPORT, BAD_REPORT, None, "", "{", '{"ok": false}'])
SPECS = st.sampled_from(
    [
        {},
        {"budgets": OTHER_BUDGETS},
        {"budgets": {"expectedTokens": 10, "maxTokens": 5}},
        {"storage": {"cache": {"sizeLimit": "1Gi"}}},
        {"dataplane": {"image": "mine:2"}},
        {"groups": []},
    ]
)
STEPS = st.one_of(
    st.tuples(st.just("edit"), SPECS),
    st.tuples(st.just("end"), REPORTS, st.sampled_from([0, 3, 137])),
    st.tuples(st.just("wait"), st.sampled_from([0, 1, 11, 25, 31, 400])),
    st.tuples(st.just("stuck"), st.sampled_from(["ErrImagePull", "ContainerCreating"])),
    st.tuples(st.just("pods"), st.booleans()),
    st.tuples(st.just("lose"), st.sampled_from(["config_maps", "jobs", "check_pods", "status"])),
    st.tuples(st.just("spoil"), st.sampled_from(["uid", "data"])),
)


def take_step(world: World, step: tuple[Any, ...]) -> None:
    match step:
        case ("edit", changes):
            spec = yaml.safe_load(SPEC) | changes
            if spec != world.resource["spec"]:
                world.resource["spec"] = spec
                world.edit()
        case ("end", report, exit_code) if world.jobs and "status" not in world.jobs[-1]:
            world.end_check(report, exit_code=exit_code)
        case ("wait", seconds):
            world.pass_time(seconds)
        case ("stuck", reason) if world.jobs and "status" not in world.jobs[-1]:
            state = {"waiting": {"reason": reason}}
            world.check_pods.append(build_check_pod(world.jobs[-1], "Pending", state))
        case ("pods", there):
            labels = [each["metadata"]["labels"] for each in world.config_maps]
            used = [each[naming.CONFIG_HASH_LABEL] for each in labels]
            world.pods = [trainer_pod(f"t-{index}", each) for index, each in enumerate(used) if there]
        case ("lose", "status"):
            world.resource.pop("status", None)
        case ("lose", what):
            getattr(world, what).clear()
        case ("spoil", "uid") if world.config_maps:
            world.config_maps[-1]["metadata"]["ownerReferences"] = []
        case ("spoil", "data") if world.config_maps:
            world.config_maps[-1]["data"] = {}


@given(st.lists(STEPS, max_size=12))
def test_after_any_history_one_look_settles_everything(history: list[tuple[Any, ...]]) -> None:
    world = World()
    for step in history:
        take_step(world, step)
        told = len(world.events)
        world.look()
        assert len(world.events) - told <= 1
        assert world.is_settled()
        DatasetStatus.model_validate(world.resource["status"], by_alias=True)


@given(st.lists(STEPS, max_size=12))
def test_an_event_is_told_when_and_only_when_ready_changes_to_an_answer(
    history: list[tuple[Any, ...]],
) -> None:
    world = World()
    before: tuple[str, str] | None = None
    for step in history:
        take_step(world, step)
        if "status" not in world.resource:
            before = None
        told = len(world.events)
        world.look()
        ready = world.condition("Ready")
        after = (ready["status"], ready["reason"])
        assert (len(world.events) > told) == (ready["status"] != "Unknown" and after != before)
        before = after


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=10,
)


@given(
    st.dictionaries(st.sampled_from(["ok", "problems", "groups"]), JSON)
    | JSON
    | st.fixed_dictionaries({"ok": st.just(False), "problems": st.lists(JSON | st.just({"what": "x"}))})
)
def test_no_report_breaks_planning(report: Any) -> None:
    world = World()
    world.look()
    world.end_check(json.dumps(report), exit_code=3)
    world.look()
    assert world.condition("Ready")["status"] == "False"
    assert world.is_settled()


def test_the_same_event_has_the_same_name_and_fits_into_the_api() -> None:
    world = World(build_resource(groups=[]))
    (event,) = world.look().events
    long = event.__class__(event.type, event.reason, "ä" * 5000, event.moment)
    first, second = (build_event(world.resource, each, "pod-1") for each in (long, long))
    assert first == second
    assert len(first["note"].encode()) <= 1024
    assert first["regarding"]["uid"] == "uid-of-the-resource"
