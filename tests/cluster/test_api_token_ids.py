"""Token ids in, token ids out."""

from typing import Any

import pytest

from splitserve.cluster.api.errors import BadRequest, InternalError, ModelNotFound
from splitserve.cluster.api.fake_service import VOCAB_SIZE, FakeService
from splitserve.cluster.api.service import Tokens
from splitserve.cluster.api.token_ids import generate_ids
from splitserve.engine.protocol import FinishReason


async def items(service: FakeService, **body: Any) -> list[dict[str, Any]]:
    return [item async for item in generate_ids(service, body)]


async def test_items():
    service = FakeService()
    service.script = [Tokens([7], cached_tokens=4), Tokens([8, 9]), Tokens([1], FinishReason.LENGTH)]
    assert await items(service, prompt_token_ids=[1, 2], max_tokens=4) == [
        {"token_ids": [7], "finish_reason": None, "cached_tokens": 4},
        {"token_ids": [8, 9], "finish_reason": None},
        {"token_ids": [1], "finish_reason": "length"},
    ]
    assert service.requests[0][0] == [1, 2]
    assert service.requests[0][1].max_tokens == 4
    assert service.open == 0


async def test_closing_aborts():
    service = FakeService()
    stream = generate_ids(service, {"prompt_token_ids": [1]})
    await anext(stream)
    assert service.open == 1
    await stream.aclose()
    assert service.open == 0


@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        ({}, BadRequest, "prompt_token_ids"),
        ({"prompt_token_ids": []}, BadRequest, "prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, BadRequest, "prompt_token_ids"),
        ({"prompt_token_ids": [VOCAB_SIZE]}, BadRequest, "prompt_token_ids"),
        ({"prompt_token_ids": [1], "stop": "x"}, BadRequest, "stop"),
        ({"prompt_token_ids": [1], "temperature": float("nan")}, BadRequest, "temperature"),
        ({"prompt_token_ids": [1], "model": "other"}, ModelNotFound, "model"),
    ],
)
async def test_refusals(body, error, param):
    with pytest.raises(error) as refusal:
        await items(FakeService(), **body)
    assert refusal.value.param == param


@pytest.mark.parametrize("script", [[Tokens([1])], [Tokens([1], FinishReason.ERROR)]])
async def test_an_end_that_is_no_finish_is_an_error(script):
    service = FakeService()
    service.script = script
    with pytest.raises(InternalError):
        await items(service, prompt_token_ids=[1])
