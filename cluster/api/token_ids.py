"""Token ids in, token ids out, for callers that bring their own tokenizer."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from splitserve.cluster.api.context import fit_max_tokens
from splitserve.cluster.api.errors import InternalError
from splitserve.cluster.api.fields import Fields, check_text
from splitserve.cluster.api.generation import Generation, find_model
from splitserve.cluster.api.no_ops import refuse_rest
from splitserve.cluster.api.options import read_options
from splitserve.cluster.api.prompt import read_token_ids
from splitserve.cluster.api.reply import Json
from splitserve.cluster.api.service import Service
from splitserve.engine.protocol import FinishReason

PARAM = "prompt_token_ids"


async def generate_ids(service: Service, body: Json, request_id: str | None = None) -> AsyncGenerator[Json, None]:
    """Items ``{"token_ids": [...], "finish_reason": None | "stop" | "length"}``; the first may have ``cached_tokens``.

    ``body`` holds ``prompt_token_ids`` and, each optional, ``model``, ``max_tokens`` (default: the rest of the
    context), ``temperature``, ``top_p``, ``seed``, ``stop_token_ids`` and ``ignore_eos``. Raises ``ApiError``;
    closing aborts the request.
    """
    generation = read_generation(service, body)
    finish = None
    async with aclosing(service.generate(generation.prompt, generation.sampling, request_id)) as items:
        async for item in items:
            finish = item.finish
            if finish not in (None, FinishReason.STOP, FinishReason.LENGTH):
                raise InternalError
            reply: Json = {"token_ids": item.token_ids, "finish_reason": None if finish is None else finish.value}
            if item.cached_tokens is not None:
                reply["cached_tokens"] = item.cached_tokens
            yield reply
            if finish is not None:
                return
    raise InternalError("The generation ended without a reason.")


def read_generation(service: Service, body: Json) -> Generation:
    """Validate. Raises ``BadRequest`` or ``ModelNotFound``."""
    fields = Fields(body)
    model = fields.take("model")
    if model is not None:
        find_model(service, check_text(model, "model"))
    options = read_options(fields, service.vocab_size)
    value = fields.require(PARAM)
    refuse_rest(fields.rest)
    prompt = read_token_ids(service, value, PARAM)
    return Generation(prompt, options.sampling(fit_max_tokens(service, len(prompt), options, None, PARAM)))
