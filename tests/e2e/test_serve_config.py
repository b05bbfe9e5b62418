"""A Serve config file with our import path, reached through Serve's own HTTP proxy."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import yaml

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 90.0


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """A client of the shipped file's application, with a simulated model."""
    config = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        config["http_options"]["port"] = probe.getsockname()[1]
    config["applications"][0]["args"] |= {
        "engine": {"simulation": {"step_s": 0.01}},
        "gateway": {"served_name": "simulated"},
    }
    folder = tmp_path_factory.mktemp("serve")
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    command = [str(Path(sys.executable).with_name("serve")), "run", "--address", "local", str(folder / "serve.yaml")]
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{config['http_options']['port']}"
    try:
        with httpx2.Client(base_url=url, timeout=30.0) as client:
            wait_until_ready(client, process)
            yield client
    finally:
        os.kill(process.pid, signal.SIGINT)
        process.wait(STOP_TIMEOUT_S)


def wait_until_ready(client: httpx2.Client, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError("the application did not become ready")


def test_it_answers_whole_and_streamed(client: httpx2.Client) -> None:
    body = {"model": "simulated", "prompt": [1, 2, 3], "max_tokens": 8, "seed": 1}
    whole = client.post("/v1/completions", json=body).json()
    assert whole["usage"]["completion_tokens"] == 8
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


def test_request_ids_are_echoed_once(client: httpx2.Client) -> None:
    answer = client.get("/v1/models", headers={"x-request-id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]


def test_a_client_that_leaves_ends_its_request(client: httpx2.Client) -> None:
    body = {"model": "simulated", "prompt": [5] * 30, "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + 2.0
    while "splitserve_requests_running 0.0" not in client.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.05)
