"""How fast pages move between two processes of this machine, beside a plain NIXL loop over the same bytes in one run.

The layout is SmolLM2-135M's with 16 tokens a page. Our side is what a hand-over does: descriptors from page tables,
the read, and the read of the pages' generations. The plain loop reads the same pages with one descriptor each and
checks nothing. Both take turns, in alternating order; of each the best repetition counts, of single pages the median.

``rate_ratio`` is the lower one of contiguous and scattered page tables. ``hidden_fraction`` and ``tail_ms`` are those
of ``overlap.py``; ``chunk_ms`` is what moving one chunk's pages takes by itself, to compare ``tail_ms`` with.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from select import select
from statistics import median
from typing import Any

import numpy as np

from splitserve.bench.overlap import CHUNK_TOKENS, LAYOUT, TOKENS, measure_overlap
from splitserve.kvtransfer.nixl_agent import new_agent
from splitserve.kvtransfer.nixl_transport import NixlTransport
from splitserve.kvtransfer.settings import TransportSettings
from splitserve.kvtransfer.transport import Peer, PoolMemory, Read, ReadState

REPEATS = 20
SINGLE_READS = 400
PEER_POLL_S = 0.001
STOP_TIMEOUT_S = 10.0


class Pool:
    """Pages in host memory with a content that can be checked, and two agents that know them: ours and a plain one."""

    def __init__(self, name: str, pages: int) -> None:
        self.data = np.zeros((pages, LAYOUT.page_bytes), np.uint8)
        memory = PoolMemory(self.data.ctypes.data, LAYOUT.page_bytes, pages, self.data)
        self.transport = NixlTransport(name, memory)
        self.plain: Any = new_agent(f"plain-{name}", TransportSettings())
        self.plain.register_memory([(memory.address, self.data.nbytes, 0, "")], "DRAM")
        self.address = memory.address


@dataclass(frozen=True)
class Sender:
    """What the receiver must know of the other process."""

    endpoint: bytes
    plain_metadata: bytes
    address: int


class Receiver:
    """Reads from the sender both ways. Page tables are of equal length; seconds are returned."""

    def __init__(self, pool: Pool, sender: Sender) -> None:
        self._pool = pool
        self._sender = sender
        self._peer: Peer = pool.transport.connect(sender.endpoint)
        self._plain_peer: str = pool.plain.add_remote_agent(sender.plain_metadata).decode()

    def ours(self, remote: Sequence[int], local: Sequence[int]) -> float:
        """By the transport, generations included."""
        start = time.perf_counter()
        transport = self._pool.transport
        drive(transport.read_pages(self._peer, remote, local))
        generations = transport.read_generations(self._peer, remote)
        drive(generations)
        values = generations.values()
        seconds = time.perf_counter() - start
        if values != [generation_of(page) for page in remote]:
            raise RuntimeError("a generation is not what the sender wrote")
        return seconds

    def plainly(self, remote: Sequence[int], local: Sequence[int]) -> float:
        """By NIXL alone: one descriptor per page, one transfer."""
        size, here, there = LAYOUT.page_bytes, self._pool.address, self._sender.address
        agent = self._pool.plain
        start = time.perf_counter()
        target = agent.get_xfer_descs([(here + page * size, size, 0) for page in local], "DRAM")
        source = agent.get_xfer_descs([(there + page * size, size, 0) for page in remote], "DRAM")
        handle = agent.initialize_xfer("READ", target, source, self._plain_peer)
        status = agent.transfer(handle)
        while status == "PROC":
            status = agent.check_xfer_state(handle)
        handle.release()
        seconds = time.perf_counter() - start
        if status != "DONE":
            raise RuntimeError(f"the plain transfer ended as {status}")
        return seconds

    def check(self, remote: Sequence[int], local: Sequence[int]) -> None:
        """Raises RuntimeError unless the local pages hold what the sender wrote; clears them."""
        for there, here in zip(remote, local, strict=True):
            if not (self._pool.data[here] == content_of(there)).all():
                raise RuntimeError(f"page {here} does not hold the sender's page {there}")
        self._pool.data[:] = 0


def drive(read: Read) -> None:
    """Poll until the read is done. Raises why it failed."""
    while (state := read.poll()) is ReadState.READING:
        pass
    if state is not ReadState.DONE:
        raise read.error or RuntimeError("the read failed")


def content_of(page: int) -> int:
    """The byte that fills a page of the sender."""
    return page % 250 + 1


def generation_of(page: int) -> int:
    """What the sender publishes for a page."""
    return page + 7


def measure_rate(receiver: Receiver, remote: Sequence[int]) -> float:
    """Our rate over the plain rate for all pages of the table ``remote``."""
    local = range(len(remote))
    ways: list[Callable[[Sequence[int], Sequence[int]], float]] = [receiver.plainly, receiver.ours]
    for way in ways:
        way(remote, local)
        receiver.check(remote, local)
    best = {way: float("inf") for way in ways}
    for repeat in range(REPEATS):
        for way in ways if repeat % 2 else ways[::-1]:
            best[way] = min(best[way], way(remote, local))
    plain_s, our_s = (best[way] for way in ways)
    total = len(remote) * LAYOUT.page_bytes
    print(f"plain {total / plain_s / 1e9:.2f} GB/s, ours {total / our_s / 1e9:.2f} GB/s", file=sys.stderr)
    return plain_s / our_s


def measure_single(receiver: Receiver, pages: int) -> float:
    """Our time for one page over the plain time; each read takes another page."""
    draw = random.Random(1)
    plain_s: list[float] = []
    our_s: list[float] = []
    for number in range(SINGLE_READS):
        pair = draw.sample(range(pages), 2)
        if number % 2:
            plain_s.append(receiver.plainly(pair[:1], pair[:1]))
            our_s.append(receiver.ours(pair[1:], pair[1:]))
        else:
            our_s.append(receiver.ours(pair[1:], pair[1:]))
            plain_s.append(receiver.plainly(pair[:1], pair[:1]))
    print(f"one page: plain {median(plain_s) * 1e6:.0f} us, ours {median(our_s) * 1e6:.0f} us", file=sys.stderr)
    return median(our_s) / median(plain_s)


def measure_chunk(receiver: Receiver) -> float:
    """Seconds to move the pages of one chunk of a prompt, each time those of another one, which no cache holds."""
    pages = LAYOUT.pages_for(CHUNK_TOKENS)
    chunks = [range(first, first + pages) for first in range(0, LAYOUT.pages_for(TOKENS), pages)]
    return median(receiver.ours(chunk, chunk) for chunk in chunks)


def measure() -> dict[str, float]:
    """All figures."""
    pages = LAYOUT.pages_for(TOKENS)
    scattered = list(range(pages))
    random.Random(0).shuffle(scattered)
    with sender_process(pages) as sender:
        receiver = Receiver(Pool("receiver", pages), sender)
        rates = [measure_rate(receiver, table) for table in (range(pages), scattered)]
        single = measure_single(receiver, pages)
        chunk_s = measure_chunk(receiver)
    overlap = measure_overlap()
    return {
        "rate_ratio": round(min(rates), 3),
        "page_latency_ratio": round(single, 3),
        "hidden_fraction": round(overlap.hidden_fraction, 3),
        "tail_ms": round(overlap.tail_s * 1e3, 2),
        "chunk_ms": round(chunk_s * 1e3, 2),
    }


@contextmanager
def sender_process(pages: int) -> Iterator[Sender]:
    """Another process whose pages can be read."""
    command = [sys.executable, "-m", "splitserve.bench.transfer", "--sender", str(pages)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        facts = json.loads(process.stdout.readline())
        yield Sender(bytes.fromhex(facts["endpoint"]), bytes.fromhex(facts["plain_metadata"]), facts["address"])
    finally:
        process.stdin.close()
        process.wait(STOP_TIMEOUT_S)


def run_sender(pages: int) -> None:
    """Offer ``pages`` pages until the input ends."""
    pool = Pool("sender", pages)
    for page in range(pages):
        pool.data[page] = content_of(page)
        pool.transport.set_generation(page, generation_of(page))
    facts = {
        "endpoint": pool.transport.endpoint().hex(),
        "plain_metadata": pool.plain.get_agent_metadata().hex(),
        "address": pool.address,
    }
    print(json.dumps(facts), flush=True)
    while not select([sys.stdin], [], [], PEER_POLL_S)[0]:
        pool.transport.progress()
        pool.plain.get_new_notifs()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments.add_argument("--sender", type=int, metavar="PAGES", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.sender is not None:
        run_sender(options.sender)
        return
    figures = measure()
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
