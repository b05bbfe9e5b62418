"""The sender's side of a hand-over: which pages are kept for whom, and until when."""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from msgspec.structs import replace

from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.notice import Notice, NoticeKind
from splitserve.kvtransfer.ticket import Ticket, TicketError, new_ticket_id


class PageHold(Protocol):
    """Pages kept from reuse, by absolute page index."""

    @property
    def page_ids(self) -> Sequence[int]:
        """Valid until ``release``."""

    def release(self) -> None:
        """Let the pages go. Called once."""


class LeaseOutcome(StrEnum):
    """Why a lease ended."""

    FETCHED = "fetched"
    REFUSED = "refused"
    ABORTED = "aborted"
    EXPIRED = "expired"
    SHUTDOWN = "shutdown"


_OUTCOME_OF = {NoticeKind.FETCHED: LeaseOutcome.FETCHED, NoticeKind.REFUSED: LeaseOutcome.REFUSED}


@dataclass(frozen=True)
class Sender:
    """What all tickets of one incarnation of a worker have in common."""

    worker: str
    incarnation: int
    endpoint: bytes
    layout: PageLayout
    lease_s: float  # of tickets that ask for no other


@dataclass(slots=True)
class _Lease:
    pages: PageHold
    ticket: Ticket
    deadline: float
    receiver: bytes | None = None  # endpoint of whoever claimed it


class LeaseBook:
    """All leases of one worker. Not thread-safe; ``now`` is monotonic seconds and never runs backwards.

    ::

        open ───claimed notice──▶ claimed ─┐ claimed, seal(): the deadline starts anew
         │                         │  ▲    │
         │                         │  └────┘
         ├─────────────────────────┴── release(FETCHED | REFUSED | ABORTED | SHUTDOWN) ──▶ released
         └─────────────────────────┴── expire(now >= deadline) ──────────────────────────▶ expired

    A lease may be opened while its pages are still being filled: ``seal`` says how far they are final, and a receiver
    that has claimed the ticket is told so. A receiver can end a lease at any time, so whoever fills the pages holds
    them in its own right, and learns from ``seal`` that the lease has ended. The newest claim counts: another receiver
    before it is told that it has lost the ticket. Entering ``released`` or ``expired`` calls the hold's ``release()``,
    once, and tells a receiver that does not know yet; no lease leaves these states. A notice that no open lease expects
    is counted and changes nothing. Pages whose lease has ended may still be read by a slow receiver: the page's
    generation tells it that they are no longer what the ticket promised.
    """

    def __init__(
        self,
        sender: Sender,
        tell: Callable[[bytes, bytes], object] = lambda endpoint, notice: None,
        new_id: Callable[[], str] = new_ticket_id,
    ) -> None:
        """``tell(endpoint, notice)`` sends a notice, best effort, and does not raise."""
        self._sender = sender
        self._tell = tell
        self._new_id = new_id
        self._open: dict[str, _Lease] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap with an entry for each open lease, perhaps too early
        self.outcomes: Counter[LeaseOutcome] = Counter()
        self.unmatched_notices = 0  # late, doubled, of a ticket that never was, or not for a sender

    @property
    def open_leases(self) -> int:
        return len(self._open)

    @property
    def claimed_leases(self) -> int:
        return sum(lease.receiver is not None for lease in self._open.values())

    def open(
        self,
        pages: PageHold,
        *,
        tokens: int,
        generations: Sequence[int],
        now: float,
        lease_s: float | None = None,
        sealed: int | None = None,
    ) -> Ticket:
        """Keep ``pages`` for a receiver of positions [0, ``tokens``), of which [0, ``sealed``) are final (None: all).
        ``generations`` are those of ``pages.page_ids``, in order.

        The book owns ``pages`` from here on, also when this raises TicketError: then they are released already.
        """
        try:
            ticket = self._issue(pages, tokens, generations, lease_s, tokens if sealed is None else sealed)
        except BaseException:
            pages.release()
            raise
        lease = _Lease(pages, ticket, now + ticket.lease_s)
        self._open[ticket.ticket_id] = lease
        heapq.heappush(self._deadlines, (lease.deadline, ticket.ticket_id))
        return ticket

    def seal(self, ticket_id: str, tokens: int, now: float) -> Ticket | None:
        """Positions [0, ``tokens``) are final, never fewer than before. The ticket as it is now; None when its lease is
        not open any more.
        """
        lease = self._open.get(ticket_id)
        if lease is None:
            return None
        known = lease.ticket
        assert known.sealed <= tokens <= known.tokens, f"{tokens} is outside [{known.sealed}, {known.tokens}]"
        lease.ticket = replace(known, sealed=tokens)
        lease.deadline = now + known.lease_s
        self._tell_sealed(lease)
        return lease.ticket

    def release(self, ticket_id: str, outcome: LeaseOutcome) -> bool:
        """End a lease. False, and nothing else, when it is not open."""
        lease = self._open.pop(ticket_id, None)
        if lease is None:
            return False
        self.outcomes[outcome] += 1
        lease.pages.release()
        if lease.receiver is not None and outcome not in (LeaseOutcome.FETCHED, LeaseOutcome.REFUSED):
            self._revoke(lease.receiver, ticket_id)
        return True

    def receive(self, notice: Notice, now: float) -> None:
        """Act on what a receiver sent: CLAIMED, FETCHED or REFUSED. What only a sender says counts as unmatched."""
        lease = self._open.get(notice.ticket_id)
        outcome = _OUTCOME_OF.get(notice.kind)
        if notice.kind is NoticeKind.CLAIMED and lease is not None:
            self._claim(lease, notice.endpoint, now)
        elif outcome is None or not self.release(notice.ticket_id, outcome):
            self.unmatched_notices += 1
            if notice.kind is NoticeKind.CLAIMED:
                self._revoke(notice.endpoint, notice.ticket_id)

    def expire(self, now: float) -> list[str]:
        """End the leases whose time is over; their ticket ids, earliest deadline first."""
        expired: list[str] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, ticket_id = heapq.heappop(self._deadlines)
            lease = self._open.get(ticket_id)
            if lease is not None and lease.deadline > deadline:
                heapq.heappush(self._deadlines, (lease.deadline, ticket_id))
            elif self.release(ticket_id, LeaseOutcome.EXPIRED):
                expired.append(ticket_id)
        return expired

    def release_all(self) -> None:
        """End every lease: the worker goes, or its memory does."""
        for ticket_id in list(self._open):
            self.release(ticket_id, LeaseOutcome.SHUTDOWN)
        self._deadlines.clear()

    def _claim(self, lease: _Lease, receiver: bytes, now: float) -> None:
        if lease.receiver is not None and lease.receiver != receiver:
            self._revoke(lease.receiver, lease.ticket.ticket_id)
        lease.receiver = receiver
        lease.deadline = now + lease.ticket.lease_s
        self._tell_sealed(lease)

    def _revoke(self, receiver: bytes, ticket_id: str) -> None:
        self._tell(receiver, Notice(NoticeKind.REVOKED, ticket_id).encode())

    def _tell_sealed(self, lease: _Lease) -> None:
        if lease.receiver is not None:
            notice = Notice(NoticeKind.SEALED, lease.ticket.ticket_id, tokens=lease.ticket.sealed)
            self._tell(lease.receiver, notice.encode())

    def _issue(
        self, pages: PageHold, tokens: int, generations: Sequence[int], lease_s: float | None, sealed: int
    ) -> Ticket:
        sender = self._sender
        page_ids = tuple(pages.page_ids)
        needed = sender.layout.pages_for(tokens)
        if len(page_ids) != needed:
            raise TicketError("page_ids", f"{len(page_ids)} pages, but {tokens} tokens need {needed}")
        ticket_id = self._new_id()
        if ticket_id in self._open:
            raise TicketError("ticket_id", f"{ticket_id} is in use")
        ticket = Ticket(
            ticket_id=ticket_id,
            worker=sender.worker,
            incarnation=sender.incarnation,
            endpoint=sender.endpoint,
            layout=sender.layout.fingerprint,
            tokens=tokens,
            sealed=sealed,
            page_ids=page_ids,
            generations=tuple(generations),
            lease_s=sender.lease_s if lease_s is None else lease_s,
        )
        ticket.check()
        return ticket
