"""Pages that leave for a peer and pages that come from one: the engine's side of ``kvtransfer``.

Sending: a sequence whose prefill is done gives its pages to a lease and is gone; the lease lets go of them when the
peer has them, refuses them or stays away too long. Receiving: a sequence with a ticket owns its pages while they are
being read; when the read fails it starts anew from the prompt, and the pages it had stay here until the transport has
let go of them.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitserve.engine.counters import Counters
from splitserve.engine.page_pool import PageHold, PagePool
from splitserve.engine.protocol import PageId, RequestId, WorkerId
from splitserve.engine.sequence import Sequence as EngineSequence
from splitserve.engine.sequence import SequenceState
from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.lease import LeaseBook, LeaseOutcome, Sender
from splitserve.kvtransfer.reception import Reception, ReceptionState
from splitserve.kvtransfer.transport import TransferError, Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HandoverLimits:
    """Deadlines of the hand-over between two workers."""

    lease_s: float = 30.0  # how long offered pages wait to be fetched
    read_s: float = 10.0  # how long a read may take before the prompt is computed here instead


class LeasedPages:
    """The pages of a request under a lease; tells when they are let go."""

    def __init__(self, pages: PageHold, ended: Callable[[], object]) -> None:
        self._pages = pages
        self._ended = ended

    @property
    def page_ids(self) -> Sequence[PageId]:
        return self._pages.page_ids

    def release(self) -> None:
        self._pages.release()
        self._ended()


class Handover:
    """The open leases and receptions of one worker. Used by the engine's thread."""

    def __init__(
        self,
        worker: WorkerId,
        incarnation: int,
        layout: PageLayout,
        pool: PagePool,
        transport: Transport,
        limits: HandoverLimits,
        counters: Counters,
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._transport = transport
        self._limits = limits
        self._counters = counters
        self._book = LeaseBook(Sender(worker, incarnation, transport.endpoint(), layout, limits.lease_s))
        self._ticket_of: dict[RequestId, str] = {}  # of open leases
        self._receiving: dict[RequestId, tuple[EngineSequence, Reception]] = {}
        self._letting_go: list[tuple[Reception, PageHold]] = []

    @property
    def active(self) -> bool:
        """Whether a peer or a transfer may need attention soon."""
        return bool(self._receiving or self._letting_go or self._book.open_leases)

    @property
    def receiving(self) -> int:
        """Sequences whose pages are being read."""
        return len(self._receiving)

    def offer(self, sequence: EngineSequence, now: float) -> bytes:
        """Give the sequence's pages to a lease; returns the encoded ticket for the worker that takes over."""
        assert sequence.pages is not None
        pages, sequence.pages = sequence.pages, None
        request_id = sequence.request_id
        ticket = self._book.open(
            LeasedPages(pages, lambda: self._ticket_of.pop(request_id, None)),
            tokens=sequence.computed,
            generations=[self._pool.generation(page) for page in pages.page_ids],
            now=now,
        )
        self._ticket_of[request_id] = ticket.ticket_id
        return ticket.encode()

    def withdraw(self, request_id: RequestId) -> bool:
        """End the lease of a request that is not wanted any more. False when it has none."""
        ticket_id = self._ticket_of.get(request_id)
        return ticket_id is not None and self._book.release(ticket_id, LeaseOutcome.ABORTED)

    def receive(self, sequence: EngineSequence, now: float) -> None:
        """Start to read the pages that the sequence's ticket offers into those it owns. Never raises: failing is a
        state.
        """
        assert sequence.pages is not None
        assert sequence.ticket is not None
        page_ids = sequence.pages.page_ids
        here = sequence.computed // self._layout.page_tokens
        needed = self._layout.pages_for(sequence.ticket.tokens)
        missing: dict[int, int] = {index: page_ids[index] for index in range(here, needed)}
        self._receiving[sequence.request_id] = (sequence, self._reception(sequence, missing, now))
        sequence.state = SequenceState.RECEIVING

    def refuse(self, sequence: EngineSequence, now: float) -> None:
        """Give up the ticket of a sequence that never got to receive, so that the sender's lease ends at once."""
        self._reception(sequence, {}, now)

    def abandon(self, sequence: EngineSequence, now: float) -> None:
        """Stop receiving for a sequence; its pages stay here until the transport has let go."""
        _, reception = self._receiving.pop(sequence.request_id)
        reception.abandon(now)
        self._park(sequence, reception)

    def poll(
        self, now: float, arrived: Callable[[EngineSequence], None], failed: Callable[[EngineSequence], None]
    ) -> None:
        """Drive everything open. ``arrived``: all pages of the ticket are in place. ``failed``: compute it here."""
        try:
            self._book.receive(self._transport.notices())
        except TransferError as error:  # leases end by their deadline, receptions by theirs
            self._counters.add("splitserve_kv_transport_errors_total", cause=error.cause)
        self._book.expire(now)
        for outcome, total in self._book.outcomes.items():
            self._counters.set("splitserve_kv_leases_total", total, outcome=outcome)
        for sequence, reception in list(self._receiving.values()):
            reception.poll(now)
            if not reception.final:
                continue
            del self._receiving[sequence.request_id]
            self._count(reception)
            if reception.state is ReceptionState.COMPLETE:
                sequence.computed = max(sequence.computed, reception.ticket.tokens)
                sequence.ticket = None
                arrived(sequence)
            else:
                logger.warning("%s: %s; the prompt is computed here", sequence.request_id, reception.message)
                self._park(sequence, reception)
                failed(sequence)
        self._let_go(now)

    def close(self, now: float) -> None:
        """End every lease and reception; the transport goes with them."""
        self._book.release_all()
        for sequence, _ in list(self._receiving.values()):
            self.abandon(sequence, now)
        self._let_go(now)
        self._transport.close()

    def _reception(self, sequence: EngineSequence, missing: dict[int, int], now: float) -> Reception:
        assert sequence.ticket is not None
        return Reception(
            sequence.ticket,
            missing,
            transport=self._transport,
            layout=self._layout,
            now=now,
            deadline_s=self._limits.read_s,
        )

    def _park(self, sequence: EngineSequence, reception: Reception) -> None:
        assert sequence.pages is not None
        self._letting_go.append((reception, sequence.pages))
        sequence.pages = None
        sequence.computed = sequence.sealed = 0
        sequence.ticket = None

    def _let_go(self, now: float) -> None:
        still_held = []
        for reception, pages in self._letting_go:
            reception.poll(now)
            if reception.settled:
                pages.release()
            else:
                still_held.append((reception, pages))
        self._letting_go = still_held

    def _count(self, reception: Reception) -> None:
        count = self._counters.add
        if reception.state is ReceptionState.COMPLETE:
            count("splitserve_kv_transfers_total")
            count("splitserve_kv_transfer_bytes_total", reception.bytes)
            count("splitserve_kv_transfer_pages_total", reception.pages)
            count("splitserve_kv_transfer_seconds_total", reception.seconds)
        else:
            count("splitserve_kv_transfer_failures_total", cause=reception.cause or "unknown")
            count("splitserve_kv_recomputed_total")
