"""The contract of a transport: one-sided reads of a peer's pages, and small notices.

A transport belongs to one worker. Its methods, and those of its reads, may be called from any thread, one at a time
unless the implementation says that it locks; none waits for a peer. It knows pages by number, never a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, NewType, Protocol

import numpy as np
import numpy.typing as npt

Peer = NewType("Peer", str)  # one incarnation of one remote worker; a restarted worker is another peer

Rows = npt.NDArray[np.int64]  # [ranges, 3]: the columns of ByteRange


class ByteRange(NamedTuple):
    """``length`` bytes at byte offset ``remote`` in the peer's pool, to byte offset ``local`` in ours."""

    remote: int
    local: int
    length: int


ByteRanges = Sequence[ByteRange] | Rows


class TransferError(Exception):
    """A peer or the transport could not do what was asked; the request it was for can still be recomputed.

    ``cause`` is a short fixed word for metrics (connect, prepare, post, read, disconnect, notify, progress, closed);
    the message names the peer. ``disconnect`` can take the place of any other: the peer is gone.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class PoolMemory:
    """A pool of equal pages that a transport may read from and write to. ``owner`` keeps the memory alive."""

    address: int
    page_bytes: int
    num_pages: int
    owner: Any
    device: int | None = None  # None: host memory; else the index of the CUDA device


class ReadState(Enum):
    """READING until the transport reports a terminal state. Only DONE means that the bytes are there.

    DONE and FAILED both say that the transport has let go of the local memory.
    """

    READING = "reading"
    DONE = "done"
    FAILED = "failed"


class Read(Protocol):
    """A read under way. The local pages belong to it until ``poll`` returned DONE or FAILED, or ``abandon`` returned
    True.
    """

    def poll(self) -> ReadState:
        """Drive the read and say how it stands. Never waits. Unknown transport states count as FAILED, not as DONE."""

    @property
    def error(self) -> TransferError | None:
        """Why it FAILED."""

    def abandon(self) -> bool:
        """Try to make the transport let go of the local memory; True once it has. Idempotent; keep calling until True.

        May stay False for as long as a frozen peer is neither back nor dead: memory that the network can still write is
        not free.
        """


class Transport(Protocol):
    """Moves pages between this worker's pool and peers' pools.

    Beside the pool each side exposes one 64-bit word per page, its *generation*: it changes before a page's old content
    can be overwritten. A reader that finds the generation it expects after the read has finished has read what it
    expected.
    """

    def endpoint(self) -> bytes:
        """What a peer needs to connect: metadata, pool address, page size, page count. Opaque; valid for this
        incarnation.
        """

    def connect(self, endpoint: bytes) -> Peer:
        """Make a peer known. Idempotent per endpoint. Raises TransferError(connect)."""

    def forget(self, peer: Peer) -> None:
        """Drop all that is known of a peer, so that the next ``connect`` starts afresh. Unknown peers are ignored.

        Reads of the peer that are under way go on undisturbed; the peer is dropped after the last of them.
        """

    def read_pages(self, peer: Peer, remote: Sequence[int], local: Sequence[int], notice: bytes = b"") -> Read:
        """Copy the peer's pages ``remote`` into ours ``local``, pairwise. With ``notice`` the peer hears of a
        successful end.

        Raises TransferError(prepare | post); then nothing was started.
        """

    def read_ranges(self, peer: Peer, ranges: ByteRanges, notice: bytes = b"") -> Read:
        """Copy bytes between pools whose pages need not have one shape. Else as ``read_pages``.

        The ranges' local ends must not overlap: in which order they are written is not said.
        """

    def read_generations(self, peer: Peer, pages: Sequence[int]) -> "GenerationRead":
        """Fetch the peer's generation words of ``pages``. Raises like ``read_pages``."""

    def set_generation(self, page: int, generation: int) -> None:
        """Publish the generation of one of our pages. Takes effect before any later write to the page."""

    def notify(self, peer: Peer, notice: bytes) -> None:
        """Send a small message. Best effort: losing one must only cost time. Raises TransferError(notify)."""

    def progress(self) -> None:
        """Serve peers that read from here or connect. The one method that a second thread may call beside the others.

        Raises TransferError(progress | closed).
        """

    def notices(self) -> list[bytes]:
        """Messages that have arrived since the last call, oldest first for each peer. Raises TransferError(progress).

        Also drives what peers do with us: a peer's first read waits until the passive side has called this a few times.
        """

    def close(self) -> None:
        """Let go of all memory and peers; reads under way end as FAILED(closed). Idempotent."""


class GenerationRead(Read, Protocol):
    """A read of generation words."""

    def values(self) -> list[int]:
        """The words, in the order asked for; only after DONE."""
