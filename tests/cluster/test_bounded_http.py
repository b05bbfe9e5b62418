"""A gateway's socket against clients that send no proper request, over loopback."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest

from splitserve.cluster import bounded_http
from splitserve.cluster.api.app import build_asgi_app
from splitserve.cluster.api.fake_service import FakeService
from splitserve.cluster.bounded_http import MAX_HEAD_BYTES
from splitserve.cluster.http_listener import HttpListener
from splitserve.cluster.settings import ListenSettings

WAIT_S = 5.0
HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
async def port() -> AsyncIterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    listener = HttpListener(build_asgi_app(FakeService()), ListenSettings(port=port, shutdown_s=1.0), shared=False)
    await listener.start()
    try:
        yield port
    finally:
        await listener.stop()


async def answers(port: int, *parts: bytes) -> bytes:
    """All that comes back until the server ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(WAIT_S):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read()
    finally:
        writer.close()


def error_of(answer: bytes) -> tuple[int, str]:
    head, body = answer.split(b"\r\n\r\n", 1)
    return int(head.split()[1]), str(json.loads(body)["error"]["code"])


async def test_ordinary_requests_share_a_connection(port: int) -> None:
    found = await answers(port, HEAD + b"\r\n" + HEAD, b"X: " + b"a" * 20_000, b"\r\nConnection: close\r\n\r\n")
    assert found.count(b"200 OK") == 2


@pytest.mark.parametrize("unit", [b"a" * 1000, b"a\r\nX: "], ids=["one long header", "many headers"])
async def test_a_head_without_an_end_is_refused(port: int, unit: bytes) -> None:
    """B112: a client must not fill the memory."""
    found = await answers(port, HEAD + b"X: ", *[unit * (8000 // len(unit))] * (MAX_HEAD_BYTES // 8000 + 1))
    assert error_of(found) == (431, "head_too_large")


async def test_a_head_that_never_comes_is_not_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_TIMEOUT_S", 0.1)
    assert error_of(await answers(port, b"GET /hea")) == (408, "head_timeout")
    assert error_of(await answers(port)) == (408, "head_timeout")


async def test_what_is_not_http_gets_the_envelope(port: int) -> None:
    """B115."""
    assert error_of(await answers(port, b"\x00\xff\r\n\r\n")) == (400, "invalid_value")


@pytest.mark.parametrize(("shared", "works"), [(True, True), (False, False)])
async def test_a_port_is_shared_only_where_that_is_meant(shared: bool, works: bool) -> None:
    """B126."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first, second = (
        HttpListener(build_asgi_app(FakeService()), ListenSettings(port=port, shutdown_s=1.0), shared) for _ in range(2)
    )
    await first.start()
    try:
        if works:
            await second.start()
            await second.stop()
        else:
            with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
                await second.start()
    finally:
        await first.stop()
