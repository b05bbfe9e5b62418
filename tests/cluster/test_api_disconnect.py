"""Clients that leave, seen from the ASGI side: the generation is closed at once."""

import asyncio
import json
from typing import Any

import pytest

from splitserve.cluster.api.app import build_asgi_app
from splitserve.cluster.api.fake_service import FakeService


class Connection:
    """One HTTP request driven by hand. ``sent`` is what was answered; ``leave`` closes the client's side."""

    def __init__(self, service: FakeService, **fields: Any) -> None:
        body = {"model": "fake", "prompt": "hi", **fields}
        self._incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.sent_some = asyncio.Event()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        self.task = asyncio.create_task(build_asgi_app(service)(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._incoming:
            return self._incoming.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self._gone.is_set():
            raise OSError("the connection is closed")
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.sent_some.set()

    def leave(self) -> None:
        self._gone.set()


def blocked_service(at: int) -> FakeService:
    service = FakeService()
    service.script.insert(at, asyncio.Event())
    return service


async def until_open(service: FakeService) -> None:
    for _ in range(1000):
        if service.open:
            return
        await asyncio.sleep(0)
    raise AssertionError("the request did not reach the service")


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token(stream):
    service = blocked_service(at=0)
    connection = Connection(service, stream=stream)
    await until_open(service)
    connection.leave()
    await asyncio.wait_for(connection.task, 1)
    assert service.open == 0


async def test_leaving_in_mid_stream():
    service = blocked_service(at=2)
    connection = Connection(service, stream=True)
    await asyncio.wait_for(connection.sent_some.wait(), 1)
    connection.leave()
    await asyncio.wait_for(connection.task, 1)
    assert service.open == 0
    assert not any(b'finish_reason":"' in message.get("body", b"") for message in connection.sent)


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_the_handler_closes_the_generation(stream):
    service = blocked_service(at=2)
    connection = Connection(service, stream=stream)
    await until_open(service)
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    assert service.open == 0


async def test_a_stream_goes_out_piece_by_piece():
    service = blocked_service(at=1)
    connection = Connection(service, stream=True)
    await asyncio.wait_for(connection.sent_some.wait(), 1)
    assert b'"text":"The"' in connection.sent[1]["body"]
    event = next(item for item in service.script if isinstance(item, asyncio.Event))
    event.set()
    await asyncio.wait_for(connection.task, 1)
    assert connection.sent[-1]["body"].endswith(b"data: [DONE]\n\n")
    assert connection.sent[-1]["more_body"] is False
    assert service.open == 0


async def test_no_task_is_left_behind():
    before = asyncio.all_tasks()
    connection = Connection(FakeService(), stream=True)
    await asyncio.wait_for(connection.task, 1)
    assert asyncio.all_tasks() == before
