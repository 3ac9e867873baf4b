"""What tests are given of a cluster: `cluster`, one for the whole run, and `installed`, with Kubeflow's operator and
our chart in it. A test that fails with one gets the parts' last words into its report, and all they said into a folder.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator

import pytest

from tests.cluster.assembly import Cluster, running_cluster

__all__ = ["Cluster", "cluster", "installed"]


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A real cluster of one node, with S3 beside it."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            # Not stdout: with several workers that is how they talk to the one that reports.
            print(f"\n[cluster] {text}", end="", file=sys.stderr, flush=True)

    with running_cluster(say) as running:
        yield running


@pytest.fixture(scope="session")
def installed(cluster: Cluster) -> Cluster:
    """The cluster with the training operator and our chart in it."""
    cluster.install()
    return cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    running = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(running, Cluster):
        folder = running.save_failure(f"{item.name}-{report.when}")
        report.sections.append((f"cluster (all of it: {folder})", running.logs()))
    return report
