"""Fixtures that the end-to-end tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.server import Server


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers write their output."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def smollm2(logs: Path) -> Iterator[Server]:
    """The default model, as `splitserve serve` without options serves it."""
    server = Server(logs / "smollm2.log")
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()
