"""The worker: one engine and one role at a time, as a replica of a Serve deployment."""

import asyncio
import logging
import secrets
import sys
import threading
import time
from collections import defaultdict

import ray
from ray import serve

from splitserve.cluster.engine_loop import Add, EngineLoop, GoOn, LoopReport, Remove, Snapshot
from splitserve.cluster.feed_server import Connection, FeedServer
from splitserve.cluster.wire import Abort, Decode, LegCommand, Prefill, Proceed, WorkerEndpoint
from splitserve.engine.build import build_engine
from splitserve.engine.engine import Engine
from splitserve.engine.protocol import (
    Request,
    RequestId,
    Role,
    SamplingParams,
    SequenceUpdate,
    StepReport,
    WorkerFacts,
    WorkerId,
)
from splitserve.engine.settings import EngineSettings
from splitserve.kvtransfer.nixl_transport import NixlTransport
from splitserve.kvtransfer.progress import ProgressThread
from splitserve.kvtransfer.ticket import Ticket, TicketError

logger = logging.getLogger("ray.serve")

SWITCH_INTERVAL_S = 0.0005  # the engine's thread and the event loop share the interpreter; neither may keep it for long
STOP_TIMEOUT_S = 5.0
TAKEN_WAIT_S = 0.05  # the engine waits so long for the event loop to take a report before it goes on


class WrongWorker(Exception):
    """The call was meant for another replica, which is gone."""


class Worker:
    """Serve starts and stops it, and tells gateways where it listens; requests come over the connections made there.

    The role says which legs the worker should be given; its engine can compute any.
    """

    def __init__(self, settings: EngineSettings, role: str) -> None:
        started = time.monotonic()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._role = Role(role)
        self._id = WorkerId(serve.get_replica_context().replica_id.unique_id)
        self._incarnation = secrets.randbits(62)
        self._connections: list[Connection] = []
        self._fresh: set[Connection] = set()  # connections that still need their snapshot
        self._connection_of: dict[RequestId, Connection] = {}  # of each leg that has not ended
        self._events: asyncio.AbstractEventLoop | None = None
        self._taken = threading.Semaphore(1)
        self._server = FeedServer(self._id, self._connected, self._commanded, self._disconnected)
        built = build_engine(
            settings,
            self._id,
            self._incarnation,
            lambda memory: NixlTransport(f"{self._id}-{self._incarnation}", memory),
            self._say,
        )
        self._facts = WorkerFacts(settings.page_tokens, built.runner.num_pages, built.runner.max_model_tokens)
        self._progress = ProgressThread(built.transport.progress, lambda: built.engine.transferring)
        self._progress.start()
        warm_up(built.engine)
        self._loop = EngineLoop(built.engine, built.counters, self._publish, self._engine_ended)
        self._loop.start()
        self._say(f"ready after {time.monotonic() - started:.1f} s with {self._facts.pool_tokens} tokens of KV memory")

    # Called through Serve

    async def endpoint(self, *, target: str | None) -> WorkerEndpoint:
        """Where gateways connect to. Raises WrongWorker when ``target`` is another replica; None means any.

        A gateway's first call also makes Serve tell it of all replicas.
        """
        if target not in (None, self._id):
            raise WrongWorker(f"{target} is gone; this is {self._id}")
        self._events = asyncio.get_running_loop()
        return await self._server.start(ray.util.get_node_ip_address())

    def check_health(self) -> None:
        """Raises when the engine's thread has ended: Serve then replaces this replica."""
        if not self._loop.alive:
            raise RuntimeError("the engine's thread has ended")

    async def __del__(self) -> None:
        """Serve has taken the replica out of routing and awaits this, within the pool's ``shutdown_s``: requests end,
        and peers fetch what they were promised.
        """
        loop = getattr(self, "_loop", None)
        if loop is None:
            return
        while loop.alive and (self._connection_of or loop.held_pages):  # noqa: ASYNC110 - changes elsewhere
            await asyncio.sleep(0.05)
        self._progress.stop()
        await asyncio.to_thread(loop.stop, STOP_TIMEOUT_S)

    # Connections

    def _connected(self, connection: Connection) -> None:
        self._connections.append(connection)
        self._fresh.add(connection)
        self._loop.post(Snapshot())

    def _commanded(self, connection: Connection, command: LegCommand) -> None:
        if isinstance(command, Abort):
            self._loop.post(Remove(command.request_id))
            return
        if isinstance(command, Proceed):
            self._loop.post(GoOn(command.request))
            return
        self._connection_of[command.request.request_id] = connection
        if isinstance(command, Prefill):
            self._loop.post(Add(command.request, hand_over=True, ticket=None))
        else:
            ticket = self._ticket_of(command)
            self._loop.post(Add(command.request, hand_over=False, ticket=ticket, awaiting=command.awaiting))

    def _disconnected(self, connection: Connection) -> None:
        """The gateway has gone: nobody waits for what is computed for it."""
        self._connections.remove(connection)
        self._fresh.discard(connection)
        for request_id, owner in list(self._connection_of.items()):
            if owner is connection:
                self._loop.post(Remove(request_id))

    def _ticket_of(self, command: Decode) -> Ticket | None:
        if command.ticket is None:
            return None
        try:
            return Ticket.decode(command.ticket)
        except TicketError as error:
            logger.warning("request %s: %s", command.request.request_id, error)
            return None

    # Reports

    def _publish(self, report: LoopReport) -> None:
        """On the engine's thread: hand the report to the event loop, at most one step ahead of it."""
        if self._events is None:
            return
        waited = self._taken.acquire(timeout=TAKEN_WAIT_S)
        self._events.call_soon_threadsafe(self._distribute, report, waited)

    def _engine_ended(self) -> None:
        """On the engine's thread: nothing comes any more, so gateways must not wait for it."""
        if self._events is not None:
            self._events.call_soon_threadsafe(self._server.close)

    def _distribute(self, report: LoopReport, in_turn: bool) -> None:
        """``in_turn``: the engine's thread has waited for the report before; else it went on without."""
        if in_turn:
            self._taken.release()
        updates: defaultdict[Connection | None, list[SequenceUpdate]] = defaultdict(list)
        for update in report.result.updates:
            updates[self._connection_of.get(update.request_id)].append(update)
            if update.finish is not None:
                self._connection_of.pop(update.request_id, None)
        for connection in self._connections:
            if connection not in self._fresh or report.names is not None:
                connection.outbox.put(self._report(report, updates[connection], connection in self._fresh))
                self._fresh.discard(connection)

    def _report(self, report: LoopReport, updates: list[SequenceUpdate], snapshot: bool) -> StepReport:
        return StepReport(
            worker=self._id,
            incarnation=self._incarnation,
            role=self._role,
            number=0,
            facts=self._facts if snapshot else None,
            updates=updates,
            stored=list(report.names or ()) if snapshot else list(report.result.stored),
            removed=[] if snapshot else list(report.result.removed),
            load=report.load,
            step_s=report.result.step_s,
            prefill_tokens=report.result.prefill_tokens,
            decode_tokens=report.result.decode_tokens,
            steps=report.steps,
            counters=report.counters,
        )

    def _say(self, line: str) -> None:
        """A line of progress for whoever watches the start: past Serve's logger, which Ray shows nobody."""
        if sys.__stdout__ is not None:
            sys.__stdout__.write(f"{self._role} worker {self._id}: {line}\n")
            sys.__stdout__.flush()


def warm_up(engine: Engine) -> None:
    """Compute a first small request, so that a worker which says it is ready has computed a step."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    engine.add(Request(RequestId("warm-up"), prompt=(0, 1), page_hashes=(), sampling=sampling))
    while not engine.idle:
        for update in engine.step().updates:
            if update.error is not None:
                raise RuntimeError(f"the first step failed: {update.error}")
