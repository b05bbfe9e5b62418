"""The worker's end of its connections, over loopback: who may connect, what is heard, what a bad peer costs."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from feed_fakes.loopback_worker import WAIT_S, LoopbackWorker
from feed_fakes.reports import report

from splitserve.cluster import feed_server
from splitserve.cluster.wire import Abort, Command, Decode, Hello, Prefill, Proceed, WorkerEndpoint, frame, read_report
from splitserve.engine.protocol import Request, RequestId, SamplingParams, SequenceUpdate

REQUEST = Request(RequestId("r"), (1, 2, 3), (), SamplingParams(max_tokens=2))
BIG = 1 << 20  # added to a token, it takes 5 bytes on the wire


class Peer:
    """The other end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *commands: Command) -> None:
        self.writer.writelines(frame(command) for command in commands)

    async def was_closed(self) -> bool:
        """Whether the server ends the connection without a word."""
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True


@pytest.fixture
async def worker() -> AsyncIterator[LoopbackWorker]:
    """At the end of a test nobody is connected."""
    async with LoopbackWorker() as worker:
        yield worker


@asynccontextmanager
async def connect(endpoint: WorkerEndpoint) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()


@asynccontextmanager
async def connected(worker: LoopbackWorker, gateway: str = "g") -> AsyncIterator[Peer]:
    """A gateway that said the right words."""
    endpoint = await worker.server.start("127.0.0.1")
    async with connect(endpoint) as peer:
        peer.send(Hello(gateway, endpoint.token))
        assert await worker.next() == ("connected", gateway)
        yield peer


async def test_it_listens_once_and_tells_where(worker: LoopbackWorker) -> None:
    endpoint = await worker.server.start("127.0.0.1")
    assert await worker.server.start("127.0.0.1") == endpoint
    assert (endpoint.worker, endpoint.host) == ("w", "127.0.0.1")
    assert len(endpoint.token) == 32


async def test_tokens_of_two_servers_differ() -> None:
    assert LoopbackWorker().server._token != LoopbackWorker().server._token


async def test_commands_arrive_in_order(worker: LoopbackWorker) -> None:
    commands = [Prefill(REQUEST), Decode(REQUEST, b"t", awaiting=True), Proceed(REQUEST), Abort(RequestId("r"))]
    async with connected(worker) as peer:
        peer.send(*commands)
        assert [await worker.next() for _ in commands] == [("g", command) for command in commands]


async def test_reports_arrive_numbered(worker: LoopbackWorker) -> None:
    async with connected(worker) as peer, connected(worker, "other") as other:
        first, second = worker.connections
        for steps in range(3):
            first.outbox.put(report(steps=steps))
            arrived = await read_report(peer.reader)
            assert (arrived.number, arrived.steps) == (steps, steps)
        second.outbox.put(report(steps=9))
        arrived = await read_report(other.reader)
        assert (arrived.number, arrived.steps) == (0, 9)


@pytest.mark.parametrize("token", ["", "0" * 32, "ü" * 32])
async def test_a_wrong_token_is_refused(worker: LoopbackWorker, token: str, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = await worker.server.start("127.0.0.1")
    async with connect(endpoint) as peer:
        peer.send(Hello("g", token), Abort(RequestId("r")))
        assert await peer.was_closed()
    assert worker.told.empty()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(frame(Abort(RequestId("r"))), id="another command"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: w\r\n\r\n", id="HTTP"),
        pytest.param(b"\x00\x00\x00\x01\xc1", id="garbage"),
        pytest.param(b"\xff\xff\xff\xff", id="a huge length"),
    ],
)
async def test_who_does_not_begin_with_hello_is_refused(
    worker: LoopbackWorker, first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(await worker.server.start("127.0.0.1")) as peer:
        peer.writer.write(first)
        assert await peer.was_closed()
    assert worker.told.empty()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


async def test_who_says_nothing_is_closed_after_a_while(
    worker: LoopbackWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_server, "HELLO_TIMEOUT_S", 0.01)
    async with connect(await worker.server.start("127.0.0.1")) as peer:
        peer.writer.write(frame(Hello("g", "t"))[:5])
        assert await peer.was_closed()
    assert worker.told.empty()


async def test_who_leaves_before_hello_leaves_no_trace(
    worker: LoopbackWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(await worker.server.start("127.0.0.1")) as peer:
        peer.writer.write(b"\x00\x00")
        peer.writer.write_eof()
        assert await peer.was_closed()
    assert worker.told.empty()
    assert caplog.records == []


@pytest.mark.parametrize("then", [b"\x00\x00\x00\x01\xc1", b"\xff\xff\xff\xff", frame(Hello("g", "again"))])
async def test_garbage_later_ends_that_connection_alone(worker: LoopbackWorker, then: bytes) -> None:
    async with connected(worker, "good") as good, connected(worker, "bad") as bad:
        bad.writer.write(then)
        assert await worker.next() == ("disconnected", "bad")
        assert await bad.was_closed()
        good.send(Abort(RequestId("r")))
        assert await worker.next() == ("good", Abort(RequestId("r")))


async def test_a_disconnect_is_told(worker: LoopbackWorker) -> None:
    async with connected(worker) as peer:
        peer.writer.write(frame(Prefill(REQUEST))[:9])  # in the middle of a command
        peer.writer.close()
        assert await worker.next() == ("disconnected", "g")
    assert worker.connections == []


async def test_a_broken_connection_is_told_though_nothing_is_sent(worker: LoopbackWorker) -> None:
    async with connected(worker) as peer:
        peer.writer.transport.abort()
        assert await worker.next() == ("disconnected", "g")


async def test_a_server_that_closes_ends_every_connection_and_takes_no_more(worker: LoopbackWorker) -> None:
    endpoint = await worker.endpoint()
    async with connected(worker) as peer, connect(endpoint) as silent:
        worker.server.close()
        worker.server.close()
        assert await peer.was_closed()
        assert await worker.next() == ("disconnected", "g")
        assert await silent.was_closed()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(endpoint.host, endpoint.port)


async def test_a_reader_that_stops_reading_costs_one_merged_report(worker: LoopbackWorker) -> None:
    """However many steps there are meanwhile (15 MB, more than the kernel's buffers), and misses nothing later."""
    async with connected(worker) as peer:
        peer.reader._transport.pause_reading()
        outbox = worker.connections[0].outbox
        for step in range(3000):
            outbox.put(report(facts=None, steps=step, updates=[SequenceUpdate(RequestId("r"), [BIG + step] * 1000)]))
            await asyncio.sleep(0)
        waiting = outbox._pending
        assert waiting is not None
        assert (waiting.steps, len(waiting.updates)) == (2999, 1)
        behind = waiting.updates[0].tokens[0] - BIG
        assert behind < 2999
        outbox.put(report(facts=None, steps=3000))
        peer.reader._transport.resume_reading()
        tokens: list[int] = []
        numbers: list[int] = []
        async with asyncio.timeout(WAIT_S):
            steps = 0
            while steps < 3000:
                arrived = await read_report(peer.reader)
                steps = arrived.steps
                numbers.append(arrived.number)
                tokens += arrived.updates[0].tokens if arrived.updates else []
        assert numbers == list(range(len(numbers)))
        assert len(numbers) <= behind + 2
        assert tokens == [BIG + step for step in range(3000) for _ in range(1000)]


async def test_a_closed_server_says_so_by_name(worker: LoopbackWorker) -> None:
    endpoint = await worker.server.start("127.0.0.1")
    worker.server.close()
    with pytest.raises(ConnectionError, match=f"worker {endpoint.worker} takes no more"):
        await worker.server.start("127.0.0.1")
