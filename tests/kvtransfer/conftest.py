"""Tiny pools whose bytes a test can see."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.lease import Sender
from splitserve.kvtransfer.local_transport import LocalNetwork, LocalTransport
from splitserve.kvtransfer.ticket import Ticket
from splitserve.kvtransfer.transport import PoolMemory

LAYOUT = PageLayout(model="tiny", layers=1, kv_heads=1, page_tokens=4, head_dim=2, dtype="float32")


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
            "page_ids": (3, 5),
            "generations": (1, 2),
            "lease_s": 10.0,
        }
        return Ticket(**(fields | changes))  # type: ignore[arg-type]

    return make
