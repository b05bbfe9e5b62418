"""The body of an HTTP request: bounded in bytes and time, strict JSON."""

import asyncio
import json
from typing import Any, NoReturn

import msgspec
from starlette.requests import Request

from splitserve.cluster.api.errors import BadRequest, BodyTimeout, BodyTooLarge

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024
BODY_TIMEOUT_S = 30.0


async def read_body(request: Request, max_bytes: int = DEFAULT_MAX_BODY_BYTES) -> dict[str, Any]:
    """The JSON object in the body, whatever its content type says.

    Raises ``BodyTooLarge`` as soon as the size is known, ``BodyTimeout``, ``BadRequest``, and Starlette's
    ``ClientDisconnect``.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > max_bytes:
        _refuse_size(max_bytes)
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                data += part
                if len(data) > max_bytes:
                    _refuse_size(max_bytes)
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {BODY_TIMEOUT_S:g} seconds.") from None
    return decode_body(bytes(data))


def decode_body(data: bytes) -> dict[str, Any]:
    """``data`` as a JSON object. Raises ``BadRequest``, with param where the mistake can be traced to a field."""
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        _name_field(data)
        raise BadRequest(f"The body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    return body


def _name_field(data: bytes) -> None:
    """Say which field holds what the strict decoder refuses: numbers that are not finite, halves of surrogate pairs."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(body, dict):
        return
    for name, value in body.items():
        try:
            name.encode()
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            shown = name.encode(errors="replace").decode()[:64]
            raise BadRequest(
                f"'{shown}' contains half of a surrogate pair, which is not valid Unicode.", shown
            ) from None
        except (ValueError, RecursionError):
            raise BadRequest(f"'{name[:64]}' contains a number that is not finite.", name[:64]) from None


def _refuse_size(max_bytes: int) -> NoReturn:
    raise BodyTooLarge(f"The body has more than {max_bytes} bytes.")
