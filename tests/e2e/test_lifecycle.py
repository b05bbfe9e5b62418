"""Starting and stopping: nothing stays behind, a running cluster is joined and left alone, mistakes are named."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from e2e.server import Server, ancestors, replica_pids

BIN = Path(sys.executable).parent
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}  # a token is shared by a file in the home folder, which tests leave alone
SIMULATED = "gateway: {served_name: simulated}\nengine: {simulation: {}}\n"


def descendants(root: int) -> set[int]:
    """All processes below ``root``."""
    pids = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    return {pid for pid in pids if pid != root and root in ancestors(pid)}


def alive(pids: Iterable[int]) -> list[int]:
    """Those of ``pids`` that still run."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "simulated.yaml"
    file.write_text(SIMULATED)
    return file


def test_two_workers_of_each_role_share_the_work_and_ctrl_c_leaves_nothing(config: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "four.log", "--config", str(config), "--prefill", "2", "--decode", "2")
    try:
        server.wait_until_ready()
        server.wait_for(lambda: server.metric("splitserve_worker_up") == 4, 60.0)
        for number in range(24):
            server.complete(prompt=[number] * 40, max_tokens=3)
        server.wait_for(server.settled)
        computed = server.metrics("splitserve_prefill_tokens_total")
        moved = server.metrics("splitserve_kv_transfer_pages_total")
        assert sum(1 for tokens in computed.values() if tokens > 100) == 2
        assert sum(1 for pages in moved.values() if pages > 6) == 2
        assert server.metric("splitserve_kv_transfer_pages_total") == 24 * 3
        started = descendants(server.process.pid)
        assert len(started) > 7  # five replicas, and Ray's own
    finally:
        status = server.stop()
    assert status == 0
    assert alive(started) == []


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """Address and process id of a Ray cluster as an administrator starts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=4", "--include-dashboard=false"]
    with (tmp_path / "ray.log").open("w") as log:
        head = subprocess.Popen(
            [*command, f"--port={port}"], stdout=log, stderr=subprocess.STDOUT, env=os.environ | NO_TOKEN
        )
        try:
            yield f"127.0.0.1:{port}", head.pid
        finally:
            head.terminate()
            head.wait(60.0)


def test_a_running_cluster_is_joined_and_left_running(config: Path, tmp_path: Path, cluster: tuple[str, int]) -> None:
    address, head = cluster
    join = ["--config", str(config), "--ray-address", address]
    server = Server(tmp_path / "joined.log", *join, env=NO_TOKEN)
    try:
        server.wait_until_ready()
        assert server.complete(prompt=[1, 2, 3], max_tokens=2)["usage"]["completion_tokens"] == 2
        second = Server(tmp_path / "second.log", *join, env=NO_TOKEN)
        assert second.process.wait(60.0) == 1
        assert "is running on this Ray cluster already" in second.log.read_text()
        assert server.complete(prompt=[1, 2, 3], max_tokens=2)["usage"]["completion_tokens"] == 2
        pids = [pid for pid in replica_pids("ServeReplica:splitserve") if head in ancestors(pid)]
        assert len(pids) == 3
    finally:
        status = server.stop()
    assert status == 0
    assert "joined the running Ray cluster" in server.log.read_text()
    assert alive(pids) == []
    with socket.create_connection(address.split(":"), timeout=5.0):
        pass  # the head still answers


def test_a_taken_port_is_named(config: Path) -> None:
    """B126."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [str(BIN / "splitserve"), "serve", "--config", str(config), "--ray-address", "local", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_a_missing_model_is_named_and_ends_the_start(tmp_path: Path) -> None:
    """B128."""
    done = subprocess.run(
        [
            str(BIN / "splitserve"),
            "serve",
            "--model",
            str(tmp_path / "no.gguf"),
            "--ray-address",
            "local",
            "--port",
            "18999",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "no.gguf does not exist" in done.stderr
