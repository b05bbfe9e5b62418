"""A worker without an engine: a real feed server on loopback, and what it was told."""

import asyncio
from types import TracebackType

from splitserve.cluster.feed_server import Connection, FeedServer
from splitserve.cluster.wire import LegCommand, WorkerEndpoint

WAIT_S = 10.0  # longest wait for what must come


class LoopbackWorker:
    """Leaving its context ends all connections."""

    def __init__(self, name: str = "w") -> None:
        self.connections: list[Connection] = []
        self.told: asyncio.Queue[tuple[str, object]] = asyncio.Queue()
        self.server = FeedServer(name, self._connected, self._commanded, self._disconnected)

    async def endpoint(self, target: str | None = None) -> WorkerEndpoint:
        return await self.server.start("127.0.0.1")

    async def next(self) -> tuple[str, object]:
        """("connected" or "disconnected", gateway) or (gateway, command)."""
        async with asyncio.timeout(WAIT_S):
            return await self.told.get()

    async def __aenter__(self) -> "LoopbackWorker":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.close()
        while self.connections and error is None:
            await self.next()

    def _connected(self, connection: Connection) -> None:
        self.connections.append(connection)
        self.told.put_nowait(("connected", connection.gateway))

    def _commanded(self, connection: Connection, command: LegCommand) -> None:
        self.told.put_nowait((connection.gateway, command))

    def _disconnected(self, connection: Connection) -> None:
        self.connections.remove(connection)
        self.told.put_nowait(("disconnected", connection.gateway))
