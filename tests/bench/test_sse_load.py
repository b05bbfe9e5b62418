"""The load generator counts what really came."""

import asyncio

import pytest

from splitserve.bench.sse_load import _load

ANSWER = b'HTTP/1.1 200 OK\r\n\r\ndata: {"a": 1}\n\ndata: {"b": 2}\n\ndata: {"usage": {"completion_tokens":7}}\n\n'


async def serve(answer: bytes) -> tuple[asyncio.Server, int]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def test_events_and_tokens_of_all_streams_are_counted() -> None:
    server, port = await serve(ANSWER)
    async with server:
        result = await _load(port, "/v1/completions", [{"prompt": "a"}] * 5, 2)
    assert [stream.events for stream in result.streams] == [3] * 5
    assert result.tokens == 35
    assert 0 < result.median_ttft_s() <= result.seconds


async def test_a_stream_without_usage_is_an_error() -> None:
    server, port = await serve(b"HTTP/1.1 500 Oops\r\n\r\n")
    async with server:
        with pytest.raises(RuntimeError, match="without usage"):
            await _load(port, "/v1/completions", [{"prompt": "a"}], 1)
