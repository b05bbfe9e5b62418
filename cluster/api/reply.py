"""From a generation to a reply as plain dicts, whole or in chunks. HTTP and Python handles use the same.

Chat and completions differ in the form of their objects only; a ``ReplyForm`` says how.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from splitserve.cluster.api.generation import Generation
from splitserve.cluster.api.service import Service
from splitserve.cluster.api.text_stream import TextStream

Json = dict[str, Any]


class ReplyForm(Protocol):
    """The objects of one endpoint, for one request."""

    def whole(self, text: str, finish_reason: str, usage: Json) -> Json:
        """The complete reply."""

    def delta(self, text: str) -> Json:
        """A chunk with new text."""

    def finish(self, finish_reason: str) -> Json:
        """The chunk that ends the choice."""

    def usage(self, usage: Json) -> Json:
        """The chunk after it, with no choices."""


async def collect(service: Service, generation: Generation, form: ReplyForm, request_id: str | None) -> Json:
    """The whole reply. Raises ``ApiError``; cancellation aborts the request."""
    stream = _open(service, generation, request_id)
    async with aclosing(stream.pieces()) as pieces:
        text = "".join([piece async for piece in pieces])
    assert stream.finish_reason is not None
    return form.whole(text, stream.finish_reason, _usage(generation, stream))


async def chunks(
    service: Service, generation: Generation, form: ReplyForm, request_id: str | None
) -> AsyncGenerator[Json, None]:
    """The reply in chunks: text, then the finish reason, then the usage where it was asked for.

    Raises ``ApiError``; closing the generator aborts the request.
    """
    stream = _open(service, generation, request_id)
    async with aclosing(stream.pieces()) as pieces:
        async for text in pieces:
            yield form.delta(text)
    assert stream.finish_reason is not None
    yield form.finish(stream.finish_reason)
    if generation.include_usage:
        yield form.usage(_usage(generation, stream))


def _open(service: Service, generation: Generation, request_id: str | None) -> TextStream:
    tokens = service.generate(generation.prompt, generation.sampling, request_id)
    follows = generation.prompt if generation.continues else ()
    return TextStream(tokens, service.tokenizer, generation.stops, follows)


def _usage(generation: Generation, stream: TextStream) -> Json:
    usage: Json = {
        "prompt_tokens": len(generation.prompt),
        "completion_tokens": stream.completion_tokens,
        "total_tokens": len(generation.prompt) + stream.completion_tokens,
    }
    if stream.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": stream.cached_tokens}
    return usage
