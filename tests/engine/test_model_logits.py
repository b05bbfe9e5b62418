"""Every architecture against transformers: logits after each token, however prompts are cut and batched.

In float32 the order of summation makes differences of up to 7e-6 in logits of size 1: TOLERANCE leaves room for that
and is far below what any setting changes (``test_every_setting_is_felt``).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_models.paged_model import PagedModel
from engine_models.references import REFERENCES
from splitserve.engine.model_config import LinearRopeScaling, ModelConfig, YarnRopeScaling
from splitserve.engine.platforms import choose_platform, plain_platform
from splitserve.engine.weights.model_files import ModelFiles
from splitserve.engine.weights.open_model import open_model

TOLERANCE = 5e-5
CPU = torch.device("cpu")
PLAIN = plain_platform(CPU, torch.float32)
PROMPTS = [[(37 * n + 11 * which) % 131 for n in range(length)] for which, length in enumerate((29, 1, 7, 18))]
FIRST = len(PROMPTS[0])
ALONE = {
    "in one piece": [[(0, FIRST)]],
    "in chunks": [[(0, 5)], [(0, 7)], [(0, FIRST - 12)]],
    "token by token": [[(0, 1)]] * FIRST,
}
TOGETHER = [
    [(0, 5), (1, 1), (2, 3)],
    [(0, 1), (2, 1), (3, 9)],
    [(3, 1), (0, 13), (2, 1)],
    [(0, 1), (2, 1), (3, 1)],
    [(2, 1), (0, 9), (3, 7)],
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make small models slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Golden:
    files: ModelFiles
    expected: list[torch.Tensor]  # per prompt: [tokens, vocab_size]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model by its name in REFERENCES: its files as transformers saves them, and its logits."""

    @cache
    def of(name: str) -> Golden:
        folder: Path = tmp_path_factory.mktemp("model")
        reference = REFERENCES[name].build()
        reference.save_pretrained(folder)
        with torch.inference_mode():
            expected = [reference(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
        return Golden(open_model(str(folder)), expected)

    return of


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(name: str, golden: Any) -> None:
    """Without experts: a token near a tie of two of them may go to either, and differs then without being wrong."""
    narrow = REFERENCES[name].build().bfloat16()
    with torch.inference_mode():
        theirs = narrow(torch.tensor([PROMPTS[0]])).logits[0].float()
    ours = PagedModel(golden(name).files, plain_platform(CPU, torch.bfloat16)).logits(PROMPTS[:1], ALONE["in chunks"])[
        0
    ]
    expected = golden(name).expected[0]
    assert (ours - expected).abs().mean() < 1.4 * (theirs - expected).abs().mean()


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", REFERENCES)
def test_logits_are_those_of_transformers_however_the_prompt_is_cut(name: str, golden: Any) -> None:
    model, expected = PagedModel(golden(name).files, PLAIN), golden(name).expected
    for steps in ALONE.values():
        assert_equal(model.logits(PROMPTS[:1], steps)[0], expected[0])


@pytest.mark.parametrize("name", REFERENCES)
def test_neighbours_of_other_lengths_change_nothing(name: str, golden: Any) -> None:
    together = PagedModel(golden(name).files, choose_platform(CPU, torch.float32)).logits(PROMPTS, TOGETHER)
    for number, expected in enumerate(golden(name).expected):
        assert_equal(together[number], expected)


@dataclass(frozen=True)
class Changed:
    """Model files with another config."""

    files: ModelFiles
    config: ModelConfig

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)


NO_WINDOWS = {"windows": (None, None, None)}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", NO_WINDOWS),
    ("qwen2, tied, windows in upper layers", {"windows": (6, 6, 6)}),
    ("qwen3, biases, windows in upper layers", {"windows": (None, 7, 6)}),
    ("gemma2", NO_WINDOWS),
    ("gemma2", {"attention_soft_cap": None}),
    ("gemma2", {"logit_soft_cap": None}),
    ("gemma2", {"attention_scale": None}),
    ("gemma3", {"windowed_rope_theta": None}),
    ("gemma3", {"windowed_rope_theta": 1e5}),
    ("gemma3", {"rope_scaling": None}),
    ("gemma3", {"rope_scaling": LinearRopeScaling(3.0)}),
    ("llama, rope yarn", {"rope_scaling": YarnRopeScaling(4.0, 32, 32.0, 1.0, 1.0, True)}),
    ("mixtral", {"normalised": False}),
    ("mixtral", {"used": 1}),
    ("qwen3 with experts", {"normalised": True}),
]


@pytest.mark.parametrize(("name", "change"), SETTINGS, ids=str)
def test_every_setting_is_felt(name: str, change: dict[str, Any], golden: Any) -> None:
    config = golden(name).files.config
    variation = config.variation
    if set(change) <= {"rope_scaling"}:
        changed = replace(config, **change)
    elif set(change) <= {"normalised", "used"}:
        changed = replace(config, variation=replace(variation, experts=replace(variation.experts, **change)))
    else:
        changed = replace(config, variation=replace(variation, **change))
    got = PagedModel(Changed(golden(name).files, changed), PLAIN).logits(PROMPTS[:1], ALONE["in one piece"])[0]
    assert (got - golden(name).expected[0]).abs().max() > 100 * TOLERANCE
    assert changed.cache_key != config.cache_key
