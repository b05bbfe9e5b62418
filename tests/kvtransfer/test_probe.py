"""Measuring a peer, on a transport whose reads take as long as told."""

import msgspec
import pytest

from splitserve.kvtransfer.probe import BULK_READS, SINGLE_READS, Probe, ProbeState, describe
from splitserve.kvtransfer.settings import TransportSettings
from splitserve.kvtransfer.transport import Peer, Read, ReadState, TransferError

PAGE_BYTES = 100
SETTINGS = TransportSettings(floor_bytes_per_s=5000.0, probe_bytes=1000, probe_s=60.0)


class TimedRead:
    error: TransferError | None = None

    def __init__(self, link: "Link", seconds: float) -> None:
        self._link = link
        self._end = link.now + seconds

    def poll(self) -> ReadState:
        self._link.now = min(self._end, self._link.now + 1.0)
        if self._link.fail_after == len(self._link.reads):
            self.error = TransferError("disconnect", "gone")
            return ReadState.FAILED
        return ReadState.DONE if self._link.now >= self._end else ReadState.READING

    def abandon(self) -> bool:
        return False


class Link:
    """A peer whose first read takes ``first_s``, later ones ``page_s`` or bytes over ``rate``, whichever is longer."""

    def __init__(self, rate: float, pool_bytes: int = 10_000, first_s: float = 3.0, page_s: float = 0.5) -> None:
        self.rate, self.size, self.first_s, self.page_s = rate, pool_bytes, first_s, page_s
        self.now = 0.0
        self.reads: list[int] = []
        self.fail_after: int | None = None
        self.forgotten: list[Peer] = []

    def connect(self, endpoint: bytes) -> Peer:
        if not endpoint:
            raise TransferError("connect", "nobody")
        return Peer("p")

    def forget(self, peer: Peer) -> None:
        self.forgotten.append(peer)

    def pool_bytes(self, peer: Peer) -> int:
        return self.size

    def discard(self, peer: Peer, num_bytes: int) -> Read:
        self.reads.append(num_bytes)
        first = len(self.reads) == 1
        return TimedRead(self, self.first_s if first else max(self.page_s, num_bytes / self.rate))


def finished(link: Link, settings: TransportSettings = SETTINGS, endpoint: bytes = b"e") -> Probe:
    probe = Probe(link, endpoint, PAGE_BYTES, settings, lambda: link.now)
    for _ in range(1000):
        if probe.poll() in (ProbeState.DONE, ProbeState.FAILED):
            return probe
    raise AssertionError("never ends")


@pytest.mark.parametrize(("rate", "slow"), [(1000.0, True), (4000.0, False)])
def test_b125_rate_latency_and_first_contact_are_told_apart(rate: float, slow: bool) -> None:
    link = Link(rate, page_s=0.125)
    settings = msgspec.structs.replace(SETTINGS, floor_bytes_per_s=2000.0)
    result = finished(link, settings).result
    assert result is not None
    assert (result.bytes_per_s, result.page_latency_s, result.connect_s) == (rate, 0.125, 3.0)
    assert link.reads == [PAGE_BYTES] * (1 + SINGLE_READS) + [1000] * BULK_READS
    assert result.slow is slow
    assert ("below the floor" in describe(result, "p", settings)) is slow


def test_a_pool_smaller_than_the_probe_is_read_whole() -> None:
    result = finished(Link(100.0, pool_bytes=300)).result
    assert result is not None
    assert (result.probe_bytes, result.bytes_per_s) == (300, 100.0)


def test_a_peer_that_never_answers_ends_at_the_deadline_and_stays_connected() -> None:
    link = Link(100.0, first_s=1e9)
    probe = finished(link)
    assert (probe.state, probe.result) == (ProbeState.FAILED, None)
    assert probe.error is not None
    assert probe.error.cause == "timeout"
    assert link.now <= SETTINGS.probe_s + 2
    assert link.forgotten == []


@pytest.mark.parametrize("reads", [1, 3, 1 + SINGLE_READS + 1])
def test_a_read_that_fails_ends_the_probe_and_the_connection(reads: int) -> None:
    link = Link(100.0)
    link.fail_after = reads
    probe = finished(link)
    assert probe.error is not None
    assert (probe.state, probe.error.cause, link.forgotten) == (ProbeState.FAILED, "disconnect", ["p"])


def test_a_peer_that_is_not_there_fails_at_once() -> None:
    probe = finished(Link(100.0), endpoint=b"")
    assert probe.error is not None
    assert (probe.state, probe.error.cause) == (ProbeState.FAILED, "connect")


@pytest.mark.parametrize(
    ("text", "field"),
    [(b'{"backends": "UCX"}', "backends"), (b'{"backend": ""}', "backend"), (b'{"probe_s": 0}', "probe_s")],
)
def test_settings_name_what_they_refuse(text: bytes, field: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(text, type=TransportSettings)
