"""The transport over NIXL: RDMA, NVLink, shared memory or TCP, whichever UCX finds."""

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import numpy as np

from splitserve.kvtransfer.nixl_endpoint import EndpointError, NixlEndpoint
from splitserve.kvtransfer.nixl_read import NixlGenerationRead, NixlRead, nixl_failure
from splitserve.kvtransfer.nixl_scratch import ScratchWords
from splitserve.kvtransfer.page_runs import PageRun, page_runs
from splitserve.kvtransfer.transport import Peer, PoolMemory, ReadState, TransferError

_WORD_BYTES = 8
_WORDS_PER_MEMORY_PAGE = 4096 // _WORD_BYTES


@dataclass(frozen=True)
class _Region:
    """Equal elements that a descriptor list cuts pieces out of."""

    address: int
    element_bytes: int
    device: int | None

    @property
    def kind(self) -> str:
        return "DRAM" if self.device is None else "VRAM"


@dataclass
class _Peer:
    endpoint: NixlEndpoint
    reads: set[NixlRead] = field(default_factory=set)  # under way
    forgotten: bool = False  # drop it when the last read has ended


class NixlTransport:
    """Implements ``Transport``; every method and read takes one lock, so that two threads of a worker can share it.

    NIXL's own progress thread would spin on a core. Without it, reads go on when they are polled, and what peers do
    (connect, notify) when ``progress`` or ``notices`` is called. A peer's first read always needs that; later ones do
    not where the hardware or the kernel copies (RDMA, shared memory), and do over TCP: a worker that leases pages has
    to keep calling, also during long steps.
    """

    def __init__(self, name: str, memory: PoolMemory, *, backend: str = "UCX") -> None:
        """Register ``memory``. Raises TransferError(register) when NIXL or its backend is not there or refuses the
        memory.
        """
        self._lock = RLock()
        self._memory = memory
        self._pool = _Region(memory.address, memory.page_bytes, memory.device)
        self._peers: dict[str, _Peer] = {}
        self._arrived: list[bytes] = []
        self._generations = _page_aligned_words(memory.num_pages)
        words = _Region(self._generations.ctypes.data, _WORD_BYTES, None)
        # A worker that starts again must not be taken for the one before, whose metadata peers may still hold.
        agent_name = f"{name}-{secrets.token_hex(8)}"
        try:
            self._agent: Any = _new_agent(agent_name, backend)
            self._registered = [
                self._agent.register_memory([(region.address, length, region.device or 0, "")], region.kind)
                for region, length in (
                    (self._pool, memory.page_bytes * memory.num_pages),
                    (words, self._generations.nbytes),
                )
            ]
            self._scratch = ScratchWords(self._agent)
            metadata = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransferError("register", f"NIXL with backend {backend}: {error}") from error
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
            return sum(len(peer.reads) for peer in self._peers.values())

    def endpoint(self) -> bytes:
        return self._endpoint

    def connect(self, endpoint: bytes) -> Peer:
        """As in ``Transport``. A forgotten peer with a read still under way keeps its old connection: dropping that
        would leave the read without anyone who can say when it has ended.
        """
        try:
            wanted = NixlEndpoint.decode(endpoint)
        except EndpointError as error:
            raise TransferError("connect", f"not an endpoint: {error}") from error
        with self._lock:
            agent = self._live_agent()
            known = self._peers.get(wanted.agent)
            if known is not None:
                known = self._sweep(wanted.agent, known)
            if known is None:
                self._add(agent, wanted)
            elif known.endpoint != wanted:
                raise TransferError("connect", f"{wanted.agent}: two endpoints of one name")
        return Peer(wanted.agent)

    def forget(self, peer: Peer) -> None:
        with self._lock:
            known = self._peers.get(peer)
            if known is not None:
                known.forgotten = True
                self._sweep(peer, known)

    def read_pages(self, peer: Peer, remote: Sequence[int], local: Sequence[int], notice: bytes = b"") -> NixlRead:
        with self._lock:
            known = self._known(peer)
            there = known.endpoint
            if there.page_bytes != self._memory.page_bytes:
                raise TransferError(
                    "prepare", f"{peer}: {self._memory.page_bytes} bytes a page here, {there.page_bytes} there"
                )
            _check_pages(peer, remote, there.num_pages)
            _check_pages(peer, local, self._memory.num_pages)
            if len(remote) != len(local):
                raise TransferError("prepare", f"{peer}: {len(remote)} pages there, {len(local)} here")
            source = _Region(there.address, there.page_bytes, there.device)
            handle = self._prepare(peer, page_runs(remote, local), source, self._pool, notice)
            failed = self._post(peer, handle)
            read = NixlRead(self._agent, handle, peer=peer, lock=self._lock, on_end=self._ended, post_error=failed)
            self._open(known, read, failed)
            return read

    def read_generations(self, peer: Peer, pages: Sequence[int]) -> NixlGenerationRead:
        with self._lock:
            known = self._known(peer)
            _check_pages(peer, pages, known.endpoint.num_pages)
            source = _Region(known.endpoint.generations, _WORD_BYTES, None)
            try:
                words = self._scratch.take(len(pages))
            except Exception as error:
                raise nixl_failure(error, "prepare", peer) from error
            target = _Region(words.ctypes.data, _WORD_BYTES, None)
            try:
                handle = self._prepare(peer, page_runs(pages, range(len(pages))), source, target, b"")
            except TransferError:
                self._scratch.give_back(words)
                raise
            failed = self._post(peer, handle)
            read = NixlGenerationRead(
                self._agent,
                handle,
                words=words,
                count=len(pages),
                peer=peer,
                lock=self._lock,
                on_end=self._ended,
                post_error=failed,
            )
            self._open(known, read, failed)
            return read

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
            for name, known in list(self._peers.items()):
                for read in list(known.reads):
                    read.drop()
                self._remove(name)
            if clean:
                for descriptors in self._registered:
                    self._agent.deregister_memory(descriptors)
            self._agent = None
            self._registered = []
            del self._scratch

    def _live_agent(self) -> Any:
        if self._agent is None:
            raise TransferError("closed", "this transport was closed")
        return self._agent

    def _known(self, peer: Peer) -> _Peer:
        self._live_agent()
        known = self._peers.get(peer)
        if known is None:
            raise TransferError("disconnect", f"{peer}: not connected; call connect again")
        return known

    def _add(self, agent: Any, wanted: NixlEndpoint) -> None:
        try:
            added = agent.add_remote_agent(wanted.metadata)
        except Exception as error:
            raise nixl_failure(error, "connect", wanted.agent) from error
        name = added.decode() if isinstance(added, bytes) else str(added)
        if name != wanted.agent:
            raise TransferError("connect", f"{wanted.agent}: its metadata is of {name}")
        self._peers[name] = _Peer(wanted)

    def _sweep(self, name: str, known: _Peer) -> _Peer | None:
        """Drop a forgotten peer if no read of it is left. Returns what remains of it."""
        if not known.forgotten:
            return known
        for read in list(known.reads):
            read.poll()
        if known.reads:
            return known
        self._remove(name)
        return None

    def _remove(self, name: str) -> None:
        if self._peers.pop(name, None) is not None:
            try:
                self._agent.remove_remote_agent(name)
            except Exception as error:
                logging.getLogger(__name__).warning("NIXL could not drop peer %s: %s", name, error)

    def _prepare(self, peer: str, runs: list[PageRun], source: _Region, target: _Region, notice: bytes) -> Any:
        agent = self._agent
        try:
            here = agent.get_xfer_descs(_descriptors(target, [(run.local, run.pages) for run in runs]), target.kind)
            there = agent.get_xfer_descs(_descriptors(source, [(run.remote, run.pages) for run in runs]), source.kind)
            return agent.initialize_xfer("READ", here, there, peer, notice)
        except Exception as error:
            raise nixl_failure(error, "prepare", peer) from error

    def _post(self, peer: str, handle: Any) -> TransferError | None:
        try:
            status = self._agent.transfer(handle)
        except Exception as error:
            return nixl_failure(error, "post", peer)
        return None if status in ("DONE", "PROC") else TransferError("post", f"{peer}: post ended as {status}")

    def _open(self, known: _Peer, read: NixlRead, post_error: TransferError | None) -> None:
        """Keep hold of the read until it ends. Raises ``post_error`` unless part of the transfer is under way all the
        same.
        """
        known.reads.add(read)
        if post_error is not None and read.poll() is not ReadState.READING:
            raise post_error

    def _ended(self, read: NixlRead) -> None:
        known = self._peers.get(read.peer)
        if known is not None:
            known.reads.discard(read)
        if isinstance(read, NixlGenerationRead):
            self._scratch.give_back(read.words)


def _check_pages(peer: str, pages: Sequence[int], num_pages: int) -> None:
    if not pages or not all(0 <= page < num_pages for page in pages):
        raise TransferError("prepare", f"{peer}: no page, or one outside [0, {num_pages})")


def _descriptors(region: _Region, pieces: list[tuple[int, int]]) -> Any:
    """``(first element, elements)`` as NIXL's rows of (address, length, device)."""
    cuts = np.asarray(pieces, np.uint64)
    rows = np.empty((len(pieces), 3), np.uint64)
    rows[:, 0] = np.uint64(region.address) + cuts[:, 0] * np.uint64(region.element_bytes)
    rows[:, 1] = cuts[:, 1] * np.uint64(region.element_bytes)
    rows[:, 2] = region.device or 0
    return rows


def _page_aligned_words(count: int) -> Any:
    """Zeros, alone in their memory pages: registering must not expose anything else."""
    padded = -(-count // _WORDS_PER_MEMORY_PAGE) * _WORDS_PER_MEMORY_PAGE
    space = np.zeros(padded + _WORDS_PER_MEMORY_PAGE, np.int64)
    skip = -space.ctypes.data % 4096 // _WORD_BYTES
    return space[skip : skip + padded]


def _new_agent(name: str, backend: str) -> Any:
    # Here, not at the top: the import loads CUDA libraries, and only workers that move pages need it.
    from nixl._api import nixl_agent, nixl_agent_config

    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[backend]))
    if backend not in agent.backends:
        raise RuntimeError("the backend's plugin is missing")
    return agent
