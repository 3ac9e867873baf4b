"""Settings of every suite. Fixtures live beside the tests that use them, but for the cluster: two suites share one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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


_ONE_CLUSTER = {"cluster", "e2e"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For runs on several workers: all that shares the cluster is one worker's, and first, since it takes longest.
    Of the rest each file stays whole, for the fixtures of its module.
    """
    root = Path(__file__).parent

    def suite(item: pytest.Item) -> str:
        return item.path.relative_to(root).parts[0]

    items.sort(key=lambda item: suite(item) not in _ONE_CLUSTER)
    for item in items:
        group = "cluster" if suite(item) in _ONE_CLUSTER else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="Write the recorded results anew.")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether recorded results are to be replaced by what comes out now."""
    return bool(request.config.getoption("--update-golden"))
