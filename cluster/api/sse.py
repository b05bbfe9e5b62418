"""Server-sent events: one ``data:`` line per chunk, ``[DONE]`` at the end, errors as an event of their own."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from splitserve.cluster.api.answers import error_response
from splitserve.cluster.api.disconnect import while_connected
from splitserve.cluster.api.errors import ApiError, InternalError, envelope
from splitserve.cluster.api.reply import Json

DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


def event(chunk: Json) -> bytes:
    """``chunk`` as one event. JSON has no raw line breaks, so a single line holds it."""
    return b"data: %b\n\n" % _encode(chunk)


class EventStream(Response):
    """Sends ``chunks``. The status waits for the first one, so that an early error gets its proper HTTP status.

    A later error becomes an event with the usual envelope, and the choice then has no finish reason. ``chunks`` is
    read and closed by one task, and closed on every path.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[Json, None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(scope, receive, send))
        except (ClientDisconnect, OSError):
            log.info("a client left its stream before the end")

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            try:
                first = await anext(chunks)
            except Exception as error:
                await error_response(_as_api_error(error))(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _send_body(send, event(first))
            await _send_body(send, await self._send_rest(chunks, send) + DONE, last=True)

    @staticmethod
    async def _send_rest(chunks: AsyncGenerator[Json, None], send: Send) -> bytes:
        """Send what comes, and return the event that tells of an error, or nothing."""
        while True:
            try:
                chunk = await anext(chunks)
            except StopAsyncIteration:
                return b""
            except Exception as error:
                return event(envelope(_as_api_error(error)))
            await _send_body(send, event(chunk))


async def _send_body(send: Send, body: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    log.error("a stream failed", exc_info=error)
    return InternalError()
