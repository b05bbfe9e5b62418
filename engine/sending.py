"""Pages that leave for a peer: the leases of one worker.

A prompt of several chunks is offered when its first chunk is planned: lease and sequence then both hold its pages, the
peer reads what is sealed while the rest is computed, and the sequence lets go when it is done. A short prompt is
offered at its end.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from splitserve.engine.counters import Counters
from splitserve.engine.page_pool import PageHold, PagePool
from splitserve.engine.protocol import PageId, RequestId
from splitserve.engine.sequence import Sequence as EngineSequence
from splitserve.kvtransfer.lease import LeaseBook, LeaseOutcome, Sender
from splitserve.kvtransfer.notice import Notice, NoticeKind
from splitserve.kvtransfer.ticket import Ticket
from splitserve.kvtransfer.transport import TransferError, Transport


class LeasedPages:
    """The pages of a request under a lease; tells when they are let go."""

    def __init__(self, pages: PageHold, ended: Callable[[], object]) -> None:
        self._pages = pages
        self._ended = ended

    @property
    def page_ids(self) -> Sequence[PageId]:
        return self._pages.page_ids

    def release(self) -> None:
        self._ended()
        self._pages.release()


class Sending:
    """Used by the engine's thread."""

    def __init__(
        self, sender: Sender, pool: PagePool, transport: Transport, counters: Counters, leased_share: float
    ) -> None:
        """``leased_share``: above this share of the pool under leases there is ``backlog``."""
        self._pool = pool
        self._transport = transport
        self._counters = counters
        self._book = LeaseBook(sender, self._tell)
        self._ticket_of: dict[RequestId, str] = {}  # of open leases
        self._under_way: dict[str, bool] = {}  # tickets whose pages are being filled; whether the receiver has all
        self._leases_on: Counter[PageId] = Counter()
        self._most_pages = leased_share * pool.total

    @property
    def active(self) -> bool:
        return bool(self._book.open_leases)

    @property
    def open_leases(self) -> int:
        return self._book.open_leases

    @property
    def claimed_leases(self) -> int:
        return self._book.claimed_leases

    @property
    def leased_pages(self) -> int:
        """Under at least one lease."""
        return len(self._leases_on)

    @property
    def backlog(self) -> bool:
        """Whether so much waits to be fetched that nothing more should be computed for peers."""
        return self.leased_pages > self._most_pages

    def begin(self, sequence: EngineSequence, now: float) -> bytes:
        """Offer pages that are about to be filled, those found in the prefix cache at once; the encoded ticket."""
        assert sequence.pages is not None
        ticket = self._open(sequence, self._pool.hold(sequence.pages.page_ids), now)
        sequence.offer = ticket.ticket_id
        self._under_way[ticket.ticket_id] = False
        return ticket.encode()

    def sealed(self, sequence: EngineSequence, now: float) -> None:
        """Tell whoever claimed the sequence's ticket how far its pages are final."""
        if sequence.offer is not None:
            self._book.seal(sequence.offer, sequence.computed, now)

    def finish(self, sequence: EngineSequence, now: float) -> bytes | None:
        """The whole prompt is computed: a lease alone holds the sequence's pages from here on. Returns the encoded
        ticket for the worker that takes over, the one known already while its lease is open. None: its receiver has
        all that it needs, and nothing is held.
        """
        assert sequence.pages is not None
        pages, sequence.pages = sequence.pages, None
        offer, sequence.offer = sequence.offer, None
        if offer is not None and self._under_way.pop(offer):
            pages.release()
            return None
        ticket = None if offer is None else self._book.seal(offer, sequence.computed, now)
        if ticket is None:
            return self._open(sequence, pages, now).encode()
        pages.release()
        return ticket.encode()

    def withdraw(self, sequence: EngineSequence) -> None:
        """The sequence ends without a hand-over: whoever reads its pages is told."""
        if sequence.offer is not None:
            self._book.release(sequence.offer, LeaseOutcome.ABORTED)
            del self._under_way[sequence.offer]
            sequence.offer = None

    def abort(self, request_id: RequestId) -> bool:
        """End the lease of a request that was handed over. False when it has none."""
        ticket_id = self._ticket_of.get(request_id)
        return ticket_id is not None and self._book.release(ticket_id, LeaseOutcome.ABORTED)

    def hear(self, notice: Notice, now: float) -> None:
        """Something that a receiver said."""
        self._book.receive(notice, now)
        if notice.kind is NoticeKind.FETCHED and notice.ticket_id in self._under_way:
            self._under_way[notice.ticket_id] = True

    def poll(self, now: float) -> None:
        """Let leases end whose time is over."""
        self._book.expire(now)
        for outcome, total in self._book.outcomes.items():
            self._counters.set("splitserve_kv_leases_total", total, outcome=outcome)

    def close(self) -> None:
        self._book.release_all()

    def _open(self, sequence: EngineSequence, pages: PageHold, now: float) -> Ticket:
        request_id, leased = sequence.request_id, tuple(pages.page_ids)

        def ended() -> None:
            self._ticket_of.pop(request_id, None)
            self._leases_on.subtract(leased)
            for page in leased:
                if not self._leases_on[page]:
                    del self._leases_on[page]

        self._leases_on.update(leased)
        ticket = self._book.open(
            LeasedPages(pages, ended),
            tokens=len(sequence.request.prompt),
            generations=[self._pool.generation(page) for page in leased],
            now=now,
            sealed=sequence.computed,
        )
        self._ticket_of[request_id] = ticket.ticket_id
        return ticket

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
