"""A worker of the chaos run: an engine in a process of its own, commands on its standard input, reports on its output.

Both ends of the pipe are here: ``WorkerProcess`` for whoever plays the gateway, ``main`` for the process itself.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import BinaryIO

import msgspec

from splitserve.cluster.engine_loop import Add, EngineLoop, GoOn, LoopReport, Remove, Snapshot
from splitserve.cluster.leg import Leg
from splitserve.cluster.wire import LENGTH_BYTES, Abort, Decode, LegCommand, Prefill, Proceed, frame, read_report
from splitserve.engine.build import build_engine
from splitserve.engine.protocol import Load, Request, RequestId, Role, StepReport, WorkerId
from splitserve.engine.settings import EngineSettings
from splitserve.kvtransfer.nixl_transport import NixlTransport
from splitserve.kvtransfer.progress import ProgressThread
from splitserve.kvtransfer.ticket import Ticket

START_S = 60.0
STOP_S = 10.0
SLOW_SHARE = 0.01  # of reports; the engine's thread then stands still
SLOW_S = (0.01, 0.15)
REMEMBERED = 64  # requests started last, to draw one from
FAILED_STEPS = "splitserve_failed_steps_total"


class WorkerProcess:
    """One incarnation of a worker, as a gateway sees it. Used on one event loop."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.alive = True
        self.load = Load()
        self.totals: dict[str, int] = {}  # of the worker's counters, labels in the name
        self.surplus_words = 0  # updates for legs that had ended or never were
        self.open: set[RequestId] = set()  # started here, and the last word has not come
        self.recent: deque[RequestId] = deque(maxlen=REMEMBERED)
        self._process = process
        self._legs: dict[RequestId, Leg] = {}
        self._ready = asyncio.Event()
        self._following = asyncio.create_task(self._follow())

    @classmethod
    async def start(cls, name: str, incarnation: int, settings: EngineSettings) -> "WorkerProcess":
        """Raises TimeoutError when it does not get ready."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "splitserve.bench.chaos_worker", name, str(incarnation), msgspec.json.encode(settings).decode()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        worker = cls(name, process)
        try:
            async with asyncio.timeout(START_S):
                await worker._ready.wait()
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def failed_steps(self) -> int:
        """Each of them met a foreign page."""
        return self.totals.get(FAILED_STEPS, 0)

    @property
    def quiet(self) -> bool:
        """Nothing runs here, and nothing is held."""
        load = self.load
        return not (self.open or load.waiting or load.running or load.held_pages or load.open_leases)

    def leg(self, request: Request, command: LegCommand) -> Leg:
        """Start a request here; lost at once when the worker is dead."""
        leg = Leg(request.request_id)
        if not self.alive:
            leg.lose(f"worker {self.name} is dead")
            return leg
        self._legs[request.request_id] = leg
        self.open.add(request.request_id)
        self.recent.append(request.request_id)
        self.send(command)
        return leg

    def leave(self, request_id: RequestId) -> None:
        """End what there is of a request, a leg or a lease, without listening any longer."""
        self._legs.pop(request_id, None)
        self.send(Abort(request_id))

    def end_behind_the_back(self, request_id: RequestId) -> None:
        """End a leg or a lease, while whoever started it goes on listening."""
        self.send(Abort(request_id))

    def send(self, command: LegCommand) -> None:
        if self.alive and self._process.stdin is not None:
            self._process.stdin.write(frame(command))

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if self.alive:
                self._process.send_signal(number)

    async def kill(self) -> None:
        """With SIGKILL, frozen or not; all legs are lost."""
        self.alive = False
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._following

    async def stop(self) -> int:
        """The orderly end; the exit status."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        async with asyncio.timeout(STOP_S):
            return await self._process.wait()

    async def _follow(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                self._take_in(await read_report(self._process.stdout))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.alive = False
            for leg in self._legs.values():
                leg.lose(f"worker {self.name} is gone")
            self._legs.clear()

    def _take_in(self, report: StepReport) -> None:
        self.load = report.load
        self._ready.set()
        for counted in report.counters or ():
            self.totals[" ".join([counted.name, *counted.labels.values()])] = int(counted.total)
        for update in report.updates:
            if update.request_id not in self.open:
                self.surplus_words += 1
            if update.finish is not None:
                self.open.discard(update.request_id)
            leg = self._legs.get(update.request_id)
            if leg is not None:
                leg.push(update)
                if leg.ended:
                    del self._legs[update.request_id]


class SlowFeed:
    """Writes an engine's reports, and now and then keeps its thread from going on."""

    def __init__(self, worker: WorkerId, incarnation: int, out: BinaryIO) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._out = out
        self._random = Random(incarnation)

    def publish(self, report: LoopReport) -> None:
        """On the engine's thread, after a step, or before one that offers pages."""
        result = report.result
        said = StepReport(
            worker=self._worker,
            incarnation=self._incarnation,
            role=Role.PREFILL,
            number=0,
            facts=None,
            updates=result.updates,
            stored=[],
            removed=[],
            load=report.load,
            step_s=result.step_s,
            prefill_tokens=result.prefill_tokens,
            decode_tokens=result.decode_tokens,
            steps=report.steps,
            counters=report.counters,
        )
        self._out.write(frame(said))
        self._out.flush()
        if self._random.random() < SLOW_SHARE:
            time.sleep(self._random.uniform(*SLOW_S))


def serve(commands: BinaryIO, post: Callable[[Add | GoOn | Remove], None]) -> None:
    """Pass commands on until there are no more."""
    decoder = msgspec.msgpack.Decoder(LegCommand)
    while head := commands.read(LENGTH_BYTES):
        command = decoder.decode(commands.read(int.from_bytes(head, "big")))
        match command:
            case Abort(request_id):
                post(Remove(request_id))
            case Proceed(request):
                post(GoOn(request))
            case Prefill(request):
                post(Add(request, hand_over=True, ticket=None))
            case Decode(request, encoded, awaiting):
                ticket = None if encoded is None else Ticket.decode(encoded)
                post(Add(request, hand_over=False, ticket=ticket, awaiting=awaiting))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("name")
    arguments.add_argument("incarnation", type=int)
    arguments.add_argument("settings", help="JSON")
    found = arguments.parse_args()
    # Failed transfers are what this run is about; a failed step is not.
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print must not print into the reports
    name, settings = WorkerId(found.name), msgspec.json.decode(found.settings, type=EngineSettings)
    built = build_engine(
        settings, name, found.incarnation, lambda memory: NixlTransport(f"{name}-{found.incarnation}", memory)
    )
    progress = ProgressThread(built.transport.progress, lambda: built.engine.transferring)
    progress.start()
    feed = SlowFeed(name, found.incarnation, out)
    loop = EngineLoop(built.engine, built.counters, feed.publish)
    loop.post(Snapshot())
    loop.start()
    serve(sys.stdin.buffer, loop.post)
    progress.stop()
    sys.exit(0 if loop.stop(STOP_S) else 1)


if __name__ == "__main__":
    main()
