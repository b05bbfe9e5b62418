"""Receptions of pages that are still being filled: claims, news of what is sealed, and ends from either side."""

from typing import Any

import pytest

from splitserve.kvtransfer.lease import LeaseOutcome
from splitserve.kvtransfer.notice import NoticeKind
from splitserve.kvtransfer.reception import Moved, ReceptionState


def is_here(filling: Any) -> list[bool]:
    """Which of the ticket's three pages have arrived."""
    return [bool((filling.d.data[local] == filling.p.data[remote]).all()) for remote, local in ((2, 7), (3, 0), (4, 1))]


def seal(filling: Any, tokens: int, now: float = 0.0) -> None:
    assert filling.book.seal(filling.ticket.ticket_id, tokens, now) is not None


def test_pages_move_when_they_are_sealed_and_not_before(filling: Any) -> None:
    reception = filling.receive()
    for tokens, arrived in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (9, 2)):
        if tokens:
            seal(filling, tokens)
        filling.run(reception, 0.0)
        assert is_here(filling) == [True] * arrived + [False] * (3 - arrived)
        assert reception.state is ReceptionState.READING
        assert filling.hold.releases == 0
    seal(filling, 10, now=2.0)
    filling.mail(reception, 2.0)
    filling.finish(reception, 2.5)
    assert is_here(filling) == [True] * 3
    assert reception.moved == Moved(pages=3, pages_before_end=2, reads=3, seconds=2.5, tail_s=0.5)
    assert filling.book.outcomes == {LeaseOutcome.FETCHED: 1}


def test_what_was_sealed_while_waiting_is_read_in_one_piece(filling: Any) -> None:
    reception = filling.expect()
    for tokens in (4, 8, 10):
        seal(filling, tokens)
        filling.mail(reception, 0.0)
    reception.fetch({0: 7, 1: 0, 2: 1}, 0.0)
    assert filling.finish(reception).moved.reads == 1


def test_pages_that_are_missing_may_be_here_before_the_rest_is_computed(filling: Any) -> None:
    reception = filling.receive({0: 7, 1: 0})
    filling.run(reception, 0.0)
    seal(filling, 8)
    filling.finish(reception)
    assert reception.state is ReceptionState.COMPLETE
    assert filling.book.seal(filling.ticket.ticket_id, 10, 1.0) is None


def test_b009_a_full_hit_ends_the_lease_while_the_pages_are_filled(filling: Any) -> None:
    reception = filling.receive({})
    assert reception.state is ReceptionState.COMPLETE
    filling.finish(reception)
    assert filling.hold.releases == 1
    assert filling.book.seal(filling.ticket.ticket_id, 4, 1.0) is None


def test_b031_pages_of_an_earlier_life_are_waited_for_not_refused(filling: Any) -> None:
    """The writer is late: the generations and contents there are not the promised ones yet."""
    for page in (2, 3, 4):
        filling.p.fill(page, 1)
    reception = filling.run(filling.receive(), 0.0)
    assert reception.state is ReceptionState.READING
    for page in (2, 3, 4):
        filling.p.fill(page, 10 + page)
    seal(filling, 10)
    assert filling.finish(reception).state is ReceptionState.COMPLETE
    assert is_here(filling) == [True] * 3


@pytest.mark.parametrize("fixture", ["hand_over", "filling"])
def test_b021_a_reception_that_waits_for_pages_keeps_its_lease(request: Any, fixture: str) -> None:
    side = request.getfixturevalue(fixture)
    reception = side.expect()
    for second in range(40):  # four times the lease
        side.run(reception, float(second), polls=1)
        assert side.book.expire(float(second)) == []
    reception.fetch({0: 7, 1: 0, 2: 1}, 40.0)
    side.book.seal(side.ticket.ticket_id, 10, 40.0)
    assert side.finish(reception, 40.0).state is ReceptionState.COMPLETE


def test_b021_a_lease_that_ran_out_meanwhile_never_gives_wrong_pages(hand_over: Any) -> None:
    hand_over.d.transport.faults.lose_notices = True
    reception = hand_over.expect()
    for second in range(11):
        hand_over.run(reception, float(second), polls=1)
    assert hand_over.book.expire(11.0) == [hand_over.ticket.ticket_id]
    hand_over.p.fill(3, 99)
    reception.fetch({0: 7, 1: 0, 2: 1}, 11.0)
    assert hand_over.finish(reception, 11.0).cause == "torn"


def test_b021_the_lease_is_renewed_while_the_last_pages_are_read(hand_over: Any) -> None:
    hand_over.d.transport.faults.hang = True
    reception = hand_over.receive()
    heard = [kind for tenth in range(49) for kind in hand_over.mail(hand_over.run(reception, tenth / 10, 0), 0.0)]
    assert heard == []
    reception.poll(4.9)
    assert hand_over.mail(reception, 4.9) == [NoticeKind.CLAIMED]
    assert hand_over.book.expire(14.8) == []


def test_b002_a_living_sender_does_not_keep_a_hanging_read_alive(hand_over: Any) -> None:
    hand_over.d.transport.faults.hang = True
    reception = hand_over.receive()
    for tenth in range(50):
        assert not hand_over.run(reception, tenth / 10, polls=1).final
    reception.sealed(10, 4.95)
    assert reception.poll(5.0) is ReceptionState.FAILED
    assert reception.cause == "timeout"


def test_a_silent_sender_of_unfinished_pages_is_given_up_after_a_lease(filling: Any) -> None:
    filling.p.transport.faults.lose_notices = True
    reception = filling.receive()
    filling.run(reception, 9.99)
    assert reception.state is ReceptionState.READING
    filling.run(reception, 10.0)
    assert (reception.state, reception.cause) == (ReceptionState.FAILED, "timeout")
    assert filling.hold.releases == 1


def test_a_sender_that_answers_is_waited_for(filling: Any) -> None:
    reception = filling.receive()
    for second in range(40):
        filling.run(reception, float(second), polls=2)
        assert filling.book.expire(float(second)) == []
    seal(filling, 10, now=40.0)
    assert filling.finish(reception, 40.0).state is ReceptionState.COMPLETE


@pytest.mark.parametrize("lost", [1, 2])
def test_b023_news_that_was_lost_comes_again_with_the_next_claim(filling: Any, lost: int) -> None:
    reception = filling.receive()
    filling.run(reception, 0.0)
    filling.p.transport.faults.lose_notices = True
    seal(filling, 10)
    for renewal in range(1, lost):
        filling.run(reception, renewal * 10 / 3 + 0.01)
    assert reception.state is ReceptionState.READING
    filling.p.transport.faults.lose_notices = False
    assert filling.finish(reception, lost * 10 / 3 + 0.02).state is ReceptionState.COMPLETE


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize(
    ("fault", "value"), [("double_notices", True), ("overtake_notices", True), ("delay_notices", 3), ("idle_polls", 2)]
)
def test_b023_doubled_late_and_reordered_news(filling: Any, side: str, fault: str, value: int) -> None:
    setattr(getattr(filling, side).transport.faults, fault, value)
    reception = filling.receive()
    for tokens in (4, 8, 10):
        filling.run(reception, 0.0, polls=2)
        seal(filling, tokens)
        seal(filling, tokens)
    filling.finish(reception, 0.0)
    assert reception.state is ReceptionState.COMPLETE
    assert (reception.moved.pages, is_here(filling), filling.hold.releases) == (3, [True] * 3, 1)


def test_older_news_takes_nothing_back(filling: Any) -> None:
    reception = filling.receive()
    for tokens in (8, 4, 0):
        reception.sealed(tokens, 0.0)
    for _ in range(4):
        reception.poll(0.0)
        reception.sealed(4, 0.0)
    assert is_here(filling) == [True, True, False]
    assert reception.moved.reads == 1


@pytest.mark.parametrize("polls", range(7))
def test_b007_the_sender_gives_up_at_every_step_around_the_last_seal(filling: Any, polls: int) -> None:
    reception = filling.receive()
    seal(filling, 8)
    filling.run(reception, 0.0)
    filling.d.transport.faults.idle_polls = 1
    seal(filling, 10)
    filling.run(reception, 0.0, polls)
    was_complete = reception.state is ReceptionState.COMPLETE
    assert filling.book.release(filling.ticket.ticket_id, LeaseOutcome.ABORTED) is not was_complete
    filling.p.fill(3, 99)
    filling.finish(reception, 0.0)
    assert filling.hold.releases == 1
    if was_complete:
        assert reception.state is ReceptionState.COMPLETE
    else:
        assert (reception.state, reception.cause, reception.notice_sent) == (ReceptionState.FAILED, "revoked", False)
    assert filling.book.unmatched_notices == 0


def test_b007_the_steps_above_end_both_ways(filling: Any) -> None:
    """With as many polls as there are the reception completes, so that the table covers both sides of the race."""
    reception = filling.receive()
    seal(filling, 8)
    filling.run(reception, 0.0)
    filling.d.transport.faults.idle_polls = 1
    seal(filling, 10)
    assert filling.run(reception, 0.0, polls=1).state is ReceptionState.READING
    assert filling.run(reception, 0.0, polls=5).state is ReceptionState.COMPLETE


def test_b008_given_up_before_any_page_was_taken(filling: Any) -> None:
    reception = filling.expect()
    reception.abandon(0.0)
    assert reception.settled
    reception.fetch({0: 7}, 0.0)
    assert filling.mail(reception, 0.0) == [NoticeKind.CLAIMED, NoticeKind.REFUSED]
    assert filling.hold.releases == 1
    assert filling.d.transport.open_reads == 0


def test_b002_b005_what_comes_after_the_end_changes_nothing(filling: Any) -> None:
    faults = filling.d.transport.faults
    faults.hang, faults.abandon_polls = True, 2
    reception = filling.receive()
    reception.sealed(8, 0.0)
    reception.poll(0.0)
    reception.abandon(0.0)
    filling.p.transport.close()
    reception.sealed(10, 0.0)
    reception.revoked(0.0)
    polls = 0
    while not reception.settled:
        reception.poll(0.0)
        polls += 1
        assert polls <= faults.abandon_polls
    assert (reception.state, reception.cause) == (ReceptionState.ABANDONED, None)
    assert filling.d.transport.open_reads == 0


def test_b024_a_refused_handshake_fails_the_reception_before_it_reads(filling: Any) -> None:
    filling.d.transport.faults.refuse_connect = True
    reception = filling.expect()
    assert (reception.state, reception.cause) == (ReceptionState.FAILED, "connect")
    reception.fetch({0: 7, 1: 0, 2: 1}, 0.0)
    assert reception.settled
    assert not filling.d.data.any()
    filling.d.transport.faults.refuse_connect = False
    seal(filling, 10)
    assert filling.finish(filling.receive()).state is ReceptionState.COMPLETE


@pytest.mark.parametrize("fixture", ["hand_over", "filling"])
def test_a_dead_sender_is_noticed_by_the_next_claim(request: Any, fixture: str) -> None:
    side = request.getfixturevalue(fixture)
    reception = side.expect()
    reception.poll(0.0)
    side.p.transport.close()
    assert reception.poll(3.3) is ReceptionState.WAITING
    assert reception.poll(3.4) is ReceptionState.FAILED
    assert reception.cause == "disconnect"


def test_b022_a_claim_that_cannot_be_sent_ends_the_reception(filling: Any) -> None:
    filling.d.transport.faults.fail_notify = True
    reception = filling.receive()
    assert (reception.state, reception.cause) == (ReceptionState.FAILED, "notify")
    assert reception.settled


def test_b022_a_last_notice_that_cannot_be_sent_only_costs_the_lease(hand_over: Any) -> None:
    hand_over.d.transport.faults.fail_notify = True
    reception = hand_over.finish(hand_over.receive())
    assert (reception.state, reception.notice_sent) == (ReceptionState.COMPLETE, False)
    assert hand_over.book.expire(10.0) == [hand_over.ticket.ticket_id]


def test_b022_more_reads_than_the_transport_takes(filling: Any) -> None:
    faults = filling.d.transport.faults
    faults.hang, faults.max_open_reads = True, 1
    reception = filling.receive()
    for tokens in (4, 8):
        reception.sealed(tokens, 0.0)
        reception.poll(0.0)
    assert (reception.state, reception.cause) == (ReceptionState.FAILED, "post")
    filling.finish(reception)
    assert filling.d.transport.open_reads == 0
    assert filling.hold.releases == 1


def test_b020_one_reception_that_fails_takes_the_connection_from_no_other(filling: Any, make_hold: Any) -> None:
    waiting = filling.receive()
    filling.mail(waiting, 0.0)
    again = filling.book.open(make_hold(5), tokens=4, generations=[15], now=0.0)
    filling.d.transport.faults.fail_post = True
    failed = filling.receive({0: 2}, ticket=again)
    assert failed.cause == "post"
    filling.d.transport.faults.fail_post = False
    seal(filling, 10)
    assert filling.finish(waiting).state is ReceptionState.COMPLETE


def test_two_receivers_of_one_ticket(filling: Any, make_side: Any) -> None:
    """A request was placed anew while its first receiver lives: the newer one gets the pages, the older one hears."""
    older = filling.expect()
    filling.mail(older, 0.0)
    first, filling.d = filling.d, make_side("d2")
    newer = filling.receive()
    filling.mail(newer, 0.0)
    filling.d, second = first, filling.d
    filling.mail(older, 0.0)
    assert (older.state, older.cause, older.notice_sent) == (ReceptionState.FAILED, "revoked", False)
    filling.d = second
    seal(filling, 10)
    assert filling.finish(newer).state is ReceptionState.COMPLETE
    assert is_here(filling) == [True] * 3
