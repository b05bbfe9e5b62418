"""Plain completions: plain dict in, plain dicts out."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from uuid import uuid4

from splitserve.cluster.api.context import fit_max_tokens
from splitserve.cluster.api.fields import Fields
from splitserve.cluster.api.generation import Generation, check_model
from splitserve.cluster.api.no_ops import refuse_rest
from splitserve.cluster.api.options import read_include_usage, read_options, read_stops
from splitserve.cluster.api.prompt import read_prompt
from splitserve.cluster.api.reply import Json, chunks, collect
from splitserve.cluster.api.service import Service

DEFAULT_MAX_TOKENS = 16


async def complete(service: Service, body: Json, request_id: str | None = None) -> Json:
    """A ``text_completion`` object. Raises ``ApiError``; cancelling aborts the request."""
    generation = await read_completion(service, body)
    return await collect(service, generation, CompletionForm(service.model, False), request_id)


async def complete_stream(service: Service, body: Json, request_id: str | None = None) -> AsyncGenerator[Json, None]:
    """``text_completion`` objects with pieces of the text. Raises ``ApiError``; closing aborts the request."""
    generation = await read_completion(service, body)
    form = CompletionForm(service.model, generation.include_usage)
    async with aclosing(chunks(service, generation, form, request_id)) as found:
        async for chunk in found:
            yield chunk


async def read_completion(service: Service, body: Json) -> Generation:
    """Validate and tokenise. Raises ``BadRequest`` or ``ModelNotFound``."""
    fields = Fields(body)
    check_model(service, fields)
    fields.boolean("stream")
    options = read_options(fields, service.vocab_size)
    stops = read_stops(fields)
    include_usage = read_include_usage(fields)
    value = fields.require("prompt")
    refuse_rest(fields.rest)
    prompt = await read_prompt(service, value)
    max_tokens = fit_max_tokens(service, len(prompt), options, DEFAULT_MAX_TOKENS, "prompt")
    return Generation(prompt, options.sampling(max_tokens), stops, include_usage, continues=True)


class CompletionForm:
    """The objects of one completion."""

    def __init__(self, model: str, include_usage: bool) -> None:
        self._head: Json = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._usage: Json = {"usage": None} if include_usage else {}

    def whole(self, text: str, finish_reason: str, usage: Json) -> Json:
        return self._chunk(text, finish_reason) | {"usage": usage}

    def delta(self, text: str) -> Json:
        return self._chunk(text, None)

    def finish(self, finish_reason: str) -> Json:
        return self._chunk("", finish_reason)

    def usage(self, usage: Json) -> Json:
        return self._head | {"choices": [], "usage": usage}

    def _chunk(self, text: str, finish_reason: str | None) -> Json:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return self._head | {"choices": [choice]} | self._usage
