"""What a step costs outside the model.

Two figures. The time of one engine step at 256 running and 10,000 waiting requests, with a runner that computes
nothing: scheduling and bookkeeping alone. And the share of a real step at batch 32 (SmolLM2 in float32 on a CPU) that
is not spent inside the model: scheduler, page tables, batch building, sampler, bookkeeping.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from splitserve.engine.build import build_engine
from splitserve.engine.counters import Counters
from splitserve.engine.engine import Engine
from splitserve.engine.handover import Handover, HandoverLimits
from splitserve.engine.model_runner import ModelRunner
from splitserve.engine.page_hash import PageHasher
from splitserve.engine.page_pool import PagePool
from splitserve.engine.protocol import Request, RequestId, SamplingParams, WorkerId
from splitserve.engine.scheduler import SchedulerLimits
from splitserve.engine.settings import EngineSettings
from splitserve.engine.simulated_runner import SimulatedRunner
from splitserve.engine.step import Chunk, ChunkOutput
from splitserve.kvtransfer.local_transport import LocalNetwork, LocalTransport

RUNNING = 256
WAITING = 10_000
BATCH = 32
PAGE_TOKENS = 16
PROMPT_TOKENS = 64
VOCAB = 30_000
WORKER = WorkerId("bench")
T = TypeVar("T")


class FreeRunner(SimulatedRunner):
    """A runner whose steps cost nothing: it neither writes nor checks pages."""

    def run(self, chunks: Sequence[Chunk]) -> list[ChunkOutput]:
        return [ChunkOutput(None if chunk.sample is None else chunk.end % VOCAB) for chunk in chunks]


def free_engine(pages: int, limits: SchedulerLimits) -> Engine:
    """An engine on a runner without cost."""
    runner = FreeRunner(num_pages=pages, page_tokens=PAGE_TOKENS, vocab_size=VOCAB, max_model_tokens=1 << 17)
    transport = LocalTransport(WORKER, runner.memory(), LocalNetwork())
    pool, counters = PagePool(pages, on_generation=transport.set_generation), Counters()
    handover = Handover(
        worker=WORKER,
        incarnation=0,
        layout=runner.layout,
        pool=pool,
        transport=transport,
        limits=HandoverLimits(),
        counters=counters,
    )
    return Engine(runner, pool, PageHasher(PAGE_TOKENS, b"bench"), limits, handover, counters, time.monotonic)


def add_requests(engine: Engine, count: int, max_tokens: int, vocab: int) -> None:
    """Prompts of ``PROMPT_TOKENS`` random tokens, greedy."""
    rng, hasher = random.Random(count), PageHasher(PAGE_TOKENS, b"bench")
    for number in range(count):
        prompt = tuple(rng.randrange(vocab) for _ in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        engine.add(Request(RequestId(f"{count}-{number}"), prompt, hasher.chain(prompt), sampling))


def step_until_running(engine: Engine, running: int) -> None:
    """Step until ``running`` sequences decode and nobody prefills."""
    while engine.step().prefill_tokens or engine.load().running < running:
        pass


def step_seconds(running: int, waiting: int, steps: int) -> list[float]:
    """Durations of steps in which ``running`` sequences decode and ``waiting`` ones wait; ``Engine.load`` included, as
    a worker reports it with each step.
    """
    limits = SchedulerLimits(step_tokens=512, chunk_tokens=256, max_running=running)
    engine = free_engine(pages=running * 64, limits=limits)
    add_requests(engine, running + waiting, max_tokens=900, vocab=VOCAB)
    step_until_running(engine, running)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        load = engine.load()
        seconds.append(time.perf_counter() - began)
        assert (load.running, load.waiting) == (running, waiting)
    engine.close()
    return seconds


@dataclass
class Stopwatch:
    """Time spent inside functions."""

    seconds: float = 0.0

    def around(self, function: Callable[..., T]) -> Callable[..., T]:
        def timed(*args: object) -> T:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


@dataclass(frozen=True)
class Overhead:
    """Medians over steps, in seconds."""

    step_s: float
    model_s: float

    @property
    def percent(self) -> float:
        """Share of the step outside the model."""
        return 100 * (1 - self.model_s / self.step_s)


def real_overhead(batch: int, steps: int) -> Overhead:
    """Decode steps of ``batch`` sequences with the default model."""
    settings = EngineSettings(dtype="float32", device="cpu", threads=os.cpu_count() or 1, max_running=batch)
    built = build_engine(settings, WORKER, 0, lambda memory: LocalTransport(WORKER, memory, LocalNetwork()))
    runner = built.runner
    assert isinstance(runner, ModelRunner)
    model, watch = runner._model, Stopwatch()
    model.forward, model.logits = watch.around(model.forward), watch.around(model.logits)  # type: ignore[method-assign]
    add_requests(built.engine, batch, max_tokens=steps + 16, vocab=runner.vocab_size)
    step_until_running(built.engine, batch)
    step_s, model_s = [], []
    for _ in range(steps):
        watch.seconds = 0.0
        began = time.perf_counter()
        result = built.engine.step()
        built.engine.load()
        step_s.append(time.perf_counter() - began)
        model_s.append(watch.seconds)
        assert result.decode_tokens == batch
    built.engine.close()
    return Overhead(statistics.median(step_s), statistics.median(model_s))


def main() -> None:
    """Print a table, or with ``--json`` one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps to take the median of")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    options = parser.parse_args()
    seconds = step_seconds(RUNNING, WAITING, options.steps)
    overhead = real_overhead(BATCH, options.steps)
    figures = {
        "step_ms": round(1000 * statistics.median(seconds), 2),
        "running": RUNNING,
        "waiting": WAITING,
        "overhead_percent_batch32": round(overhead.percent, 1),
    }
    if options.json:
        print(json.dumps(figures))
        return
    print(f"{RUNNING} running, {WAITING} waiting, no model: {figures['step_ms']} ms a step (median of {options.steps})")
    print(f"batch {BATCH}, SmolLM2 float32: {1000 * overhead.step_s:.1f} ms a step,", end=" ")
    print(f"{1000 * (overhead.step_s - overhead.model_s):.2f} ms of it ({overhead.percent:.1f} %) outside the model")


if __name__ == "__main__":
    main()
