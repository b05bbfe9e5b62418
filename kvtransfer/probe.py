"""How fast a peer's memory can be read: measured before it is relied on, since a slow path is chosen without a word."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from splitserve.kvtransfer.settings import TransportSettings
from splitserve.kvtransfer.transport import Peer, Read, ReadState, TransferError

SINGLE_READS = 5  # of one page; the fastest counts
BULK_READS = 3


@dataclass(frozen=True)
class ProbeResult:
    """What reading from one peer costs."""

    bytes_per_s: float  # of the fastest bulk read
    page_latency_s: float  # of the fastest read of one page
    connect_s: float  # from the first word to the first bytes: what the first request would have waited
    probe_bytes: int  # of each bulk read
    slow: bool  # the rate is below the settings' floor


class Probed(Protocol):
    """What a transport must offer beside ``Transport`` to be probed. Raises TransferError like ``Transport``."""

    def connect(self, endpoint: bytes) -> Peer: ...

    def forget(self, peer: Peer) -> None: ...

    def pool_bytes(self, peer: Peer) -> int:
        """Size of the peer's pool."""

    def discard(self, peer: Peer, num_bytes: int) -> Read:
        """Read the first bytes of the peer's pool into memory that nobody looks at: no page is touched."""


class ProbeState(Enum):
    """Drawn in ``Probe``."""

    CONNECTING = "connecting"
    SINGLE = "single"
    BULK = "bulk"
    DONE = "done"
    FAILED = "failed"


class Probe:
    """Warms up the connection to one peer and measures it. Not thread-safe; ``clock`` gives monotonic seconds.

    ::

        connecting ──first page──▶ single ──SINGLE_READS──▶ bulk ──BULK_READS──▶ done
            └──────────────────────┴────────────────────────┴── error, deadline ──▶ failed

    Never waits: call ``poll`` until the state is final. What a failed probe has under way goes on into memory that
    nobody looks at.
    """

    def __init__(
        self,
        transport: Probed,
        endpoint: bytes,
        page_bytes: int,
        settings: TransportSettings,
        clock: Callable[[], float],
    ) -> None:
        """``page_bytes`` is the size of the peer's pages."""
        self.state = ProbeState.CONNECTING
        self.result: ProbeResult | None = None  # with DONE
        self.error: TransferError | None = None  # with FAILED
        self._transport = transport
        self._page_bytes = page_bytes
        self._settings = settings
        self._clock = clock
        self._began = self._posted = clock()
        self._read: Read | None = None
        self._peer: Peer | None = None
        self._bulk_bytes = 0
        self._connect_s = 0.0
        self._seconds: dict[ProbeState, list[float]] = {ProbeState.SINGLE: [], ProbeState.BULK: []}
        try:
            self._peer = transport.connect(endpoint)
            self._bulk_bytes = min(settings.probe_bytes, transport.pool_bytes(self._peer))
            self._post(page_bytes)
        except TransferError as error:
            self._fail(error)

    @property
    def final(self) -> bool:
        return self.state in (ProbeState.DONE, ProbeState.FAILED)

    def poll(self) -> ProbeState:
        """Go on. Does not raise."""
        try:
            while not self.final and self._read_is_done():
                self._next(self._clock() - self._posted)
        except TransferError as error:
            self._fail(error)
        if not self.final and self._clock() - self._began > self._settings.probe_s:
            self._fail(TransferError("timeout", f"{self._peer}: {self.state.value} after {self._settings.probe_s} s"))
        return self.state

    def _next(self, seconds: float) -> None:
        if self.state is ProbeState.CONNECTING:
            self._connect_s = self._clock() - self._began
            self.state = ProbeState.SINGLE
        else:
            self._seconds[self.state].append(seconds)
        if self.state is ProbeState.SINGLE and len(self._seconds[ProbeState.SINGLE]) == SINGLE_READS:
            self.state = ProbeState.BULK
        if len(self._seconds[ProbeState.BULK]) == BULK_READS:
            self._finish()
        else:
            self._post(self._page_bytes if self.state is ProbeState.SINGLE else self._bulk_bytes)

    def _finish(self) -> None:
        rate = self._bulk_bytes / max(min(self._seconds[ProbeState.BULK]), 1e-9)
        self.result = ProbeResult(
            bytes_per_s=rate,
            page_latency_s=min(self._seconds[ProbeState.SINGLE]),
            connect_s=self._connect_s,
            probe_bytes=self._bulk_bytes,
            slow=rate < self._settings.floor_bytes_per_s,
        )
        self.state = ProbeState.DONE

    def _post(self, num_bytes: int) -> None:
        assert self._peer is not None
        self._posted = self._clock()
        self._read = self._transport.discard(self._peer, num_bytes)

    def _read_is_done(self) -> bool:
        assert self._read is not None
        state = self._read.poll()
        if state is ReadState.FAILED:
            raise self._read.error or TransferError("read", f"{self._peer}: the transport gave no reason")
        return state is ReadState.DONE

    def _fail(self, error: TransferError) -> None:
        self.error = error
        self.state = ProbeState.FAILED
        if self._peer is not None and error.cause != "timeout":
            self._transport.forget(self._peer)


def describe(result: ProbeResult, peer: str, settings: TransportSettings) -> str:
    """One line for the log."""
    text = (
        f"{peer} over {settings.backend}: {result.bytes_per_s / 1e9:.2f} GB/s, one page in "
        f"{result.page_latency_s * 1e3:.2f} ms, connected after {result.connect_s * 1e3:.0f} ms"
    )
    if not result.slow:
        return text
    floor = settings.floor_bytes_per_s / 1e9
    return f"{text}; below the floor of {floor:.2f} GB/s: look at UCX_TLS, UCX_NET_DEVICES and the network between them"
