"""A gateway's connection to one worker: the feed, and the legs that run there."""

import asyncio
import logging
from collections.abc import Callable

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from splitserve.cluster.leg import Leg
from splitserve.cluster.wire import (
    Abort,
    Command,
    Decode,
    Hello,
    Prefill,
    Proceed,
    WireError,
    WorkerEndpoint,
    frame,
    read_report,
)
from splitserve.engine.protocol import Request, RequestId, StepReport, WorkerId

logger = logging.getLogger("ray.serve")

CONNECT_TIMEOUT_S = 10.0
SILENCE_S = 20.0  # a feed brings something every second; after this long without, the worker counts as lost


class WorkerLink:
    """Open while ``run`` runs. When it ends every leg is lost, and the worker aborts what it still computes for this
    gateway.
    """

    def __init__(
        self, worker: WorkerId, pool: DeploymentHandle, gateway: str, on_report: Callable[[StepReport], None]
    ) -> None:
        self.worker = worker
        self._pool = pool
        self._gateway = gateway
        self._on_report = on_report
        self._legs: dict[RequestId, Leg] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._next_number = 0

    @property
    def busy(self) -> bool:
        """Whether requests of this gateway run there."""
        return bool(self._legs)

    def prefill(self, request: Request) -> Leg:
        """Have the worker compute the prompt and the first token; the leg ends with a ticket, or with the answer."""
        return self._start(request.request_id, Prefill(request))

    def decode(self, request: Request, ticket: bytes | None) -> Leg:
        """Have the worker compute the answer, on the pages of the ticket if there is one."""
        return self._start(request.request_id, Decode(request, ticket))

    def expect(self, request: Request, ticket: bytes) -> Leg:
        """Have the worker fetch a prompt's pages while they are computed at the ticket's sender; the leg says nothing
        before ``proceed`` unless that fails.
        """
        return self._start(request.request_id, Decode(request, ticket, awaiting=True))

    def proceed(self, leg: Leg, following: Request) -> None:
        """Have an expecting leg compute the answer of ``following``, which is its request and the first tokens."""
        if self._legs.get(leg.request_id) is leg:
            self._send(Proceed(following))

    def abort(self, request_id: RequestId) -> None:
        """End what the worker has of a request: a leg, or the lease of one that was handed over."""
        self._legs.pop(request_id, None)
        self._send(Abort(request_id))

    async def run(self) -> str:
        """Connect and follow the feed until it ends; returns why it did."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                endpoint = await self._endpoint()
                reader, self._writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            self._send(Hello(self._gateway, endpoint.token))
            while True:
                async with asyncio.timeout(SILENCE_S):
                    report = await read_report(reader)
                self._take_in(report)
        except TimeoutError:
            return "no word from it in time"
        except asyncio.IncompleteReadError:
            return "it closed the connection"
        except (OSError, RayError, RayServeException) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self._close()

    async def _endpoint(self) -> WorkerEndpoint:
        response = self._pool.endpoint.remote(target=self.worker)
        try:
            endpoint: WorkerEndpoint = await response
            return endpoint
        finally:
            response.cancel()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for leg in self._legs.values():
            leg.lose(f"worker {self.worker} is gone")
        self._legs.clear()

    def _take_in(self, report: StepReport) -> None:
        if report.worker != self.worker:
            raise WireError(f"a report of {report.worker} came from {self.worker}")
        if report.number != self._next_number:
            raise WireError(f"report {report.number} came where {self._next_number} was due")
        self._next_number += 1
        self._on_report(report)
        for update in report.updates:
            leg = self._legs.get(update.request_id)
            if leg is not None:
                leg.push(update)
                if leg.ended:
                    del self._legs[update.request_id]

    def _start(self, request_id: RequestId, command: Command) -> Leg:
        leg = Leg(request_id)
        if self._writer is None:
            leg.lose(f"worker {self.worker} is gone")
        else:
            self._legs[request_id] = leg
            self._send(command)
        return leg

    def _send(self, command: Command) -> None:
        if self._writer is not None:
            self._writer.write(frame(command))
