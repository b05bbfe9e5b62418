"""A gateway's connections follow the replicas that Serve routes to: workers come, drain, die and come back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from feed_fakes.loopback_worker import WAIT_S, LoopbackWorker
from feed_fakes.reports import report
from feed_fakes.serve_pool import FakePool

from splitserve.cluster import worker_links
from splitserve.cluster.replica_directory import ReplicaDirectory
from splitserve.cluster.telemetry import Telemetry
from splitserve.cluster.wire import WorkerEndpoint
from splitserve.cluster.worker_link import WorkerLink
from splitserve.cluster.worker_links import WorkerLinks
from splitserve.engine.protocol import (
    FinishReason,
    PageHash,
    Request,
    RequestId,
    Role,
    SamplingParams,
    SequenceUpdate,
    WorkerId,
)
from splitserve.router.load_view import LoadView

W = WorkerId("w")
REQUEST = Request(RequestId("r"), (1, 2, 3), (), SamplingParams(max_tokens=2))


class Cluster:
    """A gateway's links, one pool, and the worker ``w`` that may be one of its replicas."""

    def __init__(self, worker: LoopbackWorker) -> None:
        self.worker = worker
        self.directory = ReplicaDirectory()
        self.view = LoadView()
        self.telemetry = Telemetry()
        self.failures: list[Exception] = []  # raised by the next calls through Serve
        self.pool: Any = FakePool(self.endpoint)
        self.links = WorkerLinks("g", [self.pool], self.directory, self.view, self.telemetry)

    async def endpoint(self, target: str | None) -> WorkerEndpoint:
        if self.failures:
            raise self.failures.pop()
        return await self.worker.endpoint()

    def replicas(self, *names: str) -> None:
        self.directory.update("PrefillPool", frozenset(names))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - sockets and tasks have no event for it
                await asyncio.sleep(0)

    async def connected(self, **fields: Any) -> WorkerLink:
        """The link, once the worker has sent its snapshot."""
        assert await self.worker.next() == ("connected", "g")
        self.say(**fields)
        await self.until(lambda: W in self.view)
        link = self.links.get(W)
        assert link is not None
        return link

    async def stop(self) -> None:
        tasks = list(self.links._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert list(self.view) == []

    def say(self, **fields: Any) -> None:
        self.worker.connections[-1].outbox.put(report(**fields))


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr(worker_links, "RECONNECT_S", 0.0)
    async with LoopbackWorker() as worker:
        cluster = Cluster(worker)
        cluster.links.start()
        yield cluster
        await cluster.stop()


async def test_a_replica_that_serve_knows_is_connected(cluster: Cluster) -> None:
    assert cluster.links.get(W) is None
    cluster.replicas("w")
    assert await cluster.worker.next() == ("connected", "g")
    assert cluster.links.get(W) is None  # before its snapshot nobody knows what it can do
    change = asyncio.create_task(cluster.links.wait_for_change(WAIT_S))
    await asyncio.sleep(0)
    cluster.say(role=Role.DECODE)
    await change
    assert cluster.links.get(W) is not None
    assert [w.worker for w in cluster.view.of_role(Role.DECODE)] == ["w"]
    assert 'splitserve_worker_up{role="decode",worker="w"} 1.0' in cluster.telemetry.text()


async def test_replicas_of_other_deployments_are_none_of_ours(cluster: Cluster) -> None:
    cluster.directory.update("SomebodyElses", frozenset({"w"}))
    cluster.replicas()
    await cluster.until(lambda: cluster.pool.targets)
    assert cluster.pool.targets == [None]


async def test_serve_is_asked_until_somebody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve tells a process of a deployment's replicas once it has called one."""
    monkeypatch.setattr(worker_links, "RECONNECT_S", 0.0)
    async with LoopbackWorker() as worker:
        cluster = Cluster(worker)
        cluster.failures = [RuntimeError("nobody"), RuntimeError("nobody")]
        cluster.links.start()
        await cluster.until(lambda: len(cluster.pool.targets) == 3 and not cluster.links._tasks)
    assert [response.cancelled for response in cluster.pool.responses] == [True, True, False]


async def test_nothing_changes_is_a_wait_that_ends(cluster: Cluster) -> None:
    await cluster.links.wait_for_change(0.0)


async def test_a_worker_that_dies_is_forgotten_and_comes_back_with_nothing(cluster: Cluster) -> None:
    """B091."""
    cluster.replicas("w")
    link = await cluster.connected(stored=[PageHash(b"a" * 16)])
    leg = link.decode(REQUEST, None)
    cluster.worker.connections[-1].outbox.put(report("impostor"))  # ends the connection
    await cluster.until(lambda: W not in cluster.view)
    assert leg.ended
    assert cluster.links.get(W) is None
    assert 'worker="w"' not in cluster.telemetry.text()
    while (await cluster.worker.next())[0] != "disconnected":
        pass
    again = await cluster.connected(incarnation=2)
    assert again is not link
    view = cluster.view.get(W)
    assert view is not None
    assert (view.incarnation, view.pages, view.sent) == (2, set(), {})


async def test_an_idle_worker_that_serve_has_taken_out_is_left_at_once(cluster: Cluster) -> None:
    cluster.replicas("w")
    await cluster.connected()
    cluster.replicas()
    assert await cluster.worker.next() == ("disconnected", "g")
    await cluster.until(lambda: W not in cluster.view)


async def test_a_busy_worker_that_serve_has_taken_out_ends_what_it_has(cluster: Cluster) -> None:
    """It gets nothing new meanwhile, and the feed is closed afterwards: Serve waits for that."""
    cluster.replicas("w")
    link = await cluster.connected()
    leg = link.prefill(REQUEST)
    cluster.replicas()
    await cluster.until(lambda: cluster.view.of_role(Role.PREFILL) == [])
    assert cluster.links.get(W) is link
    cluster.say(facts=None, updates=[SequenceUpdate(REQUEST.request_id, [7])])
    assert (await leg.next(WAIT_S)).tokens == [7]
    cluster.say(facts=None, updates=[SequenceUpdate(REQUEST.request_id, [8], FinishReason.STOP)])
    assert (await leg.next(WAIT_S)).finish is FinishReason.STOP
    cluster.say(facts=None)  # the next beat
    while (await cluster.worker.next())[0] != "disconnected":
        pass
    await cluster.until(lambda: W not in cluster.view)


async def test_a_worker_that_serve_takes_back_in_is_used_again(cluster: Cluster) -> None:
    cluster.replicas("w")
    link = await cluster.connected()
    link.prefill(REQUEST)
    cluster.replicas()
    await cluster.until(lambda: cluster.view.of_role(Role.PREFILL) == [])
    cluster.replicas("w")
    await cluster.until(lambda: cluster.view.of_role(Role.PREFILL))
    assert cluster.links.get(W) is link
