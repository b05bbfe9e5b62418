"""The peers that a NIXL agent knows, and what is under way with each. None of it waits, or touches another peer."""

import logging
from dataclasses import dataclass, field
from typing import Any

from splitserve.kvtransfer.nixl_descriptors import Region
from splitserve.kvtransfer.nixl_endpoint import NixlEndpoint
from splitserve.kvtransfer.nixl_read import NixlGenerationRead, NixlRead, nixl_failure
from splitserve.kvtransfer.nixl_scratch import WORD_BYTES, ScratchWords
from splitserve.kvtransfer.nixl_words import PeerWords
from splitserve.kvtransfer.transport import TransferError


@dataclass
class NixlPeer:
    """One incarnation of a worker."""

    endpoint: NixlEndpoint
    pool: Region
    words: Region  # the generations
    word_transfers: PeerWords
    reads: set[NixlRead] = field(default_factory=set)  # under way
    forgotten: bool = False  # drop it when the last read has ended


class NixlPeers:
    """Peers by the name of their agent, which no two incarnations share. The caller holds the transport's lock."""

    def __init__(self, agent: Any, scratch: ScratchWords) -> None:
        self._agent: Any = agent
        self._scratch = scratch
        self._peers: dict[str, NixlPeer] = {}

    @property
    def open_reads(self) -> int:
        """Reads that NIXL has not ended, abandoned ones included."""
        return sum(len(peer.reads) for peer in self._peers.values())

    def connect(self, wanted: NixlEndpoint) -> None:
        """Make a peer known, or keep it. Raises TransferError(connect).

        A forgotten peer with a read still under way keeps its old connection: dropping that would leave the read
        without anyone who can say when it has ended.
        """
        known = self._peers.get(wanted.agent)
        if known is not None:
            known = self._sweep(wanted.agent, known)
        if known is None:
            self._add(wanted)
        elif known.endpoint != wanted:
            raise TransferError("connect", f"{wanted.agent}: two endpoints of one name")

    def forget(self, name: str) -> None:
        """Drop a peer, after its last read."""
        known = self._peers.get(name)
        if known is not None:
            known.forgotten = True
            self._sweep(name, known)

    def find(self, name: str) -> NixlPeer:
        """Raises TransferError(disconnect) for one that is not connected."""
        known = self._peers.get(name)
        if known is None:
            raise TransferError("disconnect", f"{name}: not connected; call connect again")
        return known

    def ended(self, read: NixlRead) -> None:
        """A read is no longer under way."""
        known = self._peers[read.peer]
        known.reads.discard(read)
        if isinstance(read, NixlGenerationRead):
            known.word_transfers.give_back(read.transfer)

    def close(self) -> None:
        """Drop all peers and the agent; reads under way end as FAILED(closed)."""
        for name, known in list(self._peers.items()):
            for read in list(known.reads):
                read.drop()
            self._remove(name)
        self._agent = None
        del self._scratch

    def _add(self, wanted: NixlEndpoint) -> None:
        try:
            added = self._agent.add_remote_agent(wanted.metadata)
        except Exception as error:
            raise nixl_failure(error, "connect", wanted.agent) from error
        name = added.decode() if isinstance(added, bytes) else str(added)
        if name != wanted.agent:
            raise TransferError("connect", f"{wanted.agent}: its metadata is of {name}")
        self._peers[name] = NixlPeer(
            wanted,
            Region(wanted.address, wanted.page_bytes, wanted.num_pages, wanted.device),
            Region(wanted.generations, WORD_BYTES, wanted.num_pages),
            PeerWords(wanted.num_pages, self._scratch),
        )

    def _sweep(self, name: str, known: NixlPeer) -> NixlPeer | None:
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
        known = self._peers.pop(name)
        for step in (known.word_transfers.release, lambda: self._agent.remove_remote_agent(name)):
            try:
                step()
            except Exception as error:
                logging.getLogger(__name__).warning("NIXL could not drop peer %s: %s", name, error)
