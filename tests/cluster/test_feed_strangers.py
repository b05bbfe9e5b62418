"""What somebody without the token can cost a worker."""

import asyncio

from feed_fakes.loopback_worker import WAIT_S, LoopbackWorker

from splitserve.cluster.wire import MAX_HELLO_BYTES


async def test_a_first_frame_is_short_or_the_connection_ends() -> None:
    """Nothing of a long one is waited for, let alone kept."""
    async with LoopbackWorker() as worker:
        endpoint = await worker.server.start("127.0.0.1")
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write((MAX_HELLO_BYTES + 1).to_bytes(4, "big"))
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        writer.close()
