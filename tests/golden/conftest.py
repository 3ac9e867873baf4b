"""What the tests of recorded streams share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for small files that data sets need beside their data."""
    return tmp_path_factory.mktemp("recorded")
