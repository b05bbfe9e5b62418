"""The sender's side of a hand-over: which pages are kept for whom, and until when."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.notice import Notice, NoticeError
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


@dataclass(frozen=True)
class Sender:
    """What all tickets of one incarnation of a worker have in common."""

    worker: str
    incarnation: int
    endpoint: bytes
    layout: PageLayout
    lease_s: float  # of tickets that ask for no other


class LeaseBook:
    """All leases of one worker. Not thread-safe; ``now`` is monotonic seconds and never runs backwards.

    ::

                 release(FETCHED | REFUSED | ABORTED | SHUTDOWN)
        open ────────────────────────────────────────────────────▶ released
          │
          └──── expire(now >= deadline) ─────────────────────────▶ expired

    Entering ``released`` or ``expired`` calls the hold's ``release()``, once; no lease leaves these states. A notice
    about a lease that is not open is counted and changes nothing. Pages whose lease has ended may still be read by a
    slow receiver: the page's generation tells it that they are no longer what the ticket promised.
    """

    def __init__(self, sender: Sender, new_id: Callable[[], str] = new_ticket_id) -> None:
        self._sender = sender
        self._new_id = new_id
        self._open: dict[str, PageHold] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; entries of ended leases stay until their time
        self.outcomes: Counter[LeaseOutcome] = Counter()
        self.unmatched_notices = 0  # late, doubled, or of a ticket that never was
        self.malformed_notices = 0

    @property
    def open_leases(self) -> int:
        return len(self._open)

    def open(
        self,
        pages: PageHold,
        *,
        tokens: int,
        generations: Sequence[int],
        now: float,
        lease_s: float | None = None,
    ) -> Ticket:
        """Keep ``pages`` for a receiver of positions [0, ``tokens``). ``generations`` are those of ``pages.page_ids``,
        in order.

        The book owns ``pages`` from here on, also when this raises TicketError: then they are released already.
        """
        try:
            ticket = self._issue(pages, tokens, generations, lease_s)
        except BaseException:
            pages.release()
            raise
        self._open[ticket.ticket_id] = pages
        heapq.heappush(self._deadlines, (now + ticket.lease_s, ticket.ticket_id))
        return ticket

    def release(self, ticket_id: str, outcome: LeaseOutcome) -> bool:
        """End a lease. False, and nothing else, when it is not open."""
        pages = self._open.pop(ticket_id, None)
        if pages is None:
            return False
        self.outcomes[outcome] += 1
        pages.release()
        return True

    def receive(self, notices: Iterable[bytes]) -> None:
        """Act on what receivers sent. Whatever the bytes are, this does not raise."""
        for data in notices:
            try:
                notice = Notice.decode(data)
            except NoticeError:
                self.malformed_notices += 1
                continue
            if not self.release(notice.ticket_id, LeaseOutcome(notice.kind.value)):
                self.unmatched_notices += 1

    def expire(self, now: float) -> list[str]:
        """End the leases whose time is over; their ticket ids, earliest deadline first."""
        expired: list[str] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, ticket_id = heapq.heappop(self._deadlines)
            if self.release(ticket_id, LeaseOutcome.EXPIRED):
                expired.append(ticket_id)
        return expired

    def release_all(self) -> None:
        """End every lease: the worker goes, or its memory does."""
        for ticket_id in list(self._open):
            self.release(ticket_id, LeaseOutcome.SHUTDOWN)
        self._deadlines.clear()

    def _issue(self, pages: PageHold, tokens: int, generations: Sequence[int], lease_s: float | None) -> Ticket:
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
            page_ids=page_ids,
            generations=tuple(generations),
            lease_s=sender.lease_s if lease_s is None else lease_s,
        )
        ticket.check()
        return ticket
