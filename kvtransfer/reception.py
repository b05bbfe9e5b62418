"""The receiver's side of a hand-over: one ticket's missing pages, fetched while they are filled, and verified."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.notice import Notice, NoticeKind
from splitserve.kvtransfer.ticket import Ticket
from splitserve.kvtransfer.transport import GenerationRead, Peer, Read, ReadState, TransferError, Transport

# Failures that say nothing against the connection.
_PEER_KEPT = frozenset({"layout", "ticket", "incarnation", "torn", "timeout", "revoked"})
# Failures after which there is nobody to tell.
_PEER_GONE = frozenset({"connect", "disconnect", "incarnation", "closed", "revoked"})
_RENEWALS = 3  # in the time of one lease: two may be lost


class ReceptionState(Enum):
    """Drawn in ``Reception``."""

    WAITING = "waiting"
    READING = "reading"
    VERIFYING = "verifying"
    COMPLETE = "complete"
    FAILED = "failed"
    ABANDONED = "abandoned"


@dataclass(slots=True)
class Moved:
    """What a reception has moved."""

    pages: int = 0  # read; right if the reception is complete
    pages_before_end: int = 0  # of these, read before the last page was sealed
    reads: int = 0
    seconds: float = 0.0  # from the first read to the final state
    tail_s: float = 0.0  # from the news that all is sealed to the final state


class Reception:
    """Fetches what is missing of one ticket. Not thread-safe; ``now`` is monotonic seconds.

    ::

        waiting ──fetch()──▶ reading ──all pages are here──▶ verifying ──generations as promised──▶ complete
           │                  │  │ ▲                          │   │
           │                  │  │ └─ sealed(): more to read  │   │
           ├──────────────────┼──┴────────────────────────────┼───┴── error, torn, revoked, deadline ──▶ failed
           └──────────────────┴───────────────────────────────┴────── abandon() ───────────────────────▶ abandoned

    Until the end the ticket is claimed again and again: that renews the lease, and makes the sender tell how far it is.
    A ticket whose pages are complete when ``fetch`` follows at once is not claimed first.

    A ticket that does not fit (layout, page count, incarnation) starts as ``failed``, one of which nothing is missing
    becomes ``complete`` in ``fetch``. Whatever the transport raises ends as ``failed``. Entering a final state sends
    the last notice of this reception: ``fetched`` from ``complete``, else ``refused`` unless the peer is gone; it is
    best effort, the lease's end does the rest.

    The local pages belong to the transport until ``settled``: after ``failed`` and ``abandoned`` keep calling ``poll``
    until then. Only ``complete`` says that their content is right.
    """

    def __init__(
        self,
        ticket: Ticket,
        *,
        transport: Transport,
        layout: PageLayout,
        now: float,
        deadline_s: float,
        incarnation: int | None = None,
    ) -> None:
        """``incarnation`` is the sender's current one, where known. While everything is sealed the reception ends at
        the latest ``deadline_s`` after the last progress; while it is not, when the sender has said nothing for the
        time of a lease.
        """
        self.ticket = ticket
        self.state = ReceptionState.WAITING
        self.cause: str | None = None  # a fixed word for metrics, with FAILED only
        self.message: str | None = None  # for the log, with FAILED only
        self.moved = Moved()
        self.notice_sent = False
        self._transport = transport
        self._layout = layout
        self._deadline_s = deadline_s
        self._sealed = ticket.sealed
        self._whole_at = now if self._whole else None
        self._started = self._heard = now
        self._claim_at = now  # when to claim next
        self._indexes: list[int] = []  # missing absolute page indexes, rising
        self._local: list[int] = []
        self._posted = 0  # of ``_indexes``, from the first
        self._peer: Peer | None = None
        self._reads: dict[Read, int] = {}  # under way, with the pages of each: the transport may hold local memory
        self._generations: GenerationRead | None = None  # under way while VERIFYING
        mismatch = self._mismatch(incarnation)
        if mismatch is not None:
            self._fail(mismatch, now)
        elif self._whole_at is None:
            self._guarded(self._claim, now)

    @property
    def settled(self) -> bool:
        """The state is final and the transport has let go of the local pages."""
        return self.final and not self._reads

    @property
    def final(self) -> bool:
        return self.state in (ReceptionState.COMPLETE, ReceptionState.FAILED, ReceptionState.ABANDONED)

    @property
    def bytes(self) -> int:
        """Read so far."""
        return self.moved.pages * self._layout.page_bytes

    def fetch(self, missing: Mapping[int, int], now: float) -> None:
        """Start reading. ``missing`` maps absolute page index to the local page that shall hold it; what is here
        already is left out. Once; changes nothing in a final state.
        """
        if self.final:
            return
        assert self.state is ReceptionState.WAITING, self.state
        self._indexes = sorted(missing)
        self._local = [missing[index] for index in self._indexes]
        self.state = ReceptionState.READING
        self._started = self._heard = now
        if self._claim_at <= now:
            self._claim_at = now + self._renewal_s
        if self._indexes and not 0 <= self._indexes[0] <= self._indexes[-1] < len(self.ticket.page_ids):
            wrong = f"{self._name} has no page {self._indexes[-1]} or {self._indexes[0]}"
            self._fail(TransferError("ticket", wrong), now)
        elif not self._indexes:
            self._complete(now)
        else:
            self._guarded(self._advance, now)

    def sealed(self, tokens: int, now: float) -> None:
        """The sender says that positions [0, ``tokens``) are final. Older news than what is known is only a sign of
        life, and once all is sealed not even that: the rest is up to the transport.
        """
        if self.final or self._whole_at is not None:
            return
        self._heard = now
        self._sealed = max(self._sealed, min(tokens, self.ticket.tokens))
        if self._whole:
            self._whole_at = now
            self.moved.pages_before_end = self.moved.pages

    def revoked(self, now: float) -> None:
        """The sender's lease has ended."""
        if not self.final:
            self._fail(TransferError("revoked", f"{self._name}: its sender gave it up"), now)

    def poll(self, now: float) -> ReceptionState:
        """Go on, without blocking. Never raises."""
        if self.state in (ReceptionState.READING, ReceptionState.VERIFYING):
            self._guarded(self._advance, now)
        if not self.final and now >= self._claim_at:
            self._guarded(self._claim, now)
        if not self.final and now >= self._deadline:
            waited = f"{self._name}: nothing heard for {now - self._heard:.3f} s, {self._sealed} tokens sealed"
            self._fail(TransferError("timeout", waited), now)
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
    def _whole(self) -> bool:
        return self._sealed >= self.ticket.tokens

    @property
    def _deadline(self) -> float:
        if self.state is ReceptionState.WAITING:
            return float("inf")  # whoever waits for pages here decides how long
        return self._heard + (min(self._deadline_s, self.ticket.lease_s) if self._whole else self.ticket.lease_s)

    @property
    def _renewal_s(self) -> float:
        return self.ticket.lease_s / _RENEWALS

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
        return None

    def _guarded(self, step: Callable[[float], None], now: float) -> None:
        try:
            step(now)
        except TransferError as error:
            self._fail(error, now)
        except Exception as error:  # a transport's own mistake must cost this reception, not the worker
            self._fail(TransferError("transport", f"{self._name}: {error!r}"), now)

    def _connected(self) -> Peer:
        """Asked for anew each time: another reception's failure may have made the transport forget the peer."""
        self._peer = self._transport.connect(self.ticket.endpoint)
        return self._peer

    def _claim(self, now: float) -> None:
        self._claim_at = now + self._renewal_s
        notice = Notice(NoticeKind.CLAIMED, self.ticket.ticket_id, endpoint=self._transport.endpoint())
        self._transport.notify(self._connected(), notice.encode())

    def _advance(self, now: float) -> None:
        """As far as it goes: polls may be a whole step of an engine apart, and some reads are done once posted."""
        self._take_done(now)
        while self._follow_up(now):
            if not self._take_done(now):
                break

    def _take_done(self, now: float) -> bool:
        """Drive the reads under way. Whether one of them is done."""
        before = len(self._reads)
        for read in list(self._reads):
            if self._is_done(read):
                self.moved.pages += self._reads.pop(read)
                self._heard = now
        return len(self._reads) < before

    def _follow_up(self, now: float) -> bool:
        """Do what is next. Whether a read was started."""
        if self.state is ReceptionState.READING:
            if self._post():
                return True
            if not self._reads and self._posted == len(self._indexes):
                self._generations = self._transport.read_generations(self._connected(), self._remote(0))
                self._reads[self._generations] = 0
                self.state = ReceptionState.VERIFYING
                return True
        elif self.state is ReceptionState.VERIFYING and not self._reads:
            assert self._generations is not None
            self._verify(self._generations.values(), now)
        return False

    def _post(self) -> bool:
        """Read what has been sealed and not been asked for, in one piece. False: there is nothing."""
        end = self._posted
        full_pages = self._sealed // self._layout.page_tokens
        while end < len(self._indexes) and (self._whole or self._indexes[end] < full_pages):
            end += 1
        if end == self._posted:
            return False
        local = self._local[self._posted : end]
        read = self._transport.read_pages(self._connected(), self._remote(self._posted, end), local)
        self._reads[read] = end - self._posted
        self._posted = end
        self.moved.reads += 1
        return True

    def _remote(self, first: int, end: int | None = None) -> list[int]:
        return [self.ticket.page_ids[index] for index in self._indexes[first:end]]

    def _is_done(self, read: Read) -> bool:
        """Drive a read under way. Raises why it failed."""
        state = read.poll()
        if state is ReadState.READING:
            return False
        if state is not ReadState.DONE:
            del self._reads[read]
            raise read.error or TransferError("read", f"{self._name}: the transport gave no reason")
        return True

    def _verify(self, generations: list[int], now: float) -> None:
        promised = [self.ticket.generations[index] for index in self._indexes]
        if generations != promised:
            index = next(
                (i for i, pair in enumerate(zip(generations, promised, strict=False)) if pair[0] != pair[1]), 0
            )
            raise TransferError("torn", f"{self._name}: page {self._indexes[index]} was reused before it was read")
        self._complete(now)

    def _complete(self, now: float) -> None:
        self._end(ReceptionState.COMPLETE, now)
        self._notify(NoticeKind.FETCHED)

    def _fail(self, error: TransferError, now: float) -> None:
        self.cause, self.message = error.cause, str(error)
        self._end(ReceptionState.FAILED, now)
        if error.cause not in _PEER_GONE:
            self._notify(NoticeKind.REFUSED)
        peer = self._peer
        if peer is not None and error.cause not in _PEER_KEPT:
            self._attempt(lambda: self._transport.forget(peer))

    def _end(self, state: ReceptionState, now: float) -> None:
        self.state = state
        self.moved.seconds = now - self._started
        if self._whole_at is not None:
            self.moved.tail_s = now - max(self._whole_at, self._started)

    def _notify(self, kind: NoticeKind) -> None:
        notice = Notice(kind, self.ticket.ticket_id).encode()
        self.notice_sent = self._attempt(lambda: self._transport.notify(self._connected(), notice))

    def _attempt(self, act: Callable[[], None]) -> bool:
        """Do what must not change how this reception ended: losing a notice only costs the sender the rest of the
        lease.
        """
        try:
            act()
        except Exception:
            return False
        return True

    def _let_go(self) -> None:
        for read in list(self._reads):
            try:
                if read.abandon():
                    del self._reads[read]
            except Exception as error:  # not known to be free, so the pages stay out of use; the next poll asks again
                self.message = self.message or repr(error)
