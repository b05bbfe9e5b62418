"""The sampler: greedy, temperature and top_p; draws that depend on nothing but seed, position and logits."""

from collections import Counter
from hashlib import blake2b

import pytest
import torch

from splitserve.engine.protocol import SamplingParams
from splitserve.engine.sampler import Draw, sample, uniform


def draw(temperature: float = 1.0, top_p: float = 1.0, seed: int = 0, position: int = 0) -> Draw:
    return Draw(SamplingParams(max_tokens=1, temperature=temperature, top_p=top_p, seed=seed), position)


def by_definition(logits: torch.Tensor, one: Draw) -> int:
    """Plain Python: sort, cut at top_p, invert the distribution."""
    top = max(logits.tolist())
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    weights = torch.tensor([float(logits[token]) - top for token in order], dtype=torch.float64)
    reached = (weights / one.sampling.temperature).exp().cumsum(0).tolist()
    last = next(n for n, mass in enumerate(reached) if mass >= one.sampling.top_p * reached[-1])
    target = uniform(one.sampling.seed, one.position) * reached[last]
    return order[min(last, next(n for n, mass in enumerate(reached) if mass > target))]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [2.0, 1.0, 2.0, 2.0]])
    assert sample(logits, [draw(temperature=0)] * 2) == [1, 0]


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 1.0])
def test_draws_agree_with_the_definition(temperature: float, top_p: float) -> None:
    logits = torch.randn(16, 61, generator=torch.Generator().manual_seed(1)).mul(2).round()  # many ties
    draws = [draw(temperature, top_p, seed=row, position=3 * row) for row in range(16)]
    assert sample(logits, draws) == [by_definition(row, one) for row, one in zip(logits, draws, strict=True)]


def test_a_draw_is_the_same_alone_and_in_any_batch() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(2))
    draws = [draw(temperature=0.5 * row, top_p=1.0 - 0.1 * row, seed=row, position=row) for row in range(6)]
    together = sample(logits, draws)
    assert together == [sample(logits[row : row + 1], draws[row : row + 1])[0] for row in range(6)]
    backwards = sample(logits.flip(0), draws[::-1])
    assert together == backwards[::-1]


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


def test_tokens_without_probability_are_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), -1.0]).expand(200, 4)
    assert set(sample(logits, [draw(temperature=3.0, position=n) for n in range(200)])) == {1, 3}


def test_logits_that_are_not_numbers_give_no_token_and_spare_the_others() -> None:
    logits = torch.zeros(3, 5)
    logits[0, 2] = float("nan")
    logits[1] = float("-inf")
    for temperature in (0.0, 1.0):
        tokens = sample(logits, [draw(temperature)] * 3)
        assert tokens[:2] == [None, None]
        assert tokens[2] is not None


def test_uniform_is_fixed_for_all_processes_and_versions() -> None:
    digest = blake2b((5).to_bytes(8, "little") + (9).to_bytes(8, "little"), digest_size=8).digest()
    assert uniform(5, 9) == (int.from_bytes(digest, "little") >> 11) / 2**53
    assert uniform(-1, 9) == uniform(2**64 - 1, 9)
    values = [uniform(0, position) for position in range(2000)]
    assert all(0 <= value < 1 for value in values)
    assert sum(values) / 2000 == pytest.approx(0.5, abs=0.03)
