"""The NIXL transport between two processes of this machine, in host memory."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
from nixl_pair.processes import LAYOUT, PAGES, PeerProcess, Receiver, wait_for, wait_until

from splitserve.kvtransfer.nixl_endpoint import EndpointError, NixlEndpoint
from splitserve.kvtransfer.nixl_transport import NixlTransport
from splitserve.kvtransfer.notice import Notice, NoticeKind
from splitserve.kvtransfer.probe import Probe, ProbeState
from splitserve.kvtransfer.reception import ReceptionState
from splitserve.kvtransfer.settings import TransportSettings
from splitserve.kvtransfer.transport import ByteRange, PoolMemory, ReadState, TransferError

pytest.importorskip("nixl")


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


def test_a_range_may_cross_pages_and_start_anywhere(peer: PeerProcess, receiver: Receiver) -> None:
    known = receiver.transport.connect(peer.endpoint)
    size = LAYOUT.page_bytes
    ranges = [
        ByteRange(3 * size + 5, 40 * size + 1, size),
        ByteRange(4 * size + 5, 41 * size + 1, 7),
        ByteRange(0, 0, 1),
    ]
    assert wait_for(receiver.transport.read_ranges(known, ranges)) is ReadState.DONE
    expected = np.zeros_like(receiver.data).reshape(-1)
    for there, here, length in ranges:
        positions = np.arange(there, there + length) // size
        expected[here : here + length] = (positions * 13 + 1) % 256
    assert (receiver.data.reshape(-1) == expected).all()


def test_ranges_do_not_need_pages_of_one_size(peer: PeerProcess) -> None:
    data = np.zeros((4, 1000), np.uint8)
    transport = NixlTransport("d", PoolMemory(data.ctypes.data, 1000, 4, data))
    known = transport.connect(peer.endpoint)
    with pytest.raises(TransferError, match="1000 bytes a page here"):
        transport.read_pages(known, [1], [1])
    rows = np.array([[LAYOUT.page_bytes * 2, 1500, 700], [LAYOUT.page_bytes * 9, 2200, 1800]])
    assert wait_for(transport.read_ranges(known, rows)) is ReadState.DONE
    flat = data.reshape(-1)
    assert (flat[1500:2200] == 27).all()
    assert (flat[2200:] == 118).all()
    assert not flat[:1500].any()
    transport.close()


POOL_BYTES = PAGES * LAYOUT.page_bytes


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [(0, 0, 0)],
        [(0, 0, -1)],
        [(-1, 0, 1)],
        [(0, -1, 1)],
        [(POOL_BYTES, 0, 1)],
        [(0, POOL_BYTES - 1, 2)],
        [(0, 0, 1), (POOL_BYTES - 1, 0, 2)],
        [(1, 0, (1 << 63) - 1)],
        [(1 << 64, 0, 1)],
        [(0, 0)],
    ],
)
def test_ranges_outside_a_pool_are_refused(peer: PeerProcess, receiver: Receiver, bad: list[ByteRange]) -> None:
    known = receiver.transport.connect(peer.endpoint)
    with pytest.raises(TransferError) as error:
        receiver.transport.read_ranges(known, bad)
    assert error.value.cause == "prepare"
    assert receiver.transport.open_reads == 0
    assert not receiver.data.any()


def test_b125_a_probe_measures_and_touches_no_page(peer: PeerProcess, receiver: Receiver) -> None:
    settings = TransportSettings(probe_bytes=1 << 20)
    probe = Probe(receiver.transport, peer.endpoint, LAYOUT.page_bytes, settings, time.monotonic)
    wait_until(lambda: bool(probe.poll()) and probe.final)
    assert probe.state is ProbeState.DONE, probe.error
    assert probe.result is not None
    assert probe.result.probe_bytes == 1 << 20
    assert 0 < probe.result.page_latency_s <= probe.result.connect_s
    assert not receiver.data.any()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (TransportSettings(backend="NOSUCH"), "backend NOSUCH: .*is missing; those that load here: .*UCX"),
        (TransportSettings(backend="POSIX"), "backend POSIX does not move memory between processes"),
        (TransportSettings(parameters={"engine_config": "TLS=nosuch"}), "backend UCX with parameters .*TLS=nosuch"),
    ],
)
def test_a_backend_that_cannot_be_used_is_named(settings: TransportSettings, why: str) -> None:
    with pytest.raises(TransferError, match=why) as error:
        small_transport(settings)
    assert error.value.cause == "register"


def test_a_parameter_that_the_plugin_does_not_list_is_named(caplog: pytest.LogCaptureFixture) -> None:
    small_transport(TransportSettings(parameters={"num_wrokers": "2"})).close()
    assert "num_wrokers is not among those that UCX lists" in caplog.text


def small_transport(settings: TransportSettings) -> NixlTransport:
    data = np.zeros(4096, np.uint8)
    return NixlTransport("d", PoolMemory(data.ctypes.data, 4096, 1, data), settings)
