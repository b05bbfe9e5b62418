"""The engine's side of ``kvtransfer``: what leaves (``sending.py``), what comes (``receiving.py``), and the notices
that tell both.
"""

from collections.abc import Callable
from dataclasses import dataclass

from splitserve.engine.counters import Counters
from splitserve.engine.page_pool import PagePool
from splitserve.engine.protocol import WorkerId
from splitserve.engine.receiving import Receiving
from splitserve.engine.sending import Sending
from splitserve.engine.sequence import Sequence
from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.lease import Sender
from splitserve.kvtransfer.notice import Notice, NoticeError, NoticeKind
from splitserve.kvtransfer.transport import TransferError, Transport

_FROM_SENDERS = (NoticeKind.SEALED, NoticeKind.REVOKED)


@dataclass(frozen=True)
class HandoverLimits:
    """Bounds of the hand-over between two workers."""

    lease_s: float = 30.0  # how long offered pages wait for a sign of whoever wants them
    read_s: float = 10.0  # how long a read may take before the prompt is computed here instead
    leased_share: float = 0.75  # of the pool; while more is under leases nothing more is computed for peers


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
        self._transport = transport
        self._counters = counters
        sender = Sender(worker, incarnation, transport.endpoint(), layout, limits.lease_s)
        self.sending = Sending(sender, pool, transport, counters, limits.leased_share)
        self.receiving = Receiving(layout, transport, limits.read_s, counters)

    @property
    def active(self) -> bool:
        """Whether a peer or a transfer may need attention soon."""
        return self.sending.active or self.receiving.active

    def poll(self, now: float, arrived: Callable[[Sequence], None], failed: Callable[[Sequence, str], None]) -> None:
        """Hear what peers say and drive everything open. ``arrived`` and ``failed`` as in ``Receiving.poll``."""
        for notice in self._notices():
            (self.receiving if notice.kind in _FROM_SENDERS else self.sending).hear(notice, now)
        self.sending.poll(now)
        self.receiving.poll(now, arrived, failed, offering=self.sending.active)

    def close(self, now: float) -> None:
        """End every lease and reception; the transport goes with them."""
        self.sending.close()
        self.receiving.close(now)
        self._transport.close()

    def _notices(self) -> list[Notice]:
        """What has arrived and can be read. Whatever the bytes are, this does not raise."""
        heard: list[Notice] = []
        try:
            arrived = self._transport.notices()
        except TransferError as error:  # leases end by their deadline, receptions by theirs
            self._counters.add("splitserve_kv_transport_errors_total", cause=error.cause)
            return heard
        for data in arrived:
            try:
                heard.append(Notice.decode(data))
            except NoticeError:
                self._counters.add("splitserve_kv_malformed_notices_total")
        return heard
