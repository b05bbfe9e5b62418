"""A pair of engines on simulated runners that hand pages over within this process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from splitserve.engine.counters import Counters
from splitserve.engine.engine import Engine, StepResult
from splitserve.engine.handover import Handover, HandoverLimits
from splitserve.engine.page_hash import PageHasher
from splitserve.engine.page_pool import PagePool
from splitserve.engine.protocol import (
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    SequenceUpdate,
    TransferRecord,
    WorkerId,
)
from splitserve.engine.scheduler import SchedulerLimits
from splitserve.engine.simulated_runner import SimulatedRunner
from splitserve.kvtransfer.local_transport import LocalNetwork, LocalTransport
from splitserve.kvtransfer.ticket import Ticket

PAGE_TOKENS = 4
VOCAB = 1000


class Clock:
    """Time that passes when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """One engine with everything a test looks at."""

    engine: Engine
    pool: PagePool
    transport: LocalTransport
    counters: Counters
    clock: Clock
    hasher: PageHasher
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, FinishReason] = field(default_factory=dict)
    tickets: dict[str, bytes] = field(default_factory=dict)
    offers: dict[str, bytes] = field(default_factory=dict)  # tickets of prompts that were not computed yet
    errors: dict[str, str | None] = field(default_factory=dict)
    transfers: dict[str, TransferRecord] = field(default_factory=dict)
    cached: dict[str, int | None] = field(default_factory=dict)

    def request(self, name: str, prompt: list[int], max_tokens: int = 4, seed: int = 7, **sampling: object) -> Request:
        params = SamplingParams(max_tokens=max_tokens, seed=seed, **sampling)  # type: ignore[arg-type]
        return Request(RequestId(name), tuple(prompt), self.hasher.chain(prompt), params)

    def step(self) -> StepResult:
        result = self.engine.step(self._announced)
        for update in result.updates:
            self.tokens.setdefault(update.request_id, []).extend(update.tokens)
            self.cached.setdefault(update.request_id, update.cached_tokens)
            if update.finish is not None:
                assert update.request_id not in self.finished, "a request ends once"
                self.finished[update.request_id] = update.finish
                self.errors[update.request_id] = update.error
            if update.ticket is not None:
                self.tickets[update.request_id] = update.ticket
            if update.transfer is not None:
                self.transfers[update.request_id] = update.transfer
        load = self.engine.load()
        assert load.free_pages + load.cached_pages + load.held_pages == load.total_pages
        return result

    def _announced(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            assert (update.tokens, update.finish) == ([], None)
            assert update.ticket is not None
            assert update.request_id not in self.offers, "a prompt is offered once"
            self.offers[update.request_id] = update.ticket

    def run(self, *names: str, steps: int = 500) -> None:
        """Step until all of ``names`` have ended."""
        for _ in range(steps):
            if all(name in self.finished for name in names):
                return
            self.step()
        raise AssertionError(f"{set(names) - set(self.finished)} did not end in {steps} steps")

    def total(self, name: str) -> float:
        return sum(counted.total for counted in self.counters.totals() if counted.name == name)

    def ticket(self, name: str) -> Ticket:
        return Ticket.decode(self.tickets[name])

    def offer(self, name: str) -> Ticket:
        return Ticket.decode(self.offers[name])


@pytest.fixture
def network() -> LocalNetwork:
    return LocalNetwork()


@pytest.fixture
def make_engine(network: LocalNetwork) -> Iterator[Callable[..., Bench]]:
    """Build engines; at the end of the test each must hold nothing."""
    made: list[Bench] = []

    def make(
        name: str = "w",
        pages: int = 64,
        limits: SchedulerLimits | None = None,
        eos: frozenset[int] = frozenset(),
        leased_share: float = 0.75,
    ) -> Bench:
        runner = SimulatedRunner(
            num_pages=pages,
            page_tokens=PAGE_TOKENS,
            vocab_size=VOCAB,
            max_model_tokens=4096,
            eos_token_ids=eos,
        )
        clock, counters = Clock(), Counters()
        hasher = PageHasher(PAGE_TOKENS, b"test")
        transport = LocalTransport(name, runner.memory(), network)
        pool = PagePool(pages, on_generation=transport.set_generation)
        handover = Handover(
            worker=WorkerId(name),
            incarnation=len(made),
            layout=runner.layout,
            pool=pool,
            transport=transport,
            limits=HandoverLimits(lease_s=5.0, read_s=2.0, leased_share=leased_share),
            counters=counters,
        )
        engine = Engine(runner, pool, hasher, limits or SchedulerLimits(64, 16, 8), handover, counters, clock)
        bench = Bench(engine, pool, transport, counters, clock, hasher)
        made.append(bench)
        return bench

    yield make
    for bench in made:
        for _ in range(20):
            bench.step()
        assert bench.engine.idle
        assert bench.pool.held_pages == 0
        bench.engine.close()
