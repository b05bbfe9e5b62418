"""The thread that runs a worker's engine: commands in, reports out.

What may live here: the order of taking commands, stepping and waiting. What a step does is the engine's; who gets
which report is ``outbox.py``. Only this thread touches the engine and, through it, the pages.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from splitserve.engine.counters import Counters
from splitserve.engine.engine import Engine, RequestRefused, StepResult
from splitserve.engine.protocol import Counted, FinishReason, Load, PageHash, Request, RequestId, SequenceUpdate
from splitserve.kvtransfer.ticket import Ticket

logger = logging.getLogger(__name__)

PEER_POLL_S = 0.001  # between looks at open leases and receptions while there is nothing to compute
IDLE_POLL_S = 0.02  # between looks for a peer's first contact while there is nothing at all
BEAT_S = 1.0  # longest silence of the loop: a report without a step says that the worker is alive


@dataclass(frozen=True)
class LoopReport:
    """What happened since the last report, and how things stand now."""

    result: StepResult
    load: Load
    steps: int
    counters: list[Counted] | None  # None: unchanged
    names: list[PageHash] | None = None  # everything in the prefix cache; where a snapshot was asked for


@dataclass(frozen=True)
class Add:
    """Take on a request."""

    request: Request
    hand_over: bool
    ticket: Ticket | None
    awaiting: bool = False


@dataclass(frozen=True)
class GoOn:
    """The first token of an awaiting request is there: go on as ``request``."""

    request: Request


@dataclass(frozen=True)
class Remove:
    """End a request, if it is still there."""

    request_id: RequestId


class Snapshot:
    """Report all that is known, before anything else happens."""


class Stop:
    """End every request and leave the thread."""


Command = Add | GoOn | Remove | Snapshot | Stop


class EngineLoop:
    """Owns the engine's thread. ``publish`` is called on it, once per step and at least every second, and before steps
    that news must not wait for; it must not block long.
    """

    def __init__(
        self,
        engine: Engine,
        counters: Counters,
        publish: Callable[[LoopReport], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """``ended`` is called on the thread when it ends, by ``stop`` or by an error."""
        self._ended = ended
        self._engine = engine
        self._counters = counters
        self._publish = publish
        self._commands: deque[Command] = deque()
        self._wake = threading.Event()
        self._reported_load = Load()
        self._reported_at = 0.0
        self._reported_counters: list[Counted] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def held_pages(self) -> int:
        """Pages of requests, leases and receptions, as of the last report."""
        return self._reported_load.held_pages

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Have the engine's thread do something before its next step. From any thread; never blocks."""
        self._commands.append(command)
        self._wake.set()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; False if it had not ended in time."""
        self.post(Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:
            logger.exception("the engine's thread ended; the worker is of no more use")
        finally:
            self._engine.close()
            self._ended()

    def _turn(self) -> bool:
        refused: list[SequenceUpdate] = []
        snapshot = False
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Stop):
                return False
            if isinstance(command, Snapshot):
                snapshot = True
            elif isinstance(command, Remove):
                self._engine.abort(command.request_id)
            elif isinstance(command, GoOn):
                self._engine.proceed(command.request)
            else:
                refused += self._add(command)
        result = self._engine.step(self._announce)
        result.updates = refused + result.updates
        self._report(result, snapshot)
        if not result.computed and not self._engine.computing:
            self._wake.wait(IDLE_POLL_S if self._engine.idle else PEER_POLL_S)
            self._wake.clear()
        return True

    def _add(self, command: Add) -> list[SequenceUpdate]:
        try:
            self._engine.add(
                command.request, hand_over=command.hand_over, ticket=command.ticket, awaiting=command.awaiting
            )
        except RequestRefused as refusal:
            return [SequenceUpdate(command.request.request_id, [], FinishReason.ERROR, error=str(refusal))]
        return []

    def _announce(self, updates: list[SequenceUpdate]) -> None:
        self._publish(LoopReport(StepResult(updates=updates), self._engine.load(), self._engine.steps, None))

    def _report(self, result: StepResult, snapshot: bool) -> None:
        load, now = self._engine.load(), time.monotonic()
        news = result.computed or result.updates or result.stored or result.removed
        if not (news or snapshot or load != self._reported_load or now - self._reported_at >= BEAT_S):
            return
        self._reported_load, self._reported_at = load, now
        names = self._engine.cached_names() if snapshot else None
        totals = self._counters.totals()
        counters = totals if snapshot or totals != self._reported_counters else None
        self._reported_counters = totals
        self._publish(LoopReport(result, load, self._engine.steps, counters, names))
