"""A gateway's connection to one worker, against a real feed server on loopback."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from feed_fakes.loopback_worker import WAIT_S, LoopbackWorker
from feed_fakes.reports import report
from feed_fakes.serve_pool import FakePool
from ray.exceptions import RayActorError

from splitserve.cluster import worker_link
from splitserve.cluster.leg import LegLost
from splitserve.cluster.outbox import Outbox
from splitserve.cluster.wire import Abort, Decode, Prefill, Proceed, WorkerEndpoint, frame
from splitserve.cluster.worker_link import WorkerLink
from splitserve.engine.protocol import (
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    SequenceUpdate,
    StepReport,
    WorkerId,
)

REQUEST = Request(RequestId("r"), (1, 2, 3), (), SamplingParams(max_tokens=2))
OTHER = Request(RequestId("other"), (1,), (), SamplingParams(max_tokens=2))


@dataclass
class Linked:
    """A running link, the pool it calls and the reports it has brought."""

    link: WorkerLink
    pool: FakePool
    running: "asyncio.Task[str]"
    reports: "asyncio.Queue[StepReport]" = field(default_factory=asyncio.Queue)

    async def ended(self) -> str:
        async with asyncio.timeout(WAIT_S):
            return await self.running

    async def next(self) -> StepReport:
        async with asyncio.timeout(WAIT_S):
            return await self.reports.get()


def link_by(answer: Callable[[str | None], Awaitable[WorkerEndpoint]]) -> Linked:
    reports: asyncio.Queue[StepReport] = asyncio.Queue()
    pool: Any = FakePool(answer)
    link = WorkerLink(WorkerId("w"), pool, "g", reports.put_nowait)
    return Linked(link, pool, asyncio.create_task(link.run()), reports)


@asynccontextmanager
async def linked(worker: LoopbackWorker) -> AsyncIterator[tuple[Linked, Outbox]]:
    """A link whose feed is open, and the outbox at its other end."""

    side = link_by(worker.endpoint)
    try:
        assert await worker.next() == ("connected", "g")
        outbox = worker.connections[-1].outbox
        outbox.put(report())
        assert (await side.next()).number == 0
        yield side, outbox
    finally:
        side.running.cancel()
        await asyncio.gather(side.running, return_exceptions=True)


class RawPeer:
    """Listens where a worker would, and says whatever a test says."""

    def __init__(self) -> None:
        self.writers: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def answer(self, target: str | None) -> WorkerEndpoint:
        port = self._server.sockets[0].getsockname()[1]
        return WorkerEndpoint("w", "127.0.0.1", port, "token")

    async def __aenter__(self) -> "RawPeer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.put_nowait(writer)
        await reader.read()
        writer.close()


def update(name: str, *tokens: int, **fields: object) -> SequenceUpdate:
    return SequenceUpdate(RequestId(name), list(tokens), **fields)  # type: ignore[arg-type]


@pytest.fixture
async def worker() -> AsyncIterator[LoopbackWorker]:
    async with LoopbackWorker() as worker:
        yield worker


async def test_it_asks_for_its_worker_and_no_other(worker: LoopbackWorker) -> None:
    async with linked(worker) as (side, _):
        assert side.pool.targets == ["w"]
        assert [response.cancelled for response in side.pool.responses] == [True]


async def test_commands_reach_the_worker_in_order(worker: LoopbackWorker) -> None:
    async with linked(worker) as (side, _):
        side.link.prefill(REQUEST)
        side.link.decode(OTHER, b"ticket")
        side.link.abort(REQUEST.request_id)
        side.link.proceed(side.link.expect(REQUEST, b"early"), REQUEST)
        told = [(await worker.next())[1] for _ in range(5)]
        assert told[:3] == [Prefill(REQUEST), Decode(OTHER, b"ticket"), Abort(REQUEST.request_id)]
        assert told[3:] == [Decode(REQUEST, b"early", awaiting=True), Proceed(REQUEST)]


async def test_a_leg_that_has_ended_does_not_proceed(worker: LoopbackWorker) -> None:
    async with linked(worker) as (side, outbox):
        leg = side.link.expect(REQUEST, b"early")
        ended = SequenceUpdate(REQUEST.request_id, [], FinishReason.ERROR, error="no room")
        outbox.put(report(facts=None, updates=[ended]))
        assert (await leg.next(WAIT_S)).error == "no room"
        side.link.proceed(leg, REQUEST)
        side.link.abort(OTHER.request_id)
        told = [(await worker.next())[1] for _ in range(2)]
        assert told == [Decode(REQUEST, b"early", awaiting=True), Abort(OTHER.request_id)]


async def test_each_leg_gets_the_updates_of_its_request(worker: LoopbackWorker) -> None:
    async with linked(worker) as (side, outbox):
        first, second = side.link.prefill(REQUEST), side.link.decode(OTHER, None)
        ticket = update("r", 5, finish=FinishReason.HANDED_OVER, ticket=b"t")
        outbox.put(report(facts=None, updates=[update("other", 1), update("stranger", 9), ticket]))
        assert await second.next(WAIT_S) == update("other", 1)
        assert await first.next(WAIT_S) == ticket
        assert side.link.busy
        outbox.put(report(facts=None, updates=[update("other", finish=FinishReason.STOP)]))
        assert await second.next(WAIT_S) == update("other", finish=FinishReason.STOP)
        assert not side.link.busy
        assert (first.settled, second.settled) == (True, True)


async def test_an_aborted_leg_gets_nothing_more_and_keeps_nobody_busy(worker: LoopbackWorker) -> None:
    async with linked(worker) as (side, outbox):
        leg = side.link.decode(REQUEST, None)
        side.link.abort(REQUEST.request_id)
        assert not side.link.busy
        outbox.put(report(facts=None, updates=[update("r", finish=FinishReason.ABORT)]))
        await side.next()
        assert not leg.ended


async def test_a_lease_can_be_aborted_after_its_leg_has_ended(worker: LoopbackWorker) -> None:
    async with linked(worker) as (side, outbox):
        leg = side.link.prefill(REQUEST)
        await worker.next()
        outbox.put(report(facts=None, updates=[update("r", 5, finish=FinishReason.HANDED_OVER, ticket=b"t")]))
        await leg.next(WAIT_S)
        side.link.abort(REQUEST.request_id)
        assert await worker.next() == ("g", Abort(REQUEST.request_id))


async def test_legs_are_lost_with_the_worker_after_what_it_said() -> None:
    async with RawPeer() as peer:
        side = link_by(peer.answer)
        writer = await peer.writers.get()
        leg = side.link.decode(REQUEST, None)
        writer.write(frame(report()) + frame(report(facts=None, number=1, updates=[update("r", 1)])))
        writer.write(frame(report(number=2))[:9])
        writer.write_eof()
        assert await side.ended() == "it closed the connection"
        assert await leg.next(WAIT_S) == update("r", 1)
        with pytest.raises(LegLost, match="worker w is gone"):
            await leg.next(WAIT_S)
        assert not side.link.busy


async def test_a_cancelled_link_disconnects_and_loses_its_legs(worker: LoopbackWorker) -> None:
    async with linked(worker) as (side, _):
        leg = side.link.decode(REQUEST, None)
        assert await worker.next() == ("g", Decode(REQUEST, None))
    assert await worker.next() == ("disconnected", "g")
    with pytest.raises(LegLost):
        await leg.next(WAIT_S)


async def test_without_a_connection_a_leg_is_lost_at_once(worker: LoopbackWorker) -> None:
    async with linked(worker) as (side, _):
        pass
    leg = side.link.prefill(REQUEST)
    side.link.abort(REQUEST.request_id)
    with pytest.raises(LegLost, match="worker w is gone"):
        await leg.next(WAIT_S)
    assert not side.link.busy


async def test_what_serve_raises_is_the_reason_it_ends() -> None:
    async def fail(target: str | None) -> WorkerEndpoint:
        raise RayActorError

    side = link_by(fail)
    assert "RayActorError" in await side.ended()
    assert side.pool.responses[0].cancelled


async def test_nobody_listens() -> None:
    async with RawPeer() as peer:
        endpoint = await peer.answer(None)

    async def answer(target: str | None) -> WorkerEndpoint:
        return endpoint

    assert "ConnectionRefusedError" in await link_by(answer).ended()


async def test_serve_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "CONNECT_TIMEOUT_S", 0.01)

    async def hang(target: str | None) -> WorkerEndpoint:
        return await asyncio.Future()

    side = link_by(hang)
    assert await side.ended() == "no word from it in time"
    assert side.pool.responses[0].cancelled


async def test_a_silent_worker_is_given_up(worker: LoopbackWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "SILENCE_S", 0.01)

    assert await link_by(worker.endpoint).ended() == "no word from it in time"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        pytest.param(b"\xff\xff\xff\xff", "exceeds the limit", id="a huge frame"),
        pytest.param(b"\x00\x00\x00\x01\xc1", "not a valid frame", id="garbage"),
        pytest.param(frame(report(number=1)), "report 1 came where 0 was due", id="a gap"),
        pytest.param(frame(report()) + frame(report()), "report 0 came where 1 was due", id="a repetition"),
        pytest.param(frame(report("other")), "a report of other came from w", id="another worker's report"),
    ],
)
async def test_a_peer_that_does_not_keep_to_the_protocol_is_left(data: bytes, why: str) -> None:
    async with RawPeer() as peer:
        side = link_by(peer.answer)
        (await peer.writers.get()).write(data)
        assert why in await side.ended()
