"""The transport over NIXL: RDMA, NVLink, shared memory or TCP, whichever UCX finds."""

import secrets
from collections.abc import Sequence
from threading import RLock
from typing import Any, NamedTuple

import numpy as np

from splitserve.kvtransfer.nixl_agent import BackendError, new_agent
from splitserve.kvtransfer.nixl_descriptors import Ends, Region, ends_of
from splitserve.kvtransfer.nixl_endpoint import EndpointError, NixlEndpoint
from splitserve.kvtransfer.nixl_peers import NixlPeer, NixlPeers
from splitserve.kvtransfer.nixl_read import FinishedRead, NixlGenerationRead, NixlRead, nixl_failure
from splitserve.kvtransfer.nixl_scratch import WORD_BYTES, ScratchWords, page_aligned_words
from splitserve.kvtransfer.page_runs import joined, page_runs
from splitserve.kvtransfer.settings import TransportSettings
from splitserve.kvtransfer.transport import ByteRanges, GenerationRead, Peer, PoolMemory, Read, ReadState, TransferError

_DEFAULTS = TransportSettings()


class _Posted(NamedTuple):
    """NIXL's answer to a post: over already (DONE), under way (PROC), or why not."""

    status: str
    error: TransferError | None


class NixlTransport:
    """Implements ``Transport``; every method and read takes one lock, so that two threads of a worker can share it.

    NIXL's own progress thread would spin on a core. Without it, reads go on when they are polled, and what peers do
    (connect, notify) when ``progress`` or ``notices`` is called. A peer's first read always needs that; later ones do
    not where the hardware or the kernel copies (RDMA, shared memory), and do over TCP: a worker that leases pages has
    to keep calling, also during long steps.
    """

    def __init__(
        self, name: str, memory: PoolMemory, settings: TransportSettings = _DEFAULTS, sink: PoolMemory | None = None
    ) -> None:
        """Register ``memory``. ``sink`` is memory that only ``discard`` writes to and nobody reads, best on the same
        device; None: host memory made here.

        Raises TransferError(register) when NIXL or its backend is not there or refuses the memory.
        """
        self._lock = RLock()
        self._owners: list[Any] = [memory.owner] if sink is None else [memory.owner, sink.owner]
        self._pool = _region(memory)
        self._sink = _region(sink) if sink is not None else None
        self._sink_bytes = settings.probe_bytes
        self._arrived: list[bytes] = []
        self._generations = page_aligned_words(memory.num_pages)
        words = Region(self._generations.ctypes.data, WORD_BYTES, len(self._generations))
        # A worker that starts again must not be taken for the one before, whose metadata peers may still hold.
        agent_name = f"{name}-{secrets.token_hex(8)}"
        try:
            self._agent: Any = new_agent(agent_name, settings)
            regions = [self._pool, words] + ([self._sink] if self._sink is not None else [])
            self._registered = [region.register(self._agent) for region in regions]
            self._peers = NixlPeers(self._agent, ScratchWords(self._agent))
            metadata = self._agent.get_agent_metadata()
        except BackendError as error:
            raise TransferError("register", str(error)) from error
        except Exception as error:
            raise TransferError("register", f"NIXL with backend {settings.backend}: {error}") from error
        self._endpoint = NixlEndpoint(
            agent=agent_name,
            metadata=metadata,
            address=memory.address,
            page_bytes=memory.page_bytes,
            num_pages=memory.num_pages,
            generations=words.address,
            device=memory.device,
        ).encode()

    @property
    def open_reads(self) -> int:
        """Reads that NIXL has not ended, abandoned ones included."""
        with self._lock:
            return self._peers.open_reads

    def endpoint(self) -> bytes:
        return self._endpoint

    def connect(self, endpoint: bytes) -> Peer:
        try:
            wanted = NixlEndpoint.decode(endpoint)
        except EndpointError as error:
            raise TransferError("connect", f"not an endpoint: {error}") from error
        with self._lock:
            self._live_agent()
            self._peers.connect(wanted)
        return Peer(wanted.agent)

    def forget(self, peer: Peer) -> None:
        with self._lock:
            self._peers.forget(peer)

    def read_pages(self, peer: Peer, remote: Sequence[int], local: Sequence[int], notice: bytes = b"") -> Read:
        with self._lock:
            known = self._known(peer)
            source, target = known.pool, self._pool
            if source.element_bytes != target.element_bytes:
                raise TransferError(
                    "prepare", f"{peer}: {target.element_bytes} bytes a page here, {source.element_bytes} there"
                )
            if len(remote) != len(local):
                raise TransferError("prepare", f"{peer}: {len(remote)} pages there, {len(local)} here")
            _check_pages(peer, remote, source)
            _check_pages(peer, local, target)
            return self._read(known, target, ends_of(page_runs(remote, local), source, target), notice)

    def read_ranges(self, peer: Peer, ranges: ByteRanges, notice: bytes = b"") -> Read:
        with self._lock:
            known = self._known(peer)
            source, target = known.pool, self._pool
            try:
                rows = joined(ranges)
            except (ValueError, TypeError, OverflowError) as error:
                raise TransferError("prepare", f"{peer}: {error}") from error
            for offsets, region, where in ((rows[:, 0], source, "there"), (rows[:, 1], target, "here")):
                if not region.holds_bytes(offsets, rows[:, 2]):
                    raise TransferError(
                        "prepare",
                        f"{peer}: no range, an empty one, or one outside the {region.num_bytes} bytes {where}",
                    )
            ends = Ends(source.cut_bytes(rows[:, 0], rows[:, 2]), target.cut_bytes(rows[:, 1], rows[:, 2]))
            return self._read(known, target, ends, notice)

    def read_generations(self, peer: Peer, pages: Sequence[int]) -> GenerationRead:
        with self._lock:
            known = self._known(peer)
            words = known.words
            _check_pages(peer, pages, words)
            placed = known.word_transfers.take(
                pages, lambda runs, target: self._prepare(known, words, target, ends_of(runs, words, target))
            )
            transfer = placed.transfer
            posted = self._post(peer, transfer.handle)
            if posted.status == "DONE":
                values = transfer.scratch.at(placed.places)
                known.word_transfers.give_back(transfer)
                return FinishedRead(values)
            read = NixlGenerationRead(
                self._agent,
                transfer,
                places=placed.places,
                peer=peer,
                lock=self._lock,
                on_end=self._peers.ended,
                post_error=posted.error,
            )
            self._open(known, read, posted.error)
            return read

    def discard(self, peer: Peer, num_bytes: int) -> Read:
        """Read the first ``num_bytes`` of the peer's pool, or all of it if that is less, into memory that nobody looks
        at: what a probe does. Raises like ``read_pages``.
        """
        with self._lock:
            known = self._known(peer)
            sink = self._sink_of(peer)
            stop = min(num_bytes, known.pool.num_bytes)
            starts = np.arange(0, stop, sink.num_bytes)
            lengths = np.minimum(sink.num_bytes, stop - starts)
            ends = Ends(known.pool.cut_bytes(starts, lengths), sink.cut_bytes(np.zeros_like(starts), lengths))
            return self._read(known, sink, ends, b"")

    def pool_bytes(self, peer: Peer) -> int:
        """Size of the peer's pool. Raises TransferError(disconnect) for an unknown peer."""
        with self._lock:
            return self._known(peer).pool.num_bytes

    def set_generation(self, page: int, generation: int) -> None:
        self._generations[page] = generation

    def notify(self, peer: Peer, notice: bytes) -> None:
        with self._lock:
            self._known(peer)
            try:
                self._agent.send_notif(peer, notice)
            except Exception as error:
                raise nixl_failure(error, "notify", peer) from error

    def progress(self) -> None:
        """Drive the agent; notices that arrive are kept for ``notices``. Raises TransferError(progress)."""
        with self._lock:
            agent = self._live_agent()
            try:
                by_peer = agent.get_new_notifs()
            except Exception as error:
                raise nixl_failure(error, "progress", "agent") from error
            for arrived in by_peer.values():
                self._arrived.extend(arrived)

    def notices(self) -> list[bytes]:
        with self._lock:
            self.progress()
            arrived, self._arrived = self._arrived, []
            return arrived

    def close(self) -> None:
        """As in ``Transport``. What is still under way ends with the agent, whose end also unregisters its memory."""
        with self._lock:
            if self._agent is None:
                return
            clean = self.open_reads == 0
            self._peers.close()
            if clean:
                for descriptors in self._registered:
                    self._agent.deregister_memory(descriptors)
            self._agent = None
            self._registered = []

    def _live_agent(self) -> Any:
        if self._agent is None:
            raise TransferError("closed", "this transport was closed")
        return self._agent

    def _known(self, peer: Peer) -> NixlPeer:
        self._live_agent()
        return self._peers.find(peer)

    def _sink_of(self, peer: str) -> Region:
        if self._sink is None:
            space = page_aligned_words(-(-self._sink_bytes // WORD_BYTES))
            sink = Region(space.ctypes.data, WORD_BYTES, len(space))
            try:
                self._registered.append(sink.register(self._agent))
            except Exception as error:
                raise nixl_failure(error, "prepare", peer) from error
            self._owners.append(space)
            self._sink = sink
        return self._sink

    def _read(self, known: NixlPeer, target: Region, ends: Ends, notice: bytes) -> Read:
        """From the peer's pool into ``target``."""
        peer = known.endpoint.agent
        handle = self._prepare(known, known.pool, target, ends, notice)
        posted = self._post(peer, handle)
        if posted.status == "DONE":
            try:
                handle.release()
            except Exception as error:
                raise nixl_failure(error, "post", peer) from error
            return FinishedRead()
        read = NixlRead(
            self._agent, handle, peer=peer, lock=self._lock, on_end=self._peers.ended, post_error=posted.error
        )
        self._open(known, read, posted.error)
        return read

    def _prepare(self, known: NixlPeer, source: Region, target: Region, ends: Ends, notice: bytes = b"") -> Any:
        agent, peer = self._agent, known.endpoint.agent
        try:
            here = agent.get_xfer_descs(ends.here, target.kind)
            there = agent.get_xfer_descs(ends.there, source.kind)
            return agent.initialize_xfer("READ", here, there, peer, notice)
        except Exception as error:
            raise nixl_failure(error, "prepare", peer) from error

    def _post(self, peer: str, handle: Any) -> _Posted:
        try:
            status = self._agent.transfer(handle)
        except Exception as error:
            return _Posted("ERR", nixl_failure(error, "post", peer))
        failed = None if status in ("DONE", "PROC") else TransferError("post", f"{peer}: post ended as {status}")
        return _Posted(status, failed)

    def _open(self, known: NixlPeer, read: NixlRead, post_error: TransferError | None) -> None:
        """Keep hold of the read until it ends. Raises ``post_error`` unless part of the transfer is under way all the
        same.
        """
        known.reads.add(read)
        if post_error is not None and read.poll() is not ReadState.READING:
            raise post_error


def _region(memory: PoolMemory) -> Region:
    return Region(memory.address, memory.page_bytes, memory.num_pages, memory.device)


def _check_pages(peer: str, pages: Sequence[int], region: Region) -> None:
    if not region.holds(pages):
        raise TransferError("prepare", f"{peer}: no page, or one outside [0, {region.elements})")
