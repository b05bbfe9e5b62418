"""The fields that all ways of generating share: how to draw, when to stop, how to send."""

import random
from dataclasses import dataclass

from splitserve.cluster.api.errors import BadRequest
from splitserve.cluster.api.fields import Fields, check_text, check_token_ids
from splitserve.engine.protocol import SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_TEMPERATURE = 2.0
SEED_BITS = 64


@dataclass(frozen=True, slots=True)
class Options:
    """Validated options of one request."""

    max_tokens: int | None  # None: the client named no limit
    max_tokens_param: str  # the field that it named it in
    temperature: float
    top_p: float
    seed: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Parameters for the engine, with the limit that was worked out."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )


def read_options(fields: Fields, vocab_size: int) -> Options:
    """Take the sampling fields out of ``fields``. Raises ``BadRequest``."""
    max_tokens, max_tokens_param = _read_max_tokens(fields)
    temperature = fields.number("temperature", 1.0, MAX_TEMPERATURE)
    top_p = fields.number("top_p", 1.0, 1.0)
    if top_p == 0:
        raise BadRequest("'top_p' must be greater than 0.", "top_p")
    seed = fields.integer("seed", -(2 ** (SEED_BITS - 1)), 2 ** (SEED_BITS - 1) - 1)
    if seed is None:
        seed = random.getrandbits(SEED_BITS)
    stop_token_ids = fields.take("stop_token_ids")
    if stop_token_ids is None:
        stop_token_ids = []
    if isinstance(stop_token_ids, list) and len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(f"'stop_token_ids' may have {MAX_STOP_TOKEN_IDS} items at most.", "stop_token_ids")
    return Options(
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        temperature=temperature,
        top_p=top_p,
        seed=seed % 2**SEED_BITS,  # the engine's seeds are unsigned
        stop_token_ids=tuple(check_token_ids(stop_token_ids, "stop_token_ids", vocab_size)),
        ignore_eos=fields.boolean("ignore_eos"),
    )


def _read_max_tokens(fields: Fields) -> tuple[int | None, str]:
    old = fields.integer("max_tokens", 1)
    new = fields.integer("max_completion_tokens", 1)
    if old is not None and new is not None and old != new:
        raise BadRequest("'max_tokens' and 'max_completion_tokens' differ; send one of them.", "max_completion_tokens")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def read_stops(fields: Fields) -> tuple[str, ...]:
    """Take ``stop``: a string or up to ``MAX_STOPS`` strings of 1 to ``MAX_STOP_CHARS`` characters."""
    value = fields.take("stop")
    if value is None:
        return ()
    stops = value if isinstance(value, list) else [value]
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"'stop' may have {MAX_STOPS} strings at most.", "stop")
    for stop in stops:
        if not isinstance(stop, str):
            raise BadRequest("'stop' must be a string or a list of strings.", "stop")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise BadRequest(f"A string in 'stop' must have 1 to {MAX_STOP_CHARS} characters.", "stop")
        check_text(stop, "stop")
    return tuple(stops)


def read_include_usage(fields: Fields) -> bool:
    """Take ``stream_options``; ``include_usage`` is the only option that exists."""
    value = fields.take("stream_options")
    if value is None:
        return False
    if not isinstance(value, dict):
        raise BadRequest("'stream_options' must be an object.", "stream_options")
    unknown = set(value) - {"include_usage", "include_obfuscation"}
    if unknown or value.get("include_obfuscation"):
        raise BadRequest("'stream_options' may only hold 'include_usage'.", "stream_options")
    include_usage = value.get("include_usage")
    if include_usage is not None and not isinstance(include_usage, bool):
        raise BadRequest("'include_usage' in 'stream_options' must be true or false.", "stream_options")
    return bool(include_usage)
