"""Pages that leave for a peer: the leases of one worker.

A prompt of several chunks is offered when its first chunk starts: lease and sequence then both hold its pages, the peer
reads what is sealed while the rest is computed, and the sequence lets go when it is done. A short prompt is offered at
its end.
"""

from collections.abc import Callable, Sequence

from splitserve.engine.counters import Counters
from splitserve.engine.page_pool import PageHold, PagePool
from splitserve.engine.protocol import PageId, RequestId
from splitserve.engine.sequence import Sequence as EngineSequence
from splitserve.kvtransfer.lease import LeaseBook, LeaseOutcome, Sender
from splitserve.kvtransfer.notice import Notice
from splitserve.kvtransfer.transport import TransferError, Transport


class LeasedPages:
    """The pages of a request under a lease; tells when they are let go."""

    def __init__(self, pages: PageHold, ended: Callable[[int], object]) -> None:
        self._pages = pages
        self._ended = ended

    @property
    def page_ids(self) -> Sequence[PageId]:
        return self._pages.page_ids

    def release(self) -> None:
        count = len(self._pages)
        self._pages.release()
        self._ended(count)


class Sending:
    """Used by the engine's thread."""

    def __init__(self, sender: Sender, pool: PagePool, transport: Transport, counters: Counters) -> None:
        self._pool = pool
        self._transport = transport
        self._counters = counters
        self._book = LeaseBook(sender, self._tell)
        self._ticket_of: dict[RequestId, str] = {}  # of open leases
        self.leased_pages = 0  # counted once for each lease

    @property
    def active(self) -> bool:
        return bool(self._book.open_leases)

    def begin(self, sequence: EngineSequence, now: float) -> bytes:
        """Offer pages that are about to be filled, those found in the prefix cache at once; the encoded ticket."""
        assert sequence.pages is not None
        return self._open(sequence, self._pool.hold(sequence.pages.page_ids), sequence.computed, now)

    def sealed(self, sequence: EngineSequence, now: float) -> None:
        """Tell whoever claimed the sequence's ticket how far its pages are final."""
        ticket_id = self._ticket_of.get(sequence.request_id)
        if ticket_id is not None:
            self._book.seal(ticket_id, sequence.computed, now)

    def finish(self, sequence: EngineSequence, now: float) -> bytes:
        """The whole prompt is computed: the lease alone holds the sequence's pages from here on. Returns the encoded
        ticket for the worker that takes over.
        """
        assert sequence.pages is not None
        pages, sequence.pages = sequence.pages, None
        ticket_id = self._ticket_of.get(sequence.request_id)
        ticket = None if ticket_id is None else self._book.seal(ticket_id, sequence.computed, now)
        if ticket is None:
            return self._open(sequence, pages, sequence.computed, now)
        pages.release()
        return ticket.encode()

    def withdraw(self, request_id: RequestId) -> bool:
        """End the lease of a request that is not wanted any more. False when it has none."""
        ticket_id = self._ticket_of.get(request_id)
        return ticket_id is not None and self._book.release(ticket_id, LeaseOutcome.ABORTED)

    def hear(self, notice: Notice, now: float) -> None:
        """Something that a receiver said."""
        self._book.receive(notice, now)

    def poll(self, now: float) -> None:
        """Let leases end whose time is over."""
        self._book.expire(now)
        for outcome, total in self._book.outcomes.items():
            self._counters.set("splitserve_kv_leases_total", total, outcome=outcome)

    def close(self) -> None:
        self._book.release_all()

    def _open(self, sequence: EngineSequence, pages: PageHold, sealed: int, now: float) -> bytes:
        request_id, count = sequence.request_id, len(pages)

        def ended(pages: int) -> None:
            self._ticket_of.pop(request_id, None)
            self.leased_pages -= pages

        self.leased_pages += count
        ticket = self._book.open(
            LeasedPages(pages, ended),
            tokens=len(sequence.request.prompt),
            generations=[self._pool.generation(page) for page in pages.page_ids],
            now=now,
            sealed=sealed,
        )
        self._ticket_of[request_id] = ticket.ticket_id
        return ticket.encode()

    def _tell(self, endpoint: bytes, notice: bytes) -> None:
        """Best effort: without it the receiver learns from the gateway that the prompt is computed."""
        peer = None
        try:
            peer = self._transport.connect(endpoint)
            self._transport.notify(peer, notice)
        except TransferError as error:
            self._counters.add("splitserve_kv_transport_errors_total", cause=error.cause)
            if peer is not None and error.cause == "disconnect":
                self._transport.forget(peer)
