"""Does the request fit? Checked before anything is computed for it."""

from splitserve.cluster.api.errors import BadRequest, ContextTooLong
from splitserve.cluster.api.options import Options
from splitserve.cluster.api.service import ContextLimit, Service

# Ordinary text has 3 to 5 bytes per token; only long runs of blanks or of one sign come near this.
MAX_BYTES_PER_TOKEN = 16


def check_bytes(service: Service, text_bytes: int, param: str) -> None:
    """Refuse text that is sure to be too long without tokenising it. Raises ``ContextTooLong``."""
    limit = _tightest(service)
    limit_bytes = MAX_BYTES_PER_TOKEN * limit.tokens
    if text_bytes > limit_bytes:
        raise ContextTooLong(
            f"The prompt has {text_bytes} bytes; the maximum context length of {limit.name} is {limit.tokens} tokens, "
            f"for which more than {limit_bytes} bytes are not considered.",
            param,
        )


def check_messages(service: Service, count: int, param: str) -> None:
    """Refuse a conversation that is sure to be too long without rendering it: each message takes at least one token.

    Raises ``ContextTooLong``.
    """
    limit = _tightest(service)
    if count > limit.tokens:
        raise ContextTooLong(
            f"There are {count} messages; the maximum context length of {limit.name} is {limit.tokens} tokens.", param
        )


def check_prompt(service: Service, prompt_tokens: int, param: str) -> None:
    """A prompt must have a token, and leave room for one more. Raises ``BadRequest``, ``ContextTooLong``."""
    if prompt_tokens < 1:
        raise BadRequest("The prompt has no tokens.", param)
    for limit in service.limits:
        if prompt_tokens + (0 if limit.prompt_only else 1) > limit.tokens:
            raise ContextTooLong.of(limit.tokens, limit.name, prompt_tokens, None, param)


def fit_max_tokens(service: Service, prompt_tokens: int, options: Options, default: int | None, param: str) -> int:
    """How many tokens may be generated: what was asked, else ``default``, else the rest of the context.

    A limit the client named is never cut silently; the default is. Raises like ``check_prompt``.
    """
    check_prompt(service, prompt_tokens, param)
    limit = _tightest(service)
    rest = limit.tokens - prompt_tokens
    asked = options.max_tokens
    if asked is None:
        return min(rest, default or rest)
    if asked > rest:
        raise ContextTooLong.of(limit.tokens, limit.name, prompt_tokens, asked, options.max_tokens_param)
    return asked


def _tightest(service: Service) -> ContextLimit:
    """Of the limits on prompt and output together."""
    return min((limit for limit in service.limits if not limit.prompt_only), key=lambda limit: limit.tokens)
