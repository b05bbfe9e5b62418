"""Leases of the sender."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from splitserve.kvtransfer.lease import LeaseBook, LeaseOutcome
from splitserve.kvtransfer.notice import MAX_NOTICE_BYTES, Notice, NoticeError, NoticeKind
from splitserve.kvtransfer.ticket import Ticket, TicketError


@pytest.fixture
def book(p: Any) -> Iterator[LeaseBook]:
    book = LeaseBook(p.sender())
    yield book
    book.release_all()
    assert book.open_leases == 0


def open_lease(book: LeaseBook, hold: Any, now: float = 0.0, lease_s: float | None = None) -> Ticket:
    tokens = 4 * len(hold.page_ids)
    generations = [10 + page for page in hold.page_ids]
    return book.open(hold, tokens=tokens, generations=generations, now=now, lease_s=lease_s)


def test_the_ticket_says_what_the_book_was_told(book: LeaseBook, make_hold: Any, p: Any) -> None:
    ticket = book.open(make_hold(3, 5), tokens=5, generations=[13, 15], now=0.0)
    assert (ticket.page_ids, ticket.generations, ticket.tokens) == ((3, 5), (13, 15), 5)
    assert (ticket.worker, ticket.incarnation, ticket.lease_s) == ("w", 1, 10.0)
    assert ticket.endpoint == p.transport.endpoint()
    assert Ticket.decode(ticket.encode()) == ticket


@pytest.mark.parametrize(
    ("kind", "outcome"), [(NoticeKind.FETCHED, LeaseOutcome.FETCHED), (NoticeKind.REFUSED, LeaseOutcome.REFUSED)]
)
def test_a_notice_ends_the_lease_once(book: LeaseBook, make_hold: Any, kind: NoticeKind, outcome: LeaseOutcome) -> None:
    hold = make_hold(1)
    notice = Notice(kind, open_lease(book, hold).ticket_id).encode()
    book.receive([notice, notice])
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
    book.receive([Notice(kind, ticket_id).encode() for kind in NoticeKind for ticket_id in (gone_id, "never seen", "")])
    assert book.unmatched_notices == 6
    assert (gone.releases, running.releases, book.open_leases) == (1, 0, 1)


def test_malformed_notices_are_counted(book: LeaseBook) -> None:
    book.receive([b"", b"\xc1", b"\x92\xa3abc\xa1t", b"\x92\xa7fetched\xa1\xff", bytes(MAX_NOTICE_BYTES + 1)])
    assert book.malformed_notices == 5
    with pytest.raises(NoticeError):
        Notice.decode(b"\x90")


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
