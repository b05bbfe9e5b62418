"""Work for a client only as long as the client is there."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which runs in a task of its own from beginning to end.

    Cancels it and waits for its clean-up when the client leaves (raises ``ClientDisconnect``) and when this call is
    cancelled. The request's body must have been read: what follows on ``receive`` can only be the disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class ClientLeft(Response):
    """The answer that nobody reads; servers and proxies count its status."""

    def __init__(self) -> None:
        super().__init__(status_code=CLIENT_CLOSED_REQUEST)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(OSError):  # some servers refuse to send, others ignore it
            await super().__call__(scope, receive, send)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
