"""What the stack costs: tokens from a simulated engine without step time through the whole HTTP path.

Beside it, in the same run, the usual way to stream with Ray Serve: an ingress that passes on, item
by item, what a replica of another deployment yields.
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import StreamingResponse

from splitserve.bench.sse_load import LoadResult, run_load

CONFIG = "gateway: {served_name: simulated}\nengine: {simulation: {}}\n"
STOP_TIMEOUT_S = 60.0
PROMPT = list(range(100, 108))
USUAL_TOKENS = 64


class UsualReplica:
    """Yields tokens as fast as they are taken."""

    async def tokens(self, count: int) -> AsyncGenerator[str, None]:
        for number in range(count):
            yield f" {number}"


class UsualIngress:
    """Passes a replica's stream on as server-sent events."""

    def __init__(self, replica: DeploymentHandle) -> None:
        self._replica = replica.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        count = (await request.json())["max_tokens"]
        return StreamingResponse(self._events(count), media_type="text/event-stream")

    async def _events(self, count: int) -> AsyncGenerator[str, None]:
        async for text in self._replica.tokens.remote(count):
            yield f"data: {json.dumps({'choices': [{'text': text}]})}\n\n"
        yield f'data: {{"usage": {{"completion_tokens":{count}}}}}\n\n'


def usual_application() -> Application:
    """The ingress in front of the replica."""
    options = {"max_ongoing_requests": 1000, "ray_actor_options": {"num_cpus": 0}}
    return serve.deployment(UsualIngress, **options).bind(serve.deployment(UsualReplica, **options).bind())


@contextmanager
def our_server(port: int) -> Iterator[None]:
    """A server as users start it, simulated."""
    with tempfile.TemporaryDirectory(prefix="splitserve-") as folder:
        config = Path(folder) / "simulated.yaml"
        config.write_text(CONFIG)
        command = [str(Path(sys.executable).with_name("splitserve")), "serve", "--config", str(config)]
        command += ["--ray-address", "local", "--port", str(port)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            wait_until_ready(server)
            yield
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(STOP_TIMEOUT_S)


@contextmanager
def usual_server(port: int) -> Iterator[None]:
    """The usual application behind Serve's proxy."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        serve.run(usual_application(), name="usual", route_prefix="/")
        yield
    finally:
        ray.shutdown()


def wait_until_ready(server: "subprocess.Popen[str]") -> None:
    """Read the server's output up to its closing line."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", file=sys.stderr)
        if "ready after" in line and " - try" in line:
            return
    raise RuntimeError("the server did not start")


def completion(tokens: int) -> dict[str, Any]:
    """A streamed request for exactly ``tokens`` tokens."""
    return {
        "model": "simulated",
        "prompt": PROMPT,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def measure_ours(streams: int, tokens: int, requests: int, port: int) -> tuple[LoadResult, LoadResult]:
    """(at one client, at ``streams`` clients)."""
    path = "/v1/completions"
    run_load(port, path, [completion(tokens)] * streams, streams)  # warm-up
    single = run_load(port, path, [completion(2)] * requests, 1)
    return single, run_load(port, path, [completion(tokens)] * (2 * streams), streams)


def measure_usual(streams: int, port: int) -> LoadResult:
    """At ``streams`` clients."""
    run_load(port, "/", [{"max_tokens": 8}] * streams, streams)  # warm-up
    return run_load(port, "/", [{"max_tokens": USUAL_TOKENS}] * (2 * streams), streams)


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    """Print a table, or with ``--json`` one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each stream")
    parser.add_argument("--requests", type=int, default=100, help="requests for the time to the first token")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    options = parser.parse_args()
    port = free_port()
    with our_server(port):
        single, ours = measure_ours(options.streams, options.tokens, options.requests, port)
    port = free_port()
    with usual_server(port):
        usual = measure_usual(options.streams, port)
    figures = {
        "tokens_per_s": round(ours.tokens_per_s),
        "added_ttft_ms": round(1000 * single.median_ttft_s(), 1),
        "events_per_s": round(ours.events_per_s),
        "usual_tokens_per_s": round(usual.tokens_per_s),
        "ratio": round(ours.tokens_per_s / usual.tokens_per_s, 1),
    }
    if options.json:
        print(json.dumps(figures))
        return
    print(f"{options.streams} streams            tokens/s   events/s")
    print(f"splitserve           {ours.tokens_per_s:10.0f} {ours.events_per_s:10.0f}")
    print(f"usual Serve stream   {usual.tokens_per_s:10.0f} {usual.events_per_s:10.0f}")
    print(f"ratio                {figures['ratio']:10.1f}")
    print(f"time to the first token at one client: {figures['added_ttft_ms']} ms (median)")


if __name__ == "__main__":
    main()
