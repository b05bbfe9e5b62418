"""Failures of the service before and during a reply: never a reply that looks complete."""

import json

import httpx2
import pytest

from splitserve.cluster.api.app import build_asgi_app
from splitserve.cluster.api.errors import NoWorker, Overloaded, WorkerLost
from splitserve.cluster.api.fake_service import FakeService
from splitserve.cluster.api.service import Tokens
from splitserve.engine.protocol import FinishReason

FAILURES = [
    (WorkerLost("the worker went away"), 502, "worker_lost", None),
    (NoWorker("nobody is there", retry_after_s=2.5), 503, "no_worker", "3"),
    (Overloaded("too much is queued", retry_after_s=0.1), 429, "overloaded", "1"),
    (RuntimeError("secret path /etc"), 500, "internal_error", None),
    (OSError("secret host"), 500, "internal_error", None),
]
with_failures = pytest.mark.parametrize(("failure", "status", "code", "retry_after"), FAILURES)


async def post(service: FakeService, stream: bool) -> httpx2.Response:
    transport = httpx2.ASGITransport(build_asgi_app(service))
    async with httpx2.AsyncClient(transport=transport, base_url="http://api") as client:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        response = await client.post("/v1/chat/completions", json=body)
    assert service.open == 0
    assert "secret" not in response.text
    return response


@with_failures
@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token_there_is_a_status(failure, status, code, retry_after, stream):
    service = FakeService()
    service.script = [failure]
    response = await post(service, stream)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.headers.get("retry-after") == retry_after
    assert response.headers["x-should-retry"] == ("false" if status == 500 else "true")
    assert response.headers["content-type"] == "application/json"


@with_failures
async def test_in_mid_stream_there_is_an_error_event(failure, status, code, retry_after):
    service = FakeService()
    service.script.insert(3, failure)
    response = await post(service, stream=True)
    assert response.status_code == 200
    *deltas, error, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == code
    assert len(deltas) == 3
    assert all('"finish_reason":null' in delta for delta in deltas)


@with_failures
async def test_a_whole_reply_that_fails_is_no_reply(failure, status, code, retry_after):
    service = FakeService()
    service.script.insert(3, failure)
    response = await post(service, stream=False)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("finish", [FinishReason.ERROR, FinishReason.ABORT, FinishReason.HANDED_OVER, None])
async def test_an_end_that_is_no_finish_is_an_error(finish, stream):
    service = FakeService()
    service.script = [Tokens([], finish)]
    response = await post(service, stream)
    expected = (502, "worker_lost") if finish is FinishReason.ABORT else (500, "internal_error")
    assert (response.status_code, response.json()["error"]["code"]) == expected
