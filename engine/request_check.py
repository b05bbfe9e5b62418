"""Whether a request makes sense by itself, whatever engine it comes to."""

from msgspec import ValidationError, convert
from msgspec.structs import fields

from splitserve.engine.protocol import Request, SamplingParams

MAX_PROMPT_LOGPROBS_BYTES = 4 << 20  # in one report, which has room for many requests' (``cluster.wire``)
_FIELDS = [(field.name, field.type) for field in fields(SamplingParams)]
_SHOWN_CHARS = 80


def objection(request: Request) -> str | None:
    """What is wrong with ``request``: a sentence that names the field and its value. None: nothing.

    The wire checks the same types and ranges; requests that were made in this process have not come over it.
    """
    sampling = request.sampling
    for name, expected in _FIELDS:
        value = getattr(sampling, name)
        try:
            convert(value, expected)
        except ValidationError as error:
            return f"sampling.{name} is {repr(value)[:_SHOWN_CHARS]}: {error}"
    prompt_tokens = len(request.prompt)
    if not 0 <= request.drawn < prompt_tokens:
        return f"drawn is {request.drawn}, of a prompt of {prompt_tokens} tokens"
    if sampling.prompt_logprobs is not None:
        size = _encoded_bytes(prompt_tokens - request.drawn, sampling.prompt_logprobs)
        if size > MAX_PROMPT_LOGPROBS_BYTES:
            return (
                f"sampling.prompt_logprobs is {sampling.prompt_logprobs}: for {prompt_tokens} prompt tokens that takes "
                f"{size} bytes, more than {MAX_PROMPT_LOGPROBS_BYTES}"
            )
    return None


def _encoded_bytes(tokens: int, alternatives: int) -> int:
    """Of so many ``TokenLogprobs`` in msgpack, at most: 9 bytes a float, 5 an id, 1 to 3 the head of an array."""
    return tokens * (1 + 9 + 2 * 3 + alternatives * (5 + 9))
