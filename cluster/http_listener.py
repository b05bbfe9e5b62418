"""A gateway's own HTTP socket, beside Serve's ingress.

Serve's HTTP proxy is a process of its own between client and gateway, which costs several milliseconds a request and
most of a core at a few thousand tokens a second (bench/LOG.md). A gateway that listens itself needs none.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from splitserve.cluster.bounded_http import BoundedHttp
from splitserve.cluster.settings import ListenSettings

BACKLOG = 2048


class _Server(uvicorn.Server):
    """Without uvicorn's signal handlers: the process belongs to Ray."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpListener:
    """Serves one application on one address, on the running event loop."""

    def __init__(self, app: Starlette, settings: ListenSettings, shared: bool) -> None:
        """``shared``: other gateways of this node may listen on the same port. If not, a taken port is an error."""
        self._settings = settings
        self._shared = shared
        config = uvicorn.Config(
            app,
            http=BoundedHttp,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(settings.shutdown_s),
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises OSError, which names the address."""
        family = socket.AF_INET6 if ":" in self._settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(self._shared))
            listener.bind((self._settings.host, self._settings.port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise OSError(f"cannot listen on {self._settings.host}:{self._settings.port}: {error}") from error
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def stop(self) -> None:
        """Take no more connections and let the open ones end, for as long as the settings allow."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
