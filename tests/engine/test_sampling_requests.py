"""Sampling through whole engines on a random model: what a client asked for holds on every way a request can take."""

from collections.abc import Callable, Iterator

import pytest
import torch

from engine_models.model_engine import EOS, Answer, ModelEngine, request, resumed, through_two, through_two_at_once
from splitserve.engine.protocol import FinishReason, Request
from splitserve.engine.scheduler import SchedulerLimits

PROMPT = [(11 * n + 3) % 90 + 6 for n in range(10)]
ALL_FEATURES = {
    "temperature": 0.8,
    "top_k": 60,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": ((7, 2.0), (2, 3.0)),
    "min_tokens": 5,
    "seed": 42,
    "logprobs": 2,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make small models slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone(one: Request) -> Answer:
    return ModelEngine().run(one)


def among_others(one: Request) -> Answer:
    """With seeded, unseeded, greedy and penalised neighbours, in small chunks."""
    others = [
        request("greedy", PROMPT[::-1], 30, temperature=0, presence_penalty=1.0),
        request("hot", PROMPT[:3], 30, temperature=2.0, seed=42, ignore_eos=True),
        request("cut", PROMPT * 3, 20, top_k=5, seed=1, logprobs=1),
        request("same", PROMPT, 20, seed=43),
    ]
    return ModelEngine(limits=SchedulerLimits(9, 3, 8)).run(one, *others)


def preempted(one: Request) -> Answer:
    """In a pool that holds one and a half of such sequences, where the older one always wins."""
    engine = ModelEngine(pages=9, limits=SchedulerLimits(64, 16, 8, headroom_pages=0))
    older = request("older", PROMPT[:8], 18, temperature=0, ignore_eos=True)
    engine.run(older, one)
    preemptions = sum(c.total for c in engine.counters.totals() if c.name == "splitserve_preemptions_total")
    assert preemptions > 0, "the test needs a preemption"
    return engine.answers[one.request_id]


def moved_half_way(one: Request) -> Answer:
    """The worker is lost after three tokens; another one computes everything anew."""
    first = ModelEngine()
    first.add(one)
    answer = first.answers[one.request_id]
    while len(answer.tokens) < 3:
        first.step()
    rest = ModelEngine().run(resumed(one, answer.tokens[:3]))
    return Answer(answer.tokens[:3] + rest.tokens, rest.finish, logprobs=answer.logprobs[:3] + rest.logprobs)


WAYS: list[Callable[[Request], Answer]] = [among_others, preempted, through_two, through_two_at_once, moved_half_way]


@pytest.mark.parametrize("sampling", [{"temperature": 0.8, "seed": 42}, ALL_FEATURES], ids=["seeded", "all features"])
@pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])
def test_a_seeded_request_draws_the_same_on_every_way(way: Callable[[Request], Answer], sampling: dict) -> None:  # type: ignore[type-arg]
    """B051, B042."""
    one = request("one", PROMPT, 16, ignore_eos=True, **sampling)
    expected, found = alone(one), way(one)
    assert (found.tokens, found.finish) == (expected.tokens, expected.finish)
    assert len(found.tokens) == 16
    assert len(found.logprobs) == len(expected.logprobs) == (16 if "logprobs" in sampling else 0)
    for mine, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert mine.top_ids == theirs.top_ids


def test_another_seed_draws_something_else() -> None:
    one, other = (request("r", PROMPT, 16, seed=seed, ignore_eos=True) for seed in (42, 43))
    assert alone(one).tokens != alone(other).tokens


@pytest.mark.parametrize("way", [alone, through_two])
def test_one_token_is_one_token(way: Callable[[Request], Answer]) -> None:
    """B036."""
    found = way(request("r", PROMPT, 1, temperature=0, logprobs=0))
    assert (len(found.tokens), found.finish, len(found.logprobs)) == (1, FinishReason.LENGTH, 1)


@pytest.mark.parametrize("way", [alone, among_others, through_two, through_two_at_once])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("minimum", [0, 1, 4])
def test_the_end_comes_exactly_when_it_may(way: Callable[[Request], Answer], temperature: float, minimum: int) -> None:
    """B038, B039: every end-of-sequence id and stop id is held back, and what was held back is not counted."""
    bias = tuple((token, 100.0) for token in (*EOS, 9))
    one = request(
        "r", PROMPT, 20, temperature=temperature, min_tokens=minimum, logit_bias=bias, stop_token_ids=(9,), seed=3
    )
    found = way(one)
    assert found.finish is FinishReason.STOP
    assert len(found.tokens) == minimum + 1
    ends = {*EOS, 9}
    assert [token in ends for token in found.tokens] == [False] * minimum + [True]


@pytest.mark.parametrize("way", [alone, through_two])
def test_ignored_ends_do_not_end_and_the_clients_own_do(way: Callable[[Request], Answer]) -> None:
    """B050: with two end-of-sequence ids, which can be drawn and do not count as stop tokens."""
    bias = tuple((token, 100.0) for token in EOS)
    ignoring = way(request("r", PROMPT, 40, logit_bias=bias, ignore_eos=True, min_tokens=10, seed=1))
    assert (len(ignoring.tokens), ignoring.finish) == (40, FinishReason.LENGTH)
    assert set(ignoring.tokens) == set(EOS)
    stopping = way(request("r", PROMPT, 40, logit_bias=((9, 100.0),), ignore_eos=True, stop_token_ids=(9,)))
    assert (stopping.tokens, stopping.finish) == ([9], FinishReason.STOP)


def test_a_stop_token_that_is_out_of_the_vocabulary_harms_nobody() -> None:
    odd = request("odd", PROMPT, 4, temperature=0, stop_token_ids=(10**6,), logit_bias=((10**6, 1.0),), min_tokens=4)
    plain = request("plain", PROMPT, 4, temperature=0, ignore_eos=True)
    engine = ModelEngine()
    engine.run(odd, plain)
    assert len(engine.answers["odd"].tokens) == len(engine.answers["plain"].tokens) == 4


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11, 40])
def test_prompt_logprobs_are_those_of_the_model_whatever_is_cached(length: int) -> None:
    """B045: in chunks, whole, and a second time; the chunk's length is 16 and a page's is 4."""
    prompt = [(7 * n + 1) % 97 for n in range(length)]
    one = request("first", prompt, 2, temperature=0, prompt_logprobs=3, ignore_eos=True)
    engine = ModelEngine()
    first = engine.run(one)
    second = engine.run(request("second", prompt, 2, temperature=0, prompt_logprobs=3, ignore_eos=True))
    whole = ModelEngine(limits=SchedulerLimits(512, 512, 4)).run(one)
    assert first.prompt_logprobs == second.prompt_logprobs
    assert first.prompt_logprobs is not None
    assert whole.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == length - 1
    for in_chunks, at_once in zip(first.prompt_logprobs, whole.prompt_logprobs, strict=True):
        assert in_chunks.logprob == pytest.approx(at_once.logprob, abs=1e-4)
        assert in_chunks.top_logprobs == pytest.approx(at_once.top_logprobs, abs=1e-4)
    # What the model says of a token does not depend on whether it was drawn or given.
    given = request("given", [*prompt, *first.tokens], 1, temperature=0, prompt_logprobs=0)
    echoed = alone(request("drawn", prompt, 2, temperature=0, logprobs=0, ignore_eos=True))
    tail = (alone(given).prompt_logprobs or [])[-2:]
    assert [t.logprob for t in tail] == pytest.approx([t.logprob for t in echoed.logprobs], abs=1e-4)


@pytest.mark.parametrize("way", [through_two, preempted, among_others])
def test_prompt_logprobs_come_once_and_whole_on_every_way(way: Callable[[Request], Answer]) -> None:
    """B044."""
    one = request("one", PROMPT, 16, seed=5, ignore_eos=True, prompt_logprobs=2, logprobs=1)
    expected, found = alone(one), way(one)
    assert found.tokens == expected.tokens
    assert found.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    for mine, theirs in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    assert len(found.prompt_logprobs) == len(PROMPT) - 1


def test_who_does_not_ask_gets_no_logprobs() -> None:
    answer = alone(request("r", PROMPT, 3, temperature=0))
    assert (answer.logprobs, answer.prompt_logprobs) == ([], None)
