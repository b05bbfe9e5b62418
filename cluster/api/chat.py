"""Chat completions: plain dict in, plain dicts out."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from uuid import uuid4

from splitserve.cluster.api.context import check_bytes, check_messages, fit_max_tokens
from splitserve.cluster.api.fields import Fields
from splitserve.cluster.api.generation import Generation, check_model
from splitserve.cluster.api.messages import read_messages, text_bytes
from splitserve.cluster.api.no_ops import refuse_rest
from splitserve.cluster.api.options import read_include_usage, read_options, read_stops
from splitserve.cluster.api.reply import Json, chunks, collect
from splitserve.cluster.api.service import Service


async def chat(service: Service, body: Json, request_id: str | None = None) -> Json:
    """A ``chat.completion`` object. Raises ``ApiError``; cancelling aborts the request."""
    generation = await read_chat(service, body)
    return await collect(service, generation, ChatForm(service.model, False), request_id)


async def chat_stream(service: Service, body: Json, request_id: str | None = None) -> AsyncGenerator[Json, None]:
    """``chat.completion.chunk`` objects. Raises ``ApiError``; closing the generator aborts the request."""
    generation = await read_chat(service, body)
    form = ChatForm(service.model, generation.include_usage)
    async with aclosing(chunks(service, generation, form, request_id)) as found:
        async for chunk in found:
            yield chunk


async def read_chat(service: Service, body: Json) -> Generation:
    """Validate and tokenise. Raises ``BadRequest`` or ``ModelNotFound``."""
    fields = Fields(body)
    check_model(service, fields)
    fields.boolean("stream")
    options = read_options(fields, service.vocab_size)
    stops = read_stops(fields)
    include_usage = read_include_usage(fields)
    messages = read_messages(fields.require("messages"))
    refuse_rest(fields.rest)
    check_messages(service, len(messages), "messages")
    check_bytes(service, text_bytes(messages), "messages")
    prompt = await service.tokenize_chat(messages)
    max_tokens = fit_max_tokens(service, len(prompt), options, None, "messages")
    return Generation(prompt, options.sampling(max_tokens), stops, include_usage)


class ChatForm:
    """The objects of one chat completion. Its first chunk carries the role, together with the first text."""

    def __init__(self, model: str, include_usage: bool) -> None:
        self._head: Json = {"id": f"chatcmpl-{uuid4().hex}", "object": "", "created": int(time.time()), "model": model}
        self._role: Json = {"role": "assistant"}
        self._usage: Json = {"usage": None} if include_usage else {}

    def whole(self, text: str, finish_reason: str, usage: Json) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return self._head | {"object": "chat.completion", "choices": [choice], "usage": usage}

    def delta(self, text: str) -> Json:
        return self._chunk({"content": text}, None)

    def finish(self, finish_reason: str) -> Json:
        return self._chunk({}, finish_reason)

    def usage(self, usage: Json) -> Json:
        return self._head | {"object": "chat.completion.chunk", "choices": [], "usage": usage}

    def _chunk(self, delta: Json, finish_reason: str | None) -> Json:
        if self._role:
            delta, self._role = self._role | delta, {}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]} | self._usage
