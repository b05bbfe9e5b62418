"""A transport within one process, with fault points: what tests use in place of a network."""

import ctypes
import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from splitserve.kvtransfer.transport import Peer, PoolMemory, ReadState, TransferError

_NO_SUCH_PEER = "not connected; call connect again"


@dataclass
class Faults:
    """What goes wrong for the transport that holds it. Change it at any time; counters of polls are those of each
    read.
    """

    refuse_connect: bool = False
    fail_prepare: bool = False
    fail_post: bool = False
    fail_poll: bool = False
    raise_foreign: bool = False  # polls raise an exception that is no TransferError
    hang: bool = False  # reads make no progress
    fail_notify: bool = False
    lose_notices: bool = False
    double_notices: bool = False
    delay_notices: int = 0  # so often the other side asks in vain before a notice arrives
    overtake_notices: bool = False  # a notice arrives before those that wait already
    drop_peer_once: bool = False  # the next read finds its peer disconnected, and stays so until forget and connect
    drop_in_read_once: bool = False  # as before, but after the read has moved something
    fail_silently: bool = False  # reads end as FAILED and give no reason
    idle_polls: int = 0  # so many polls of a read move nothing before one does
    max_open_reads: int = sys.maxsize  # more fail to post
    abandon_polls: int = 0  # so many times abandon says no, and the read writes a piece each time


class LocalNetwork:
    """Finds the transports of one process by their endpoint."""

    def __init__(self) -> None:
        self._live: dict[bytes, LocalTransport] = {}
        self._numbers = itertools.count(1)

    def add(self, name: str, transport: "LocalTransport") -> bytes:
        """Give a transport its endpoint, another one for each incarnation of ``name``."""
        endpoint = f"{name}#{next(self._numbers)}".encode()
        self._live[endpoint] = transport
        return endpoint

    def remove(self, endpoint: bytes) -> None:
        """From now on the transport behind ``endpoint`` is gone for all."""
        self._live.pop(endpoint, None)

    def find(self, endpoint: bytes) -> "LocalTransport | None":
        return self._live.get(endpoint)


class _Piece(NamedTuple):
    """Bytes that move at once: offsets in the two pools, and how many."""

    remote: int
    local: int
    length: int


class _Mail(NamedTuple):
    """A notice on its way, and how many calls of ``notices`` it stays there."""

    notice: bytes
    calls_left: int


class LocalTransport:
    """Moves one page or range per poll, so that everything else can happen in between. Implements ``Transport``; not
    thread-safe.
    """

    def __init__(self, name: str, memory: PoolMemory, network: LocalNetwork, faults: Faults | None = None) -> None:
        if memory.device is not None:
            raise ValueError("a local transport copies host memory only")
        self.memory = memory
        self.faults = faults if faults is not None else Faults()
        self.generations = [0] * memory.num_pages
        self.open_reads = 0
        self._network = network
        self._endpoint = network.add(name, self)
        self._peers: dict[Peer, bool] = {}  # whether it still answers
        self._inbox: list[_Mail] = []
        self._closed = False

    def endpoint(self) -> bytes:
        return self._endpoint

    def connect(self, endpoint: bytes) -> Peer:
        peer = Peer(endpoint.decode())
        if peer not in self._peers:
            if self.faults.refuse_connect or self._network.find(endpoint) is None:
                raise TransferError("connect", f"nobody at {endpoint!r}")
            self._peers[peer] = True
        return peer

    def forget(self, peer: Peer) -> None:
        self._peers.pop(peer, None)

    def read_pages(self, peer: Peer, remote: Sequence[int], local: Sequence[int], notice: bytes = b"") -> "LocalRead":
        source = self._source(peer)
        size = self.memory.page_bytes
        if source.memory.page_bytes != size:
            raise TransferError("prepare", f"{peer}: pages of {source.memory.page_bytes} bytes, of {size} here")
        _check_pages(peer, remote, source.memory)
        _check_pages(peer, local, self.memory)
        pieces = [_Piece(there * size, here * size, size) for there, here in zip(remote, local, strict=True)]
        return self._post(source, peer, pieces, notice)

    def read_ranges(self, peer: Peer, ranges: Iterable[Iterable[int]], notice: bytes = b"") -> "LocalRead":
        """Copy bytes: each range is (offset in the peer's pool, offset in ours, length). The pools may have pages of
        different size. Else as ``read_pages``.
        """
        source = self._source(peer)
        pieces = [_Piece(*map(int, piece)) for piece in ranges]
        for piece in pieces:
            for offset, memory in ((piece.remote, source.memory), (piece.local, self.memory)):
                if not 0 <= offset < offset + piece.length <= memory.page_bytes * memory.num_pages:
                    raise TransferError("prepare", f"{peer}: {piece.length} bytes at {offset} leave the pool")
        return self._post(source, peer, pieces, notice)

    def read_generations(self, peer: Peer, pages: Sequence[int]) -> "LocalGenerationRead":
        source = self._source(peer)
        _check_pages(peer, pages, source.memory)
        self._check_post(peer)
        return LocalGenerationRead(self, source, peer, list(pages))

    def set_generation(self, page: int, generation: int) -> None:
        self.generations[page] = generation

    def notify(self, peer: Peer, notice: bytes) -> None:
        target = self.alive(peer)
        faults = self.faults
        if target is None:
            raise TransferError("disconnect", f"{peer}: {_NO_SUCH_PEER}")
        if faults.fail_notify:
            raise TransferError("notify", f"{peer}: told to fail")
        copies = 0 if faults.lose_notices else 2 if faults.double_notices else 1
        place = 0 if faults.overtake_notices else len(target._inbox)
        target._inbox[place:place] = [_Mail(notice, faults.delay_notices) for _ in range(copies)]

    def progress(self) -> None:
        """Nothing to do: reads here need no help of the side they read from."""

    def notices(self) -> list[bytes]:
        arrived = [mail.notice for mail in self._inbox if not mail.calls_left]
        self._inbox = [_Mail(mail.notice, mail.calls_left - 1) for mail in self._inbox if mail.calls_left]
        return arrived

    def close(self) -> None:
        self._closed = True
        self._network.remove(self._endpoint)
        self._peers.clear()

    def drop(self, peer: Peer) -> None:
        """Break the connection; it stays broken until ``forget`` and ``connect``."""
        if peer in self._peers:
            self._peers[peer] = False

    @property
    def closed(self) -> bool:
        return self._closed

    def alive(self, peer: Peer) -> "LocalTransport | None":
        """The peer's transport while both ends and the connection are up."""
        return self._network.find(peer.encode()) if self._peers.get(peer, False) else None

    def _source(self, peer: Peer) -> "LocalTransport":
        if self.faults.fail_prepare:
            raise TransferError("prepare", f"{peer}: told to fail")
        if self.faults.drop_peer_once and peer in self._peers:
            self.faults.drop_peer_once = False
            self.drop(peer)
        source = self.alive(peer)
        if source is None:
            raise TransferError("disconnect", f"{peer}: {_NO_SUCH_PEER}")
        return source

    def _post(self, source: "LocalTransport", peer: Peer, pieces: list[_Piece], notice: bytes) -> "LocalRead":
        self._check_post(peer)
        return LocalRead(self, source, peer, pieces, notice)

    def _check_post(self, peer: Peer) -> None:
        if self.faults.fail_post or self.open_reads >= self.faults.max_open_reads:
            raise TransferError("post", f"{peer}: told to fail")


def _check_pages(peer: Peer, pages: Sequence[int], memory: PoolMemory) -> None:
    if any(not 0 <= page < memory.num_pages for page in pages):
        raise TransferError("prepare", f"{peer}: a page is outside [0, {memory.num_pages})")


class LocalRead:
    """Implements ``Read``: piece after piece, in order."""

    def __init__(
        self, reader: LocalTransport, source: LocalTransport, peer: Peer, pieces: list[_Piece], notice: bytes
    ) -> None:
        self._reader = reader
        self._source = source
        self._peer = peer
        self._left = pieces[::-1]
        self._notice = notice
        self._state = ReadState.READING
        self._error: TransferError | None = None
        self._refusals_left = reader.faults.abandon_polls
        self._idle_left = reader.faults.idle_polls
        reader.open_reads += 1

    @property
    def error(self) -> TransferError | None:
        return self._error

    def poll(self) -> ReadState:
        faults = self._reader.faults
        if self._state is not ReadState.READING or self._ended_by_close():
            return self._state
        if faults.raise_foreign:
            raise RuntimeError("told to fail")
        if faults.fail_poll:
            self._end(ReadState.FAILED, TransferError("read", f"{self._peer}: told to fail"))
        elif faults.fail_silently:
            self._end(ReadState.FAILED)
        elif self._source.closed:
            self._end(ReadState.FAILED, TransferError("disconnect", f"{self._peer} is gone"))
        elif self._idle_left > 0:
            self._idle_left -= 1
        elif not faults.hang:
            self._idle_left = faults.idle_polls
            self._copy_one()
            if faults.drop_in_read_once:
                faults.drop_in_read_once = False
                self._reader.drop(self._peer)
                self._end(ReadState.FAILED, TransferError("disconnect", f"{self._peer} broke off"))
            elif not self._left:
                self._end(ReadState.DONE)
                if self._notice:
                    self._reader.notify(self._peer, self._notice)
        return self._state

    def abandon(self) -> bool:
        if self._state is ReadState.READING and not self._ended_by_close():
            if self._refusals_left > 0:
                self._refusals_left -= 1
                if not self._source.closed:
                    self._copy_one()
            else:
                self._end(ReadState.FAILED, TransferError("read", f"{self._peer}: abandoned"))
        return self._state is not ReadState.READING

    def _copy_one(self) -> None:
        if not self._left:
            return
        piece = self._left.pop()
        here, there = self._reader.memory, self._source.memory
        ctypes.memmove(here.address + piece.local, there.address + piece.remote, piece.length)

    def _ended_by_close(self) -> bool:
        if self._reader.closed:
            self._end(ReadState.FAILED, TransferError("closed", "this transport was closed"))
        return self._reader.closed

    def _end(self, state: ReadState, error: TransferError | None = None) -> None:
        self._state, self._error = state, error
        self._reader.open_reads -= 1


class LocalGenerationRead(LocalRead):
    """Implements ``GenerationRead``."""

    def __init__(self, reader: LocalTransport, source: LocalTransport, peer: Peer, pages: list[int]) -> None:
        super().__init__(reader, source, peer, [], b"")
        self._pages = pages
        self._values: list[int] = []

    def values(self) -> list[int]:
        if self._state is not ReadState.DONE:
            raise RuntimeError("generations are known after DONE only")
        return self._values

    def _end(self, state: ReadState, error: TransferError | None = None) -> None:
        if state is ReadState.DONE:
            self._values = [self._source.generations[page] for page in self._pages]
        super()._end(state, error)
