"""A model's shape from a Hugging Face ``config.json``.

Where that leaves a field out, the value that transformers takes is taken here. A field that would change results in a
way that is not computed here is refused by its name.
"""

from collections.abc import Mapping
from typing import Any

from splitserve.engine.config_fields import ConfigFields, supported
from splitserve.engine.hf_rope import rope_from_hf
from splitserve.engine.model_config import MOST_LAYERS, Experts, ModelConfig, Variation
from splitserve.engine.weights.errors import ModelLoadError

HF_ARCHITECTURES = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",  # its text model
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

# What absent fields mean, where that is not the same for all.
_GEMMA = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"eos_token_id": 2},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
    "mixtral": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "eos_token_id": 2,
    },
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
    },
    "gemma2": _GEMMA
    | {
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": _GEMMA | {"vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1e6},
}
_NO = (None, False)
_ONE = (None, 1)
_REFUSED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": _ONE,
    "rope_interleaved": _NO,
    "use_mrope": _NO,
    "mlp_bias": _NO,
    "qk_norm": _NO,
    "use_qk_norm": _NO,
    "use_bidirectional_attention": _NO,
    "attention_sinks": _NO,
    "attention_chunk_size": (None,),
    "dual_chunk_attention_config": (None,),
    "attn_temperature_tuning": _NO,
    "clip_qkv": (None,),
    "num_kv_shared_layers": (None, 0),
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "attention_multiplier": _ONE,
    "embedding_multiplier": _ONE,
    "residual_multiplier": _ONE,
    "logits_scaling": _ONE,
    "logit_scale": _ONE,
}


def config_from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read the parsed ``config.json``, with the end-of-sequence tokens of ``generation_config.json`` added.

    Raises ModelLoadError naming the field that is missing, wrong or not supported.
    """
    where = "config.json"
    names = config.get("architectures") or [None]
    architecture = supported(names[0] if isinstance(names, list) else names, HF_ARCHITECTURES, where)
    fields = ConfigFields(_DEFAULTS[architecture] | dict(_text_config(config)), where)
    for name, accepted in _REFUSED.items():
        fields.require(name, None, accepted)
    if architecture.startswith("gemma"):
        fields.require("hidden_activation", None, (None, "gelu_pytorch_tanh"))
    else:
        fields.require("hidden_act", "silu", ("silu",))
    rope = rope_from_hf(fields, architecture)
    layers, heads = fields.integer_up_to("num_hidden_layers", MOST_LAYERS), fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    eos = ConfigFields(config, where).token_ids("eos_token_id") | fields.token_ids("eos_token_id")
    if generation_config is not None:
        eos |= ConfigFields(generation_config, "generation_config.json").token_ids("eos_token_id")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden_size // max(heads, 1)),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_model_tokens=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=eos,
        variation=_variation(fields, architecture, layers, rope.windowed_theta),
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model: the whole, but for models that see as well."""
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, Mapping):
        raise ModelLoadError(f"config.json: text_config must be an object, got {text!r}")
    outer = ("tie_word_embeddings", "quantization_config")  # of the whole model, wherever there is one
    return {**text, **{name: config[name] for name in outer if config.get(name) is not None}}


def _variation(fields: ConfigFields, architecture: str, layers: int, windowed_rope_theta: float | None) -> Variation:
    projection_bias, output_bias = _biases(fields, architecture)
    attention_scale, attention_cap, logit_cap = None, None, None
    if architecture.startswith("gemma"):
        attention_scale = fields.positive("query_pre_attn_scalar") ** -0.5
        logit_cap = fields.number_or_none("final_logit_softcapping")
    else:
        fields.require("final_logit_softcapping", None, (None,))
    if architecture == "gemma2":
        attention_cap = fields.number_or_none("attn_logit_softcapping")
    else:
        fields.require("attn_logit_softcapping", None, (None,))
    return Variation(
        projection_bias=projection_bias,
        output_bias=output_bias,
        attention_scale=attention_scale,
        attention_soft_cap=attention_cap,
        logit_soft_cap=logit_cap,
        windows=_windows(fields, architecture, layers),
        windowed_rope_theta=windowed_rope_theta,
        experts=_experts(fields, architecture, layers),
    )


def _biases(fields: ConfigFields, architecture: str) -> tuple[bool, bool]:
    """Whether there are biases of query, key and value, and one after attention."""
    if architecture == "qwen2":
        return True, False
    if architecture in ("mistral", "mixtral"):
        fields.require("attention_bias", None, _NO)
        return False, False
    biased = fields.flag("attention_bias", False)
    return biased, biased


def _windows(fields: ConfigFields, architecture: str, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer; empty where none has one."""
    window = fields.integer_or_none("sliding_window")
    if architecture == "llama":
        fields.require("sliding_window", None, (None,))
    if architecture.startswith("qwen") and not fields.flag("use_sliding_window", False):
        window = None
    windowed = _windowed_layers(fields, architecture, layers, window)
    if (named := fields.list_or_none("layer_types")) is not None:
        named_windowed = [_is_windowed(kind) for kind in named]
        if len(named) != layers:
            raise ModelLoadError(f"config.json: layer_types names {len(named)} of {layers} layers")
        if architecture in ("llama", "mistral", "mixtral", "qwen3_moe") and named_windowed != windowed:
            raise ModelLoadError(f"config.json: layer_types={named!r} is not supported for {architecture}")
        windowed = named_windowed
    if any(windowed) and window is None:
        raise ModelLoadError("config.json: sliding_window is missing, though layers with a window are named")
    return tuple(window if own else None for own in windowed) if any(windowed) else ()


def _windowed_layers(fields: ConfigFields, architecture: str, layers: int, window: int | None) -> list[bool]:
    """Which layers have the window where ``layer_types`` does not say."""
    match architecture:
        case "mistral" | "mixtral" | "qwen3_moe":
            return [window is not None] * layers
        case "qwen2" | "qwen3" if window is not None:
            first = fields.integer("max_window_layers")
            return [layer >= first for layer in range(layers)]
        case "gemma2":
            return [layer % 2 == 0 for layer in range(layers)]
        case "gemma3":
            period = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
            return [(layer + 1) % max(period, 1) != 0 for layer in range(layers)]
    return [False] * layers


def _is_windowed(kind: object) -> bool:
    if kind not in ("sliding_attention", "full_attention"):
        raise ModelLoadError(
            f"config.json: layer_types: {kind!r} is not supported; supported: full_attention, sliding_attention"
        )
    return kind == "sliding_attention"


def _experts(fields: ConfigFields, architecture: str, layers: int) -> Experts | None:
    if architecture not in ("mixtral", "qwen3_moe"):
        return None
    count = fields.integer("num_local_experts", fields.integer("num_experts"))
    used = fields.integer("num_experts_per_tok")
    if architecture == "mixtral":
        return Experts(count, used, fields.integer("intermediate_size"), normalised=True)
    dense = fields.list_or_none("mlp_only_layers") or []
    step = fields.integer("decoder_sparse_step", 1)
    return Experts(
        count,
        used,
        fields.integer("moe_intermediate_size"),
        normalised=fields.flag("norm_topk_prob", False),
        dense_layers=tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % max(step, 1)),
    )
