"""Ten thousand random requests on one engine: nothing is lost, nothing is held, nothing grows."""

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from splitserve.engine import simulated_runner
from splitserve.engine.protocol import FinishReason, RequestId
from splitserve.engine.scheduler import SchedulerLimits

Make = Callable[..., Any]

REQUESTS = 10_000
WARM_UP = 2_000
GROWTH_BYTES = 1 << 20  # 131 bytes for each request after the warm-up would show
PAGE_BYTES = 4096


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


class Crowd:
    """Sends requests so that 20 to 60 are there at any time, and aborts one of them in every twentieth step."""

    def __init__(self, bench: Any) -> None:
        self._bench = bench
        self._rng = random.Random(11)
        self._open: dict[str, int] = {}  # tokens wanted
        self._aborted: set[str] = set()
        self.sent = 0
        self.ended = 0

    def step(self) -> None:
        rng = self._rng
        while self.sent < REQUESTS and len(self._open) < 60 and (len(self._open) < 20 or rng.random() < 0.5):
            self._send()
        if self._open and rng.random() < 0.05:
            self._abort(rng.choice(list(self._open)))
        self._bench.clock.now += 0.01
        self._bench.step()
        self._take_ended()

    def _send(self) -> None:
        rng, name = self._rng, str(self.sent)
        prompt = [rng.randrange(3)] * rng.choice([1, 4, 9]) + [rng.randrange(999) for _ in range(rng.randint(1, 12))]
        request = self._bench.request(name, prompt, rng.randint(1, 30), seed=self.sent)
        hand_over = rng.random() < 0.1
        self._bench.engine.add(replace(request, priority=rng.choice([0, 0, 0, -1, 1])), hand_over=hand_over)
        self._open[name] = 1 if hand_over else request.sampling.max_tokens
        self.sent += 1

    def _abort(self, name: str) -> None:
        assert self._bench.engine.abort(RequestId(name))
        self._aborted.add(name)

    def _take_ended(self) -> None:
        """The fixture's books are emptied: they would grow with the requests."""
        bench = self._bench
        for name, finish in bench.finished.items():
            wanted, tokens = self._open.pop(name), bench.tokens.pop(name)
            bench.cached.pop(name)
            bench.tickets.pop(name, None)
            assert (finish is FinishReason.ABORT) == (name in self._aborted)
            assert len(tokens) == wanted or name in self._aborted
            self._aborted.discard(name)
            self.ended += 1
        bench.finished.clear()


def test_ten_thousand_requests_leave_nothing_behind(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the simulated runner remembers is bounded, but would still be filling up during the measurement.
    monkeypatch.setattr(simulated_runner, "REMEMBERED_REQUESTS", 128)
    limits = SchedulerLimits(step_tokens=96, chunk_tokens=16, max_running=32)
    bench = make_engine(pages=80, limits=limits)
    crowd = Crowd(bench)
    after_warm_up = 0
    while crowd.ended < REQUESTS:
        crowd.step()
        if not after_warm_up and crowd.ended >= WARM_UP:
            after_warm_up = resident_bytes()
    grown = resident_bytes() - after_warm_up
    bench.clock.now += 6.0
    bench.step()
    assert crowd.sent == REQUESTS
    assert bench.total("splitserve_preemptions_total") > 100
    assert bench.engine.idle
    load = bench.engine.load()
    assert (load.waiting, load.waiting_tokens, load.running, load.held_pages) == (0, 0, 0, 0)
    assert load.free_pages + load.cached_pages == 80
    assert not any(bench.pool._owners)
    assert len(bench.pool.cache.names()) == load.cached_pages
    assert grown < GROWTH_BYTES
