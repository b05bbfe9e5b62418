"""Does the request fit? Checked before anything is computed for it."""

from splitserve.cluster.api.errors import BadRequest, ContextTooLong
from splitserve.cluster.api.service import Service

# A vocabulary's longest tokens are runs of blanks of about this length; ordinary text has 3 to 5 bytes per token.
MAX_BYTES_PER_TOKEN = 32


def check_bytes(service: Service, text_bytes: int, param: str) -> None:
    """Refuse text that is sure to be too long without tokenising it. Raises ``ContextTooLong``."""
    limit_bytes = MAX_BYTES_PER_TOKEN * service.max_model_tokens
    if text_bytes > limit_bytes:
        raise ContextTooLong(
            f"The prompt has {text_bytes} bytes; the maximum context length of the model is {service.max_model_tokens} "
            f"tokens, for which more than {limit_bytes} bytes are not considered.",
            param,
        )


def fit_max_tokens(service: Service, prompt_tokens: int, asked: int | None, default: int | None, param: str) -> int:
    """How many tokens may be generated: what was asked, else ``default``, else the rest of the context.

    A limit the client named is never cut silently; the default is. Raises ``ContextTooLong``, and ``BadRequest`` for
    an empty prompt.
    """
    if prompt_tokens < 1:
        raise BadRequest("The prompt has no tokens.", param)
    rest = service.max_model_tokens - prompt_tokens
    if rest < 1 or (asked is not None and asked > rest):
        raise ContextTooLong.of(service.max_model_tokens, "the model", prompt_tokens, asked, param)
    max_tokens = asked if asked is not None else min(rest, default or rest)
    service.check_prompt(prompt_tokens, max_tokens)
    return max_tokens
