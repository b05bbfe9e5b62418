"""Bad requests in one table: what is sent, and which status, param and code come back."""

import json

import httpx2
import pytest

from splitserve.cluster.api.app import build_asgi_app
from splitserve.cluster.api.fake_service import VOCAB_SIZE, FakeService
from splitserve.cluster.api.service import ContextLimit

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]

VALUE = "invalid_value"
MISSING = "missing_required_parameter"
UNKNOWN = "unknown_parameter"
UNSUPPORTED = "unsupported_parameter"
CONTEXT = "context_length_exceeded"


async def post(service: FakeService, path: str, content: bytes) -> httpx2.Response:
    transport = httpx2.ASGITransport(build_asgi_app(service))
    async with httpx2.AsyncClient(transport=transport, base_url="http://api") as client:
        return await client.post(path, content=content)


def assert_refused(response: httpx2.Response, status: int, param: str | None, code: str) -> None:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), error["message"]
    assert error["message"]


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"max_tokens": 0}, "max_tokens", VALUE),
        ({"max_tokens": -1}, "max_tokens", VALUE),
        ({"max_tokens": True}, "max_tokens", VALUE),
        ({"max_tokens": 1.0}, "max_tokens", VALUE),
        ({"max_tokens": "5"}, "max_tokens", VALUE),
        ({"max_completion_tokens": 0}, "max_completion_tokens", VALUE),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", VALUE),
        ({"temperature": -0.1}, "temperature", VALUE),
        ({"temperature": 2.01}, "temperature", VALUE),
        ({"temperature": False}, "temperature", VALUE),
        ({"temperature": "1"}, "temperature", VALUE),
        ({"temperature": 10**400}, "temperature", VALUE),
        ({"top_p": 0}, "top_p", VALUE),
        ({"top_p": 1.1}, "top_p", VALUE),
        ({"top_p": [1]}, "top_p", VALUE),
        ({"seed": 2**63}, "seed", VALUE),
        ({"seed": -(2**63) - 1}, "seed", VALUE),
        ({"seed": 1.5}, "seed", VALUE),
        ({"stream": 1}, "stream", VALUE),
        ({"stream": "true"}, "stream", VALUE),
        ({"stream_options": []}, "stream_options", VALUE),
        ({"stream_options": {"include_usage": 1}}, "stream_options", VALUE),
        ({"stream_options": {"other": True}}, "stream_options", VALUE),
        ({"ignore_eos": 0}, "ignore_eos", VALUE),
        ({"stop": ""}, "stop", VALUE),
        ({"stop": 5}, "stop", VALUE),
        ({"stop": ["a", None]}, "stop", VALUE),
        ({"stop": ["a"] * 17}, "stop", VALUE),
        ({"stop": ["a"] * 10_000}, "stop", VALUE),
        ({"stop": "x" * 257}, "stop", VALUE),
        ({"stop": "x" * 1_000_000}, "stop", VALUE),
        ({"stop_token_ids": 0}, "stop_token_ids", VALUE),
        ({"stop_token_ids": False}, "stop_token_ids", VALUE),
        ({"stop_token_ids": [-1]}, "stop_token_ids", VALUE),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", VALUE),
        ({"stop_token_ids": [True]}, "stop_token_ids", VALUE),
        ({"stop_token_ids": [1.0]}, "stop_token_ids", VALUE),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids", VALUE),
        ({"n": 2}, "n", UNSUPPORTED),
        ({"n": 5_000_000}, "n", UNSUPPORTED),
        ({"n": True}, "n", UNSUPPORTED),
        ({"best_of": 2}, "best_of", UNSUPPORTED),
        ({"logprobs": True}, "logprobs", UNSUPPORTED),
        ({"logprobs": 0}, "logprobs", UNSUPPORTED),
        ({"top_logprobs": 1_000_000_000}, "top_logprobs", UNSUPPORTED),
        ({"frequency_penalty": 0.5}, "frequency_penalty", UNSUPPORTED),
        ({"presence_penalty": -1}, "presence_penalty", UNSUPPORTED),
        ({"repetition_penalty": 1.1}, "repetition_penalty", UNSUPPORTED),
        ({"logit_bias": {"5": 100}}, "logit_bias", UNSUPPORTED),
        ({"response_format": {"type": "json_object"}}, "response_format", UNSUPPORTED),
        ({"tools": [{"type": "function"}]}, "tools", UNSUPPORTED),
        ({"tool_choice": "auto"}, "tool_choice", UNSUPPORTED),
        ({"store": True}, "store", UNSUPPORTED),
        ({"echo": True}, "echo", UNSUPPORTED),
        ({"reasoning_effort": "high"}, "reasoning_effort", UNSUPPORTED),
        ({"temperatur": 0.5}, "temperatur", UNKNOWN),
        ({"": 1}, "", UNKNOWN),
        ({"model": None}, "model", MISSING),
        ({"model": 5}, "model", VALUE),
        ({"max_tokens": 1000}, "max_tokens", CONTEXT),
        ({"max_completion_tokens": 10**300}, "max_completion_tokens", CONTEXT),
    ],
)
@pytest.mark.parametrize(
    ("path", "prompt"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "hello"})], ids=["chat", "text"]
)
async def test_fields_of_both_endpoints(path, prompt, change, param, code):
    service = FakeService()
    response = await post(service, path, json.dumps({"model": "fake", **prompt, **change}).encode())
    assert_refused(response, 400, param, code)
    assert service.requests == []
    assert (await post(service, path, json.dumps({"model": "fake", **prompt}).encode())).status_code == 200


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        (None, MISSING),
        ([], VALUE),
        ("hello", VALUE),
        ({}, VALUE),
        (["hello"], VALUE),
        ([{}], VALUE),
        ([{"role": "user"}], VALUE),
        ([{"role": "user", "content": None}], VALUE),
        ([{"role": "user", "content": 5}], VALUE),
        ([{"role": "user", "content": []}], VALUE),
        ([{"role": "user", "content": ["hello"]}], VALUE),
        ([{"role": "user", "content": [{"type": "text"}]}], VALUE),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254"}}]}], VALUE),
        ([{"role": "tool", "content": "x"}], VALUE),
        ([{"role": "function", "content": "x"}], VALUE),
        ([{"role": "User", "content": "x"}], VALUE),
        ([{"role": True, "content": "x"}], VALUE),
        ([{"role": ["user"], "content": "x"}], VALUE),
        ([{"role": "user", "content": "x", "name": 5}], VALUE),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "a"}]}], VALUE),
        ([{"role": "user", "content": "\ud800"}], VALUE),
        ([{"role": "\ud800", "content": "x"}], VALUE),
        ([{"role": "user", "content": "x", "name": "\udfff"}], VALUE),
        ([{"role": "user", "content": "a b " * 60}], CONTEXT),
        ([{"role": "user", "content": "a" * 5000}], CONTEXT),
    ],
)
async def test_messages(messages, code):
    service = FakeService()
    response = await post(service, CHAT, json.dumps({"model": "fake", "messages": messages}).encode())
    assert_refused(response, 400, "messages", code)
    assert service.requests == []


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (None, MISSING),
        ("", VALUE),
        ([], VALUE),
        ([""], VALUE),
        ([[]], VALUE),
        (5, VALUE),
        ({"a": 1}, VALUE),
        (["a", "b"], VALUE),
        ([[1], [2]], VALUE),
        (["a"] * 100_000, VALUE),
        (["a", 1], VALUE),
        ([1, "a"], VALUE),
        ([["a"]], VALUE),
        ([[[1]]], VALUE),
        ([True], VALUE),
        ([1.0], VALUE),
        ([None], VALUE),
        ([-1], VALUE),
        ([VOCAB_SIZE], VALUE),
        ([2**63], VALUE),
        ("\ud800", VALUE),
        ("a " * 99, CONTEXT),
        ([1] * 100, CONTEXT),
        ("a" * 5000, CONTEXT),
    ],
)
async def test_prompts(prompt, code):
    service = FakeService()
    response = await post(service, TEXT, json.dumps({"model": "fake", "prompt": prompt}).encode())
    assert_refused(response, 400, "prompt", code)
    assert service.requests == []


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"null", None),
        (b"[]", None),
        (b'"text"', None),
        (b"\xff\xfe", None),
        (b'{"model": "fake", "prompt": "a\xff"}', None),
        (b'{"model": "fake", "prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"model": "fake", "prompt": "a", "temperature": -Infinity}', "temperature"),
        (b'{"model": "fake", "prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"model": "fake", "prompt": "a", "metadata": {"x": [1e999]}}', "metadata"),
        (b'{"model": "fake", "prompt": "a", "stop": ["\\udc00"]}', "stop"),
        (b'{"model": "fake", "prompt": "a", "user": "\\ud800 x"}', "user"),
        (b'{"model": "fake", "prompt": "a", "\\ud800": 1}', "?"),
        (b'{"model": "fake", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, None),
        (b'{"seed": ' + b"9" * 5000 + b"}", None),
    ],
)
async def test_bodies(content, param):
    assert_refused(await post(FakeService(), TEXT, content), 400, param, VALUE)


async def test_an_unknown_model_is_not_found():
    for path, prompt in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})):
        response = await post(FakeService(), path, json.dumps({"model": "other", **prompt}).encode())
        assert_refused(response, 404, "model", "model_not_found")


async def test_text_that_is_sure_to_be_too_long_is_not_tokenised():
    service = FakeService()
    await post(service, TEXT, json.dumps({"model": "fake", "prompt": "a" * 5000}).encode())
    await post(service, CHAT, json.dumps({"model": "fake", "messages": HELLO + HELLO * 1000}).encode())
    assert service.tokenized == []


@pytest.mark.parametrize(
    ("limit", "max_tokens", "param"),
    [
        (ContextLimit(20, "the prefill pool", prompt_only=True), 5, "prompt"),
        (ContextLimit(31, "the decode pool"), 5, "prompt"),
        (ContextLimit(35, "the decode pool"), 5, "max_tokens"),
    ],
)
async def test_the_limit_that_applied_is_named(limit: ContextLimit, max_tokens: int, param: str):
    """B130."""
    service = FakeService()
    service.limits = (*service.limits, limit)
    body = json.dumps({"model": "fake", "prompt": "a " * 30, "max_tokens": max_tokens}).encode()
    error = (await post(service, TEXT, body)).json()["error"]
    assert (error["code"], error["param"]) == (CONTEXT, param)
    assert f"{limit.name} is {limit.tokens} tokens" in error["message"]
    assert "the prompt has 31 tokens" in error["message"]
    assert service.requests == []


async def test_the_rest_of_the_context_is_that_of_the_tightest_limit():
    service = FakeService()
    service.limits = (*service.limits, ContextLimit(40, "the decode pool"), ContextLimit(35, "the prefill pool", True))
    body = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "a " * 20}]}).encode()
    assert (await post(service, CHAT, body)).status_code == 200
    ((prompt, sampling, _),) = service.requests
    assert len(prompt) + sampling.max_tokens == 40


async def test_no_ops_are_accepted_and_everything_null_too():
    harmless = {
        "n": 1,
        "best_of": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logprobs": None,
        "echo": False,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "store": False,
        "metadata": {"a": "b"},
        "user": "someone",
        "service_tier": "auto",
        "stop": None,
        "stream": None,
        "stream_options": None,
        "temperature": None,
        "top_p": None,
        "seed": None,
        "max_tokens": None,
        "stop_token_ids": None,
        "no_such_field": None,
    }
    for path, prompt in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})):
        response = await post(FakeService(), path, json.dumps({"model": "fake", **prompt, **harmless}).encode())
        assert response.status_code == 200, response.text
