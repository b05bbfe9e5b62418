"""Fixtures that every end-to-end test shares."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers write their output."""
    return tmp_path_factory.mktemp("logs")
