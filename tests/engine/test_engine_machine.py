"""Two small engines under random operations, faults and time: whatever happens, a request ends once, with the tokens
that an undisturbed engine would have drawn, and nothing stays behind.

The simulated runner checks what its pages hold: one foreign page would fail a step. Prompts begin alike, so that some
wait for pages that others compute; priorities differ, and pools are so small that sequences lose their pages.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from splitserve.engine.protocol import FinishReason, Request, RequestId, SamplingParams
from splitserve.engine.scheduler import SchedulerLimits
from splitserve.engine.sequence import SequenceState
from splitserve.engine.simulated_runner import mix
from splitserve.kvtransfer.ticket import Ticket

Make = Callable[..., Any]

PAGES = 7  # of 4 tokens, in each engine
MAX_PREEMPTIONS = 1
LIMITS = SchedulerLimits(step_tokens=7, chunk_tokens=3, max_running=3, max_preemptions=MAX_PREEMPTIONS)
FAULTS = ["refuse_connect", "fail_prepare", "fail_post", "fail_poll", "raise_foreign", "hang", "lose_notices"]
FAULTS += ["double_notices", "drop_peer_once"]
PROMPT = st.builds(
    lambda head, length, tail: [head] * length + tail,
    head=st.sampled_from([1, 2]),
    length=st.sampled_from([0, 1, 3, 4, 5, 8, 11]),
    tail=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4),
)


def tokens_of(request: Request, vocab: int = 1000) -> list[int]:
    """What the simulated runner draws: a function of seed and position."""
    start, sampling = len(request.prompt), request.sampling
    return [mix(mix(sampling.seed) + start + drawn) % vocab for drawn in range(sampling.max_tokens)]


@dataclass(eq=False)
class Leg:
    """A request on one engine."""

    bench: Any
    request: Request
    expected: list[int]
    hand_over: bool
    source: "Leg | None" = None  # whose first token this one awaits
    proceeded: bool = False
    aborted: bool = False

    @property
    def name(self) -> RequestId:
        return self.request.request_id

    @property
    def finish(self) -> FinishReason | None:
        return self.bench.finished.get(self.name)

    @property
    def tokens(self) -> list[int]:
        return list(self.bench.tokens.get(self.name, []))


def waiting_tokens(bench: Any) -> int:
    scheduler = bench.engine._scheduler
    return int(scheduler.waiting.tokens + scheduler.to_receive.tokens)


class EngineMachine(RuleBasedStateMachine):
    """A gateway that does what it likes with two engines; each can do both parts."""

    def __init__(self, make_engine: Make) -> None:
        super().__init__()
        self.benches = [make_engine(name, pages=PAGES, limits=LIMITS) for name in ("p", "d")]
        self.legs: list[Leg] = []
        self.taken: list[Leg] = []  # legs that were handed over and whose ticket was used

    def add(
        self,
        bench: Any,
        prompt: list[int],
        sampling: SamplingParams,
        ticket: Ticket | None,
        over: bool,
        priority: int = 0,
    ) -> None:
        request = self.named(bench, prompt, sampling, priority)
        bench.engine.add(request, hand_over=over, ticket=ticket)
        self.legs.append(Leg(bench, request, tokens_of(request), over))

    def named(self, bench: Any, prompt: list[int], sampling: SamplingParams, priority: int = 0) -> Request:
        name = RequestId(f"r{len(self.legs)}")
        return Request(name, tuple(prompt), bench.hasher.chain(prompt), sampling, priority=priority)

    @rule(
        at=st.sampled_from([0, 1]),
        prompts=st.lists(PROMPT, min_size=1, max_size=4),
        max_tokens=st.integers(1, 12),
        seed=st.integers(0, 2),
        over=st.booleans(),
        priority=st.sampled_from([0, 0, -1, 1]),
    )
    def burst(self, at: int, prompts: list[list[int]], max_tokens: int, seed: int, over: bool, priority: int) -> None:
        """More than fits at once: some wait, some are preempted."""
        for prompt in prompts:
            self.add(self.benches[at], prompt, SamplingParams(max_tokens=max_tokens, seed=seed), None, over, priority)

    @rule(at=st.sampled_from([0, 1]), prompt=PROMPT, max_tokens=st.integers(2, 9), seed=st.integers(0, 2))
    def prefill(self, at: int, prompt: list[int], max_tokens: int, seed: int) -> None:
        """Most probably there is an offer afterwards."""
        self.add(self.benches[at], prompt, SamplingParams(max_tokens=max_tokens, seed=seed), None, over=True)
        self.step(at, 6)

    @precondition(lambda self: self.open_offers())
    @rule(data=st.data(), keep=st.sampled_from([False, False, True]), over=st.sampled_from([False, False, True]))
    def take_up(self, data: st.DataObject, keep: bool, over: bool) -> None:
        """Go on at the other engine; with ``keep`` the ticket is used again, with ``over`` it goes on from there."""
        leg = data.draw(st.sampled_from(self.open_offers()))
        if not keep:
            self.taken.append(leg)
        ticket = Ticket.decode(leg.bench.tickets[leg.name])
        other = self.benches[1 - self.benches.index(leg.bench)]
        sampling, request = leg.request.sampling, leg.request
        rest = SamplingParams(max_tokens=sampling.max_tokens - 1, seed=sampling.seed)
        self.add(other, [*request.prompt, *leg.tokens], rest, ticket, over)

    def open_offers(self) -> list[Leg]:
        return [leg for leg in self.legs if leg.name in leg.bench.tickets and leg not in self.taken]

    @precondition(lambda self: self.early_offers())
    @rule(data=st.data())
    def wait_for(self, data: st.DataObject) -> None:
        """Take a prompt over while it is computed, or long after."""
        source = data.draw(st.sampled_from(self.early_offers()))
        other = self.benches[1 - self.benches.index(source.bench)]
        request = self.named(other, list(source.request.prompt), source.request.sampling)
        other.engine.add(request, ticket=Ticket.decode(source.bench.offers[source.name]), awaiting=True)
        self.legs.append(Leg(other, request, tokens_of(request)[1:], False, source))

    def early_offers(self) -> list[Leg]:
        """Those that nobody has taken up."""
        sources = [leg.source for leg in self.legs]
        return [leg for leg in self.legs if leg.name in leg.bench.offers and leg not in sources]

    @precondition(lambda self: self.continuable())
    @rule(data=st.data())
    def proceed(self, data: st.DataObject) -> None:
        self.go_on(data.draw(st.sampled_from(self.continuable())))

    def continuable(self) -> list[Leg]:
        """Those whose first token is here."""
        waiting = [leg for leg in self.legs if leg.source is not None and not leg.proceeded]
        return [leg for leg in waiting if leg.source and leg.source.finish is FinishReason.HANDED_OVER]

    def go_on(self, leg: Leg) -> None:
        assert leg.source is not None
        prompt, sampling = [*leg.request.prompt, *leg.source.tokens], leg.request.sampling
        rest = SamplingParams(max_tokens=sampling.max_tokens - 1, seed=sampling.seed)
        request = Request(leg.name, tuple(prompt), leg.bench.hasher.chain(prompt), rest)
        ended = leg.aborted or leg.finish is not None
        leg.proceeded = leg.bench.engine.proceed(request)
        assert leg.proceeded is not ended

    @precondition(lambda self: self.legs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """In any state, also long after the end."""
        leg = data.draw(st.sampled_from(self.legs))
        ended, held = leg.aborted or leg.finish is not None, leg.bench.pool.held_pages
        leg.aborted = leg.aborted or not ended
        found = leg.bench.engine.abort(leg.name)
        assert not leg.bench.engine.abort(leg.name)
        assert found or ended
        assert found or leg.bench.pool.held_pages == held

    @rule(at=st.sampled_from([0, 1]), steps=st.integers(1, 12))
    def step(self, at: int, steps: int) -> None:
        for _ in range(steps):
            self.step_once(self.benches[at])

    def step_once(self, bench: Any) -> None:
        """One step, and what has to be true of its decisions."""
        engine, scheduler = bench.engine, bench.engine._scheduler
        before = {sequence: sequence.preemptions for sequence in engine._sequences.values()}
        transferring = engine.transferring
        result = bench.step()
        waits_for_peers = transferring or engine.transferring or scheduler.receiving
        assert result.computed or waits_for_peers or not (scheduler.running or scheduler.waiting)
        for sequence, preemptions in before.items():
            assert sequence.preemptions <= MAX_PREEMPTIONS
            if sequence.preemptions > preemptions:
                behind = [other for other in scheduler.running if other.rank > sequence.rank]
                assert all(other.offer is not None for other in behind)

    @rule(at=st.sampled_from([0, 1]), seconds=st.sampled_from([0.5, 0.5, 2.5, 6.0]))
    def wait(self, at: int, seconds: float) -> None:
        """Reads end after 2 s, leases after 5 s."""
        self.benches[at].clock.now += seconds

    @rule(at=st.sampled_from([0, 1]), fault=st.sampled_from(FAULTS + ["", "hang"] * 4), polls=st.integers(0, 3))
    def set_fault(self, at: int, fault: str, polls: int) -> None:
        faults = self.benches[at].transport.faults
        self.clear_faults(faults)
        faults.abandon_polls = polls
        if fault:
            setattr(faults, fault, True)

    def clear_faults(self, faults: Any) -> None:
        for fault in FAULTS:
            setattr(faults, fault, False)

    @invariant()
    def the_ledger_is_exact(self) -> None:
        for bench in self.benches:
            pool, owners = bench.pool, Counter[int]()
            for sequence in bench.engine._sequences.values():
                if sequence.pages is not None:
                    owners.update(sequence.pages.page_ids)
            assert all(pool._owners[page] >= count for page, count in owners.items())
            assert all(count == 1 or pool.cache.is_sealed(page) for page, count in owners.items())
            assert pool.held_pages == sum(1 for count in pool._owners if count)
            waiting = [s for s in bench.engine._sequences.values() if s.state is SequenceState.WAITING]
            assert sum(len(s.tokens) for s in waiting) == waiting_tokens(bench)

    @invariant()
    def no_page_is_foreign(self) -> None:
        assert [bench.total("splitserve_failed_steps_total") for bench in self.benches] == [0, 0]

    @invariant()
    def drawn_tokens_are_right(self) -> None:
        for leg in self.legs:
            assert leg.tokens == leg.expected[: len(leg.tokens)]

    def teardown(self) -> None:
        """Without faults everything ends."""
        for bench in self.benches:
            self.clear_faults(bench.transport.faults)
        for _ in range(1000):
            for bench in self.benches:
                bench.clock.now += 0.1
                self.step_once(bench)
            self.settle()
            if all(bench.engine.idle for bench in self.benches):
                break
        for bench in self.benches:
            load = bench.engine.load()
            assert (load.waiting, load.waiting_tokens, load.running, load.held_pages) == (0, 0, 0, 0)
            assert bench.engine.idle
            assert bench.transport.open_reads == 0
        for leg in self.legs:
            self.check_end(leg)

    def settle(self) -> None:
        """Nobody waits for a first token that is here, or never comes."""
        for leg in self.legs:
            if leg.source is None or leg.proceeded or leg.aborted or leg.finish is not None:
                continue
            if leg in self.continuable():
                self.go_on(leg)
            elif leg.source.aborted:
                leg.aborted = leg.bench.engine.abort(leg.name)

    def check_end(self, leg: Leg) -> None:
        """``Bench.step`` has made sure that it ended once at most."""
        handed_over = leg.hand_over and leg.request.sampling.max_tokens > 1
        if leg.aborted:
            assert leg.finish is FinishReason.ABORT
        elif leg.source is not None and not leg.proceeded:
            assert (leg.finish, leg.tokens) == (FinishReason.ERROR, [])
        elif handed_over:
            assert (leg.finish, leg.tokens) == (FinishReason.HANDED_OVER, leg.expected[:1])
        else:
            assert (leg.finish, leg.tokens) == (FinishReason.LENGTH, leg.expected)


def test_two_engines_under_random_operations(make_engine: Make) -> None:
    run_state_machine_as_test(
        lambda: EngineMachine(make_engine),
        settings=settings(
            max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
