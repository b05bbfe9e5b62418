"""The prompt of a completion: one text or one list of token ids."""

from splitserve.cluster.api.context import check_bytes, check_prompt
from splitserve.cluster.api.errors import BadRequest
from splitserve.cluster.api.fields import check_text, check_token_ids
from splitserve.cluster.api.service import Service


async def read_prompt(service: Service, value: object) -> list[int]:
    """Token ids of ``prompt``. Text is tokenised off the event loop, and not at all where it is sure to be too long.

    Raises ``BadRequest`` with param "prompt".
    """
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise BadRequest("'prompt' may hold one prompt only; send one request for each.", "prompt")
        value = value[0]
    if not isinstance(value, str | list):
        raise BadRequest("'prompt' must be a string or a list of token ids.", "prompt")
    if not value:
        raise BadRequest("'prompt' must not be empty.", "prompt")
    if isinstance(value, list):
        return read_token_ids(service, value, "prompt")
    text = check_text(value, "prompt")
    check_bytes(service, len(text.encode()), "prompt")
    return await service.tokenize_text(text)


def read_token_ids(service: Service, value: object, param: str) -> list[int]:
    """A prompt given as token ids. Too long a list is refused by its length before its items are looked at."""
    if isinstance(value, list) and value:
        check_prompt(service, len(value), param)
    token_ids = check_token_ids(value, param, service.vocab_size)
    if not token_ids:
        raise BadRequest(f"'{param}' must not be empty.", param)
    return token_ids
