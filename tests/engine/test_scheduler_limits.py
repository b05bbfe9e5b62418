"""What is refused, with which words; what is asked of a prompt with log-probabilities; the order of the queue."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.engine.counters import Counters
from splitserve.engine.engine import RequestRefused
from splitserve.engine.page_hash import PageHasher
from splitserve.engine.page_pool import PagePool
from splitserve.engine.protocol import Request, RequestId, SamplingParams, TokenLogprobs
from splitserve.engine.scheduler import Scheduler, SchedulerLimits
from splitserve.engine.sequence import Sequence
from splitserve.engine.waiting_queue import WaitingQueue

Make = Callable[..., Any]

# Engines of these tests have pages of 4 tokens and a model of 4096.


@pytest.mark.parametrize(
    ("pages", "prompt_tokens", "max_tokens", "message"),
    [
        pytest.param(8, 30, 4, "a prompt of 30 tokens and 4 new exceed this worker's pool of 32 tokens", id="pool"),
        pytest.param(8, 33, 1, "a prompt of 33 tokens and 1 new exceed this worker's pool of 32 tokens", id="prompt"),
        pytest.param(2000, 4096, 1, "a prompt of 4096 tokens and 1 new exceed the model's 4096 tokens", id="model"),
        pytest.param(2000, 1, 4096, "a prompt of 1 tokens and 4096 new exceed the model's 4096 tokens", id="output"),
        pytest.param(8, 5000, 1, "a prompt of 5000 tokens and 1 new exceed this worker's pool of 32", id="both"),
    ],
)
def test_a_refusal_names_the_limit_that_applied_and_the_sizes(
    make_engine: Make, pages: int, prompt_tokens: int, max_tokens: int, message: str
) -> None:
    """B130."""
    bench = make_engine(pages=pages)
    with pytest.raises(RequestRefused, match=message):
        bench.engine.add(bench.request("r", [1] * prompt_tokens, max_tokens))
    assert bench.engine.idle


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(32, 1), (31, 2), (1, 32)])
def test_a_request_of_exactly_the_pool_is_computed(make_engine: Make, prompt_tokens: int, max_tokens: int) -> None:
    bench = make_engine(pages=8)
    bench.engine.add(bench.request("r", [1] * prompt_tokens, max_tokens))
    bench.run("r")
    assert len(bench.tokens["r"]) == max_tokens


def test_a_request_that_is_handed_over_needs_room_for_its_prompt_alone(make_engine: Make) -> None:
    bench = make_engine(pages=8)
    bench.engine.add(bench.request("r", [1] * 32, 2000), hand_over=True)
    bench.run("r")
    bench.engine.abort(RequestId("r"))
    with pytest.raises(RequestRefused, match="a prompt of 33 tokens and 1 new"):
        bench.engine.add(bench.request("longer", [1] * 33, 2000), hand_over=True)


def test_limits_of_a_step_refuse_nothing(make_engine: Make) -> None:
    bench = make_engine(limits=SchedulerLimits(step_tokens=1, chunk_tokens=1, max_running=1))
    bench.engine.add(bench.request("r", list(range(50)), 5))
    bench.run("r")
    assert len(bench.tokens["r"]) == 5


# Log-probabilities of prompts, on the scheduler alone


@dataclass
class Desk:
    """A scheduler whose steps compute nothing but what a chunk asks for."""

    pages: int
    limits: SchedulerLimits
    reported: dict[str, list[int]] = field(default_factory=dict)  # positions whose tokens got a log-probability

    def __post_init__(self) -> None:
        self.pool, self.counters = PagePool(self.pages), Counters()
        self.hasher = PageHasher(4, b"test")
        self.scheduler = Scheduler(self.pool, 4, self.limits, self.counters)
        self.arrivals = 0

    def add(self, prompt: list[int], max_tokens: int, drawn: int = 0, prompt_logprobs: int | None = None) -> Sequence:
        sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        name = RequestId(str(self.arrivals))
        request = Request(name, tuple(prompt), self.hasher.chain(prompt), sampling, drawn=drawn)
        sequence = Sequence(request=request, hand_over=False, ticket=None, arrival=self.arrivals)
        self.arrivals += 1
        self.scheduler.enqueue(sequence)
        return sequence

    def step(self) -> None:
        for sequence, chunk in self.scheduler.plan():
            assert chunk.prompt_tokens == sequence.client_prompt_tokens
            assert list(chunk.history[chunk.start : chunk.end]) == list(chunk.token_ids)
            sequence.computed = chunk.end
            for index in range(sequence.sealed, min(chunk.end // 4, len(sequence.names))):
                assert sequence.pages is not None
                sequence.pages.seal(index, sequence.names[index])
                sequence.sealed += 1
            if chunk.prompt_logprobs is not None:
                asked = range(chunk.start + 1, min(chunk.end + 1, chunk.prompt_tokens))
                self.reported.setdefault(sequence.request_id, []).extend(asked)
                sequence.prompt_logprobs += [TokenLogprobs(0.0) for _ in asked]
            if chunk.sample is not None:
                sequence.tokens.append(5)
            if sequence.new_tokens == sequence.request.sampling.max_tokens:
                self.scheduler.remove(sequence)
                assert sequence.pages is not None
                sequence.pages.release()

    def run(self) -> None:
        for _ in range(2000):
            if not (self.scheduler.running or self.scheduler.waiting):
                return
            self.step()
        raise AssertionError("not done after 2000 steps")


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 11, 16])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 16])
def test_every_prompt_token_but_the_first_is_asked_for_once_whatever_is_cached(length: int, chunk_tokens: int) -> None:
    """B045."""
    desk = Desk(pages=32, limits=SchedulerLimits(32, chunk_tokens, 4))
    for _ in range(2):
        sequence = desk.add(list(range(length)), 3, prompt_logprobs=0)
        desk.run()
        assert sequence.cached_tokens == 0
        assert desk.reported.pop(sequence.request_id, []) == list(range(1, length))


def test_two_with_the_same_prompt_do_not_wait_for_each_other() -> None:
    desk = Desk(pages=32, limits=SchedulerLimits(32, 4, 4))
    for _ in range(2):
        desk.add(list(range(11)), 2, prompt_logprobs=1)
    desk.step()
    assert desk.reported == {"0": [1, 2, 3, 4], "1": [1, 2, 3, 4]}


def test_tokens_that_were_drawn_elsewhere_are_no_prompt() -> None:
    desk = Desk(pages=32, limits=SchedulerLimits(32, 16, 4))
    sequence = desk.add(list(range(10)), 2, drawn=3, prompt_logprobs=0)
    desk.run()
    assert desk.reported[sequence.request_id] == list(range(1, 7))


@pytest.mark.parametrize("chunk_tokens", [2, 3, 5, 8])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 9])
def test_a_preempted_prompt_is_not_asked_again(chunk_tokens: int, steps: int) -> None:
    """Preempted in a chunk or while decoding; pages of what is known may come from the cache then."""
    desk = Desk(pages=32, limits=SchedulerLimits(32, chunk_tokens, 4))
    sequence = desk.add(list(range(19)), 8, prompt_logprobs=0)
    for _ in range(steps):
        desk.step()
    known = len(sequence.prompt_logprobs)
    desk.scheduler._preempt(sequence)
    desk.step()
    assert sequence.cached_tokens == 0
    assert sequence.computed > (known // 4) * 4
    desk.run()
    assert desk.reported[sequence.request_id] == list(range(1, 19))


def test_pages_that_lost_their_name_are_not_waited_for() -> None:
    """Two compute the same prompt; the one whose pages have the names ends, and these are given up."""
    desk = Desk(pages=32, limits=SchedulerLimits(32, 4, 4))
    first = desk.add(list(range(24)), 2, prompt_logprobs=0)
    desk.add(list(range(24)), 2, prompt_logprobs=0)
    desk.step()
    desk.step()
    desk.scheduler.remove(first)
    assert first.pages is not None
    first.pages.release()
    everything = desk.pool.hold()
    everything.grow(desk.pool.available_pages)
    everything.release()
    third = desk.add(list(range(24)), 2)
    desk.step()
    assert third.computed == 4
    desk.run()


# The queue


@given(
    operations=st.lists(
        st.one_of(st.tuples(st.just("push"), st.integers(-2, 2)), st.tuples(st.just("remove"), st.integers(0, 99))),
        max_size=60,
    )
)
def test_the_queue_keeps_its_order_and_its_sum(operations: list[tuple[str, int]]) -> None:
    queue, model = WaitingQueue(), list[Sequence]()
    for arrival, (operation, value) in enumerate(operations):
        if operation == "push":
            request = Request(RequestId(str(arrival)), (1,) * (arrival + 1), (), SamplingParams(1), priority=value)
            model.append(Sequence(request=request, hand_over=False, ticket=None, arrival=arrival))
            queue.push(model[-1])
        elif model:
            queue.remove(model.pop(value % len(model)))
        model.sort(key=lambda s: (s.request.priority, s.arrival))
        assert list(queue) == model
        assert queue.first(3) == model[:3]
        assert (len(queue), queue.tokens) == (len(model), sum(len(s.tokens) for s in model))
