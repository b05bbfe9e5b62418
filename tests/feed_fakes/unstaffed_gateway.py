"""A gateway's request path over links without workers: a test answers in their place."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from feed_fakes.loopback_worker import WAIT_S
from feed_fakes.reports import report

from splitserve.cluster.api.service import Tokens
from splitserve.cluster.leg import Leg
from splitserve.cluster.request_path import RequestPath
from splitserve.cluster.settings import GatewaySettings
from splitserve.cluster.telemetry import Telemetry
from splitserve.engine.page_hash import PageHasher
from splitserve.engine.protocol import FinishReason, Request, RequestId, Role, SamplingParams, SequenceUpdate, WorkerId
from splitserve.router.load_view import LoadView

HASHER = PageHasher(4, b"test")
PROMPT = list(range(10))
SAMPLING = SamplingParams(max_tokens=8, temperature=0.5, seed=3)


@dataclass(eq=False)
class Started:
    """What a worker was asked for, and the leg by which it answers."""

    kind: str
    request: Request
    ticket: bytes | None
    leg: Leg

    def say(self, *tokens: int, **fields: Any) -> None:
        self.leg.push(SequenceUpdate(self.request.request_id, list(tokens), **fields))

    def offer(self, ticket: bytes = b"early ticket") -> None:
        self.say(ticket=ticket)

    def hand_over(self, token: int, ticket: bytes = b"ticket") -> None:
        self.say(token, finish=FinishReason.HANDED_OVER, ticket=ticket, cached_tokens=4)


class FakeLink:
    """In place of ``WorkerLink``."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[Started] = asyncio.Queue()
        self.aborted: list[RequestId] = []
        self.proceeded: list[Request] = []
        self.went_on = asyncio.Event()

    def prefill(self, request: Request) -> Leg:
        return self._start("prefill", request, None)

    def decode(self, request: Request, ticket: bytes | None) -> Leg:
        return self._start("decode", request, ticket)

    def expect(self, request: Request, ticket: bytes) -> Leg:
        return self._start("expect", request, ticket)

    def proceed(self, leg: Leg, following: Request) -> None:
        assert following.request_id == leg.request_id
        if not leg.ended:
            self.proceeded.append(following)
            self.went_on.set()

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)

    def _start(self, kind: str, request: Request, ticket: bytes | None) -> Leg:
        started = Started(kind, request, ticket, Leg(request.request_id))
        self.started.put_nowait(started)
        return started.leg

    async def next(self) -> Started:
        async with asyncio.timeout(WAIT_S):
            return await self.started.get()


class FakeLinks:
    """In place of ``WorkerLinks``: workers that come and go as a test says."""

    def __init__(self) -> None:
        self.view = LoadView()
        self.links: dict[str, FakeLink] = {}
        self.changed = asyncio.Event()

    def add(self, worker: str, role: Role) -> FakeLink:
        self.view.update(report(worker, role=role))
        self.links[worker] = FakeLink()
        self.changed.set()
        return self.links[worker]

    def remove(self, worker: str) -> None:
        self.view.remove(WorkerId(worker))
        del self.links[worker]

    def get(self, worker: WorkerId) -> FakeLink | None:
        return self.links.get(worker)

    async def wait_for_change(self, timeout_s: float) -> None:
        self.changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        except TimeoutError:
            return

    @property
    def sent(self) -> list[RequestId]:
        return [request for worker in self.view for request in worker.sent]


class UnstaffedGateway:
    """A path with one prefill and one decode worker."""

    def __init__(self, **settings: Any) -> None:
        self.links: Any = FakeLinks()
        self.telemetry = Telemetry()
        fields = {"placement_wait_s": WAIT_S, "token_wait_s": WAIT_S, **settings}
        self.path = RequestPath(self.links, self.links.view, HASHER, GatewaySettings(**fields), self.telemetry)
        self.prefill: FakeLink = self.links.add("p", Role.PREFILL)
        self.decode: FakeLink = self.links.add("d", Role.DECODE)

    def run(self) -> AsyncGenerator[Tokens, None]:
        return self.path.run(PROMPT, SAMPLING)

    @property
    def aborted(self) -> tuple[list[RequestId], list[RequestId]]:
        return self.prefill.aborted, self.decode.aborted

    @property
    def recovered(self) -> float | None:
        return self.telemetry._registry.get_sample_value("splitserve_requests_recovered_total")


class Client:
    """Reads items one after the other, in a task of its own that it cancels when it leaves."""

    def __init__(self, items: AsyncGenerator[Tokens, None]) -> None:
        self._items = items
        self._reading: asyncio.Task[Tokens] | None = None

    def read(self) -> "asyncio.Task[Tokens]":
        self._reading = asyncio.ensure_future(anext(self._items))  # type: ignore[arg-type]
        return self._reading

    async def next(self) -> Tokens:
        async with asyncio.timeout(WAIT_S):
            return await self.read()

    async def leave(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._items.aclose()


async def handed_over(gateway: UnstaffedGateway, client: Client) -> Started:
    """The decode leg of a request whose first token, 100, the client has."""
    reading = client.read()
    (await gateway.prefill.next()).hand_over(100)
    assert await reading == Tokens([100], None, 4)
    return await gateway.decode.next()
