"""GGUF metadata of each architecture: keys and defaults as llama.cpp writes and reads them."""

import contextlib
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.gguf_config import GGUF_ARCHITECTURES, config_from_gguf
from splitserve.engine.model_config import (
    Experts,
    LinearRopeScaling,
    ModelConfig,
    RopeDivisors,
    Variation,
    YarnRopeScaling,
)
from splitserve.engine.weights.errors import ModelLoadError

SIZES: dict[str, Any] = {
    "context_length": 128,
    "embedding_length": 32,
    "block_count": 4,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 8,
    "vocab_size": 50,
}
PLAIN = ModelConfig(
    architecture="llama",
    hidden_size=32,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=50,
    max_model_tokens=128,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    rope_scaling=None,
    tied_embeddings=False,
    eos_token_ids=frozenset([2]),
)


def gguf(architecture: str, divisors: tuple[float, ...] | None = None, **changes: Any) -> ModelConfig:
    """``changes`` spell dots as two underscores."""
    own = SIZES | {name.replace("__", "."): value for name, value in changes.items()}
    metadata = {f"{architecture}.{name}": value for name, value in own.items() if value is not None}
    metadata |= {"general.architecture": architecture, "tokenizer.ggml.eos_token_id": 2}
    return config_from_gguf(metadata, tied_embeddings=False, rope_divisors=divisors)


def test_the_plain_decoder_is_read() -> None:
    assert gguf("llama") == PLAIN
    assert gguf("qwen3", attention__key_length=16, rope__dimension_count=16, rope__freq_base=1e6) == replace(
        PLAIN, architecture="qwen3", head_dim=16, rope_theta=1e6
    )
    assert gguf("qwen2") == replace(PLAIN, architecture="qwen2", variation=Variation(projection_bias=True))


@pytest.mark.parametrize(
    ("architecture", "changes", "variation"),
    [
        (
            "gemma2",
            {},
            Variation(attention_soft_cap=50.0, logit_soft_cap=30.0, windows=(4096, None, 4096, None)),
        ),
        (
            "gemma2",
            {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "attention__sliding_window": 9},
            Variation(attention_soft_cap=5.0, logit_soft_cap=3.0, windows=(9, None, 9, None)),
        ),
        (
            "gemma3",
            {"rope__freq_base": 1e6, "attention__sliding_window": 9},
            Variation(windows=(9,) * 4, windowed_rope_theta=10_000.0),
        ),
        (
            "gemma3",
            {
                "rope__freq_base": 1e6,
                "rope__freq_base_swa": 2e4,
                "attention__sliding_window": 9,
                "attention__sliding_window_pattern": 2,
                "final_logit_softcapping": 3.0,
                "attention__scale": 0.25,
            },
            Variation(attention_scale=0.25, logit_soft_cap=3.0, windows=(9, None, 9, None), windowed_rope_theta=2e4),
        ),
        (
            "gemma3",
            {
                "rope__freq_base": 1e6,
                "attention__sliding_window": 9,
                "attention__sliding_window_pattern": [True, False, False, True],
            },
            Variation(windows=(9, None, None, 9), windowed_rope_theta=10_000.0),
        ),
        (
            "qwen3moe",
            {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 16},
            Variation(experts=Experts(8, 3, 16, normalised=True)),
        ),
    ],
)
def test_variations_are_read(architecture: str, changes: dict[str, Any], variation: Variation) -> None:
    assert gguf(architecture, **changes).variation == variation


def test_llama_with_experts_is_mixtral() -> None:
    config = gguf("llama", expert_count=8, expert_used_count=2)
    experts = Experts(8, 2, 64, normalised=True)
    assert config == replace(PLAIN, architecture="mixtral", variation=Variation(experts=experts))


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_scores_by_the_width_per_head(architecture: str, layers: int) -> None:
    changes = {"rope__freq_base": 1e6, "attention__sliding_window": 9, "attention__key_length": 16}
    changes["rope__dimension_count"] = 16
    assert gguf(architecture, block_count=layers, **changes).variation.attention_scale == (32 / 4) ** -0.5
    assert gguf(architecture, block_count=layers - 1, **changes).variation.attention_scale is None


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope__scaling__type": "none"}, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}, LinearRopeScaling(8.0)),
        ({"rope__scale_linear": 4.0}, LinearRopeScaling(4.0)),
        ({"rope__scale_linear": 1.0}, None),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32,
            },
            YarnRopeScaling(4.0, 32, 32.0, 1.0, 0.1 * math.log(4) + 1, True),
        ),
        ({"divisors": (1.0, 1.5, 2.0, 8.0)}, RopeDivisors((1.0, 1.5, 2.0, 8.0))),
    ],
)
def test_rope_scaling_is_read(changes: dict[str, Any], scaling: object) -> None:
    assert gguf("llama", **changes).rope_scaling == scaling


def test_the_vocabulary_is_as_long_as_the_list_of_tokens() -> None:
    metadata = {f"llama.{name}": value for name, value in SIZES.items() if name != "vocab_size"}
    metadata |= {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a"] * 50}
    metadata |= {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eos_token_id": 2}
    assert config_from_gguf(metadata, tied_embeddings=False) == replace(PLAIN, eos_token_ids=frozenset([2, 3]))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"block_count": None}, r"llama\.\*: block_count is missing"),
        ("llama", {"block_count": 10**9}, "block_count must be at most"),
        ("llama", {"attention__head_count_kv": [2, 1, 2, 1]}, r"attention\.head_count_kv must be an integer, got \[2"),
        ("llama", {"rope__dimension_count": 4}, r"rope\.dimension_count=4 is not supported"),
        ("llama", {"attention__value_length": 4}, r"attention\.value_length=4 is not supported"),
        ("llama", {"attention__sliding_window": 4}, r"attention\.sliding_window=4 is not supported"),
        ("llama", {"attention__causal": False}, r"attention\.causal=False is not supported"),
        ("llama", {"rope__scaling__type": "longrope"}, r"rope\.scaling\.type 'longrope' is not supported"),
        ("llama", {"rope__scaling__type": "linear"}, r"rope\.scaling\.factor is missing"),
        ("llama", {"rope__scale_linear": 2.0, "divisors": (1.0,) * 4}, "exclude each other"),
        ("llama", {"divisors": (1.0,) * 3}, "rope_freqs must hold 4 values, got 3"),
        ("llama", {"divisors": (1.0, 1.0, 0.0, 1.0)}, "positive and finite: rope_freqs=0.0"),
        ("llama", {"expert_count": 4}, "expert_used_count is missing"),
        ("qwen3moe", {"expert_count": 4, "expert_used_count": 2}, "expert_feed_forward_length is missing"),
        ("qwen3", {"expert_count": 4}, "expert_count=4 is not supported"),
        ("gemma3", {"attention__sliding_window": 9}, r"rope\.freq_base is missing"),
        ("gemma3", {"rope__freq_base": 1e6}, r"attention\.sliding_window is missing"),
        (
            "gemma3",
            {
                "rope__freq_base": 1e6,
                "attention__sliding_window": 9,
                "attention__sliding_window_pattern": [True],
            },
            "windows must name 4 layers, got 1",
        ),
        ("llama", {"attention__layer_norm_rms_epsilon": math.nan}, "positive and finite: rms_norm_eps=nan"),
    ],
)
def test_what_is_wrong_or_not_computed_is_refused_by_name(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        gguf(architecture, **changes)


VALUES = (
    st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["linear", "yarn", "none", ""])
    | st.lists(st.integers() | st.booleans(), max_size=5)
)
KEYS = [
    *SIZES,
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.freq_base",
    "attention.sliding_window",
    "attention.scale",
]
KEYS += ["attention.sliding_window_pattern", "expert_count", "expert_used_count", "attention.key_length"]


@settings(max_examples=300, deadline=None)
@given(
    architecture=st.sampled_from(sorted(GGUF_ARCHITECTURES)),
    wrong=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
    divisors=st.none() | st.lists(st.floats(), min_size=3, max_size=4).map(tuple),
)
def test_whatever_metadata_hold_they_are_read_or_refused(
    architecture: str, wrong: dict[str, Any], divisors: tuple[float, ...] | None
) -> None:
    with contextlib.suppress(ModelLoadError):
        assert gguf(architecture, divisors, **wrong).layers >= 1
