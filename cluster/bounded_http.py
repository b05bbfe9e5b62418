"""uvicorn's HTTP protocol, with bounds on the size of a request's head and on the time it takes to come.

httptools keeps an unfinished head however long it is, so a single connection could fill the gateway's memory.
"""

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from splitserve.cluster.api.errors import ApiError, BadRequest, HeadTimeout, HeadTooLarge, answer_of, envelope

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0


class BoundedHttp(HttpToolsProtocol):
    """One client's connection. What is wrong below HTTP's level is answered with our envelope, and ends it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0  # received of a head that is not complete
        self._head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(HeadTooLarge(f"The head of the request has more than {MAX_HEAD_BYTES} bytes."))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_done()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequest(msg))

    @property
    def _in_head(self) -> bool:
        return self._head_deadline is not None

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        self._head_done()
        self._head_deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_done(self) -> None:
        self._head_bytes = 0
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _head_is_late(self) -> None:
        if self._answering:  # the next request of a client that still gets an answer
            self._head_deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)
        else:
            self._refuse(HeadTimeout(f"The head of the request did not arrive within {HEAD_TIMEOUT_S:g} seconds."))

    def _refuse(self, error: ApiError) -> None:
        self._head_done()
        if self.transport.is_closing():
            return
        if not self._answering:  # else it would stand in the middle of another answer
            status, body = HTTPStatus(answer_of(error).status), msgspec.json.encode(envelope(error))
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()
