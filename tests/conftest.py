"""Settings of every suite. Fixtures live beside the tests that use them, but for the cluster: two suites share one."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["tests.cluster.fixtures"]

# Two shared cores make a deadline of milliseconds a coin toss; a hang still meets pytest's time limit.
settings.register_profile("bagelplane", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bagelplane")


@pytest.fixture(autouse=True)
def same_logging_as_before() -> Iterator[None]:
    """What a command sets up for its process is not to silence the tests after it."""
    loggers = [logging.root, logging.getLogger("bagelplane")]
    levels, handlers = [logger.level for logger in loggers], list(logging.root.handlers)
    disabled = logging.root.manager.disable
    yield
    logging.disable(disabled)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    for handler in [handler for handler in logging.root.handlers if handler not in handlers]:
        if not isinstance(handler, logging.NullHandler) and type(handler).__module__ == "logging":
            logging.root.removeHandler(handler)


_ONE_CLUSTER = ("tests/cluster/", "tests/e2e/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs the cluster first: one worker does that while the others share the rest, and it takes longest."""
    items.sort(key=lambda item: not item.nodeid.startswith(_ONE_CLUSTER))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _FilesAndOneCluster(config, log)


class _FilesAndOneCluster(LoadScopeScheduling):
    """For runs on several workers: each file is one worker's, for its fixtures, and so is what shares the cluster."""

    def _split_scope(self, nodeid: str) -> str:
        return "cluster" if nodeid.startswith(_ONE_CLUSTER) else nodeid.partition("::")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logged goes from its worker as UTF-8; some tests log what is none, and would end the run."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="Write the recorded results anew.")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether recorded results are to be replaced by what comes out now."""
    return bool(request.config.getoption("--update-golden"))
