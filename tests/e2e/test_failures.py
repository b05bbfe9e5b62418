"""Whatever dies or leaves: everybody gets an answer or an error, nothing stays held, and the next request works.

On simulated workers with slow steps, so that the moment of a fault can be chosen.
"""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from e2e.server import Server

PROMPT = list(range(1000, 1060))
LONG_PROMPT = list(range(1000, 1400))  # 8 s of prefill
CONFIG = """
gateway: {served_name: slow, placement_wait_s: 3.0}
engine:
  transfer: {lease_s: 4.0}
  chunk_tokens: 32
  simulation: {prefill_token_s: 0.02, step_s: 0.02}
"""
REPLACED_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def server(logs: Path) -> Iterator[Server]:
    config = logs / "slow.yaml"
    config.write_text(CONFIG)
    server = Server(logs / "failures.log", "--config", str(config))
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def afterwards(server: Server) -> Iterator[None]:
    """Within 10 s nothing is held anywhere; once the worker has been replaced requests go through both pools again."""
    yield
    server.wait_for(lambda: server.metric("splitserve_pages", state="total"), REPLACED_WITHIN_S)  # somebody lives
    server.wait_for(server.settled)
    server.wait_for(server.ready, REPLACED_WITHIN_S)
    transfers = server.metric("splitserve_kv_transfers_total")
    assert answer(server, prompt=[5] * 40, max_tokens=2)["finish_reason"] == "length"
    server.wait_for(lambda: server.metric("splitserve_kv_transfers_total") > transfers)
    server.wait_for(server.settled)


def answer(server: Server, **body: Any) -> dict[str, Any]:
    return dict(server.complete(seed=1, ignore_eos=True, **body)["choices"][0])


def running(server: Server, role: str) -> float:
    """Requests that a role's workers have taken on."""
    workers = [labels.split('"')[3] for labels in server.metrics("splitserve_worker_up", role=role)]
    return sum(server.metric("splitserve_sequences", worker=worker) for worker in workers)


def kill(server: Server, pool: str) -> None:
    for pid in server.workers(pool):
        os.kill(pid, signal.SIGKILL)


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if "choices" in chunk)


def leave(server: Server, stream: bool, **body: Any) -> None:
    """Send a request and close the connection without reading an answer, once a worker computes it."""
    body = {"model": "slow", "prompt": LONG_PROMPT, "max_tokens": 200, "stream": stream} | body
    client = httpx2.Client(base_url=server.url, timeout=httpx2.Timeout(5.0, read=0.7))
    with client, pytest.raises(httpx2.TimeoutException):
        client.post("/v1/completions", json=body)


@pytest.mark.parametrize("stream", [True, False])
def test_client_leaves_during_prefill(server: Server, stream: bool) -> None:
    """B029, B097."""
    leave(server, stream, prompt=[*LONG_PROMPT, int(stream)])
    server.wait_for(lambda: running(server, "prefill") == 0 and server.settled(), 2.0)


def test_client_leaves_while_decoding(server: Server) -> None:
    chunks = server.stream(prompt=PROMPT, max_tokens=400, seed=1, ignore_eos=True)
    for _ in range(10):
        next(chunks)
    assert running(server, "decode") == 1
    chunks.close()  # type: ignore[attr-defined]
    server.wait_for(lambda: running(server, "decode") == 0 and server.settled(), 2.0)


def test_prefill_worker_is_killed(server: Server) -> None:
    """The prompt is computed by whoever is left; the client notices only the time."""
    expected = answer(server, prompt=PROMPT, max_tokens=20)["text"]
    results: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: results.append(answer(server, prompt=[*PROMPT, *PROMPT], max_tokens=20)))
    thread.start()
    server.wait_for(lambda: running(server, "prefill") > 0)
    kill(server, "PrefillPool")
    thread.join(15.0)
    assert results
    assert results[0]["finish_reason"] == "length"
    assert answer(server, prompt=PROMPT, max_tokens=20)["text"] == expected
    assert server.metric("splitserve_requests_recovered_total") > 0


def test_decode_worker_is_killed_while_streaming(server: Server) -> None:
    """B093: the stream goes on where it was, or ends with an error object; never with a silent cut."""
    expected = answer(server, prompt=PROMPT, max_tokens=100)["text"]
    chunks = server.stream(prompt=PROMPT, max_tokens=100, seed=1, ignore_eos=True)
    got = [next(chunks) for _ in range(10)]
    kill(server, "DecodePool")
    got += list(chunks)
    assert "error" not in got[-1], got[-1]
    assert text_of(got) == expected
    assert got[-1]["choices"][0]["finish_reason"] == "length"


def test_both_workers_are_killed_while_streaming(server: Server) -> None:
    chunks = server.stream(prompt=PROMPT, max_tokens=300, seed=1, ignore_eos=True)
    got = [next(chunks) for _ in range(5)]
    kill(server, "PrefillPool")
    kill(server, "DecodePool")
    got += list(chunks)
    assert got[-1]["error"]["code"] in ("no_worker", "worker_lost")
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in got[:-1])
    assert server.http.get("/health").status_code == 200
    refused = server.http.post("/v1/completions", json={"model": "slow", "prompt": [1], "max_tokens": 1})
    assert refused.status_code in (200, 503)
    if refused.status_code == 503:
        assert refused.json()["error"]["code"] == "no_worker"
        assert int(refused.headers["retry-after"]) >= 1


def test_decode_worker_is_frozen_and_comes_back(server: Server) -> None:
    """B086: a stall is waited out."""
    chunks = server.stream(prompt=PROMPT, max_tokens=60, seed=1, ignore_eos=True)
    got = [next(chunks) for _ in range(5)]
    pids = server.workers("DecodePool")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        threading.Event().wait(2.0)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    got += list(chunks)
    assert got[-1]["choices"][0]["finish_reason"] == "length"
    assert server.workers("DecodePool") == pids
