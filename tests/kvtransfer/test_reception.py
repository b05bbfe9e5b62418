"""Receptions over the local transport, one fault at a time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.lease import LeaseOutcome
from splitserve.kvtransfer.notice import NoticeKind
from splitserve.kvtransfer.reception import Moved, ReceptionState
from splitserve.kvtransfer.ticket import Ticket


def test_pages_arrive_and_the_sender_hears_of_it(hand_over: Any) -> None:
    reception = hand_over.finish(hand_over.receive())
    assert reception.state is ReceptionState.COMPLETE
    for remote, local in ((2, 7), (3, 0), (4, 1)):
        assert (hand_over.d.data[local] == hand_over.p.data[remote]).all()
    assert not hand_over.d.data[2:7].any()
    assert reception.moved == Moved(pages=3, reads=1, seconds=1.0, tail_s=1.0)
    assert reception.bytes == 3 * hand_over.layout.page_bytes
    assert hand_over.hold.releases == 1
    assert hand_over.book.outcomes == {LeaseOutcome.FETCHED: 1}
    assert hand_over.d.transport.open_reads == 0


def test_the_fetched_notice_waits_for_verification(hand_over: Any) -> None:
    reception = hand_over.receive()
    while reception.state is ReceptionState.READING:
        assert hand_over.p.transport.notices() == []
        reception.poll(0.0)
    hand_over.finish(reception)
    assert hand_over.hold.releases == 1


def test_only_missing_pages_are_read(hand_over: Any) -> None:
    reception = hand_over.finish(hand_over.receive({1: 6}))
    assert reception.moved.pages == 1
    assert (hand_over.d.data[6] == hand_over.p.data[3]).all()
    assert not hand_over.d.data[:6].any()


def test_b009_a_full_hit_tells_the_sender_at_once(hand_over: Any) -> None:
    reception = hand_over.receive({})
    assert reception.state is ReceptionState.COMPLETE
    assert reception.settled
    assert reception.moved == Moved()
    assert hand_over.mail(reception, 0.0) == [NoticeKind.FETCHED]
    assert hand_over.hold.releases == 1


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 9])
def test_b011_b012_every_length_moves_its_pages(hand_over: Any, make_hold: Any, tokens: int, chunk: int) -> None:
    """In chunks of any size, and with no time passing: nothing waits for a deadline or for the next claim."""
    pages = list(range(-(-tokens // 4)))
    book, p, d = hand_over.book, hand_over.p, hand_over.d
    ticket = book.open(make_hold(*pages), tokens=tokens, generations=[10 + i for i in pages], now=0.0, sealed=0)
    reception = hand_over.receive({i: i for i in pages}, ticket=ticket)
    for sealed in [*range(chunk, tokens, chunk), tokens]:
        hand_over.run(reception, 0.0, polls=2)
        assert reception.state is ReceptionState.READING
        book.seal(ticket.ticket_id, sealed, 0.0)
    hand_over.finish(reception, 0.0)
    assert reception.state is ReceptionState.COMPLETE
    assert reception.moved.pages == len(pages)
    assert (d.data[: len(pages)] == p.data[: len(pages)]).all()
    assert book.outcomes == {LeaseOutcome.FETCHED: 1}


def test_b021_a_page_reused_while_it_was_read_is_torn(hand_over: Any) -> None:
    reception = hand_over.receive()
    reception.poll(0.0)
    hand_over.p.fill(4, 99)
    hand_over.finish(reception)
    assert (reception.state, reception.cause) == (ReceptionState.FAILED, "torn")
    assert hand_over.book.outcomes == {LeaseOutcome.REFUSED: 1}


def test_b021_a_page_reused_before_the_read_is_torn(hand_over: Any) -> None:
    hand_over.p.fill(2, 99)
    assert hand_over.finish(hand_over.receive()).cause == "torn"


def test_pages_not_asked_for_may_change(hand_over: Any) -> None:
    hand_over.p.fill(2, 99)
    assert hand_over.finish(hand_over.receive({1: 0, 2: 1})).state is ReceptionState.COMPLETE


def altered(ticket: Ticket, layout: PageLayout) -> dict[str, dict[str, Any]]:
    return {
        "layout": {"layout": replace(layout, model="other")},
        "incarnation": {"incarnation": 2},
        "ticket": {"ticket": msgspec.structs.replace(ticket, tokens=13, sealed=13)},
        "index": {"missing": {3: 0}},
        "below": {"missing": {-1: 0}},
    }


@pytest.mark.parametrize("change", ["layout", "incarnation", "ticket", "index", "below"])
def test_b034_a_ticket_that_does_not_fit_starts_nothing(hand_over: Any, change: str) -> None:
    reception = hand_over.receive(**altered(hand_over.ticket, hand_over.layout)[change])
    assert reception.state is ReceptionState.FAILED
    assert reception.cause == (change if change in ("layout", "incarnation") else "ticket")
    assert reception.settled
    assert hand_over.d.transport.open_reads == 0
    assert not hand_over.d.data.any()


def test_a_page_count_that_does_not_fit_the_tokens(hand_over: Any, make_ticket: Callable[..., Ticket]) -> None:
    reception = hand_over.receive(ticket=make_ticket(tokens=9, sealed=0))
    assert (reception.state, reception.cause) == (ReceptionState.FAILED, "ticket")


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("refuse_connect", "connect"),
        ("fail_prepare", "prepare"),
        ("fail_post", "post"),
        ("fail_poll", "read"),
        ("raise_foreign", "transport"),
        ("drop_peer_once", "disconnect"),
        ("drop_in_read_once", "disconnect"),
        ("fail_silently", "read"),  # how B030's kind looks from here: an end without a reason is no success
    ],
)
def test_b022_b024_b030_a_fault_at_any_stage_ends_as_failed(hand_over: Any, fault: str, cause: str) -> None:
    setattr(hand_over.d.transport.faults, fault, True)
    reception = hand_over.finish(hand_over.receive())
    assert (reception.state, reception.cause) == (ReceptionState.FAILED, cause)
    assert hand_over.d.transport.open_reads == 0
    hand_over.book.expire(10.0)
    assert hand_over.hold.releases == 1


@pytest.mark.parametrize("fault", ["fail_poll", "raise_foreign", "fail_silently", "drop_in_read_once"])
def test_b022_b030_faults_while_verifying(hand_over: Any, fault: str) -> None:
    reception = hand_over.receive()
    hand_over.run(reception, 0.0, polls=1)
    hand_over.d.transport.faults.idle_polls = 1
    hand_over.run(reception, 0.0, polls=1)
    assert reception.state is ReceptionState.VERIFYING
    setattr(hand_over.d.transport.faults, fault, True)
    hand_over.finish(reception)
    assert reception.state is ReceptionState.FAILED
    assert hand_over.d.transport.open_reads == 0
    hand_over.book.expire(10.0)
    assert hand_over.hold.releases == 1


def test_b020_after_one_disconnect_the_next_ticket_works(hand_over: Any, make_hold: Any) -> None:
    hand_over.d.transport.faults.drop_peer_once = True
    assert hand_over.finish(hand_over.receive()).cause == "disconnect"
    again = hand_over.book.open(make_hold(2, 3, 4), tokens=10, generations=[12, 13, 14], now=0.0)
    assert hand_over.finish(hand_over.receive(ticket=again)).state is ReceptionState.COMPLETE


def test_a_sender_that_dies_ends_the_reading(hand_over: Any) -> None:
    reception = hand_over.receive()
    reception.poll(0.0)
    hand_over.p.transport.close()
    assert hand_over.finish(reception).cause == "disconnect"


def test_b002_a_hanging_read_times_out_and_keeps_its_pages_until_the_transport_lets_go(hand_over: Any) -> None:
    faults = hand_over.d.transport.faults
    faults.hang, faults.abandon_polls = True, 2
    reception = hand_over.receive()
    assert reception.poll(4.99) is ReceptionState.READING
    assert reception.poll(5.0) is ReceptionState.FAILED
    assert reception.cause == "timeout"
    assert hand_over.mail(reception, 5.0) == [NoticeKind.CLAIMED, NoticeKind.REFUSED]
    assert hand_over.hold.releases == 1  # the sender need not wait for the receiver's transport
    assert not reception.settled
    reception.poll(5.1)
    assert not reception.settled
    reception.poll(5.2)
    assert reception.settled
    assert reception.state is ReceptionState.FAILED


def test_the_lease_bounds_the_deadline(hand_over: Any) -> None:
    hand_over.d.transport.faults.hang = True
    reception = hand_over.receive(deadline_s=1000.0)
    assert reception.poll(9.9) is ReceptionState.READING
    assert reception.poll(10.0) is ReceptionState.FAILED


@pytest.mark.parametrize("polls", range(6))
def test_b028_abandoned_in_every_state(hand_over: Any, polls: int) -> None:
    hand_over.d.transport.faults.abandon_polls = 1
    reception = hand_over.receive()
    hand_over.run(reception, 0.0, polls)
    was_complete = reception.state is ReceptionState.COMPLETE
    reception.abandon(0.0)
    reception.abandon(0.0)
    hand_over.finish(reception)
    assert reception.state is (ReceptionState.COMPLETE if was_complete else ReceptionState.ABANDONED)
    assert hand_over.d.transport.open_reads == 0
    assert hand_over.hold.releases == 1
    assert hand_over.book.unmatched_notices == 0


def test_b023_a_lost_notice_only_costs_the_lease(hand_over: Any) -> None:
    hand_over.d.transport.faults.lose_notices = True
    assert hand_over.finish(hand_over.receive()).state is ReceptionState.COMPLETE
    assert hand_over.hold.releases == 0
    assert hand_over.book.expire(10.0) == [hand_over.ticket.ticket_id]
    assert hand_over.hold.releases == 1


def test_b023_a_doubled_notice_releases_once(hand_over: Any) -> None:
    hand_over.d.transport.faults.double_notices = True
    hand_over.finish(hand_over.receive())
    assert hand_over.hold.releases == 1
    assert hand_over.book.unmatched_notices == 1


def test_closing_the_receivers_transport_settles_its_receptions(hand_over: Any) -> None:
    reception = hand_over.receive()
    reception.poll(0.0)
    hand_over.d.transport.close()
    hand_over.finish(reception)
    assert (reception.state, reception.cause) == (ReceptionState.FAILED, "closed")
