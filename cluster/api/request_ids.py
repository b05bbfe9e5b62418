"""``X-Request-Id``: taken from the client or made, and sent back with every answer.

It is the client's name for the request, for logs and traces. Two requests may bear the same; nothing here or below is
keyed by it.
"""

from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitserve.cluster.api.answers import error_response
from splitserve.cluster.api.errors import BadRequest

HEADER = "x-request-id"
MAX_CHARS = 128


class RequestIds:
    """ASGI middleware. Puts the id into ``request.state.request_id``; answers 400 where the client's is not usable."""

    def __init__(self, app: ASGIApp, echo: bool = True) -> None:
        """``echo``: send it back. False where the server around the application does so itself."""
        self._app = app
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER)
        acceptable = given is None or (1 <= len(given) <= MAX_CHARS and given.isascii() and given.isprintable())
        request_id = given if given is not None and acceptable else f"req-{uuid4().hex}"
        header = (HEADER.encode(), request_id.encode())

        async def send_with_id(message: Message) -> None:
            if self._echo and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], header]
            await send(message)

        if not acceptable:
            error = BadRequest(f"'{HEADER}' must have 1 to {MAX_CHARS} printable ASCII characters.", HEADER)
            await error_response(error)(scope, receive, send_with_id)
            return
        scope.setdefault("state", {})["request_id"] = request_id
        await self._app(scope, receive, send_with_id)
