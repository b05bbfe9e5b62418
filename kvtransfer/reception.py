"""The receiver's side of a hand-over: one ticket's missing pages, fetched and verified."""

from collections.abc import Callable, Mapping
from enum import Enum

from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.notice import Notice, NoticeKind
from splitserve.kvtransfer.ticket import Ticket
from splitserve.kvtransfer.transport import GenerationRead, Peer, Read, ReadState, TransferError, Transport

# Failures that say nothing against the connection.
_PEER_KEPT = frozenset({"layout", "ticket", "incarnation", "torn", "timeout"})
# Failures after which there is nobody to tell.
_PEER_GONE = frozenset({"connect", "disconnect", "incarnation", "closed"})


class ReceptionState(Enum):
    """Drawn in ``Reception``."""

    READING = "reading"
    VERIFYING = "verifying"
    COMPLETE = "complete"
    FAILED = "failed"
    ABANDONED = "abandoned"


class Reception:
    """Fetches what is missing of one ticket. Not thread-safe; ``now`` is monotonic seconds.

    ::

        reading ──pages are here──▶ verifying ──generations as promised──▶ complete
           │  │                       │   │
           │  └───────────────────────┼───┴── error, torn, deadline ─────▶ failed
           └──────────────────────────┴────── abandon() ─────────────────▶ abandoned

    A ticket that does not fit (layout, page count, incarnation) starts as ``failed``, one of which nothing is missing
    as ``complete``. Whatever the transport raises ends as ``failed``. Entering a final state sends the one notice of
    this reception: ``fetched`` from ``complete``, else ``refused`` unless the peer is gone; it is best effort, the
    lease's end does the rest.

    The local pages belong to the transport until ``settled``: after ``failed`` and ``abandoned`` keep calling ``poll``
    until then. Only ``complete`` says that their content is right.
    """

    def __init__(
        self,
        ticket: Ticket,
        missing: Mapping[int, int],
        *,
        transport: Transport,
        layout: PageLayout,
        now: float,
        deadline_s: float,
        incarnation: int | None = None,
    ) -> None:
        """Start reading. ``missing`` maps absolute page index to the local page that shall hold it; what is here
        already is left out. The reception ends at the latest ``deadline_s`` (and no later than ``ticket.lease_s``) from
        ``now``. ``incarnation`` is the sender's current one, where known.
        """
        self.ticket = ticket
        self.state = ReceptionState.READING
        self.cause: str | None = None  # a fixed word for metrics, with FAILED only
        self.message: str | None = None  # for the log, with FAILED only
        self.pages = 0  # read and verified
        self.bytes = 0  # read and verified
        self.seconds = 0.0  # until the final state
        self.notice_sent = False
        self._transport = transport
        self._layout = layout
        self._started = now
        self._deadline = now + min(deadline_s, ticket.lease_s)
        self._indexes = sorted(missing)
        self._local = [missing[index] for index in self._indexes]
        self._peer: Peer | None = None
        self._read: Read | None = None  # under way: the transport may hold local memory
        self._generations: GenerationRead | None = None  # the same read, while VERIFYING
        mismatch = self._mismatch(incarnation)
        if mismatch is not None:
            self._fail(mismatch, now)
        elif not self._indexes:
            self._complete(now)
        else:
            self._guarded(self._begin, now)

    @property
    def settled(self) -> bool:
        """The state is final and the transport has let go of the local pages."""
        return self.final and self._read is None

    @property
    def final(self) -> bool:
        return self.state not in (ReceptionState.READING, ReceptionState.VERIFYING)

    def poll(self, now: float) -> ReceptionState:
        """Go on, without blocking. Never raises."""
        if not self.final:
            self._guarded(self._advance, now)
        if not self.final and now >= self._deadline:
            self._fail(TransferError("timeout", f"{self._name} took longer than {now - self._started:.3f} s"), now)
        if self.final:
            self._let_go()
        return self.state

    def abandon(self, now: float) -> None:
        """Nobody wants the pages any more. Changes nothing once the state is final."""
        if not self.final:
            self._end(ReceptionState.ABANDONED, now)
            self._notify(NoticeKind.REFUSED)
            self._let_go()

    @property
    def _name(self) -> str:
        return f"ticket {self.ticket.ticket_id} of {self.ticket.worker}"

    def _mismatch(self, incarnation: int | None) -> TransferError | None:
        ticket, layout = self.ticket, self._layout
        if ticket.layout != layout.fingerprint:
            return TransferError("layout", f"{self._name}: layout {layout.fingerprint} here, {ticket.layout} there")
        if incarnation is not None and ticket.incarnation != incarnation:
            return TransferError("incarnation", f"{self._name}: of incarnation {ticket.incarnation}, now {incarnation}")
        if len(ticket.page_ids) != layout.pages_for(ticket.tokens):
            return TransferError("ticket", f"{self._name}: {len(ticket.page_ids)} pages for {ticket.tokens} tokens")
        if self._indexes and not 0 <= self._indexes[0] <= self._indexes[-1] < len(ticket.page_ids):
            return TransferError("ticket", f"{self._name} has no page {self._indexes[-1]} or {self._indexes[0]}")
        return None

    def _guarded(self, step: Callable[[float], None], now: float) -> None:
        try:
            step(now)
        except TransferError as error:
            self._fail(error, now)
        except Exception as error:  # a transport's own mistake must cost this reception, not the worker
            self._fail(TransferError("transport", f"{self._name}: {error!r}"), now)

    def _begin(self, now: float) -> None:
        self._peer = self._transport.connect(self.ticket.endpoint)
        remote = [self.ticket.page_ids[index] for index in self._indexes]
        self._read = self._transport.read_pages(self._peer, remote, self._local)

    def _advance(self, now: float) -> None:
        if self.state is ReceptionState.READING and self._read_is_done():
            assert self._peer is not None
            remote = [self.ticket.page_ids[index] for index in self._indexes]
            self._read = self._generations = self._transport.read_generations(self._peer, remote)
            self.state = ReceptionState.VERIFYING
        if self.state is ReceptionState.VERIFYING and self._read_is_done():
            assert self._generations is not None
            self._verify(self._generations.values(), now)

    def _read_is_done(self) -> bool:
        """Drive the read under way. Raises why it failed."""
        assert self._read is not None
        state = self._read.poll()
        if state is ReadState.READING:
            return False
        error, self._read = self._read.error, None
        if state is not ReadState.DONE:
            raise error or TransferError("read", f"{self._name}: the transport gave no reason")
        return True

    def _verify(self, generations: list[int], now: float) -> None:
        promised = [self.ticket.generations[index] for index in self._indexes]
        if generations != promised:
            index = next(
                (i for i, pair in enumerate(zip(generations, promised, strict=False)) if pair[0] != pair[1]), 0
            )
            raise TransferError("torn", f"{self._name}: page {self._indexes[index]} was reused before it was read")
        self.pages = len(self._indexes)
        self.bytes = self.pages * self._layout.page_bytes
        self._complete(now)

    def _complete(self, now: float) -> None:
        self._end(ReceptionState.COMPLETE, now)
        self._notify(NoticeKind.FETCHED)

    def _fail(self, error: TransferError, now: float) -> None:
        self.cause, self.message = error.cause, str(error)
        self._end(ReceptionState.FAILED, now)
        if error.cause not in _PEER_GONE:
            self._notify(NoticeKind.REFUSED)
        if self._peer is not None and error.cause not in _PEER_KEPT:
            self._attempt(self._transport.forget)

    def _end(self, state: ReceptionState, now: float) -> None:
        self.state = state
        self.seconds = now - self._started

    def _notify(self, kind: NoticeKind) -> None:
        notice = Notice(kind, self.ticket.ticket_id).encode()
        self.notice_sent = self._attempt(lambda peer: self._transport.notify(peer, notice))

    def _attempt(self, act: Callable[[Peer], None]) -> bool:
        """Do what must not change how this reception ended: losing a notice only costs the sender the rest of the
        lease.
        """
        try:
            if self._peer is None:
                self._peer = self._transport.connect(self.ticket.endpoint)
            act(self._peer)
        except Exception:
            return False
        return True

    def _let_go(self) -> None:
        if self._read is None:
            return
        try:
            if self._read.abandon():
                self._read = None
        except Exception as error:  # not known to be free, so the pages stay out of use; the next poll asks again
            self.message = self.message or repr(error)
