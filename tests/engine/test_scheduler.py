"""Order, preemption and headroom, seen from outside the engine."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from splitserve.engine.protocol import FinishReason, RequestId
from splitserve.engine.scheduler import SchedulerLimits

Make = Callable[..., Any]
PAGE_TOKENS = 4


def add(bench: Any, name: str, prompt: list[int], max_tokens: int, priority: int = 0, seed: int = 7) -> None:
    bench.engine.add(replace(bench.request(name, prompt, max_tokens, seed), priority=priority))


@dataclass(frozen=True)
class Course:
    """What became of all requests of an engine."""

    ended: list[str]  # in this order
    preemptions: Counter[str]
    steps: int
    tokens_computed: int


def run_all(bench: Any, steps: int = 20_000) -> Course:
    """Step until the engine is idle. Each step has to compute something."""
    ended: list[str] = []
    preemptions: Counter[str] = Counter()
    computed = 0
    for step in range(steps):
        if bench.engine.idle:
            return Course(ended, preemptions, step, computed)
        sequences = list(bench.engine._sequences.values())
        before = len(bench.finished)
        result = bench.step()
        assert result.computed
        computed += result.prefill_tokens + result.decode_tokens
        ended += list(bench.finished)[before:]
        preemptions |= Counter({s.request_id: s.preemptions for s in sequences})
    raise AssertionError(f"not idle after {steps} steps")


def distinct(number: int, length: int) -> list[int]:
    """A prompt that shares no page with that of another number."""
    return [number, *([999 - number % 7] * (length - 1))]


# Order


def test_the_more_urgent_start_first_and_of_equals_the_older(make_engine: Make) -> None:
    bench = make_engine(limits=SchedulerLimits(64, 16, max_running=1))
    for number, priority in enumerate([3, 0, 3, -1, 0, -1]):
        add(bench, f"{priority} {number}", distinct(number, 5), 3, priority)
    assert run_all(bench).ended == ["-1 3", "-1 5", "0 1", "0 4", "3 0", "3 2"]


def test_the_less_urgent_gives_way_though_it_is_older(make_engine: Make) -> None:
    bench = make_engine(pages=10)
    add(bench, "low", [1] * 6, 20, priority=1)
    add(bench, "urgent", [2] * 6, 20)
    course = run_all(bench)
    assert course.ended == ["urgent", "low"]
    assert course.preemptions == Counter({"low": 1})


def test_a_waiting_request_never_displaces_a_running_one(make_engine: Make) -> None:
    bench = make_engine(pages=8)
    add(bench, "low", [1] * 6, 20, priority=9)
    bench.step()
    add(bench, "urgent", [2] * 20, 5, priority=-9)
    course = run_all(bench)
    assert course.ended == ["low", "urgent"]
    assert course.preemptions == Counter()


def test_the_preempted_resume_before_newcomers(make_engine: Make) -> None:
    """B068."""
    bench = make_engine(pages=14)
    for number in range(4):
        add(bench, f"old {number}", distinct(number, 6), 25)
    while not bench.total("splitserve_preemptions_total"):
        bench.step()
    for number in range(4, 8):
        add(bench, f"new {number}", distinct(number, 6), 3)
    scheduler = bench.engine._scheduler
    while not bench.engine.idle:
        bench.step()
        if any(s.request_id.startswith("old") for s in scheduler.waiting):
            assert all(s.request_id.startswith("old") for s in scheduler.running)


def test_a_long_prompt_and_a_short_one_share_the_steps(make_engine: Make) -> None:
    """B071: fifty chunks, then a short prompt."""

    def steps_of_the_long(short: bool) -> int:
        bench = make_engine(pages=256, limits=SchedulerLimits(step_tokens=32, chunk_tokens=16, max_running=8))
        add(bench, "long", list(range(800)), 2)
        bench.step()
        bench.step()
        if short:
            add(bench, "short", [7] * 12, 2)
            bench.run("short", steps=3)
        bench.run("long")
        return int(bench.engine.steps)

    assert steps_of_the_long(short=True) <= 1.1 * steps_of_the_long(short=False)


# Preemption


def demanding(make_engine: Make, limits: SchedulerLimits) -> Any:
    """An engine whose running requests need more pages than it has, all the time."""
    rng = random.Random(5)
    bench = make_engine(pages=200, limits=limits)
    for number in range(120):
        add(bench, str(number), [number] + [rng.randrange(999) for _ in range(rng.randint(5, 60))], rng.randint(5, 80))
    return bench


@pytest.mark.parametrize("max_preemptions", [0, 1, 4])
@pytest.mark.parametrize("headroom_pages", [0, 1])
def test_more_demand_than_pages_ends_with_few_preemptions_each(
    make_engine: Make, max_preemptions: int, headroom_pages: int
) -> None:
    """B067, B120: each step computes something, nobody is preempted more often than allowed, nothing is a cache hit."""
    bench = demanding(make_engine, SchedulerLimits(64, 32, 32, max_preemptions, headroom_pages))
    sequences = list(bench.engine._sequences.values())
    course = run_all(bench)
    assert len(course.ended) == 120
    assert max(course.preemptions.values(), default=0) <= max_preemptions
    assert set(bench.cached.values()) == {0}
    recomputed = bench.total("splitserve_recomputed_tokens_total")
    assert course.tokens_computed == sum(s.longest for s in sequences) + recomputed
    assert (recomputed > 0) == (bench.total("splitserve_preemptions_total") > 0)
    assert bench.total("splitserve_preemptions_total") == sum(course.preemptions.values())


def test_headroom_makes_preemptions_rare(make_engine: Make) -> None:
    """Without it a pool that is full all the time admits what it has to take back."""
    preemptions = {}
    for headroom_pages in (0, 1):
        bench = demanding(make_engine, SchedulerLimits(64, 32, 64, 99, headroom_pages))
        run_all(bench)
        preemptions[headroom_pages] = bench.total("splitserve_preemptions_total")
    assert preemptions[0] > 50
    assert preemptions[1] < preemptions[0] / 3


def test_a_full_pool_leaves_no_trace_in_later_steps(make_engine: Make) -> None:
    """B066: the same load takes as many steps as on a new engine."""

    def steps(bench: Any) -> int:
        for number in range(500, 506):
            add(bench, f"later {number}", distinct(number, 9), 10)
        return run_all(bench).steps

    limits = SchedulerLimits(64, 32, 32)
    bench = demanding(make_engine, limits)
    run_all(bench)
    assert steps(bench) == steps(make_engine(pages=200, limits=limits))


def test_a_recomputed_prompt_comes_in_chunks_and_nobody_before_it_misses_a_step(make_engine: Make) -> None:
    """B069."""
    bench = make_engine(pages=30, limits=SchedulerLimits(step_tokens=12, chunk_tokens=8, max_running=8))
    add(bench, "old", [1] * 4, 60)
    add(bench, "middle", [3] * 40, 25)
    add(bench, "young", [2] * 40, 25)
    prefill_tokens = []
    while "old" not in bench.finished:
        drawn = len(bench.tokens.get("old", []))
        result = bench.step()
        prefill_tokens.append(result.prefill_tokens)
        assert len(bench.tokens["old"]) == drawn + 1
    assert bench.total("splitserve_preemptions_total") > 0
    assert bench.total("splitserve_recomputed_tokens_total") > 0
    assert max(prefill_tokens) <= 12
    run_all(bench)


def test_one_that_outgrows_what_leases_leave_keeps_its_pages_and_waits(make_engine: Make) -> None:
    """B065, B067: no preemption that frees nothing; the lease's deadline ends the wait."""
    bench = make_engine(pages=8)
    bench.engine.add(bench.request("leased", list(range(12)), 5), hand_over=True)
    bench.run("leased")
    add(bench, "r", [9] * 4, 28)
    for _ in range(40):
        bench.step()
    assert not bench.step().computed
    assert not bench.engine.computing
    assert len(bench.tokens["r"]) == 17
    bench.clock.now = 6.0
    bench.run("r")
    assert bench.finished["r"] is FinishReason.LENGTH
    assert bench.total("splitserve_preemptions_total") == 0


def test_who_was_preempted_as_often_as_may_be_starts_for_good(make_engine: Make) -> None:
    """Both would fit for a while, but not to their ends: with no preemption allowed the second one waits."""
    bench = make_engine(pages=8, limits=SchedulerLimits(64, 16, 8, max_preemptions=0))
    add(bench, "first", [1] * 4, 20)
    add(bench, "second", [2] * 4, 20)
    bench.step()
    assert bench.engine.load().running == 1
    assert run_all(bench).preemptions == Counter()


# Prompts in flight


def shared_prompt(bench: Any, count: int, max_tokens: int = 3) -> None:
    for number in range(count):
        add(bench, str(number), list(range(100, 142)), max_tokens, seed=number)


def test_a_prompt_that_is_being_computed_is_not_computed_twice(make_engine: Make) -> None:
    bench = make_engine(pages=128, limits=SchedulerLimits(64, 8, 8))
    shared_prompt(bench, 5)
    course = run_all(bench)
    assert course.tokens_computed == 42 + 4 * 2 + 5 * 2
    assert [bench.cached[str(number)] for number in range(5)] == [0, 40, 40, 40, 40]


def test_others_go_past_those_that_wait_for_pages_in_flight(make_engine: Make) -> None:
    bench = make_engine(pages=128, limits=SchedulerLimits(64, 8, 8))
    shared_prompt(bench, 3)
    add(bench, "other", [5] * 6, 1)
    bench.step()
    assert bench.finished["other"] is FinishReason.LENGTH
    run_all(bench)


def test_a_short_common_beginning_delays_for_as_long_as_it_is_computed(make_engine: Make) -> None:
    bench = make_engine(pages=128, limits=SchedulerLimits(64, 8, 8))
    add(bench, "first", [*range(8), *range(500, 540)], 2)
    add(bench, "second", [*range(8), *range(600, 640)], 2)
    assert bench.step().prefill_tokens == 8
    assert bench.step().prefill_tokens == 16
    run_all(bench)
    assert bench.cached["second"] == 8


def test_what_just_ends_a_page_is_not_waited_for_as_it_cannot_be_shared(make_engine: Make) -> None:
    """The last token is computed in any case; so its page is not shared, and nothing is gained by waiting for it."""
    bench = make_engine(limits=SchedulerLimits(64, 2, 8))
    for name in ("first", "second"):
        add(bench, name, [1, 2, 3, 4], 2)
    assert bench.step().prefill_tokens == 4
    run_all(bench)


@pytest.mark.parametrize("end", ["abort", "failure"])
def test_when_the_one_that_computes_ends_another_takes_over(
    make_engine: Make, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_engine(pages=128, limits=SchedulerLimits(64, 8, 8))
    shared_prompt(bench, 4)
    bench.step()
    bench.step()
    if end == "abort":
        bench.engine.abort(RequestId("0"))
    else:
        with monkeypatch.context() as patch:
            patch.setattr(bench.engine._runner, "run", lambda chunks: 1 / 0)
            bench.step()
    course = run_all(bench)
    assert sorted(bench.finished) == ["0", "1", "2", "3"]
    assert bench.finished["3"] is FinishReason.LENGTH
    assert course.tokens_computed == 42 - 16 + 2 * 2 + 3 * 2  # what was sealed before the end is shared


def test_an_urgent_request_does_not_wait_for_one_that_comes_after_it(make_engine: Make) -> None:
    bench = make_engine(pages=128, limits=SchedulerLimits(64, 8, 8))
    add(bench, "low", list(range(100, 142)), 3, priority=1)
    bench.step()
    add(bench, "urgent", list(range(100, 142)), 3)
    assert bench.step().prefill_tokens == 16
    assert run_all(bench).ended == ["urgent", "low"]


def test_a_crowd_with_one_prompt_is_computed_once_and_ends(make_engine: Make) -> None:
    bench = make_engine(pages=40, limits=SchedulerLimits(32, 8, 4))
    shared_prompt(bench, 200, max_tokens=2)
    course = run_all(bench)
    assert course.tokens_computed == 42 + 199 * 2 + 200
    assert course.ended == [str(number) for number in range(200)]


def test_a_prompt_is_fetched_once_for_all_that_begin_with_it(make_engine: Make) -> None:
    prefill, decode = make_engine("p", pages=128), make_engine("d", pages=128)
    prompt = list(range(41))
    for name in ("a", "b", "c"):
        prefill.engine.add(prefill.request(name, prompt, 5), hand_over=True)
    prefill.run("a", "b", "c")
    for name in ("a", "b", "c"):
        following = decode.request(name, [*prompt, prefill.tokens[name][0]], 4)
        decode.engine.add(following, ticket=prefill.ticket(name))
    decode.run("a", "b", "c")
    prefill.step()
    assert decode.total("splitserve_kv_transfer_pages_total") == 11 + 1 + 1
    assert decode.tokens["a"] == decode.tokens["b"] == decode.tokens["c"]


def test_newcomers_do_not_overtake_an_older_request_that_waits_for_pages_to_receive_into(make_engine: Make) -> None:
    prefill, decode = make_engine("p"), make_engine("d", pages=12)
    prefill.engine.add(prefill.request("ticket", [7] * 39, 5), hand_over=True)
    prefill.run("ticket")
    add(decode, "first", [1] * 9, 8)
    decode.step()
    following = decode.request("ticket", [*[7] * 39, prefill.tokens["ticket"][0]], 4)
    decode.engine.add(following, ticket=prefill.ticket("ticket"))
    for number in range(60):
        add(decode, str(number), distinct(number, 5), 12)
        decode.step()
        prefill.step()
    assert "ticket" in decode.finished
    assert decode.total("splitserve_kv_transfers_total") == 1
    run_all(decode)


@pytest.mark.parametrize("length", [2, 4, 11])
def test_requests_of_different_salts_share_nothing_and_those_of_one_do(make_engine: Make, length: int) -> None:
    """B056, B104: also what was drawn after a prompt of less than a page."""
    bench = make_engine()

    def cached(name: str, prompt: list[int], salt: str) -> int | None:
        names = bench.hasher.chain(prompt, salt=salt)
        bench.engine.add(replace(bench.request(name, prompt, 8), page_hashes=names, cache_salt=salt))
        bench.run(name)
        return bench.cached[name]

    cached("first", list(range(length)), "tenant")
    turn = [*range(length), *bench.tokens["first"]]
    known = (length + 7) // 4 * 4
    assert [cached(f"{salt}.", turn, salt) for salt in ("other", "", "tenant")] == [0, 0, known]
