"""Leases and receptions under random operations and faults, on two pools of a few pages.

The sender's pages are free or held for exactly one ticket, by its lease, by the prefill that fills them, or by both; a
free one may be rewritten at any time. The receiver's pages are free or the target of exactly one reception; a free one
carries a mark that a late write would destroy. ``SPLITSERVE_MACHINE_STEPS`` says how many steps to take in all, about.
"""

import contextlib
import os
from collections import Counter
from dataclasses import dataclass, fields

import numpy as np
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.lease import LeaseBook, LeaseOutcome, Sender
from splitserve.kvtransfer.local_transport import Faults, LocalNetwork, LocalTransport
from splitserve.kvtransfer.notice import Notice, NoticeKind
from splitserve.kvtransfer.reception import Reception, ReceptionState
from splitserve.kvtransfer.ticket import Ticket
from splitserve.kvtransfer.transport import Peer, PoolMemory, TransferError

LAYOUT = PageLayout(model="tiny", layers=1, kv_heads=1, page_tokens=2, head_dim=1, dtype="float32")
STEPS = int(os.environ.get("SPLITSERVE_MACHINE_STEPS", "5000"))
STEPS_PER_RUN = 50
PAGES = 5
MARK = 255  # of the receiver's free pages
UNWRITTEN = 254  # in a page's new life
LAST_WORDS = (NoticeKind.FETCHED, NoticeKind.REFUSED)
ENDS = (ReceptionState.COMPLETE, ReceptionState.FAILED, ReceptionState.ABANDONED)
NO_FAULTS = Faults()
SWITCHES = [field.name for field in fields(Faults) if field.type is bool]
COUNTS = {"abandon_polls": 3, "delay_notices": 4, "idle_polls": 3, "max_open_reads": 1}


def content(page: int, generation: int, slot: int) -> int:
    """The bytes of one token."""
    return (page * 41 + generation * 7 + slot * 3) % UNWRITTEN


class Pool:
    """Pages that are free or owned once; ``data`` [PAGES, page_bytes] and, by token, ``tokens`` [PAGES, 2, page_tokens,
    4].
    """

    def __init__(self) -> None:
        self.data = np.full((PAGES, LAYOUT.page_bytes), MARK, np.uint8)
        self.tokens = self.data.reshape(PAGES, 2, LAYOUT.page_tokens, 4)
        self.memory = PoolMemory(self.data.ctypes.data, LAYOUT.page_bytes, PAGES, self.data)
        self.free = list(range(PAGES))

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, pages: list[int]) -> None:
        assert not set(pages) & set(self.free), "freed twice"
        self.free += pages


class Held:
    """Pages of the sender that several may hold; the last one gives them back."""

    def __init__(self, pool: Pool, page_ids: list[int]) -> None:
        self.pool, self.page_ids, self.holders = pool, page_ids, 0


class Hold:
    """One holder of pages. Counts its releases."""

    def __init__(self, held: Held) -> None:
        self.held, self.page_ids, self.releases = held, held.page_ids, 0
        held.holders += 1

    def release(self) -> None:
        self.releases += 1
        self.held.holders -= 1
        if not self.held.holders:
            self.held.pool.give_back(self.held.page_ids)


@dataclass(eq=False)
class Prefill:
    """Fills the pages of a ticket token by token."""

    ticket: Ticket
    hold: Hold
    filled: int = 0


class HeardTransport(LocalTransport):
    """Counts what was to be sent, by ticket and kind."""

    def __init__(self, name: str, pool: Pool, network: LocalNetwork, faults: Faults) -> None:
        super().__init__(name, pool.memory, network, faults)
        self.said: Counter[tuple[str, NoticeKind]] = Counter()

    def notify(self, peer: Peer, notice: bytes) -> None:
        said = Notice.decode(notice)
        self.said[said.ticket_id, said.kind] += 1
        super().notify(peer, notice)


class TransferMachine(RuleBasedStateMachine):
    """A prefill worker ``p`` and a decode worker ``d``, both restarted now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.network = LocalNetwork()
        self.faults = Faults(abandon_polls=3)
        self.incarnation = 0
        self.tickets: list[Ticket] = []
        self.start_p()
        self.start_d()

    def start_p(self) -> None:
        self.incarnation += 1
        self.issued_since_start = 0
        self.p = Pool()
        self.p_transport = transport = HeardTransport("p", self.p, self.network, self.faults)

        def tell(endpoint: bytes, notice: bytes) -> None:
            with contextlib.suppress(TransferError):
                transport.notify(transport.connect(endpoint), notice)

        self.book = LeaseBook(Sender("p", self.incarnation, transport.endpoint(), LAYOUT, 10.0), tell)
        self.generation = [0] * PAGES
        self.leased: list[Hold] = []
        self.prefills: list[Prefill] = []

    def start_d(self) -> None:
        self.d = Pool()
        self.d_transport = HeardTransport("d", self.d, self.network, self.faults)
        self.receptions: dict[Reception, dict[int, int]] = {}  # with their targets, until settled
        self.ends: dict[Reception, ReceptionState] = {}

    def renew(self, page: int) -> None:
        """A new life for a page of ``p``."""
        self.generation[page] += 1
        self.p_transport.set_generation(page, self.generation[page])
        self.p.data[page] = UNWRITTEN

    def draw_ticket(self, data: st.DataObject) -> Ticket:
        """Mostly a recent one."""
        return data.draw(st.sampled_from(self.tickets[-2:] * 4 + self.tickets))

    @precondition(lambda self: self.p.free)
    @rule(
        count=st.integers(1, 4),
        odd=st.booleans(),
        lease_s=st.sampled_from([1.0, 5.0]),
        chunked=st.booleans(),
        wanted=st.sampled_from(["now", "later", "perhaps"]),
    )
    def issue(self, count: int, odd: bool, lease_s: float, chunked: bool, wanted: str) -> None:
        held = Held(self.p, self.p.take(count))
        for page in held.page_ids:
            self.renew(page)
        tokens = LAYOUT.page_tokens * len(held.page_ids) - odd
        lease = Hold(held)
        ticket = self.book.open(
            lease,
            tokens=tokens,
            generations=[self.generation[page] for page in held.page_ids],
            now=self.now,
            lease_s=lease_s,
            sealed=0,
        )
        self.leased.append(lease)
        self.issued_since_start += 1
        self.tickets.append(Ticket.decode(ticket.encode()))
        self.prefills.append(Prefill(ticket, Hold(held)))
        if not chunked:
            self.tickets[-1] = self.fill(self.prefills[-1], tokens) or ticket
        if wanted != "perhaps":
            reception = self.expect(self.tickets[-1], deadline_s=4.0)
            if wanted == "now":
                self.fetch(reception, set(range(len(ticket.page_ids))))

    def fill(self, prefill: Prefill, tokens: int) -> Ticket | None:
        """Compute the next tokens and tell; the prefill ends with the last one or when nobody wants it any more."""
        ticket, first = prefill.ticket, prefill.filled
        prefill.filled = min(first + tokens, ticket.tokens)
        for position in range(first, prefill.filled):
            index, slot = divmod(position, LAYOUT.page_tokens)
            page = ticket.page_ids[index]
            self.p.tokens[page, :, slot] = content(page, ticket.generations[index], slot)
        sealed = self.book.seal(ticket.ticket_id, prefill.filled, self.now)
        if sealed is None or prefill.filled == ticket.tokens:
            self.prefills.remove(prefill)
            prefill.hold.release()
        return sealed

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), deadline_s=st.sampled_from([1.0, 4.0]))
    def expect_again(self, data: st.DataObject, deadline_s: float) -> None:
        """Also tickets that were used, have expired, or are of an incarnation that is gone."""
        self.expect(self.draw_ticket(data), deadline_s)

    def expect(self, ticket: Ticket, deadline_s: float) -> Reception:
        reception = Reception(ticket, transport=self.d_transport, layout=LAYOUT, now=self.now, deadline_s=deadline_s)
        self.receptions[reception] = {}
        return reception

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def fetch_missing(self, data: st.DataObject) -> None:
        reception = data.draw(st.sampled_from(self.waiting()))
        pages = range(len(reception.ticket.page_ids))
        self.fetch(
            reception, data.draw(st.sets(st.sampled_from(pages), min_size=data.draw(st.integers(0, len(pages)))))
        )

    def waiting(self) -> list[Reception]:
        return [reception for reception in self.receptions if reception.state is ReceptionState.WAITING]

    def fetch(self, reception: Reception, missing: set[int]) -> None:
        if len(missing) <= len(self.d.free):
            targets = dict(zip(sorted(missing), self.d.take(len(missing)), strict=True))
            self.receptions[reception] = targets
            reception.fetch(targets, self.now)

    @precondition(lambda self: self.receptions)
    @rule(data=st.data(), polls=st.integers(1, 4))
    def poll(self, data: st.DataObject, polls: int) -> None:
        reception = data.draw(st.sampled_from(list(self.receptions)))
        for _ in range(polls):
            if reception in self.receptions:
                self.step(reception)

    @rule(rounds=st.integers(1, 8), tokens=st.integers(0, 3))
    def go_on(self, rounds: int, tokens: int) -> None:
        """What both workers do all the time."""
        for prefill in list(self.prefills):
            self.fill(prefill, tokens)
        for _ in range(rounds):
            self.hear_at_p()
            self.hear_at_d()
            for reception in list(self.receptions):
                self.step(reception)
        for reception in self.ends.keys() - self.receptions.keys():
            reception.poll(self.now)  # must not move anything any more

    @precondition(lambda self: len(self.receptions) >= 2)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        reception = data.draw(st.sampled_from(list(self.receptions)))
        reception.abandon(self.now)
        assert reception.final

    def step(self, reception: Reception) -> None:
        """Poll; once settled, check what is claimed and give the target pages back."""
        if reception.poll(self.now) in ENDS:
            self.ends.setdefault(reception, reception.state)
        if not reception.settled:
            return
        event(f"{reception.state.value} {reception.cause}")
        targets = self.receptions.pop(reception)
        if reception.state is ReceptionState.COMPLETE:
            self.check_content(reception.ticket, targets)
        freed = list(targets.values())
        self.d.data[freed] = MARK
        self.d.give_back(freed)

    def check_content(self, ticket: Ticket, targets: dict[int, int]) -> None:
        for index, local in targets.items():
            for slot in range(min(LAYOUT.page_tokens, ticket.tokens - index * LAYOUT.page_tokens)):
                promised = content(ticket.page_ids[index], ticket.generations[index], slot)
                assert (self.d.tokens[local, :, slot] == promised).all()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), preempt=st.booleans(), reuse=st.booleans())
    def abort_at_p(self, data: st.DataObject, preempt: bool, reuse: bool) -> None:
        ticket = self.draw_ticket(data)
        self.book.release(ticket.ticket_id, LeaseOutcome.ABORTED)
        for prefill in list(self.prefills):
            if preempt and prefill.ticket.ticket_id == ticket.ticket_id:
                self.prefills.remove(prefill)
                prefill.hold.release()
        for page in self.p.free if reuse else ():
            self.renew(page)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), kind=st.sampled_from([NoticeKind.SEALED, NoticeKind.REVOKED]), known=st.booleans())
    def strange_notice(self, data: st.DataObject, kind: NoticeKind, known: bool) -> None:
        ticket_id = self.draw_ticket(data).ticket_id if known else "never seen"
        open_before = self.book.open_leases
        self.book.receive(Notice(kind, ticket_id, tokens=1), self.now)
        assert self.book.open_leases == open_before

    @rule()
    def hear_at_p(self) -> None:
        for data in self.p_transport.notices():
            self.book.receive(Notice.decode(data), self.now)

    @rule()
    def hear_at_d(self) -> None:
        """Also what is about receptions that have ended."""
        for notice in map(Notice.decode, self.d_transport.notices()):
            for reception in {**self.receptions, **self.ends}:
                if reception.ticket.ticket_id == notice.ticket_id:
                    if notice.kind is NoticeKind.SEALED:
                        reception.sealed(notice.tokens, self.now)
                    else:
                        reception.revoked(self.now)

    @rule(seconds=st.sampled_from([0.3, 2.0]), expire=st.booleans())
    def wait(self, seconds: float, expire: bool) -> None:
        self.now += seconds
        if expire:
            self.book.expire(self.now)

    @rule(switch=st.sampled_from(SWITCHES + [""] * len(SWITCHES)))
    def set_fault(self, switch: str) -> None:
        for name in SWITCHES:
            setattr(self.faults, name, name == switch)

    @rule(count=st.sampled_from(sorted(COUNTS)), fault=st.booleans())
    def set_fault_count(self, count: str, fault: bool) -> None:
        setattr(self.faults, count, COUNTS[count] if fault else getattr(NO_FAULTS, count))

    @precondition(lambda self: self.issued_since_start >= 3)
    @rule(killed=st.booleans())
    def restart_p(self, killed: bool) -> None:
        if not killed:
            self.book.release_all()
            for prefill in self.prefills:
                prefill.hold.release()
            assert sorted(self.p.free) == list(range(PAGES))
        self.p_transport.close()
        self.start_p()

    @precondition(lambda self: len(self.ends) >= 3)
    @rule(killed=st.booleans())
    def restart_d(self, killed: bool) -> None:
        if not killed:
            for reception in list(self.receptions):
                reception.abandon(self.now)
        self.d_transport.close()
        if not killed:
            for reception in list(self.receptions):
                self.step(reception)
            self.nothing_is_left_at_d()
        self.start_d()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        held = {hold.held for hold in [*self.leased, *(prefill.hold for prefill in self.prefills)] if not hold.releases}
        assert sorted([page for pages in held for page in pages.page_ids] + self.p.free) == list(range(PAGES))
        targets = [page for pages in self.receptions.values() for page in pages.values()]
        assert sorted(targets + self.d.free) == list(range(PAGES))

    @invariant()
    def each_lease_ends_once(self) -> None:
        assert all(hold.releases <= 1 for hold in self.leased)
        assert self.book.open_leases == sum(not hold.releases for hold in self.leased)
        assert self.book.outcomes.total() == sum(hold.releases for hold in self.leased)

    @invariant()
    def each_reception_ends_once(self) -> None:
        for reception in self.receptions:
            if reception.final:
                self.ends.setdefault(reception, reception.state)
        last_words: Counter[str] = Counter()
        for reception, state in self.ends.items():
            assert reception.state is state
            last_words[reception.ticket.ticket_id] += 1
        for (ticket_id, kind), times in self.d_transport.said.items():
            assert kind not in LAST_WORDS or times <= last_words[ticket_id]

    @invariant()
    def nothing_writes_to_free_pages(self) -> None:
        assert (self.d.data[self.d.free] == MARK).all()

    def nothing_is_left_at_d(self) -> None:
        assert not self.receptions
        assert self.d_transport.open_reads == 0
        assert sorted(self.d.free) == list(range(PAGES))

    def teardown(self) -> None:
        """Without faults all comes to rest, with nothing held: no time passes until the receptions have ended."""
        for field in fields(Faults):
            setattr(self.faults, field.name, getattr(NO_FAULTS, field.name))
        for reception in self.waiting():
            self.fetch(reception, set(range(len(reception.ticket.page_ids))))
        for _ in range(2):
            self.go_on(30, LAYOUT.page_tokens * PAGES)
            for reception in self.waiting():
                reception.abandon(self.now)
            self.now += 5.0  # for news that was lost while there were faults
        self.now += 5.0
        self.book.expire(self.now)
        self.nothing_is_left_at_d()
        assert self.book.open_leases == 0
        assert sorted(self.p.free) == list(range(PAGES))


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(
    max_examples=-(-STEPS // (STEPS_PER_RUN - 10)), stateful_step_count=STEPS_PER_RUN, deadline=None
)
