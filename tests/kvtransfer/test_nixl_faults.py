"""Peers that die, freeze or fall silent, between processes of this machine."""

import time
from collections.abc import Callable, Iterator

import pytest
from nixl_pair.processes import PAGES, PeerProcess, Receiver, wait_for, wait_until

from splitserve.kvtransfer.reception import ReceptionState
from splitserve.kvtransfer.transport import ReadState, TransferError

pytest.importorskip("nixl")

StartPeer = Callable[..., PeerProcess]


@pytest.fixture(scope="module")
def shared_peer() -> Iterator[PeerProcess]:
    peer = PeerProcess()
    yield peer
    peer.kill()


@pytest.fixture
def peer(shared_peer: PeerProcess) -> Iterator[PeerProcess]:
    """A peer that answers; each test meets it with a transport it has not seen."""
    yield shared_peer
    shared_peer.tell("progress on")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    wait_until(lambda: receiver.transport.open_reads == 0)
    receiver.transport.close()


@pytest.fixture
def start_peer() -> Iterator[StartPeer]:
    """Peers to kill, with the arguments of ``PeerProcess``."""
    peers: list[PeerProcess] = []

    def start(*arguments: str) -> PeerProcess:
        peers.append(PeerProcess(*arguments))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


def test_b020_a_killed_peer_fails_within_the_deadline_and_its_successor_works(
    start_peer: StartPeer, peer: PeerProcess, receiver: Receiver
) -> None:
    """Both peers have one name, as a worker that starts again has."""
    mortal_peer = start_peer()
    assert receiver.finish(receiver.receive(mortal_peer.ticket((1, 2)))).state is ReceptionState.COMPLETE
    mortal_peer.kill()
    reception = receiver.finish(receiver.receive(mortal_peer.ticket((3, 4)), deadline_s=5.0))
    assert reception.state is ReceptionState.FAILED
    assert reception.cause in ("disconnect", "timeout")
    reception = receiver.finish(receiver.receive(peer.ticket((5, 6)), first_page=10))
    assert reception.state is ReceptionState.COMPLETE, reception.message
    assert receiver.holds(10, 5)


def test_b002_a_silent_peer_times_out_and_pages_stay_taken_until_it_is_heard_of(
    peer: PeerProcess, receiver: Receiver
) -> None:
    peer.tell("progress off")
    reception = receiver.receive(peer.ticket((1, 2)), deadline_s=0.2)
    wait_until(lambda: reception.poll(time.monotonic()) is ReceptionState.FAILED)
    assert reception.cause == "timeout"
    assert not reception.settled
    assert receiver.transport.open_reads == 1
    peer.tell("progress on")
    receiver.finish(reception)
    assert reception.state is ReceptionState.FAILED
    assert receiver.finish(receiver.receive(peer.ticket((3, 4)), first_page=8)).state is ReceptionState.COMPLETE


def test_b020_of_two_peers_over_tcp_one_freezes_and_dies_in_mid_read_and_comes_back(
    start_peer: StartPeer, peer: PeerProcess, receiver: Receiver
) -> None:
    mortal_peer = start_peer("p", "tcp")
    assert receiver.finish(receiver.receive(mortal_peer.ticket((1, 2)))).state is ReceptionState.COMPLETE
    mortal_peer.freeze()
    reception = receiver.receive(mortal_peer.ticket((3, 4)), first_page=100, deadline_s=0.2)
    wait_until(lambda: reception.poll(time.monotonic()) is ReceptionState.FAILED)
    assert (reception.cause, reception.settled) == ("timeout", False)

    other = receiver.finish(receiver.receive(peer.ticket((5, 6)), first_page=10))
    assert other.state is ReceptionState.COMPLETE, other.message
    assert not reception.settled
    assert receiver.transport.open_reads == 1

    mortal_peer.kill()
    receiver.finish(reception)
    assert (reception.state, receiver.transport.open_reads) == (ReceptionState.FAILED, 0)
    receiver.data[100:102] = 77  # these pages are somebody else's now
    successor = start_peer("p", "tcp")
    for ticket, first_page in ((successor.ticket((7, 8)), 20), (peer.ticket((9,)), 30)):
        later = receiver.finish(receiver.receive(ticket, first_page))
        assert later.state is ReceptionState.COMPLETE, later.message
    assert receiver.holds(20, 7)
    assert (receiver.data[100:102] == 77).all()


def test_a_frozen_peer_over_tcp_that_comes_back_is_of_use_again(start_peer: StartPeer, receiver: Receiver) -> None:
    slow_peer = start_peer("p", "tcp")
    assert receiver.finish(receiver.receive(slow_peer.ticket((1,)))).state is ReceptionState.COMPLETE
    slow_peer.freeze()
    known = receiver.transport.connect(slow_peer.endpoint)
    pages = receiver.transport.read_pages(known, range(PAGES), range(PAGES))
    words = receiver.transport.read_generations(known, [5])
    again = receiver.transport.read_generations(known, [6])
    for read in (pages, words, again):
        assert read.abandon() is False
    assert receiver.transport.open_reads == 3
    slow_peer.thaw()
    for read in (pages, words, again):
        assert wait_for(read) is ReadState.DONE
    assert words.values() == again.values() == [1]
    assert receiver.transport.open_reads == 0
    assert all(receiver.holds(page, page) for page in range(PAGES))


def test_forgetting_a_peer_leaves_its_read_alone(peer: PeerProcess, receiver: Receiver) -> None:
    peer.tell("progress off")
    known = receiver.transport.connect(peer.endpoint)
    read = receiver.transport.read_pages(known, [1], [1])
    receiver.transport.forget(known)
    assert receiver.transport.open_reads == 1
    assert read.abandon() is False
    peer.tell("progress on")
    assert wait_for(read) is ReadState.DONE
    assert read.abandon() is True
    assert receiver.holds(1, 1)


def test_close_with_a_read_under_way(peer: PeerProcess) -> None:
    receiver = Receiver()
    peer.tell("progress off")
    known = receiver.transport.connect(peer.endpoint)
    read = receiver.transport.read_pages(known, [1], [1])
    receiver.transport.close()
    receiver.transport.close()
    assert read.poll() is ReadState.FAILED
    assert read.error is not None
    assert read.error.cause == "closed"
    assert read.abandon() is True
    with pytest.raises(TransferError, match="closed"):
        receiver.transport.connect(peer.endpoint)
    receiver.data[:] = 0
    peer.tell("progress on")
    other = Receiver()  # once it has been served, so would have been the read
    assert other.finish(other.receive(peer.ticket((2,)))).state is ReceptionState.COMPLETE
    other.transport.close()
    assert not receiver.data.any()
