"""The sampler: the rule and its cuts; draws that depend on nothing but seed, position, logits and parameters."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import exp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.protocol import SamplingParams
from splitserve.engine.sampler import Draw, draw_together, sample, uniform

Sampler = Callable[[torch.Tensor, Sequence[Draw]], list[int | None]]
both_samplers = pytest.mark.parametrize("sampler", [sample, draw_together])  # row by row, and as on a GPU
CUTS = [
    {},
    {"top_p": 1e-9},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.7},
    {"top_p": 0.8, "min_p": 0.1},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.05},
]


def draw(temperature: float = 1.0, top_p: float = 1.0, seed: int = 0, position: int = 0, **cuts: float) -> Draw:
    sampling = SamplingParams(max_tokens=1, temperature=temperature, top_p=top_p, seed=seed, **cuts)  # type: ignore[arg-type]
    return Draw(sampling, position)


def by_definition(logits: torch.Tensor, one: Draw) -> int:
    """Plain Python: cut, cut, cut, then lay out by id."""
    values, sampling = logits.tolist(), one.sampling
    largest = max(values)
    weights = [exp((value - largest) / sampling.temperature) for value in values]
    kept = sorted(range(len(values)), key=lambda token: (-values[token], token))[: sampling.top_k or None]
    total, reached, count = sum(weights[token] for token in kept), 0.0, 0
    while reached < sampling.top_p * total * (1 - 1e-12) and count < len(kept):
        reached += weights[kept[count]]
        count += 1
    kept = sorted(token for token in kept[:count] if weights[token] >= sampling.min_p)
    target, reached = uniform(sampling.seed, one.position) * sum(weights[token] for token in kept), 0.0
    for token in kept:
        reached += weights[token]
        if reached > target:
            return token
    return kept[-1]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [2.0, 1.0, 2.0, 2.0]])
    assert sample(logits, [draw(temperature=0)] * 2) == [1, 0]


@both_samplers
@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 5.0])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_draws_agree_with_the_definition(sampler: Sampler, temperature: float, cuts: dict[str, float]) -> None:
    logits = torch.randn(16, 611, generator=torch.Generator().manual_seed(1)).mul(8).round().div(4)  # many ties
    draws = [draw(temperature, seed=row, position=3 * row, **cuts) for row in range(16)]
    assert sampler(logits, draws) == [by_definition(row, one) for row, one in zip(logits, draws, strict=True)]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_the_cuts_are_those_of_transformers(cuts: dict[str, float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(6)).mul(2)
    draws = [draw(0.7, seed=row, position=row, **cuts) for row in range(40)]
    sampling = draws[0].sampling
    scores = transformers.TemperatureLogitsWarper(0.7)(None, logits)
    if sampling.top_k:
        scores = transformers.TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = transformers.TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = transformers.MinPLogitsWarper(sampling.min_p)(None, scores)
    reached = scores.double().softmax(dim=-1).cumsum(dim=-1)
    random = torch.tensor([[uniform(one.sampling.seed, one.position)] for one in draws], dtype=torch.float64)
    assert sample(logits, draws) == (reached <= random * reached[:, -1:]).sum(dim=-1).tolist()


def test_a_cut_that_needs_most_of_a_large_vocabulary() -> None:
    """Nearly flat, so that the first looks at the likeliest do not reach ``top_p``."""
    logits = torch.randn(3, 30_000, generator=torch.Generator().manual_seed(3))
    draws = [draw(4.0, top_p, seed=row, position=row) for row, top_p in enumerate((0.2, 0.6, 0.97))]
    assert sample(logits, draws) == [by_definition(row, one) for row, one in zip(logits, draws, strict=True)]
    assert draw_together(logits, draws) == sample(logits, draws)


draws_of_any_kind = st.builds(
    draw,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 3.0]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 10_000),
    top_k=st.sampled_from([0, 1, 40, 5000]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)


@settings(max_examples=25)
@given(draws=st.lists(draws_of_any_kind, min_size=32, max_size=32), which=st.integers(0, 31))
def test_a_draw_is_the_same_alone_and_in_any_batch(draws: list[Draw], which: int) -> None:
    logits = torch.randn(32, 1500, generator=torch.Generator().manual_seed(2)).mul(2)
    together = sample(logits, draws)
    assert sample(logits[which : which + 1], [draws[which]]) == [together[which]]
    assert sample(logits.flip(0), draws[::-1]) == together[::-1]
    assert draw_together(logits, draws) == together


@pytest.mark.parametrize("cuts", [{}, {"top_k": 50}, {"top_p": 0.9}], ids=str)
def test_last_bits_of_logits_hardly_ever_change_a_draw(cuts: dict[str, float]) -> None:
    """B051: a product of matrices rounds differently in another batch."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(400, 3000, generator=generator).mul(2)
    rounded = logits * (1 + 1e-6 * torch.randn(logits.shape, generator=generator))
    draws = [draw(seed=9, position=n, **cuts) for n in range(400)]
    assert sum(a != b for a, b in zip(sample(logits, draws), sample(rounded, draws), strict=True)) <= 1


@both_samplers
def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_flat(sampler: Sampler) -> None:
    logits = torch.tensor([[1e30, -3.0, 2e30, 0.0], [1.0, 1.001, -1e4, 0.5]])
    for temperature in (1e-6, 1e-300):
        assert sampler(logits, [draw(temperature, position=n) for n in range(2)]) == [2, 1]
    flat = sampler(torch.tensor([0.0, 1.0, 2.0]).expand(300, 3), [draw(100.0, position=n) for n in range(300)])
    assert set(flat) == {0, 1, 2}


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 4000
    drawn = Counter(sample(probabilities.log().expand(count, 4), [draw(seed=7, position=n) for n in range(count)]))
    for token, probability in enumerate(probabilities.tolist()):
        assert drawn[token] / count == pytest.approx(probability, abs=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(300, 4)
    assert set(sample(logits, [draw(top_p=0.6, position=n) for n in range(300)])) == {0, 1}
    assert set(sample(logits, [draw(top_p=0.4, position=n) for n in range(300)])) == {0}


def test_zero_and_minus_zero_are_equal_logits() -> None:
    draws = [draw(seed=5, position=n) for n in range(20)]
    assert sample(torch.tensor([[0.0, -0.0]]).expand(20, 2), draws) == sample(torch.zeros(20, 2), draws)


@both_samplers
@pytest.mark.parametrize("cuts", [{}, {"top_k": 3}, {"top_p": 0.999}], ids=str)
def test_tokens_without_probability_are_never_drawn(sampler: Sampler, cuts: dict[str, float]) -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), -1.0]).expand(200, 4)
    assert set(sampler(logits, [draw(temperature=3.0, position=n, **cuts) for n in range(200)])) == {1, 3}


@both_samplers
def test_logits_that_are_not_numbers_give_no_token_and_spare_the_others(sampler: Sampler) -> None:
    logits = torch.zeros(3, 5)
    logits[0, 2] = float("nan")
    logits[1] = float("-inf")
    assert sampler(torch.tensor([[0.0, float("inf")]]), [draw()]) == [None]
    for temperature in (0.0, 1.0):
        tokens = sampler(logits, [draw(temperature)] * 3)
        assert tokens[:2] == [None, None]
        assert tokens[2] is not None


def test_uniform_is_fixed_for_all_processes_and_versions() -> None:
    digest = blake2b((5).to_bytes(8, "little") + (9).to_bytes(8, "little"), digest_size=8).digest()
    assert uniform(5, 9) == (int.from_bytes(digest, "little") >> 11) / 2**53
    assert uniform(-1, 9) == uniform(2**64 - 1, 9)
    values = [uniform(0, position) for position in range(2000)]
    assert all(0 <= value < 1 for value in values)
    assert sum(values) / 2000 == pytest.approx(0.5, abs=0.03)


@both_samplers
@pytest.mark.parametrize(("random", "token"), [(0.0, 700), (1 - 2**-53, 1100)])
def test_the_ends_of_the_random_number_draw_tokens_that_can_be_drawn(
    sampler: Sampler, random: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitserve.engine.sampler.uniform", lambda seed, position: random)
    logits = torch.full((1, 2000), float("-inf"))
    logits[0, 700:1101] = torch.linspace(-1, 1, 401)
    for cuts in ({}, {"top_p": 0.999999}, {"top_k": 500}):
        assert sampler(logits, [draw(**cuts)]) == [token]
