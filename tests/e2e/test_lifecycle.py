"""Starting and stopping: nothing stays behind, a running cluster is joined and left alone, mistakes are named."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.server import Server, replica_pids

BIN = Path(sys.executable).parent
SIMULATED = "gateway: {served_name: simulated}\nengine: {simulation: {}}\n"


def processes_of_ray() -> set[str]:
    """Command lines of whatever runs Ray or us."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if "raylet" in command or "gcs_server" in command or command.startswith("ray::"):
                found.add(f"{entry.name} {command[:100]}")
    return found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "simulated.yaml"
    file.write_text(SIMULATED)
    return file


def test_two_workers_of_each_role_share_the_work_and_ctrl_c_leaves_nothing(config: Path, tmp_path: Path) -> None:
    before = processes_of_ray()
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
    finally:
        status = server.stop()
    assert status == 0
    assert processes_of_ray() == before


def test_a_running_cluster_is_joined_and_left_running(config: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    start = [str(BIN / "ray"), "start", "--head", "--num-cpus=4", "--include-dashboard=false", f"--port={port}"]
    started = subprocess.run(start, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert started.returncode == 0, started.stdout + started.stderr
    join = ["--config", str(config), "--ray-address", f"127.0.0.1:{port}"]
    try:
        server = Server(tmp_path / "joined.log", *join)
        try:
            server.wait_until_ready()
            assert server.complete(prompt=[1, 2, 3], max_tokens=2)["usage"]["completion_tokens"] == 2
            second = Server(tmp_path / "second.log", *join)
            assert second.process.wait(60.0) == 1
            assert "is running on this Ray cluster already" in second.log.read_text()
            assert server.complete(prompt=[1, 2, 3], max_tokens=2)["usage"]["completion_tokens"] == 2
        finally:
            status = server.stop()
        assert status == 0
        assert "joined the running Ray cluster" in server.log.read_text()
        assert replica_pids("ServeReplica:splitserve") == []
        assert any("gcs_server" in process for process in processes_of_ray())
    finally:
        subprocess.run([str(BIN / "ray"), "stop", "--force"], capture_output=True, timeout=60, check=False)


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
