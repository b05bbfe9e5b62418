"""A load of streamed requests from one process, cheap enough to leave a small machine to the server.

It speaks just as much HTTP as it must: one connection per request, read to its end, events counted in the raw bytes.
"""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

CLIENT_TIMEOUT_S = 120.0
USAGE = re.compile(rb'"completion_tokens":(\d+)')


@dataclass
class StreamTimes:
    """One streamed answer: seconds since the request was sent, and what came."""

    ttft_s: float
    total_s: float
    events: int
    tokens: int  # by the answer's own usage


@dataclass
class LoadResult:
    """All answers of one run."""

    streams: list[StreamTimes] = field(default_factory=list)
    seconds: float = 0.0  # from the first request to the last answer's end

    @property
    def tokens(self) -> int:
        return sum(stream.tokens for stream in self.streams)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def events_per_s(self) -> float:
        return sum(stream.events for stream in self.streams) / self.seconds

    def median_ttft_s(self) -> float:
        times = sorted(stream.ttft_s for stream in self.streams)
        return times[len(times) // 2]


def run_load(port: int, path: str, bodies: list[dict[str, Any]], concurrency: int) -> LoadResult:
    """Send ``bodies`` to 127.0.0.1:``port``, at most ``concurrency`` at a time, from a process of its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply_async(_run, (port, path, bodies, concurrency)).get(CLIENT_TIMEOUT_S)


def _run(port: int, path: str, bodies: list[dict[str, Any]], concurrency: int) -> LoadResult:
    return asyncio.run(_load(port, path, bodies, concurrency))


async def _load(port: int, path: str, bodies: list[dict[str, Any]], concurrency: int) -> LoadResult:
    result = LoadResult()
    waiting = list(reversed(bodies))

    async def client() -> None:
        while waiting:
            result.streams.append(await _stream(port, path, waiting.pop()))

    started = time.perf_counter()
    async with asyncio.timeout(CLIENT_TIMEOUT_S):
        await asyncio.gather(*(client() for _ in range(concurrency)))
    result.seconds = time.perf_counter() - started
    return result


async def _stream(port: int, path: str, body: dict[str, Any]) -> StreamTimes:
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started = time.perf_counter()
    writer.write(head.encode() + payload)
    ttft_s, events, tail = 0.0, 0, b""
    while data := await reader.read(1 << 16):
        found = data.count(b"data: ")
        if found and not events:
            ttft_s = time.perf_counter() - started
        events += found
        tail = (tail + data)[-4096:]
    total_s = time.perf_counter() - started
    writer.close()
    usage = USAGE.search(tail)
    if usage is None:
        raise RuntimeError(f"a stream ended without usage: {tail[-300:]!r}")
    return StreamTimes(ttft_s, total_s, events, int(usage[1]))
