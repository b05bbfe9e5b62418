"""Pages that come from a peer: the receptions of one worker.

A sequence with a ticket waits for pages of its own, then owns them while they are read; its ticket is claimed from the
first moment on. When that fails the pages it had stay here until the transport has let go of them.

A worker that has offered pages itself does not keep peers' leases open for sequences that wait: two such workers would
each wait for the pages that the other one holds for it, for ever.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from splitserve.engine.counters import Counters
from splitserve.engine.page_pool import PageHold
from splitserve.engine.protocol import RequestId, TransferRecord, WorkerId
from splitserve.engine.sequence import Sequence
from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.notice import Notice, NoticeKind
from splitserve.kvtransfer.reception import Reception, ReceptionState
from splitserve.kvtransfer.transport import Transport

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Incoming:
    sequence: Sequence
    reception: Reception
    reused_pages: int = 0


class Receiving:
    """Used by the engine's thread."""

    def __init__(self, layout: PageLayout, transport: Transport, read_s: float, counters: Counters) -> None:
        self._layout = layout
        self._transport = transport
        self._read_s = read_s
        self._counters = counters
        self._open: dict[RequestId, _Incoming] = {}
        self._by_ticket: defaultdict[str, set[RequestId]] = defaultdict(set)
        self._letting_go: list[tuple[Reception, PageHold]] = []

    @property
    def active(self) -> bool:
        return bool(self._open or self._letting_go)

    def expect(self, sequence: Sequence, now: float) -> None:
        """Claim the sequence's ticket, which keeps its lease alive until there are pages to read into."""
        assert sequence.ticket is not None
        reception = Reception(
            sequence.ticket, transport=self._transport, layout=self._layout, now=now, deadline_s=self._read_s
        )
        self._open[sequence.request_id] = _Incoming(sequence, reception)
        self._by_ticket[sequence.ticket.ticket_id].add(sequence.request_id)

    def fetch(self, sequence: Sequence, now: float) -> None:
        """Read what the ticket offers, and the sequence has not, into pages that it owns. Failing is a state."""
        assert sequence.pages is not None
        assert sequence.ticket is not None
        page_ids = sequence.pages.page_ids
        here = sequence.computed // self._layout.page_tokens
        needed = self._layout.pages_for(sequence.ticket.tokens)
        missing: dict[int, int] = {index: page_ids[index] for index in range(here, needed)}
        incoming = self._open[sequence.request_id]
        incoming.reused_pages = needed - len(missing)
        incoming.reception.fetch(missing, now)

    def complete(self, sequence: Sequence, now: float) -> None:
        """The gateway says that all of the ticket's pages are filled, in case the sender's own word was lost."""
        incoming = self._open.get(sequence.request_id)
        if incoming is not None:
            incoming.reception.sealed(incoming.reception.ticket.tokens, now)

    def abandon(self, sequence: Sequence, now: float) -> None:
        """Stop receiving for a sequence; its pages stay here until the transport has let go."""
        incoming = self._open.get(sequence.request_id)
        if incoming is not None:
            incoming.reception.abandon(now)
            self._close(incoming)
            self._park(incoming)

    def hear(self, notice: Notice, now: float) -> None:
        """Something that a sender said."""
        for request_id in self._by_ticket.get(notice.ticket_id, ()):
            reception = self._open[request_id].reception
            if notice.kind is NoticeKind.SEALED:
                reception.sealed(notice.tokens, now)
            else:
                reception.revoked(now)

    def poll(
        self,
        now: float,
        arrived: Callable[[Sequence], None],
        failed: Callable[[Sequence, str], None],
        *,
        offering: bool = False,
    ) -> None:
        """Drive everything open. ``arrived``: all pages of the ticket are in place. ``failed``: they will not come, and
        why. ``offering``: whether peers wait for pages of this worker.
        """
        for incoming in list(self._open.values()):
            sequence, reception = incoming.sequence, incoming.reception
            if not (offering and reception.state is ReceptionState.WAITING):
                reception.poll(now)
            if not reception.final:
                continue
            self._close(incoming)
            sequence.transfer = self._record(incoming)
            if reception.state is ReceptionState.COMPLETE:
                sequence.computed = max(sequence.computed, reception.ticket.tokens)
                arrived(sequence)
            else:
                logger.warning("%s: %s", sequence.request_id, reception.message)
                self._park(incoming)
                failed(sequence, reception.message or "")
        self._let_go(now)

    def close(self, now: float) -> None:
        for incoming in list(self._open.values()):
            self.abandon(incoming.sequence, now)
        self._let_go(now)

    def _close(self, incoming: _Incoming) -> None:
        del self._open[incoming.sequence.request_id]
        ticket_id = incoming.reception.ticket.ticket_id
        self._by_ticket[ticket_id].discard(incoming.sequence.request_id)
        if not self._by_ticket[ticket_id]:
            del self._by_ticket[ticket_id]

    def _park(self, incoming: _Incoming) -> None:
        sequence = incoming.sequence
        pages, sequence.pages = sequence.pages, None
        sequence.computed = sequence.sealed = 0
        if pages is not None:
            self._letting_go.append((incoming.reception, pages))

    def _let_go(self, now: float) -> None:
        still_held = []
        for reception, pages in self._letting_go:
            reception.poll(now)
            if reception.settled:
                pages.release()
            else:
                still_held.append((reception, pages))
        self._letting_go = still_held

    def _record(self, incoming: _Incoming) -> TransferRecord:
        """What the reception came to, counted."""
        reception = incoming.reception
        count, moved = self._counters.add, reception.moved
        if reception.state is ReceptionState.COMPLETE:
            count("splitserve_kv_transfers_total")
            count("splitserve_kv_transfer_bytes_total", reception.bytes)
            count("splitserve_kv_transfer_pages_total", moved.pages)
            count("splitserve_kv_transfer_hidden_pages_total", moved.pages_before_end)
            count("splitserve_kv_transfer_seconds_total", moved.seconds)
            count("splitserve_kv_transfer_tail_seconds_total", moved.tail_s)
        else:
            count("splitserve_kv_transfer_failures_total", cause=reception.cause or "unknown")
        return TransferRecord(
            source=WorkerId(reception.ticket.worker),
            pages=moved.pages,
            bytes=reception.bytes,
            reused_pages=incoming.reused_pages,
            hidden_pages=moved.pages_before_end,
            seconds=moved.seconds,
            tail_s=moved.tail_s,
            cause=reception.cause,
        )
