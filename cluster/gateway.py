"""The gateway: the HTTP API and the Python methods, as a Serve deployment in front of the two pools."""

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from splitserve.cluster.api.app import build_asgi_app
from splitserve.cluster.api.chat import chat, chat_stream
from splitserve.cluster.api.completions import complete, complete_stream
from splitserve.cluster.api.token_ids import generate_ids
from splitserve.cluster.gateway_service import GatewayService
from splitserve.cluster.http_listener import HttpListener
from splitserve.cluster.settings import AppSettings

SWITCH_INTERVAL_S = 0.0005  # tokenising threads and the event loop share the interpreter; neither may keep it for long


class Gateway:
    """Python callers get its handle with ``serve.get_app_handle("splitserve")`` and use ``chat``, ``complete`` and
    ``generate``.

    All three raise ``cluster.api.errors.ApiError`` (Serve wraps it in an error that is an instance of the same class).
    """

    def __init__(self, settings: AppSettings, prefill: DeploymentHandle, decode: DeploymentHandle) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._settings = settings
        self._service = GatewayService(settings, [prefill, decode])
        self._listener: HttpListener | None = None

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Serve calls this once, on the event loop that will serve."""
        self._service.start()
        max_body_bytes = self._settings.gateway.max_body_bytes
        if self._settings.listen is not None:
            app = build_asgi_app(self._service, max_body_bytes)
            self._listener = HttpListener(app, self._settings.listen, shared=self._settings.gateways > 1)
            await self._listener.start()
        return build_asgi_app(self._service, max_body_bytes, echo_request_ids=False)  # Serve echoes them itself

    async def __del__(self) -> None:
        """Serve awaits this when the gateway is to stop."""
        listener = getattr(self, "_listener", None)
        if listener is not None:
            await listener.stop()

    async def chat(self, body: dict[str, Any]) -> dict[str, Any] | AsyncGenerator[dict[str, Any], None]:
        """A chat completion, body and answer as in ``POST /v1/chat/completions``.

        With ``"stream": True`` in the body, call it by ``handle.options(stream=True)``: it yields the chunks.
        """
        return chat_stream(self._service, body) if body.get("stream") is True else await chat(self._service, body)

    async def complete(self, body: dict[str, Any]) -> dict[str, Any] | AsyncGenerator[dict[str, Any], None]:
        """A text completion, body and answer as in ``POST /v1/completions``; streams like ``chat``."""
        if body.get("stream") is True:
            return complete_stream(self._service, body)
        return await complete(self._service, body)

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Token ids in, token ids out, by ``handle.options(stream=True)``: ``body`` has ``prompt_token_ids`` and
        sampling fields, each item ``token_ids`` and ``finish_reason``.
        """
        async with aclosing(generate_ids(self._service, body)) as items:
            async for item in items:
                yield item
