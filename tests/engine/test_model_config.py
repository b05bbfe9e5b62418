"""What a model's own configuration says, in all its spellings, and what is refused by name."""

import contextlib
import math
from dataclasses import replace
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.gguf_config import config_from_gguf
from splitserve.engine.hf_config import HF_ARCHITECTURES, config_from_hf
from splitserve.engine.model_config import (
    Experts,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelConfig,
    RopeDivisors,
    Variation,
    YarnRopeScaling,
)
from splitserve.engine.models.registry import MODELS
from splitserve.engine.weights.errors import ModelLoadError

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
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


def hf(family: str, **changes: Any) -> ModelConfig:
    return config_from_hf({"architectures": [f"{family}ForCausalLM"]} | SIZES | changes)


def test_the_plain_decoder_is_read() -> None:
    assert hf("Llama") == PLAIN
    assert hf("Mistral", sliding_window=None) == replace(PLAIN, architecture="mistral")


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("Mistral", {}, (4096,) * 4),
        ("Mistral", {"sliding_window": 9}, (9,) * 4),
        ("Mixtral", {}, ()),
        ("Qwen2", {"sliding_window": 9}, ()),
        ("Qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 9)),
        ("Qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 4}, ()),
        (
            "Qwen3",
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] + ["full_attention"] * 3,
            },
            (9, None, None, None),
        ),
        ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 9}, (9,) * 4),
        ("Gemma2", {}, (4096, None, 4096, None)),
        ("Gemma3", {"sliding_window": 9, "sliding_window_pattern": 3}, (9, 9, None, 9)),
        ("Gemma3", {"sliding_window": 9, "_sliding_window_pattern": 2}, (9, None, 9, None)),
        ("Gemma3", {"sliding_window": 9}, (9,) * 4),
    ],
)
def test_windows_are_read_per_layer(family: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = hf(family, **changes)
    assert config.variation.windows == windows
    assert [config.window(layer) for layer in range(4)] == list(windows or (None,) * 4)


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope_scaling": {"type": "llama3", **LLAMA3}}, Llama3RopeScaling(8.0, 1.0, 4.0, 64)),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3}}, Llama3RopeScaling(8.0, 1.0, 4.0, 64)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, LinearRopeScaling(2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        ({"rope_scaling": YARN}, YarnRopeScaling(4.0, 32, 32.0, 1.0, 0.1 * math.log(4) + 1, True)),
        (
            {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16, "truncate": False}},
            YarnRopeScaling(4.0, 32, 16.0, 1.0, 1.0, False),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
            YarnRopeScaling(4.0, 128, 32.0, 1.0, 1.5, True),
        ),
        (
            {"rope_scaling": YARN | {"attention_factor": 1.0}, "original_max_position_embeddings": 16},
            YarnRopeScaling(4.0, 16, 32.0, 1.0, 1.0, True),
        ),
    ],
)
def test_rope_scaling_is_read_in_both_spellings(changes: dict[str, Any], scaling: object) -> None:
    assert hf("Llama", **changes).rope_scaling == scaling


@pytest.mark.parametrize(
    "spelled",
    [
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ],
)
def test_gemma3_has_two_rotary_bases_in_both_spellings(spelled: dict[str, Any]) -> None:
    config = hf("Gemma3", **spelled)
    assert (config.rope_theta, config.rope_scaling) == (5e5, LinearRopeScaling(8.0))
    assert config.variation.windowed_rope_theta == 2e4


def test_a_gemma3_that_sees_is_read_as_its_text_model() -> None:
    """As the published 4B checkpoint spells it: most of the text model's fields are left out."""
    config = config_from_hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152},
        },
        {"eos_token_id": 106},
    )
    windows = tuple(None if layer % 6 == 5 else 1024 for layer in range(34))
    assert config == ModelConfig(
        architecture="gemma3",
        hidden_size=2560,
        layers=34,
        heads=8,
        kv_heads=4,
        head_dim=256,
        intermediate_size=10240,
        vocab_size=262_208,
        max_model_tokens=131_072,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=LinearRopeScaling(8.0),
        tied_embeddings=True,
        eos_token_ids=frozenset([1, 106]),
        variation=Variation(attention_scale=1 / 16, windows=windows, windowed_rope_theta=10_000.0),
    )


@pytest.mark.parametrize(
    ("family", "changes", "variation"),
    [
        ("Llama", {"attention_bias": True}, Variation(projection_bias=True, output_bias=True)),
        ("Qwen2", {}, Variation(projection_bias=True)),
        (
            "Gemma2",
            {"sliding_window": 9, "query_pre_attn_scalar": 25, "final_logit_softcapping": None},
            Variation(attention_scale=0.2, attention_soft_cap=50.0, windows=(9, None, 9, None)),
        ),
        (
            "Mixtral",
            {"num_local_experts": 4, "num_experts_per_tok": 2},
            Variation(experts=Experts(4, 2, 64, normalised=True)),
        ),
        (
            "Qwen3Moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
            Variation(experts=Experts(4, 2, 16, normalised=False, dense_layers=(0,))),
        ),
        (
            "Qwen3Moe",
            {"num_local_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True, "decoder_sparse_step": 2},
            Variation(experts=Experts(4, 3, 768, normalised=True, dense_layers=(0, 2))),
        ),
    ],
)
def test_variations_are_read(family: str, changes: dict[str, Any], variation: Variation) -> None:
    assert hf(family, **changes).variation == variation


@pytest.mark.parametrize("architecture", HF_ARCHITECTURES)
def test_absent_fields_mean_what_they_mean_to_transformers(architecture: str) -> None:
    family = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    given = {"hidden_size": 256, "num_hidden_layers": 30, "intermediate_size": 300}
    if family != "Gemma3":
        given |= {"vocab_size": 500, "max_position_embeddings": 900, "num_attention_heads": 32}
    read = config_from_hf({"architectures": [architecture], **given})
    theirs = getattr(transformers, f"{family}{'Text' if family == 'Gemma3' else ''}Config")(**given)
    rope = theirs.rope_parameters
    eos = [] if theirs.eos_token_id is None else [theirs.eos_token_id]
    assert read == replace(
        read,
        heads=theirs.num_attention_heads,
        kv_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, "head_dim", None) or 256 // theirs.num_attention_heads,
        vocab_size=theirs.vocab_size,
        max_model_tokens=theirs.max_position_embeddings,
        rms_norm_eps=theirs.rms_norm_eps,
        rope_theta=rope.get("full_attention", rope)["rope_theta"],
        rope_scaling=None,
        tied_embeddings=theirs.tie_word_embeddings,
        eos_token_ids=frozenset(eos),
    )
    every_layer = "sliding_attention" if getattr(theirs, "sliding_window", None) else "full_attention"
    kinds = getattr(theirs, "layer_types", None) or [every_layer] * 30
    assert [read.window(layer) for layer in range(30)] == [
        theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds
    ]
    assert read.variation.logit_soft_cap == getattr(theirs, "final_logit_softcapping", None)
    assert read.variation.attention_soft_cap == getattr(theirs, "attn_logit_softcapping", None)
    if experts := read.variation.experts:
        size = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        assert experts == Experts(
            theirs.num_local_experts, theirs.num_experts_per_tok, size, getattr(theirs, "norm_topk_prob", True)
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
ROPE = st.dictionaries(
    st.sampled_from(
        ["rope_type", "type", "factor", "rope_theta", "beta_fast", "mscale", "full_attention", "low_freq_factor"]
    ),
    st.sampled_from(["llama3", "yarn", "linear", "default"]) | JSON,
    max_size=5,
)
FIELDS = [*SIZES, "rope_theta", "tie_word_embeddings", "layer_types", "text_config", "architectures", "sliding_window"]
FIELDS += ["query_pre_attn_scalar", "num_experts", "num_local_experts", "mlp_only_layers", "attention_bias"]


@settings(max_examples=300, deadline=None)
@given(
    architecture=st.sampled_from(sorted(HF_ARCHITECTURES)),
    wrong=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    rope=st.none() | ROPE,
)
def test_whatever_a_config_holds_it_is_read_or_refused(architecture: str, wrong: dict[str, Any], rope: Any) -> None:
    config = {"architectures": [architecture], "rope_scaling": rope} | SIZES | wrong
    with contextlib.suppress(ModelLoadError):
        assert config_from_hf(config, {"eos_token_id": wrong.get("eos_token_id")}).layers >= 1


def test_an_unknown_architecture_is_refused_with_what_is_supported() -> None:
    with pytest.raises(
        ModelLoadError, match=r"'GPT2LMHeadModel' is not supported; supported: .*Gemma3.*Mixtral.*Qwen2"
    ):
        config_from_hf({"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(ModelLoadError, match=r"'mamba' is not supported; supported: gemma2, .*qwen3moe"):
        config_from_gguf({"general.architecture": "mamba"}, tied_embeddings=True)


def test_every_accepted_architecture_has_a_model() -> None:
    assert set(HF_ARCHITECTURES.values()) == set(MODELS)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Llama", {"hidden_size": None}, "hidden_size is missing"),
        ("Llama", {"num_hidden_layers": "two"}, "num_hidden_layers must be an integer, got 'two'"),
        ("Llama", {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most"),
        ("Llama", {"num_key_value_heads": 3}, "multiple of kv_heads"),
        ("Llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("Gemma2", {"hidden_activation": "silu"}, "hidden_activation='silu' is not supported"),
        ("Mistral", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("Llama", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("Llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
        ("Llama", {"sliding_window": 4}, "sliding_window=4 is not supported"),
        ("Llama", {"attn_logit_softcapping": 4.0}, "attn_logit_softcapping=4.0 is not supported"),
        ("Gemma3", {"attn_logit_softcapping": 4.0}, "attn_logit_softcapping=4.0 is not supported"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("Gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be positive"),
        ("Qwen2", {"dual_chunk_attention_config": {}}, "dual_chunk_attention_config={} is not supported"),
        ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ("Llama", {"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope' is not supported"),
        (
            "Llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            "rope_parameters: low_freq_factor is missing",
        ),
        ("Llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_parameters: factor is missing"),
        ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": -1}}, "positive and finite: rope factor=-1.0"),
        ("Llama", {"rope_scaling": {"mrope_section": [1, 2]}}, "mrope_section is not supported"),
        ("Llama", {"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ("Qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention is not supported"),
        ("Gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "sliding_attention"),
        ("Gemma3", {"layer_types": ["full_attention"] * 3}, "layer_types names 3 of 4 layers"),
        ("Gemma3", {"layer_types": ["chunked_attention"] * 4}, "'chunked_attention' is not supported"),
        ("Gemma3", {"sliding_window": 0}, "sliding_window=0"),
        ("Mistral", {"layer_types": ["full_attention"] * 4}, "layer_types=.* is not supported for mistral"),
        ("Qwen3", {"layer_types": ["sliding_attention"] * 4}, "sliding_window is missing"),
        ("Mixtral", {"num_experts_per_tok": 9}, r"must lie in \[1, 8\], got 9"),
        ("Llama", {"eos_token_id": [1, 99]}, r"\[99\] lie outside the vocabulary"),
        ("Llama", {"eos_token_id": "end"}, "eos_token_id must be an integer or a list of integers, got 'end'"),
        ("Llama", {"rms_norm_eps": 0}, "positive and finite: rms_norm_eps=0"),
    ],
)
def test_what_is_wrong_or_not_computed_is_refused_by_name(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        hf(family, **changes)


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"architecture": "mistral"}, True),
        ({"rms_norm_eps": 1e-5}, True),
        ({"rope_theta": 5e5}, True),
        ({"rope_scaling": RopeDivisors((1.0, 1.0, 2.0, 4.0))}, True),
        ({"intermediate_size": 32}, True),
        ({"variation": Variation(windows=(None, 8, 8, 8))}, True),
        ({"variation": Variation(attention_scale=0.2)}, True),
        ({"variation": Variation(experts=Experts(4, 2, 16, normalised=True))}, True),
        ({"eos_token_ids": frozenset()}, False),
        ({"max_model_tokens": 64}, False),
    ],
)
def test_the_cache_key_differs_where_keys_and_values_do(change: dict[str, Any], differs: bool) -> None:
    assert (replace(PLAIN, **change).cache_key != PLAIN.cache_key) == differs
