"""Leases of the sender."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from splitserve.kvtransfer.lease import LeaseBook, LeaseOutcome
from splitserve.kvtransfer.notice import Notice, NoticeKind
from splitserve.kvtransfer.ticket import Ticket, TicketError


class Told:
    """What the book has told receivers since the last look, as (endpoint, kind, tokens)."""

    def __init__(self) -> None:
        self._told: list[tuple[bytes, NoticeKind, int]] = []

    def __call__(self, endpoint: bytes, data: bytes) -> None:
        notice = Notice.decode(data)
        self._told.append((endpoint, notice.kind, notice.tokens))

    def news(self) -> list[tuple[bytes, NoticeKind, int]]:
        news, self._told = self._told, []
        return news


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def book(p: Any, told: Told) -> Iterator[LeaseBook]:
    book = LeaseBook(p.sender(), told)
    yield book
    book.release_all()
    assert (book.open_leases, book.claimed_leases) == (0, 0)


def open_lease(book: LeaseBook, hold: Any, now: float = 0.0, lease_s: float | None = None) -> Ticket:
    tokens = 4 * len(hold.page_ids)
    generations = [10 + page for page in hold.page_ids]
    return book.open(hold, tokens=tokens, generations=generations, now=now, lease_s=lease_s)


def open_unsealed(book: LeaseBook, hold: Any, tokens: int, now: float = 0.0) -> Ticket:
    """A lease whose pages are still to be filled."""
    generations = [10 + page for page in hold.page_ids]
    return book.open(hold, tokens=tokens, generations=generations, now=now, sealed=0)


def claim(ticket: Ticket, endpoint: bytes = b"d") -> Notice:
    return Notice(NoticeKind.CLAIMED, ticket.ticket_id, endpoint=endpoint)


def test_the_ticket_says_what_the_book_was_told(book: LeaseBook, make_hold: Any, p: Any) -> None:
    ticket = book.open(make_hold(3, 5), tokens=5, generations=[13, 15], now=0.0)
    assert (ticket.page_ids, ticket.generations, ticket.tokens, ticket.sealed) == ((3, 5), (13, 15), 5, 5)
    assert (ticket.worker, ticket.incarnation, ticket.lease_s) == ("w", 1, 10.0)
    assert ticket.endpoint == p.transport.endpoint()
    assert Ticket.decode(ticket.encode()) == ticket


@pytest.mark.parametrize(
    ("kind", "outcome"), [(NoticeKind.FETCHED, LeaseOutcome.FETCHED), (NoticeKind.REFUSED, LeaseOutcome.REFUSED)]
)
def test_a_notice_ends_the_lease_once(book: LeaseBook, make_hold: Any, kind: NoticeKind, outcome: LeaseOutcome) -> None:
    hold = make_hold(1)
    notice = Notice(kind, open_lease(book, hold).ticket_id)
    book.receive(notice, now=0.0)
    book.receive(notice, now=0.0)
    assert hold.releases == 1
    assert book.outcomes == {outcome: 1}
    assert book.unmatched_notices == 1
    assert book.expire(1e9) == []
    assert hold.releases == 1


def test_b005_late_and_unknown_notices_are_counted_and_change_nothing(book: LeaseBook, make_hold: Any) -> None:
    gone, running = make_hold(1), make_hold(2)
    gone_id = open_lease(book, gone, lease_s=1.0).ticket_id
    open_lease(book, running)
    assert book.expire(1.0) == [gone_id]
    for kind in NoticeKind:
        for ticket_id in (gone_id, "never seen"):
            book.receive(Notice(kind, ticket_id, endpoint=b"d" if kind is NoticeKind.CLAIMED else b""), now=1.0)
    assert book.unmatched_notices == 2 * len(NoticeKind)
    assert (gone.releases, running.releases, book.open_leases) == (1, 0, 1)


@pytest.mark.parametrize("kind", [NoticeKind.SEALED, NoticeKind.REVOKED])
def test_b005_what_only_a_sender_says_changes_no_lease(book: LeaseBook, make_hold: Any, kind: NoticeKind) -> None:
    hold = make_hold(1)
    book.receive(Notice(kind, open_lease(book, hold).ticket_id, tokens=4), now=9.0)
    assert (hold.releases, book.open_leases, book.unmatched_notices) == (0, 1, 1)
    assert len(book.expire(10.0)) == 1


def test_b013_a_ticket_names_all_pages_before_they_are_filled(book: LeaseBook, make_hold: Any, told: Told) -> None:
    """The pages of a chunked prefill are in the ticket from the first chunk on; only ``sealed`` grows."""
    ticket = open_unsealed(book, make_hold(3, 5, 6), tokens=9)
    assert (ticket.page_ids, ticket.sealed) == ((3, 5, 6), 0)
    assert Ticket.decode(ticket.encode()) == ticket
    book.receive(claim(ticket), now=0.0)
    for sealed in (1, 4, 8, 9, 9):
        assert book.seal(ticket.ticket_id, sealed, now=0.0) == msgspec.structs.replace(ticket, sealed=sealed)
    assert told.news() == [(b"d", NoticeKind.SEALED, sealed) for sealed in (0, 1, 4, 8, 9, 9)]


@pytest.mark.parametrize("tokens", [-1, 3, 10])
def test_a_seal_neither_goes_back_nor_beyond_the_end(book: LeaseBook, make_hold: Any, tokens: int) -> None:
    ticket = open_unsealed(book, make_hold(3, 5, 6), tokens=9)
    book.seal(ticket.ticket_id, 4, now=0.0)
    with pytest.raises(AssertionError, match=f"{tokens} is outside"):
        book.seal(ticket.ticket_id, tokens, now=0.0)


def test_seals_before_the_claim_are_told_with_it(book: LeaseBook, make_hold: Any, told: Told) -> None:
    ticket = open_unsealed(book, make_hold(3, 5), tokens=8)
    book.seal(ticket.ticket_id, 6, now=0.0)
    assert told.news() == []
    assert book.claimed_leases == 0
    book.receive(claim(ticket), now=0.0)
    assert told.news() == [(b"d", NoticeKind.SEALED, 6)]
    assert book.claimed_leases == 1


@pytest.mark.parametrize("outcome", [None, *LeaseOutcome])
def test_b007_a_seal_after_the_end_changes_nothing(
    book: LeaseBook, make_hold: Any, told: Told, outcome: LeaseOutcome | None
) -> None:
    hold = make_hold(3, 5)
    ticket = open_unsealed(book, hold, tokens=8)
    book.receive(claim(ticket), now=0.0)
    if outcome is None:
        assert book.expire(10.0) == [ticket.ticket_id]
    else:
        book.release(ticket.ticket_id, outcome)
    told.news()
    assert book.seal(ticket.ticket_id, 8, now=10.0) is None
    assert told.news() == []
    assert (hold.releases, book.open_leases) == (1, 0)


@pytest.mark.parametrize("outcome", list(LeaseOutcome))
def test_b025_a_receiver_hears_of_every_end_that_it_did_not_cause(
    book: LeaseBook, make_hold: Any, told: Told, outcome: LeaseOutcome
) -> None:
    ticket = open_lease(book, make_hold(1))
    book.receive(claim(ticket), now=0.0)
    told.news()
    book.release(ticket.ticket_id, outcome)
    ended_here = outcome not in (LeaseOutcome.FETCHED, LeaseOutcome.REFUSED)
    assert told.news() == [(b"d", NoticeKind.REVOKED, 0)] * ended_here


def test_b025_a_claim_that_comes_too_late_is_answered(book: LeaseBook, make_hold: Any, told: Told) -> None:
    ticket = open_lease(book, make_hold(1))
    assert book.expire(10.0) == [ticket.ticket_id]
    assert told.news() == []
    book.receive(claim(ticket), now=10.0)
    assert told.news() == [(b"d", NoticeKind.REVOKED, 0)]
    assert book.open_leases == 0


def test_the_newest_claim_counts_and_the_one_before_is_told(book: LeaseBook, make_hold: Any, told: Told) -> None:
    ticket = open_unsealed(book, make_hold(1), tokens=4)
    book.receive(claim(ticket, b"dead"), now=0.0)
    told.news()
    book.receive(claim(ticket, b"d"), now=1.0)
    assert told.news() == [(b"dead", NoticeKind.REVOKED, 0), (b"d", NoticeKind.SEALED, 0)]
    book.seal(ticket.ticket_id, 4, now=1.0)
    assert told.news() == [(b"d", NoticeKind.SEALED, 4)]


def test_b021_claims_keep_a_lease_for_as_long_as_they_come(book: LeaseBook, make_hold: Any) -> None:
    hold = make_hold(1)
    ticket = open_lease(book, hold)
    for now in (9.0, 18.0, 27.0):
        book.receive(claim(ticket), now=now)
        assert book.expire(now + 9.99) == []
    assert book.expire(37.0) == [ticket.ticket_id]
    assert hold.releases == 1


def test_b021_a_lease_does_not_run_out_while_its_pages_are_filled(book: LeaseBook, make_hold: Any) -> None:
    ticket = open_unsealed(book, make_hold(1, 2), tokens=8)
    for now, sealed in ((9.0, 2), (18.0, 4), (27.0, 8)):
        assert book.expire(now) == []
        book.seal(ticket.ticket_id, sealed, now=now)
    assert book.expire(36.9) == []
    assert book.expire(37.0) == [ticket.ticket_id]


def test_b021_renewed_leases_expire_in_the_order_of_their_new_deadlines(book: LeaseBook, make_hold: Any) -> None:
    tickets = [open_lease(book, make_hold(page), lease_s=1.0 + page) for page in range(3)]
    book.receive(claim(tickets[0]), now=0.9)
    book.receive(claim(tickets[0]), now=1.8)
    assert book.expire(100.0) == [tickets[1].ticket_id, tickets[0].ticket_id, tickets[2].ticket_id]


def test_b021_leases_expire_at_their_deadline_in_order(book: LeaseBook, make_hold: Any) -> None:
    holds = [make_hold(page) for page in range(3)]
    ids = [
        open_lease(book, hold, now=5.0, lease_s=lease_s).ticket_id
        for hold, lease_s in zip(holds, (3.0, 1.0, 2.0), strict=True)
    ]
    assert book.expire(5.999) == []
    assert book.expire(7.0) == [ids[1], ids[2]]
    assert [hold.releases for hold in holds] == [0, 1, 1]
    assert book.expire(8.0) == [ids[0]]
    assert book.outcomes[LeaseOutcome.EXPIRED] == 3


@pytest.mark.parametrize("first", list(LeaseOutcome))
@pytest.mark.parametrize("second", list(LeaseOutcome))
def test_b007_whatever_comes_second_changes_nothing(
    book: LeaseBook, make_hold: Any, first: LeaseOutcome, second: LeaseOutcome
) -> None:
    hold = make_hold(1)
    ticket_id = open_lease(book, hold).ticket_id
    assert book.release(ticket_id, first) is True
    assert book.release(ticket_id, second) is False
    assert hold.releases == 1
    assert book.outcomes == {first: 1}


def test_b015_an_id_in_use_is_refused_and_the_first_lease_untouched(p: Any, make_hold: Any) -> None:
    book = LeaseBook(p.sender(), new_id=lambda: "same")
    first, second = make_hold(1), make_hold(2)
    open_lease(book, first)
    with pytest.raises(TicketError, match="in use"):
        open_lease(book, second)
    assert (first.releases, second.releases) == (0, 1)
    book.release("same", LeaseOutcome.ABORTED)
    assert open_lease(book, make_hold(3)).ticket_id == "same"


@pytest.mark.parametrize(
    "arguments",
    [
        {"tokens": 4, "generations": [11, 12]},  # one page too many
        {"tokens": 9, "generations": [11, 12]},  # one too few
        {"tokens": 8, "generations": [11]},
        {"tokens": -1, "generations": [11, 12]},
        {"tokens": 8, "generations": [11, 12], "lease_s": 0.0},
        {"tokens": 8, "generations": [11, 12], "sealed": -1},
        {"tokens": 8, "generations": [11, 12], "sealed": 9},
    ],
)
def test_a_refused_lease_has_released_its_pages(book: LeaseBook, make_hold: Any, arguments: dict[str, Any]) -> None:
    hold = make_hold(1, 2)
    with pytest.raises(TicketError):
        book.open(hold, now=0.0, **arguments)
    assert hold.releases == 1
    assert book.open_leases == 0


def test_b008_a_lease_of_no_page(book: LeaseBook, make_hold: Any) -> None:
    hold = make_hold()
    ticket = book.open(hold, tokens=0, generations=[], now=0.0)
    assert book.release(ticket.ticket_id, LeaseOutcome.ABORTED)
    assert hold.releases == 1


def test_shutdown_releases_all(p: Any, make_hold: Any) -> None:
    book = LeaseBook(replace(p.sender(), lease_s=1.0))
    holds = [make_hold(page) for page in range(3)]
    for hold in holds:
        open_lease(book, hold)
    book.release_all()
    book.release_all()
    assert book.expire(1e9) == []
    assert [hold.releases for hold in holds] == [1, 1, 1]
    assert book.outcomes == {LeaseOutcome.SHUTDOWN: 3}
