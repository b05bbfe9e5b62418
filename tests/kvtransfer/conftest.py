"""Tiny pools whose bytes a test can see."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.lease import LeaseBook, Sender
from splitserve.kvtransfer.local_transport import LocalNetwork, LocalTransport
from splitserve.kvtransfer.notice import Notice, NoticeKind
from splitserve.kvtransfer.reception import Reception
from splitserve.kvtransfer.ticket import Ticket
from splitserve.kvtransfer.transport import PoolMemory, TransferError

LAYOUT = PageLayout(model="tiny", layers=1, kv_heads=1, page_tokens=4, head_dim=2, dtype="float32")
MAX_POLLS = 25
TOKENS = 10


class Side:
    """One worker: a pool, its transport, and the bytes of its pages, ``data`` [num_pages, page_bytes]."""

    def __init__(self, name: str, network: LocalNetwork, num_pages: int = 8) -> None:
        self.data: npt.NDArray[np.uint8] = np.zeros((num_pages, LAYOUT.page_bytes), np.uint8)
        memory = PoolMemory(self.data.ctypes.data, LAYOUT.page_bytes, num_pages, self.data)
        self.transport = LocalTransport(name, memory, network)

    def fill(self, page: int, generation: int) -> None:
        """A new life for a page: first its generation, then its content."""
        self.transport.set_generation(page, generation)
        self.data[page] = content(page, generation)

    def sender(self, lease_s: float = 10.0) -> Sender:
        return Sender("w", 1, self.transport.endpoint(), LAYOUT, lease_s)


class Hold:
    """A page hold that counts its releases."""

    def __init__(self, *page_ids: int) -> None:
        self.page_ids = page_ids
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


class HandOver:
    """A lease over the sender's pages 2, 3, 4 (10 tokens, ``sealed`` of them final), and its receiver."""

    def __init__(self, p: Any, d: Any, hold: Any, layout: PageLayout, sealed: int = TOKENS) -> None:
        self.p, self.d, self.hold, self.layout = p, d, hold, layout
        self.book = LeaseBook(p.sender(), self._tell)
        self.ticket = self.book.open(hold, tokens=TOKENS, generations=[12, 13, 14], now=0.0, sealed=sealed)

    def expect(self, **options: Any) -> Reception:
        """A reception that waits for its pages."""
        settings: dict[str, Any] = {"ticket": self.ticket, "layout": self.layout, "now": 0.0, "deadline_s": 5.0}
        settings |= options
        return Reception(settings.pop("ticket"), transport=self.d.transport, **settings)

    def receive(self, missing: dict[int, int] | None = None, **options: Any) -> Reception:
        reception = self.expect(**options)
        reception.fetch({0: 7, 1: 0, 2: 1} if missing is None else missing, options.get("now", 0.0))
        return reception

    def mail(self, reception: Reception, now: float) -> list[NoticeKind]:
        """Deliver what has been sent, first to the sender. What the sender heard."""
        arrived = [Notice.decode(data) for data in self.p.transport.notices()]
        for notice in arrived:
            self.book.receive(notice, now)
        for data in self.d.transport.notices():
            notice = Notice.decode(data)
            if notice.kind is NoticeKind.SEALED:
                reception.sealed(notice.tokens, now)
            else:
                assert notice.kind is NoticeKind.REVOKED
                reception.revoked(now)
        return [notice.kind for notice in arrived]

    def run(self, reception: Reception, now: float, polls: int = MAX_POLLS) -> Reception:
        """Both sides go on for a while, no time passing."""
        for _ in range(polls):
            self.mail(reception, now)
            reception.poll(now)
        self.mail(reception, now)
        return reception

    def finish(self, reception: Reception, now: float = 1.0) -> Reception:
        assert self.run(reception, now).settled, f"still {reception.state}"
        return reception

    def _tell(self, endpoint: bytes, notice: bytes) -> None:
        with contextlib.suppress(TransferError):
            self.p.transport.notify(self.p.transport.connect(endpoint), notice)


def content(page: int, generation: int) -> npt.NDArray[np.uint8]:
    """What page ``page`` holds in its life ``generation``, [page_bytes]: differs between lives and within the page."""
    return (np.arange(LAYOUT.page_bytes) * 7 + page * 31 + generation * 101).astype(np.uint8)


@pytest.fixture
def network() -> LocalNetwork:
    return LocalNetwork()


@pytest.fixture
def make_side(network: LocalNetwork) -> Callable[[str], Side]:
    return lambda name: Side(name, network)


@pytest.fixture
def p(make_side: Callable[[str], Side]) -> Side:
    """The sender; page i is in its life 10 + i."""
    side = make_side("p")
    for page in range(8):
        side.fill(page, 10 + page)
    return side


@pytest.fixture
def d(make_side: Callable[[str], Side]) -> Side:
    """The receiver, its pages all zero."""
    return make_side("d")


@pytest.fixture
def layout() -> PageLayout:
    return LAYOUT


@pytest.fixture
def make_hold() -> type[Hold]:
    return Hold


@pytest.fixture
def make_ticket() -> Callable[..., Ticket]:
    """A valid ticket, with the given fields changed."""

    def make(**changes: object) -> Ticket:
        fields: dict[str, object] = {
            "ticket_id": "t1",
            "worker": "w",
            "incarnation": 1,
            "endpoint": b"e",
            "layout": LAYOUT.fingerprint,
            "tokens": 7,
            "sealed": 7,
            "page_ids": (3, 5),
            "generations": (1, 2),
            "lease_s": 10.0,
        }
        return Ticket(**(fields | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def hand_over(p: Any, d: Any, make_hold: Any, layout: PageLayout) -> HandOver:
    return HandOver(p, d, make_hold(2, 3, 4), layout)


@pytest.fixture
def filling(p: Any, d: Any, make_hold: Any, layout: PageLayout) -> HandOver:
    """The same, before the first token is computed."""
    return HandOver(p, d, make_hold(2, 3, 4), layout, sealed=0)
