"""The form of replies, whole and streamed, and what reaches the service."""

import json
from typing import Any

import httpx2
import pytest

from splitserve.cluster.api.app import build_asgi_app
from splitserve.cluster.api.fake_service import FakeService
from splitserve.cluster.api.service import Tokens
from splitserve.engine.protocol import FinishReason

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello you"}]},
    TEXT: {"prompt": "hello you"},
}
PARIS = "The capital of France is Paris."

both = pytest.mark.parametrize("path", [CHAT, TEXT])


async def post(service: FakeService, path: str, **fields: Any) -> httpx2.Response:
    transport = httpx2.ASGITransport(build_asgi_app(service))
    async with httpx2.AsyncClient(transport=transport, base_url="http://api") as client:
        response = await client.post(path, json={"model": "fake", **PROMPTS[path], **fields})
    assert service.open == 0
    return response


def events(response: httpx2.Response) -> list[Any]:
    """The chunks of a stream, which must end with [DONE]."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def text_of(chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


async def test_whole_chat():
    reply = (await post(FakeService(), CHAT)).json()
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    assert reply["model"] == "fake"
    message = {"role": "assistant", "content": PARIS, "refusal": None}
    assert reply["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_whole_completion():
    service = FakeService()
    service.say("a b", FinishReason.LENGTH, cached_tokens=None)
    reply = (await post(service, TEXT)).json()
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["choices"] == [{"index": 0, "text": "a b", "logprobs": None, "finish_reason": "length"}]
    assert reply["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


@both
@pytest.mark.parametrize("stop", [None, "France", ["zzz", "is Par"], ". "])
async def test_a_stream_joins_to_the_whole_reply(path, stop):
    whole = (await post(FakeService(), path, stop=stop)).json()
    chunks = events(await post(FakeService(), path, stop=stop, stream=True, stream_options={"include_usage": True}))
    *deltas, finish, usage = chunks
    choice = whole["choices"][0]
    assert "".join(map(text_of, deltas)) == choice.get("text", choice.get("message", {}).get("content"))
    assert all(map(text_of, deltas))
    assert [chunk["choices"][0]["finish_reason"] for chunk in deltas] == [None] * len(deltas)
    assert finish["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert text_of(finish) == ""
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1


async def test_the_first_chat_chunk_carries_the_role():
    first, *rest = events(await post(FakeService(), CHAT, stream=True))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "The"}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in rest)


async def test_a_reply_without_text_has_a_role_and_a_finish():
    service = FakeService()
    service.script = [Tokens([], FinishReason.STOP)]
    (chunk,) = events(await post(service, CHAT, stream=True))
    assert chunk["choices"][0]["delta"] == {"role": "assistant"}
    assert chunk["choices"][0]["finish_reason"] == "stop"


@both
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_no_usage_unless_it_is_asked_for(path, options):
    chunks = events(await post(FakeService(), path, stream=True, stream_options=options))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@both
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_generation_at_once(path, stream):
    service = FakeService()
    service.script.insert(4, AssertionError("read on after the stop string"))
    response = await post(service, path, stop="Fra", stream=stream, stream_options={"include_usage": True})
    if stream:
        *deltas, finish, last = events(response)
        assert "".join(map(text_of, deltas)) == "The capital of "
        assert finish["choices"][0]["finish_reason"] == "stop"
    else:
        last = response.json()
    assert last["usage"]["completion_tokens"] == 4


async def test_tokens_that_wait_together_become_one_delta():
    service = FakeService()
    ids = service.tokenizer.encode(PARIS)
    service.script = [Tokens(ids[:1]), Tokens(ids[1:], FinishReason.LENGTH)]
    chunks = events(await post(service, TEXT, stream=True))
    assert [text_of(chunk) for chunk in chunks] == ["The", " capital of France is Paris.", ""]


async def test_options_reach_the_service():
    service = FakeService()
    await post(
        service,
        CHAT,
        max_tokens=7,
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        seed=-1,
        stop_token_ids=[3, 4],
        ignore_eos=True,
    )
    prompt, sampling, _ = service.requests[0]
    assert service.tokenizer.decode(prompt) == "user: hello you"
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.0, 0.5)
    assert (sampling.seed, sampling.stop_token_ids, sampling.ignore_eos) == (2**64 - 1, (3, 4), True)


async def test_defaults():
    service = FakeService()
    await post(service, CHAT)
    await post(service, TEXT)
    await post(service, TEXT, prompt=[1] * 95)
    await post(service, TEXT, prompt=[[1] * 60], max_tokens=40)
    assert [sampling.max_tokens for _, sampling, _ in service.requests] == [97, 16, 5, 40]
    first = service.requests[0][1]
    assert (first.temperature, first.top_p, first.stop_token_ids, first.ignore_eos) == (1.0, 1.0, (), False)
    seeds = {sampling.seed for _, sampling, _ in service.requests}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_roles_and_text_parts():
    service = FakeService()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "brief"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "\u0000 \U0001f600 e\u0301"},
    ]
    assert (await post(service, CHAT, messages=messages)).status_code == 200
    assert service.tokenized == ["system: brief user: one\ntwo assistant: ok user: \u0000 \U0001f600 e\u0301"]


@pytest.mark.parametrize("prompt", ["hello", ["hello"], [5, 6], [[5, 6]]])
async def test_all_forms_of_one_prompt(prompt):
    assert (await post(FakeService(), TEXT, prompt=prompt)).status_code == 200
