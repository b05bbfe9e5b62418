"""A cluster is joined only where one answers."""

import socket
from pathlib import Path

import pytest

from splitserve.deploy.ray_environment import cluster_of_this_machine


def remember(folder: Path, address: str) -> None:
    (folder / "ray").mkdir()
    (folder / "ray" / "ray_current_cluster").write_text(f"{address}\n")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path


def test_no_cluster_was_ever_started() -> None:
    assert cluster_of_this_machine() is None


def test_a_cluster_that_answers_is_found(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        remember(folder, address)
        assert cluster_of_this_machine() == address


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "host:port", ""])
def test_what_a_dead_cluster_left_is_passed_over(folder: Path, address: str) -> None:
    remember(folder, address)
    assert cluster_of_this_machine() is None
