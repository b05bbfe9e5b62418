"""The NIXL transport between two processes of this machine, in host memory."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue

import numpy as np
import pytest

from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.nixl_endpoint import EndpointError, NixlEndpoint
from splitserve.kvtransfer.nixl_transport import NixlTransport
from splitserve.kvtransfer.notice import Notice, NoticeKind
from splitserve.kvtransfer.reception import Reception, ReceptionState
from splitserve.kvtransfer.ticket import Ticket, new_ticket_id
from splitserve.kvtransfer.transport import PoolMemory, Read, ReadState, TransferError

pytest.importorskip("nixl")

LAYOUT = PageLayout(model="m", layers=2, kv_heads=4, page_tokens=16, head_dim=64, dtype="float32")
PAGES = 512
LIMIT_S = 20.0
POLL_S = 0.001


class PeerProcess:
    """The other worker."""

    def __init__(self, name: str = "p", tls: str | None = None) -> None:
        environment = dict(os.environ) | ({"UCX_TLS": tls} if tls else {})
        script = Path(__file__).with_name("nixl_peer.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), name, str(PAGES), str(LAYOUT.page_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.notices: Queue[bytes] = Queue()
        self._answers: Queue[str] = Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.endpoint = bytes.fromhex(self._answers.get(timeout=LIMIT_S))

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            match line.split():
                case ["@notice", data]:
                    self.notices.put(bytes.fromhex(data))
                case ["@endpoint", data]:
                    self._answers.put(data)
                case ["@done"]:
                    self._answers.put("done")

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self._answers.get(timeout=LIMIT_S) == "done"

    def notice_about(self, ticket_id: str) -> NoticeKind:
        """The first one; those about other tickets are dropped."""
        while True:
            notice = Notice.decode(self.notices.get(timeout=LIMIT_S))
            if notice.ticket_id == ticket_id:
                return notice.kind

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        self._listener.join(LIMIT_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def ticket(self, pages: tuple[int, ...], generation: int = 1) -> Ticket:
        return Ticket(
            ticket_id=new_ticket_id(),
            worker="p",
            incarnation=1,
            endpoint=self.endpoint,
            layout=LAYOUT.fingerprint,
            tokens=16 * len(pages),
            page_ids=pages,
            generations=(generation,) * len(pages),
            lease_s=60.0,
        )


class Receiver:
    """This process's pool and transport."""

    def __init__(self) -> None:
        self.data = np.zeros((PAGES, LAYOUT.page_bytes), np.uint8)
        self.transport = NixlTransport("d", PoolMemory(self.data.ctypes.data, LAYOUT.page_bytes, PAGES, self.data))

    def receive(self, ticket: Ticket, first_page: int = 0, deadline_s: float = LIMIT_S) -> Reception:
        return Reception(
            ticket,
            {index: first_page + index for index in range(len(ticket.page_ids))},
            transport=self.transport,
            layout=LAYOUT,
            now=time.monotonic(),
            deadline_s=deadline_s,
        )

    def finish(self, reception: Reception) -> Reception:
        wait_until(lambda: bool(reception.poll(time.monotonic())) and reception.settled)
        return reception

    def holds(self, page: int, remote: int, generation: int = 1) -> bool:
        return bool((self.data[page] == (remote * 13 + generation) % 256).all())


def wait_until(condition: Callable[[], bool]) -> None:
    pause, end = threading.Event(), time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "took too long"
        pause.wait(POLL_S)


def wait_for(read: Read) -> ReadState:
    wait_until(lambda: read.poll() is not ReadState.READING)
    return read.poll()


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
def mortal_peer() -> Iterator[PeerProcess]:
    """A peer to kill."""
    peer = PeerProcess()
    yield peer
    if peer.process.poll() is None:
        peer.kill()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    wait_until(lambda: receiver.transport.open_reads == 0)
    receiver.transport.close()


def test_pages_and_the_notice_arrive(peer: PeerProcess, receiver: Receiver) -> None:
    pages = (7, 8, 9, 3, 500, 2)
    ticket = peer.ticket(pages)
    reception = receiver.finish(receiver.receive(ticket, first_page=20))
    assert reception.state is ReceptionState.COMPLETE, reception.message
    assert reception.bytes == 6 * LAYOUT.page_bytes
    for index, remote in enumerate(pages):
        assert receiver.holds(20 + index, remote)
    assert not receiver.data[:20].any()
    assert not receiver.data[26:].any()
    assert peer.notice_about(ticket.ticket_id) is NoticeKind.FETCHED


def test_the_whole_pool_at_once(peer: PeerProcess, receiver: Receiver) -> None:
    reception = receiver.finish(receiver.receive(peer.ticket(tuple(range(PAGES)))))
    assert reception.state is ReceptionState.COMPLETE, reception.message
    assert all(receiver.holds(page, page) for page in range(PAGES))


def test_b021_another_generation_is_torn(peer: PeerProcess, receiver: Receiver) -> None:
    ticket = peer.ticket((1, 2, 3), generation=2)
    reception = receiver.finish(receiver.receive(ticket))
    assert (reception.state, reception.cause) == (ReceptionState.FAILED, "torn")
    assert peer.notice_about(ticket.ticket_id) is NoticeKind.REFUSED


def test_generations_follow_the_peer_in_the_order_asked_for(peer: PeerProcess, receiver: Receiver) -> None:
    peer.tell("write 5 77")
    peer.tell("write 6 88")
    known = receiver.transport.connect(peer.endpoint)
    read = receiver.transport.read_generations(known, [6, 4, 5])
    with pytest.raises(RuntimeError, match="after DONE"):
        read.values()
    assert wait_for(read) is ReadState.DONE
    assert read.values() == [88, 1, 77]
    peer.tell("write 5 1")
    peer.tell("write 6 1")


def test_the_transports_own_notice_follows_the_read(peer: PeerProcess, receiver: Receiver) -> None:
    known = receiver.transport.connect(peer.endpoint)
    notice = Notice(NoticeKind.FETCHED, "with the read")
    assert wait_for(receiver.transport.read_pages(known, [1], [1], notice.encode())) is ReadState.DONE
    assert peer.notice_about("with the read") is NoticeKind.FETCHED


def test_connect_is_idempotent_and_forget_starts_afresh(peer: PeerProcess, receiver: Receiver) -> None:
    known = receiver.transport.connect(peer.endpoint)
    assert receiver.transport.connect(peer.endpoint) == known
    receiver.transport.forget(known)
    receiver.transport.forget(known)
    with pytest.raises(TransferError, match="connect again"):
        receiver.transport.read_pages(known, [1], [1])
    assert receiver.transport.connect(peer.endpoint) == known
    assert wait_for(receiver.transport.read_pages(known, [4], [4])) is ReadState.DONE
    assert receiver.holds(4, 4)


@pytest.mark.parametrize(
    ("remote", "local"), [([PAGES], [0]), ([-1], [0]), ([0], [PAGES]), ([0], [-1]), ([0, 1], [0]), ([], [])]
)
def test_pages_outside_a_pool_are_refused(
    peer: PeerProcess, receiver: Receiver, remote: list[int], local: list[int]
) -> None:
    known = receiver.transport.connect(peer.endpoint)
    with pytest.raises(TransferError) as error:
        receiver.transport.read_pages(known, remote, local)
    assert error.value.cause == "prepare"
    assert receiver.transport.open_reads == 0


def test_an_endpoint_beyond_what_the_peer_registered_is_refused(peer: PeerProcess, receiver: Receiver) -> None:
    there = NixlEndpoint.decode(peer.endpoint)
    stretched = NixlEndpoint(
        there.agent,
        there.metadata,
        there.address,
        there.page_bytes,
        there.num_pages * 1000,
        there.generations,
        there.device,
    )
    known = receiver.transport.connect(stretched.encode())
    with pytest.raises(TransferError) as error:
        receiver.transport.read_pages(known, [PAGES * 999], [0])
    assert error.value.cause == "prepare"


@pytest.mark.parametrize("data", [b"", b"junk", bytes(1 << 17), b"\x81\xa5agent\xa1\xff"])
def test_b024_what_is_no_endpoint_is_refused(receiver: Receiver, data: bytes) -> None:
    with pytest.raises(EndpointError):
        NixlEndpoint.decode(data)
    with pytest.raises(TransferError) as error:
        receiver.transport.connect(data)
    assert error.value.cause == "connect"


def test_b024_damaged_metadata_is_refused(peer: PeerProcess, receiver: Receiver) -> None:
    there = NixlEndpoint.decode(peer.endpoint)
    damaged = peer.endpoint.replace(there.metadata, bytes(len(there.metadata)))
    with pytest.raises(TransferError) as error:
        receiver.transport.connect(damaged)
    assert error.value.cause == "connect"
    assert receiver.transport.connect(peer.endpoint) == there.agent


def test_b020_a_killed_peer_fails_within_the_deadline_and_its_successor_works(
    mortal_peer: PeerProcess, peer: PeerProcess, receiver: Receiver
) -> None:
    """Both peers have one name, as a worker that starts again has."""
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


def test_a_peer_killed_while_silent_lets_go(mortal_peer: PeerProcess, receiver: Receiver) -> None:
    os.kill(mortal_peer.process.pid, signal.SIGSTOP)
    reception = receiver.receive(mortal_peer.ticket((1, 2)), deadline_s=0.2)
    wait_until(lambda: reception.poll(time.monotonic()) is ReceptionState.FAILED)
    mortal_peer.kill()
    receiver.finish(reception)
    assert receiver.transport.open_reads == 0


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


def test_a_missing_backend_is_named() -> None:
    data = np.zeros(4096, np.uint8)
    with pytest.raises(TransferError, match="NOSUCH") as error:
        NixlTransport("d", PoolMemory(data.ctypes.data, 4096, 1, data), backend="NOSUCH")
    assert error.value.cause == "register"
