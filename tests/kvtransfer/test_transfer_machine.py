"""Leases and receptions under random operations and faults, on two pools of a few pages.

The sender's pages are free or held by exactly one lease; a free one may be rewritten at any time. The receiver's pages
are free or the target of exactly one reception; a free one carries a mark that a late write would destroy.
"""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.lease import LeaseBook, LeaseOutcome, Sender
from splitserve.kvtransfer.local_transport import Faults, LocalNetwork, LocalTransport
from splitserve.kvtransfer.reception import Reception, ReceptionState
from splitserve.kvtransfer.ticket import Ticket
from splitserve.kvtransfer.transport import PoolMemory

LAYOUT = PageLayout(model="tiny", layers=1, kv_heads=1, page_tokens=2, head_dim=1, dtype="float32")
PAGES = 5
MARK = 255
SWITCHES = ["refuse_connect", "fail_prepare", "fail_post", "fail_poll", "raise_foreign", "hang", "lose_notices"]
SWITCHES += ["double_notices", "drop_peer_once"]


def content(page: int, generation: int) -> Any:
    return np.full(LAYOUT.page_bytes, (page * 41 + generation * 7) % MARK, np.uint8)


class Pool:
    """Pages that are free or owned once."""

    def __init__(self) -> None:
        self.data = np.full((PAGES, LAYOUT.page_bytes), MARK, np.uint8)
        self.memory = PoolMemory(self.data.ctypes.data, LAYOUT.page_bytes, PAGES, self.data)
        self.free = list(range(PAGES))

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, pages: list[int]) -> None:
        assert not set(pages) & set(self.free), "freed twice"
        self.free += pages


class PoolHold:
    """Counts its releases, and takes the one that is due."""

    def __init__(self, pool: Pool, page_ids: list[int]) -> None:
        self.pool, self.page_ids, self.releases = pool, page_ids, 0

    def release(self) -> None:
        self.releases += 1
        self.pool.give_back(self.page_ids)


class TransferMachine(RuleBasedStateMachine):
    """A prefill worker ``p``, restarted now and then, and a decode worker ``d``."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.network = LocalNetwork()
        self.faults = Faults(abandon_polls=1)
        self.d = Pool()
        self.d_transport = LocalTransport("d", self.d.memory, self.network, self.faults)
        self.holds: list[PoolHold] = []
        self.tickets: list[Ticket] = []
        self.receptions: dict[Reception, dict[int, int]] = {}
        self.incarnation = 0
        self.start_p()

    def start_p(self) -> None:
        self.incarnation += 1
        self.issued_since_start = 0
        self.p = Pool()
        self.p_transport = LocalTransport("p", self.p.memory, self.network)
        self.book = LeaseBook(Sender("p", self.incarnation, self.p_transport.endpoint(), LAYOUT, 10.0))
        self.generation = [0] * PAGES
        for page in range(PAGES):
            self.write(page)

    def write(self, page: int) -> None:
        """A new life for a page of ``p``."""
        self.generation[page] += 1
        self.p_transport.set_generation(page, self.generation[page])
        self.p.data[page] = content(page, self.generation[page])

    def draw_ticket(self, data: st.DataObject) -> Ticket:
        """Mostly a recent one."""
        return data.draw(st.sampled_from(self.tickets[-2:] * 4 + self.tickets))

    @precondition(lambda self: self.p.free)
    @rule(count=st.integers(1, 3), odd=st.booleans(), lease_s=st.sampled_from([1.0, 5.0]))
    def issue(self, count: int, odd: bool, lease_s: float) -> None:
        pages = self.p.take(count)
        hold = PoolHold(self.p, pages)
        self.holds.append(hold)
        generations = [self.generation[page] for page in pages]
        tokens = 2 * len(pages) - odd
        ticket = self.book.open(hold, tokens=tokens, generations=generations, now=self.now, lease_s=lease_s)
        self.issued_since_start += 1
        self.tickets.append(Ticket.decode(ticket.encode()))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), deadline_s=st.sampled_from([1.0, 4.0]))
    def receive(self, data: st.DataObject, deadline_s: float) -> None:
        """Also of tickets that were used, have expired, or are of an incarnation that is gone."""
        ticket = self.draw_ticket(data)
        missing = data.draw(
            st.sets(st.sampled_from(range(len(ticket.page_ids))), min_size=data.draw(st.integers(0, 1)))
        )
        targets = dict(zip(sorted(missing), self.d.take(len(missing)), strict=False))
        reception = Reception(
            ticket,
            targets,
            transport=self.d_transport,
            layout=LAYOUT,
            now=self.now,
            deadline_s=deadline_s,
        )
        self.receptions[reception] = targets

    @precondition(lambda self: self.receptions)
    @rule(data=st.data(), polls=st.integers(1, 4))
    def poll(self, data: st.DataObject, polls: int) -> None:
        reception = data.draw(st.sampled_from(list(self.receptions)))
        for _ in range(polls):
            if reception in self.receptions:
                self.step(reception)

    @precondition(lambda self: self.receptions)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        reception = data.draw(st.sampled_from(list(self.receptions)))
        reception.abandon(self.now)
        assert reception.final

    def step(self, reception: Reception) -> None:
        """Poll; once settled, check what is claimed and give the target pages back."""
        reception.poll(self.now)
        if not reception.settled:
            return
        targets = self.receptions.pop(reception)
        if reception.state is ReceptionState.COMPLETE:
            ticket = reception.ticket
            for index, local in targets.items():
                assert (self.d.data[local] == content(ticket.page_ids[index], ticket.generations[index])).all()
        freed = list(targets.values())
        self.d.data[freed] = MARK
        self.d.give_back(freed)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), reuse=st.booleans())
    def abort_at_p(self, data: st.DataObject, reuse: bool) -> None:
        self.book.release(self.draw_ticket(data).ticket_id, LeaseOutcome.ABORTED)
        if reuse:
            self.reuse_free_pages()

    @rule()
    def reuse_free_pages(self) -> None:
        for page in self.p.free:
            self.write(page)

    @rule(data=st.sampled_from([b"", b"junk", b"\x92\xa7fetched\xa4none"]))
    def strange_notice(self, data: bytes) -> None:
        self.book.receive([data])

    @rule()
    def hear(self) -> None:
        self.book.receive(self.p_transport.notices())

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.book.expire(self.now)

    @rule(switch=st.sampled_from(SWITCHES + [""] * len(SWITCHES)))
    def set_fault(self, switch: str) -> None:
        self.clear_faults()
        if switch:
            setattr(self.faults, switch, True)

    def clear_faults(self) -> None:
        for switch in SWITCHES:
            setattr(self.faults, switch, False)

    @rule(polls=st.integers(0, 3))
    def set_abandon_polls(self, polls: int) -> None:
        self.faults.abandon_polls = polls

    @precondition(lambda self: self.issued_since_start >= 3)
    @rule()
    def restart_p(self) -> None:
        self.p_transport.close()
        self.book.release_all()
        assert sorted(self.p.free) == list(range(PAGES))
        self.start_p()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        held = [page for hold in self.holds if hold.pool is self.p and not hold.releases for page in hold.page_ids]
        assert sorted(held + self.p.free) == list(range(PAGES))
        targets = [page for pages in self.receptions.values() for page in pages.values()]
        assert sorted(targets + self.d.free) == list(range(PAGES))

    @invariant()
    def holds_are_released_at_most_once(self) -> None:
        assert all(hold.releases <= 1 for hold in self.holds)
        assert self.book.open_leases == sum(not hold.releases for hold in self.holds)

    @invariant()
    def nothing_writes_to_free_pages(self) -> None:
        assert (self.d.data[self.d.free] == MARK).all()

    def teardown(self) -> None:
        """Without faults all comes to rest within a deadline, with nothing held."""
        self.clear_faults()
        self.now += 100.0
        for _ in range(20):
            for reception in list(self.receptions):
                self.step(reception)
        self.book.receive(self.p_transport.notices())
        self.book.expire(self.now)
        assert not self.receptions
        assert self.book.open_leases == 0
        assert self.d_transport.open_reads == 0
        assert sorted(self.p.free) == sorted(self.d.free) == list(range(PAGES))
        assert all(hold.releases == 1 for hold in self.holds)


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
