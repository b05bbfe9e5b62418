"""The worker's end of its connections to gateways: commands come in, reports go out."""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable

from splitserve.cluster.outbox import Outbox
from splitserve.cluster.wire import (
    Hello,
    LegCommand,
    WireError,
    WorkerEndpoint,
    frame,
    read_command,
    read_hello,
)

logger = logging.getLogger("ray.serve")

HELLO_TIMEOUT_S = 5.0


class Connection:
    """One gateway's connection."""

    def __init__(self, gateway: str) -> None:
        self.gateway = gateway
        self.outbox = Outbox()


class FeedServer:
    """Listens on one address of this node, on the running event loop.

    ``on_connect`` and ``on_disconnect`` tell of connections, ``on_command`` of what they ask. All run on the event
    loop.
    """

    def __init__(
        self,
        worker: str,
        on_connect: Callable[[Connection], None],
        on_command: Callable[[Connection, LegCommand], None],
        on_disconnect: Callable[[Connection], None],
    ) -> None:
        self._worker = worker
        self._token = secrets.token_hex(16)
        self._on_connect = on_connect
        self._on_command = on_command
        self._on_disconnect = on_disconnect
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, host: str) -> WorkerEndpoint:
        """Listen on a free port of ``host``; a second call only tells where. Raises OSError."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, host, 0)
        if not self._server.is_serving():
            raise ConnectionError(f"worker {self._worker} takes no more connections")
        port = self._server.sockets[0].getsockname()[1]
        return WorkerEndpoint(self._worker, host, port, self._token)

    def close(self) -> None:
        """Listen no more and end all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = None
        sending = None
        self._writers.add(writer)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await read_hello(reader)
            if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), self._token.encode()):
                logger.warning("a connection without the right token was refused")
                return
            connection = Connection(hello.gateway)
            self._on_connect(connection)
            sending = asyncio.create_task(self._send(connection.outbox, writer))
            while True:
                command = await read_command(reader)
                if isinstance(command, Hello):
                    raise WireError("a second Hello")
                self._on_command(connection, command)
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError) as error:
            if isinstance(error, WireError):
                logger.warning("the connection of a gateway ends: %s", error)
        finally:
            if sending is not None:
                sending.cancel()
            if connection is not None:
                self._on_disconnect(connection)
            self._writers.discard(writer)
            writer.close()

    async def _send(self, outbox: Outbox, writer: asyncio.StreamWriter) -> None:
        """Send reports as fast as the gateway reads; what piles up meanwhile is merged in the outbox."""
        try:
            async for report in outbox.reports():
                writer.write(frame(report))
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()  # ends the reading side, too
