"""Bias, penalties and minimum length: against plain Python, and against transformers where it has the same."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.next_tokens import NextTokens
from splitserve.engine.penalties import Penalties
from splitserve.engine.protocol import RequestId, SamplingParams
from splitserve.engine.step import Chunk

VOCAB = 12
EOS = (1, 3)


def chunk(history: list[int], prompt_tokens: int, **sampling: Any) -> Chunk:
    """The step that draws what follows ``history``."""
    params = SamplingParams(max_tokens=99, **sampling)
    return Chunk(RequestId("r"), history[-1:], len(history) - 1, [], params, history, prompt_tokens)


def by_definition(logits: list[float], one: Chunk) -> list[float]:
    sampling = one.sample
    assert sampling is not None
    history, output = list(one.history[: one.end]), list(one.history[one.prompt_tokens : one.end])
    changed = list(logits)
    for token, bias in sampling.logit_bias:
        if token < VOCAB:
            changed[token] += bias
    for token in range(VOCAB):
        if token in history:
            factor = sampling.repetition_penalty
            changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
        if token in output:
            changed[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    if len(output) < sampling.min_tokens:
        for token in (*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS)):
            if token < VOCAB:
                changed[token] = float("-inf")
    return changed


tokens = st.integers(0, VOCAB - 1)
params = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.0, 0.5, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.0, -1.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.25, -0.5]),
        "logit_bias": st.lists(st.tuples(st.integers(0, VOCAB + 3), st.sampled_from([-100.0, 1.5])), max_size=3).map(
            tuple
        ),
        "min_tokens": st.integers(0, 3),
        "stop_token_ids": st.lists(st.integers(0, VOCAB + 3), max_size=2).map(tuple),
        "ignore_eos": st.booleans(),
    }
)
sequences = st.tuples(st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, max_size=6), params)


@settings(max_examples=60)
@given(st.lists(sequences, min_size=1, max_size=5))
def test_every_step_of_every_sequence_is_as_defined(batch: list[tuple[list[int], list[int], dict[str, Any]]]) -> None:
    """The same object sees histories grow, in steps that hold only some of the sequences."""
    penalties = Penalties(EOS)
    histories = [list(prompt) for prompt, _, _ in batch]
    samplings = [SamplingParams(max_tokens=99, **sampling) for _, _, sampling in batch]
    generator = torch.Generator().manual_seed(1)
    for step in range(7):
        rows = [n for n in range(len(batch)) if step <= len(batch[n][1]) and (n + step) % 3]
        chunks = [
            Chunk(
                RequestId("r"),
                histories[n][-1:],
                len(histories[n]) - 1,
                [],
                samplings[n],
                histories[n],
                len(batch[n][0]),
            )
            for n in rows
        ]
        logits = torch.randn(len(rows), VOCAB, generator=generator)
        expected = [by_definition(row, one) for row, one in zip(logits.tolist(), chunks, strict=True)]
        penalties.apply(logits, chunks)
        if rows:
            torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-5)
        for history, (prompt, output, _) in zip(histories, batch, strict=True):
            history += output[len(history) - len(prompt) :][:1]


def test_repetition_penalty_is_that_of_transformers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import RepetitionPenaltyLogitsProcessor
    history = [4, 4, 7, 1, 0]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([history]), logits.clone())
    Penalties(EOS).apply(logits, [chunk(history, 3, repetition_penalty=1.7)])
    torch.testing.assert_close(logits, expected)


def test_a_history_that_was_not_seen_before_is_counted_anew() -> None:
    """After a preemption, or when a worker takes over: one object with a past, and one without."""
    history = [5, 6, 7, 7]
    sampling = {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
    seen, fresh = Penalties(EOS), Penalties(EOS)
    one = chunk(history, 2, **sampling)
    seen.apply(torch.zeros(1, VOCAB), [one])
    for token in (7, 8, 2):
        history.append(token)
        later = Chunk(one.request_id, [token], len(history) - 1, [], one.sample, history, 2)
        mine, theirs = torch.ones(1, VOCAB), torch.ones(1, VOCAB)
        seen.apply(mine, [later])
        fresh.apply(theirs, [chunk(list(history), 2, **sampling)])
        assert mine.tolist() == theirs.tolist()


def test_what_is_remembered_is_bounded() -> None:
    penalties = Penalties(EOS)
    for number in range(300):
        penalties.apply(torch.zeros(1, VOCAB), [chunk([number % VOCAB, 1], 1, presence_penalty=1.0)])
    assert len(penalties._states) < 100


def test_greedy_draws_honour_all_of_it() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 5, 8, 9]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    biased = {"logit_bias": ((8, 1.5),), "min_tokens": 2, "presence_penalty": 4.0}
    (found,) = NextTokens(EOS).draw(logits, [chunk([2, 5], 1, temperature=0, **biased)])
    assert found.token == 8


def test_minus_100_for_every_token_still_draws() -> None:
    bias = tuple((token, -100.0) for token in range(VOCAB))
    logits = torch.arange(VOCAB, dtype=torch.float32).unsqueeze(0)
    (found,) = NextTokens(EOS).draw(logits, [chunk([2], 1, temperature=0, logit_bias=bias)])
    assert found.token == VOCAB - 1


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_logits_stay_broken_where_their_place_is_out_of_reach(broken: float) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, EOS[0]] = broken
    chunks = [chunk([2], 1, min_tokens=3, logprobs=1), chunk([2], 1, min_tokens=3, logprobs=1)]
    bad, good = NextTokens(EOS).draw(logits, chunks)
    assert (bad.token, bad.logprobs) == (None, None)
    assert good.token not in (None, *EOS)


def test_nothing_left_to_draw_gives_no_token() -> None:
    stops = tuple(range(VOCAB))
    (found,) = NextTokens(EOS).draw(torch.zeros(1, VOCAB), [chunk([2], 1, min_tokens=1, stop_token_ids=stops)])
    assert found.token is None


def test_tokens_outside_the_vocabulary_change_nothing() -> None:
    """A prompt whose pages came from a peer was never looked up here, so its ids can be anything."""
    penalties = Penalties(EOS)
    history, sampling = [5, VOCAB, 7], {"presence_penalty": 1.0, "repetition_penalty": 2.0}
    one = chunk(history, 1, **sampling)
    for token in (VOCAB + 1, VOCAB + 2):
        logits = torch.ones(2, VOCAB)
        later = Chunk(one.request_id, [token], len(history) - 1, [], one.sample, history, 1)
        penalties.apply(logits, [later, chunk([2], 1)])
        assert logits[1].tolist() == [1.0] * VOCAB
        assert [n for n, value in enumerate(logits[0].tolist()) if value != 1.0] == [5, 7]
        history.append(token)
