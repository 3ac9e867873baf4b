"""The operator's loop in parts: the schedule, the guard of the watches, complaints, settings, the command."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import subprocess
import sys
from pathlib import Path

import kopf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.config import incluster_config

from bagelplane.errors import SpecError
from bagelplane_operator import naming
from bagelplane_operator.checks import LONGEST_PAUSE_SECONDS, attempt_of, pause_seconds
from bagelplane_operator.cluster import load_configuration
from bagelplane_operator.handlers import Watcher, WatchGuard, build_connection
from bagelplane_operator.reconciler import Complaints, Schedule
from bagelplane_operator.service import read_settings

KEY = ("training", "bagel-sft")


# --- names ----------------------------------------------------------------------------------------

NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
HASHES = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)


@given(NAMES, HASHES, st.integers(1, 10**6))
def test_names_of_made_objects_are_ones_that_kubernetes_takes(name: str, digest: str, attempt: int) -> None:
    job = naming.check_job_name(name, "uid", digest, attempt)
    config_map = naming.config_map_name(name, digest)
    for made in (job, config_map):
        assert made.strip("-") == made
        assert set(made) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert len(job) <= 63
    assert len(config_map) <= 253


def test_each_attempt_spec_and_resource_has_a_check_of_its_own_even_where_names_are_cut() -> None:
    base = "a" * 60
    names = {
        naming.check_job_name(f"{base}{end}", uid, digest, attempt)
        for end, uid in (("x", "1"), ("y", "2"), ("x", "3"))
        for digest in ("0" * 64, "1" * 64)
        for attempt in (1, 2)
    }
    assert len(names) == 12


# --- pauses and attempts --------------------------------------------------------------------------


@given(st.integers(-5, 10**9))
def test_pauses_grow_from_30_s_to_5_min(failures: int) -> None:
    assert 30 <= pause_seconds(failures) <= pause_seconds(failures + 1) <= LONGEST_PAUSE_SECONDS


@pytest.mark.parametrize(
    ("text", "attempt"), [("3", 3), ("", 0), ("-1", 0), ("x", 0), ("٣", 0), ("9" * 100, 1_000_000)]
)
def test_an_attempt_is_a_number_whatever_the_annotation_says(text: str, attempt: int) -> None:
    assert attempt_of({"metadata": {"annotations": {naming.ATTEMPT_ANNOTATION: text}}}) == attempt


# --- the schedule ---------------------------------------------------------------------------------


def test_what_is_due_twice_is_taken_once_at_the_earlier_time() -> None:
    schedule = Schedule()
    schedule.at(KEY, 10.0)
    schedule.at(KEY, 5.0)
    schedule.at(KEY, 7.0)
    assert schedule.next_moment(99.0) == 5.0
    assert schedule.take(4.9) == set()
    assert schedule.take(5.0) == {KEY}
    assert schedule.take(99.0) == set()


def test_a_resource_that_fails_again_waits_longer_each_time_and_is_forgiven_once_it_succeeds() -> None:
    schedule = Schedule()
    pauses = []
    for _ in range(7):
        schedule.failed(KEY, 100.0)
        pauses.append(schedule.next_moment(0.0) - 100.0)
        schedule.take(1000.0)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    schedule.succeeded(KEY)
    schedule.failed(KEY, 100.0)
    assert schedule.next_moment(0.0) == 101.0


def test_a_fault_is_said_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    complaints = Complaints()
    for _ in range(5):
        complaints.raise_("the cluster", "no answer")
    complaints.settle("the cluster")
    complaints.settle("the cluster")
    assert [record.message for record in caplog.records] == ["no answer", "the cluster: in order again"]


# --- the guard of the watches ---------------------------------------------------------------------


def test_a_watch_that_hears_is_not_silent() -> None:
    guard = WatchGuard()
    for version in range(5):
        guard.hear("a")
        assert not guard.is_silent({"a": str(version)})


def test_a_quiet_cluster_is_no_silent_watch() -> None:
    guard = WatchGuard()
    guard.hear("a")
    assert not any(guard.is_silent({"a": "1"}) for _ in range(5))


def test_a_change_that_is_never_heard_of_is_silence_said_once() -> None:
    guard = WatchGuard()
    guard.hear("a")
    found = [guard.is_silent({"a": version}) for version in ("1", "1", "2", "2", "2")]
    assert found == [False, False, False, True, False]


def test_a_change_that_is_heard_of_a_moment_after_the_listing_is_none() -> None:
    guard = WatchGuard()
    guard.is_silent({})
    assert not guard.is_silent({"a": "1"})
    guard.hear("a")
    assert not guard.is_silent({"a": "1"})


# --- settings and the command ---------------------------------------------------------------------


def test_settings_come_from_the_environment_of_the_chart() -> None:
    settings = read_settings(
        {
            "BAGELPLANE_DATAPLANE_IMAGE": "example/dataplane:1",
            "BAGELPLANE_DATAPLANE_IMAGE_PULL_POLICY": "Never",
            "BAGELPLANE_NAMESPACES": "b, a,,b",
        },
        8080,
    )
    assert (settings.image.name, settings.image.pull_policy) == ("example/dataplane:1", "Never")
    assert settings.namespaces == ("a", "b")


@pytest.mark.parametrize(
    "environment",
    [{}, {"BAGELPLANE_DATAPLANE_IMAGE": "x", "BAGELPLANE_DATAPLANE_IMAGE_PULL_POLICY": "Sometimes"}],
)
def test_settings_that_are_missing_or_wrong_are_named(environment: dict[str, str]) -> None:
    with pytest.raises(SpecError, match="BAGELPLANE_DATAPLANE_IMAGE"):
        read_settings(environment, 8080)


def test_in_a_pod_client_and_watches_use_the_service_account_and_follow_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("first")
    authority.write_text("a certificate")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.delenv("KUBECONFIG", raising=False)

    async def connections() -> list[kopf.ConnectionInfo]:
        configuration = await load_configuration()
        first = await build_connection(configuration)
        token.write_text("second")
        monkeypatch.setattr(incluster_config, "datetime", FarFuture)
        return [first, await build_connection(configuration)]

    first, second = asyncio.run(connections())
    assert (first.server, first.ca_path) == ("https://[fd00::1]:443", str(authority))
    assert (first.scheme, first.token, second.token) == ("Bearer", "first", "second")


class FarFuture:
    """The module `datetime` an hour later: tokens are read again after a while."""

    timedelta = dt.timedelta

    class datetime(dt.datetime):  # noqa: N801  (as the module has it)
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:
            return dt.datetime.now(tz) + dt.timedelta(hours=1)


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["operator"], {}, "error: BAGELPLANE_DATAPLANE_IMAGE is not set. Fix: "),
        (["operator", "--log-level", "loud"], {}, "error: --log-level is not known; got loud"),
        (
            ["operator"],
            {"BAGELPLANE_DATAPLANE_IMAGE": "x", "KUBECONFIG": "/nowhere"},
            "error: no Kubernetes cluster is configured: ",
        ),
    ],
)
def test_the_command_ends_with_one_line(arguments: list[str], environment: dict[str, str], said: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "bagelplane_operator", *arguments],
        env={"PATH": "", "HOME": "/nowhere", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 2
    assert finished.stderr.startswith(said)
    assert finished.stderr.count("\n") == 1


def test_kopf_is_not_left_to_ask_for_the_name_of_a_user_that_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, object] = {}

    async def operator(**arguments: object) -> None:
        given.update(arguments)

    monkeypatch.setattr(kopf, "operator", operator)
    asyncio.run(Watcher(kopf.OperatorRegistry(), [])._watch())
    assert given["identity"]
