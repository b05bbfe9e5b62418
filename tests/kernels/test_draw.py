"""Drawing tokens without sorting: the kernel against the engine's sampler."""

from random import Random

import pytest
import torch

from splitserve.engine.kernels import draw as draw_module
from splitserve.engine.kernels.draw import DrawSettings, draw
from splitserve.engine.protocol import SamplingParams
from splitserve.engine.sampler import Draw, sample

ALMOST_ONE = 1 - 1e-9


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles per row, the last one ragged."""
    monkeypatch.setattr(draw_module, "TILE", 64)


def _settings(rows: list[tuple[float, float, float, float]], top_k: list[int]) -> DrawSettings:
    return DrawSettings(torch.tensor(rows, dtype=torch.float64), torch.tensor(top_k, dtype=torch.int32))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "random", "token"),
    [
        (1.0, 0, 1.0, 0.0, 0.0, 0),
        (1.0, 0, 1.0, 0.0, 0.19, 0),
        (1.0, 0, 1.0, 0.0, 0.21, 1),
        (1.0, 0, 1.0, 0.0, 0.71, 2),
        (1.0, 0, 1.0, 0.0, 0.73, 3),
        (1.0, 0, 1.0, 0.0, ALMOST_ONE, 4),
        (1.0, 3, 1.0, 0.0, ALMOST_ONE, 3),
        (1.0, 3, 1.0, 0.0, 0.26, 2),  # 0.2 of 0.8 are passed, and 1 is cut
        (1.0, 2, 1.0, 0.0, ALMOST_ONE, 2),  # of the equals 0 and 3 the lower id stays
        (1.0, 2, 1.0, 0.0, 0.3, 0),
        (1.0, 0, 0.59, 0.0, ALMOST_ONE, 2),
        (1.0, 0, 0.61, 0.0, ALMOST_ONE, 3),
        (1.0, 0, 1e-9, 0.0, 0.0, 2),
        (1.0, 2, 0.65, 0.0, 0.0, 2),  # 0.4 of the 0.6 that top_k left are 0.667
        (1.0, 0, 1.0, 0.4, ALMOST_ONE, 3),  # 0.2 / 0.4 stays, 0.08 / 0.4 does not
        (1.0, 0, 1.0, 1.0, 0.0, 2),
        (0.0, 0, 1.0, 0.0, ALMOST_ONE, 2),
        (1e-6, 0, 1.0, 0.0, 0.0, 2),
        (1e-300, 0, 1.0, 0.0, 0.0, 2),
        (1e6, 0, 1.0, 0.0, 0.39, 1),  # nearly even
        (1.0, 900, 1.0, 0.0, ALMOST_ONE, 4),
    ],
)
def test_a_row_whose_answer_is_known(
    temperature: float, top_k: int, top_p: float, min_p: float, random: float, token: int
) -> None:
    logits = torch.tensor([[0.2, 0.12, 0.4, 0.2, 0.08]]).log()
    assert draw(logits, _settings([(temperature, top_p, min_p, random)], [top_k])).tolist() == [token]


@pytest.mark.parametrize(("top_p", "last"), [(0.5, 1), (0.500001, 2), (0.75, 2), (1e-9, 0), (1.0, 3)])
def test_equals_stay_until_top_p_is_just_reached(top_p: float, last: int) -> None:
    assert draw(torch.zeros(1, 4), _settings([(1.0, top_p, 0.0, ALMOST_ONE)], [0])).tolist() == [last]


def test_rows_of_all_kinds_as_the_sampler_draws_them() -> None:
    torch.manual_seed(0)
    dice = Random(0)
    rows, vocab_size = 24, 150
    logits = torch.randn(rows, vocab_size) * 4
    logits[::3] = logits[::3].round()  # many equals, on both sides of every border
    logits[4] = 0.0
    logits[7, 3:] = float("-inf")
    logits[10] *= 1e-30
    logits[13] = -logits[13].abs() - 50
    draws = [
        Draw(
            SamplingParams(
                max_tokens=1,
                temperature=dice.choice([0.0, 1e-6, 0.5, 1.0, 3.0, 3.0]),
                top_k=dice.choice([0, 0, 1, 5, 40, vocab_size - 1, vocab_size, 2**31]),
                top_p=dice.choice([1.0, 0.95, 0.3, 1e-9]),
                min_p=dice.choice([0.0, 0.0, 0.05, 1.0]),
                seed=row,
            ),
            position=row,
        )
        for row in range(rows)
    ]
    assert draw(logits, DrawSettings.of(draws, logits.device)).tolist() == sample(logits, draws)


def test_no_token_from_nonsense() -> None:
    logits = torch.zeros(4, 70)
    logits[0, 69] = float("nan")
    logits[1] = float("-inf")
    logits[2, 5] = float("inf")
    settings = _settings([(0.0, 1.0, 0.0, 0.5)] * 2 + [(1.0, 1.0, 0.0, 0.5)] * 2, [0] * 4)
    assert draw(logits, settings).tolist() == [-1, -1, -1, 35]


def test_the_door_refuses_what_does_not_fit() -> None:
    settings = _settings([(1.0, 1.0, 0.0, 0.5)], [0])
    with pytest.raises(ValueError, match="logits must be float32"):
        draw(torch.zeros(1, 9).half(), settings)
    with pytest.raises(ValueError, match=r"numbers must be contiguous float64 \[2, 4\]"):
        draw(torch.zeros(2, 9), settings)
    with pytest.raises(ValueError, match="vocab_size must lie in"):
        draw(torch.zeros(1, 2**18 + 1), settings)
