"""How much of a transfer hides behind prefill: two engines in two processes of this machine, pages over NIXL.

The pages are SmolLM2-135M's; the runner fills them, and then sleeps for the rest of the time that a chunk is said to
take. ``hidden_fraction`` is the part of a prompt's pages that the decode worker had read when it heard that the last
chunk was computed; ``tail_ms`` is the time from the end of the last chunk at one worker to the first decode step at the
other, the way of the first token through this process included. Both are medians. Every page is checked.
"""

import argparse
import json
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import IO, Any

import numpy as np

from splitserve.cluster.engine_loop import Add, EngineLoop, GoOn, LoopReport
from splitserve.engine.counters import Counters
from splitserve.engine.engine import Engine
from splitserve.engine.handover import Handover, HandoverLimits
from splitserve.engine.page_hash import PageHasher
from splitserve.engine.page_pool import PagePool
from splitserve.engine.protocol import PageHash, Request, RequestId, SamplingParams, SequenceUpdate, WorkerId
from splitserve.engine.scheduler import SchedulerLimits
from splitserve.engine.step import Chunk, ChunkOutput
from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.nixl_transport import NixlTransport
from splitserve.kvtransfer.progress import ProgressThread
from splitserve.kvtransfer.ticket import Ticket
from splitserve.kvtransfer.transport import PoolMemory

LAYOUT = PageLayout(model="bench", layers=30, kv_heads=3, page_tokens=16, head_dim=64, dtype="float32")
TOKENS = 8192
CHUNK_TOKENS = 512
PREFILL_TOKEN_S = 1e-4  # faster than this model is on a CPU: less time to hide in
NEW_TOKENS = 3
WARM_UPS = 1
REPEATS = 7
WAIT_S = 60.0
HASHER = PageHasher(LAYOUT.page_tokens, b"bench")


@dataclass(frozen=True)
class Overlap:
    """One prompt's transfer."""

    hidden_fraction: float
    tail_s: float


class TimedRunner:
    """Implements ``engine.step.Runner`` over real pages, whose content names prompt and page index. The prompt's first
    token is its number.
    """

    layout = LAYOUT
    num_pages = LAYOUT.pages_for(TOKENS) + 16
    eos_token_ids: frozenset[int] = frozenset()
    max_model_tokens = 2 * TOKENS

    def __init__(self) -> None:
        self._data = np.zeros((self.num_pages, LAYOUT.page_bytes), np.uint8)
        self.prefill_ended = 0.0  # monotonic seconds, the same clock in all processes of a machine
        self.decode_started: dict[int, float] = {}  # by the prompt's number

    def memory(self) -> PoolMemory:
        return PoolMemory(self._data.ctypes.data, LAYOUT.page_bytes, self.num_pages, self._data)

    def run(self, chunks: Sequence[Chunk]) -> list[ChunkOutput]:
        started = time.monotonic()
        for chunk in chunks:
            number, decoding = chunk.history[0], len(chunk.token_ids) == 1
            if decoding and number not in self.decode_started:
                self.decode_started[number] = started
                self._check(chunk)
            elif not decoding:
                for index in range(chunk.start // LAYOUT.page_tokens, LAYOUT.pages_for(chunk.end)):
                    self._data[chunk.page_table[index]] = content_of(number, index)
                time.sleep(max(0.0, started + PREFILL_TOKEN_S * len(chunk.token_ids) - time.monotonic()))
                self.prefill_ended = time.monotonic()
        return [ChunkOutput(None if chunk.sample is None else 1) for chunk in chunks]

    def _check(self, chunk: Chunk) -> None:
        for index in range(LAYOUT.pages_for(TOKENS)):
            if not (self._data[chunk.page_table[index]] == content_of(chunk.history[0], index)).all():
                raise RuntimeError(f"page {index} of prompt {chunk.history[0]} does not hold what was computed")


def content_of(number: int, index: int) -> int:
    """The byte that fills page ``index`` of prompt ``number``."""
    return (31 * number + index) % 250 + 1


@contextmanager
def engine_thread(name: str, publish: Callable[[LoopReport, TimedRunner], None]) -> Iterator[EngineLoop]:
    """An engine as a worker runs it. ``publish`` is called on its thread."""
    runner, counters = TimedRunner(), Counters()
    transport = NixlTransport(name, runner.memory())
    pool = PagePool(runner.num_pages, on_generation=transport.set_generation)
    handover = Handover(
        worker=WorkerId(name),
        incarnation=1,
        layout=LAYOUT,
        pool=pool,
        transport=transport,
        limits=HandoverLimits(leased_share=1.0),
        counters=counters,
    )
    limits = SchedulerLimits(step_tokens=CHUNK_TOKENS, chunk_tokens=CHUNK_TOKENS)
    engine = Engine(runner, pool, HASHER, limits, handover, counters, time.monotonic)
    progress = ProgressThread(transport.progress, lambda: engine.transferring)
    loop = EngineLoop(engine, counters, lambda report: publish(report, runner))
    progress.start()
    loop.start()
    try:
        yield loop
    finally:
        progress.stop()
        loop.stop(WAIT_S)


def request_of(number: int, drawn: Sequence[int] = ()) -> Request:
    """Prompt ``number``, each with pages of its own, and what was drawn after it."""
    prompt = (number, *range(1, TOKENS))
    sampling = SamplingParams(max_tokens=NEW_TOKENS - len(drawn))
    return Request(RequestId(f"r{number}"), (*prompt, *drawn), names_of(prompt), sampling, drawn=len(drawn))


@cache
def names_of(prompt: tuple[int, ...]) -> tuple[PageHash, ...]:
    """Hashed once, as in a gateway; what is drawn in this measurement fills no page."""
    return HASHER.chain(prompt)


def measure_overlap() -> Overlap:
    """The medians of several prompts, one after the other. Raises RuntimeError when a page is wrong or a request does
    not end as it should.
    """
    updates: queue.Queue[tuple[SequenceUpdate, TimedRunner]] = queue.Queue()

    def publish(report: LoopReport, runner: TimedRunner) -> None:
        for update in report.result.updates:
            updates.put((update, runner))

    command = [sys.executable, "-m", "splitserve.bench.overlap", "--sender"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender,
        engine_thread("receiver", publish) as loop,
    ):
        assert sender.stdin is not None
        assert sender.stdout is not None
        try:
            found = [follow(number, loop, sender.stdin, sender.stdout, updates) for number in range(WARM_UPS + REPEATS)]
        finally:
            sender.stdin.close()
    for overlap in found:
        print(f"{overlap.hidden_fraction:.0%} hidden, tail {overlap.tail_s * 1e3:.1f} ms", file=sys.stderr)
    counted = found[WARM_UPS:]
    return Overlap(median(o.hidden_fraction for o in counted), median(o.tail_s for o in counted))


def follow(
    number: int,
    loop: EngineLoop,
    commands: IO[str],
    news: IO[str],
    updates: "queue.Queue[tuple[SequenceUpdate, TimedRunner]]",
) -> Overlap:
    """One prompt through both workers, as a gateway leads it."""
    print(number, file=commands, flush=True)
    early = json.loads(news.readline())
    loop.post(
        Add(request_of(number), hand_over=False, ticket=Ticket.decode(bytes.fromhex(early["ticket"])), awaiting=True)
    )
    final = json.loads(news.readline())
    loop.post(GoOn(request_of(number, final["tokens"])))
    record = None
    while True:
        update, runner = updates.get(timeout=WAIT_S)
        record = record or update.transfer
        if update.error is not None:
            raise RuntimeError(f"prompt {number}: {update.error}")
        if update.finish is not None:
            break
    if record is None or record.cause is not None or record.pages != LAYOUT.pages_for(TOKENS):
        raise RuntimeError(f"prompt {number} was not moved as a whole: {record}")
    tail_s = runner.decode_started[number] - final["ended"]
    return Overlap(record.hidden_pages / record.pages, tail_s)


def run_sender() -> None:
    """Prefill the prompts whose numbers come in, and tell what there is to tell of each."""

    def publish(report: LoopReport, runner: TimedRunner) -> None:
        for update in report.result.updates:
            ticket = None if update.ticket is None else update.ticket.hex()
            said: dict[str, Any] = {"ticket": ticket, "tokens": update.tokens, "ended": runner.prefill_ended}
            print(json.dumps(said), flush=True)

    with engine_thread("sender", publish) as loop:
        for line in sys.stdin:
            loop.post(Add(request_of(int(line)), hand_over=True, ticket=None))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--sender", action="store_true", help=argparse.SUPPRESS)
    if arguments.parse_args().sender:
        run_sender()
        return
    found = measure_overlap()
    print(f"hidden_fraction: {found.hidden_fraction:.3f}\ntail_ms: {found.tail_s * 1e3:.2f}")


if __name__ == "__main__":
    main()
