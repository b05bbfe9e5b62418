"""The official client against the API."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from splitserve.cluster.api.app import build_asgi_app
from splitserve.cluster.api.errors import NoWorker, Overloaded, WorkerLost
from splitserve.cluster.api.fake_service import FakeService

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PARIS = "The capital of France is Paris."


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[openai.AsyncOpenAI]:
    http_client = httpx2.AsyncClient(transport=httpx2.ASGITransport(build_asgi_app(service)))
    async with openai.AsyncOpenAI(
        api_key="none", base_url="http://api/v1", http_client=http_client, max_retries=0
    ) as c:
        yield c
    assert service.open == 0


async def test_chat(client):
    reply = await client.chat.completions.create(model="fake", messages=HELLO, max_completion_tokens=20, seed=1)
    assert reply.choices[0].message.content == PARIS
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens_details.cached_tokens == 2
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


async def test_chat_stream(client):
    stream = await client.chat.completions.create(
        model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PARIS
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 6


async def test_the_clients_own_stream_helper(client):
    async with client.chat.completions.stream(model="fake", messages=HELLO) as stream:
        reply = await stream.get_final_completion()
    assert reply.choices[0].message.content == PARIS


async def test_completion_and_its_stream(client):
    whole = await client.completions.create(model="fake", prompt="hello", stop=["is"])
    stream = await client.completions.create(model="fake", prompt="hello", stop=["is"], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text
    assert whole.choices[0].text == "The capital of France "


async def test_a_reply_can_be_sent_back(client):
    reply = await client.chat.completions.create(model="fake", messages=HELLO)
    echo = reply.choices[0].message.model_dump()
    again = await client.chat.completions.create(model="fake", messages=[*HELLO, echo, *HELLO])
    assert again.choices[0].message.content == PARIS


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["fake"]
    assert (await client.models.retrieve("fake")).owned_by == "splitserve"


async def test_errors_become_the_matching_class(client, service):
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=0)
    assert (bad.value.param, bad.value.type) == ("max_tokens", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    for failure, expected in (
        (Overloaded("later", retry_after_s=1), openai.RateLimitError),
        (NoWorker("later", retry_after_s=1), openai.InternalServerError),
        (RuntimeError(), openai.InternalServerError),
    ):
        service.script = [failure]
        for stream in (False, True):
            with pytest.raises(expected):
                await client.chat.completions.create(model="fake", messages=HELLO, stream=stream)


async def test_a_failure_in_mid_stream_raises(client, service):
    service.script.insert(3, WorkerLost("the worker went away"))
    stream = await client.chat.completions.create(model="fake", messages=HELLO, stream=True)
    texts = [(await anext(stream)).choices[0].delta.content for _ in range(3)]
    assert texts == ["The", " capital", " of"]
    with pytest.raises(openai.APIError, match="the worker went away"):
        await anext(stream)
