"""A model's shape from GGUF metadata: keys as in the GGUF specification, defaults as in llama.cpp."""

from collections.abc import Mapping
from math import log
from typing import Any

from splitserve.engine.config_fields import ConfigFields, supported
from splitserve.engine.model_config import (
    MOST_LAYERS,
    Experts,
    LinearRopeScaling,
    ModelConfig,
    RopeDivisors,
    RopeScaling,
    Variation,
    YarnRopeScaling,
)
from splitserve.engine.weights.errors import ModelLoadError

GGUF_ARCHITECTURES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "llama": "llama",  # Mistral as well, and Mixtral where there are experts
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
}
_WHERE = "GGUF metadata"
_SOFTMAX_ROUTER = 1
_WIDEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, whose scores have a scale of their own
_REFUSED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (None, True),
    "attention.clamp_kqv": (None, 0.0),
    "attention.max_alibi_bias": (None, 0.0),
    "attention.shared_kv_layers": (None, 0),
    "attention.temperature_length": (None, 0),
    "expert_gating_func": (None, 0, _SOFTMAX_ROUTER),
    "expert_group_count": (None, 0, 1),
    "expert_shared_count": (None, 0),
    "expert_weights_scale": (None, 0.0, 1.0),
    "leading_dense_block_count": (None, 0),
    "embedding_scale": (None, 0.0, 1.0),
    "logit_scale": (None, 0.0, 1.0),
    "residual_scale": (None, 0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (None, 1.0),
    "rope.scaling.yarn_ext_factor": (None, -1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (None, 0.0),
    "router_logit_softcapping": (None, 0.0),
    "use_parallel_residual": (None, False),
}


def config_from_gguf(
    metadata: Mapping[str, Any], *, tied_embeddings: bool, rope_divisors: tuple[float, ...] | None = None
) -> ModelConfig:
    """Read GGUF metadata. What GGUF says through tensors is passed in: whether there is an output head of its own, and
    the content of ``rope_freqs.weight``. Raises ModelLoadError naming the key that is missing, wrong or not supported.
    """
    stored_as = metadata.get("general.architecture")
    architecture = supported(stored_as, GGUF_ARCHITECTURES, _WHERE)
    fields = _of_architecture(metadata, f"{stored_as}.")
    for name, accepted in _REFUSED.items():
        fields.require(name, None, accepted)
    if architecture == "llama" and fields.integer("expert_count", 0):
        architecture = "mixtral"
    layers, heads = fields.integer_up_to("block_count", MOST_LAYERS), fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // max(heads, 1))
    for same in ("attention.value_length", "rope.dimension_count"):
        fields.require(same, head_dim, (None, head_dim))
    scaling = _rope_scaling(fields)
    if rope_divisors is not None:
        if scaling is not None:
            raise ModelLoadError(f"{_WHERE}: rope.scaling.type and the tensor rope_freqs.weight exclude each other")
        scaling = RopeDivisors(rope_divisors)
    tokenizer = ConfigFields(metadata, _WHERE)
    eos = frozenset[int]().union(
        *(tokenizer.token_ids(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))
    )
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        vocab_size=fields.integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None),
        max_model_tokens=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", None if architecture == "gemma3" else 10_000.0),
        rope_scaling=scaling,
        tied_embeddings=tied_embeddings,
        eos_token_ids=eos,
        variation=_variation(fields, architecture, layers),
    )


def _of_architecture(metadata: Mapping[str, Any], prefix: str) -> ConfigFields:
    """The keys of the architecture, without its name before them."""
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return ConfigFields(own, f"{_WHERE}: {prefix}*")


def _variation(fields: ConfigFields, architecture: str, layers: int) -> Variation:
    scale = fields.number("attention.scale", 0.0) or None
    if scale is None and layers == _WIDEST.get(architecture):
        scale = (fields.positive("embedding_length") / fields.positive("attention.head_count")) ** -0.5
    logit_cap = fields.number("final_logit_softcapping", 30.0 if architecture == "gemma2" else 0.0)
    attention_cap = fields.number("attn_logit_softcapping", 50.0 if architecture == "gemma2" else 0.0)
    return Variation(
        projection_bias=architecture == "qwen2",
        attention_scale=scale,
        attention_soft_cap=attention_cap or None,
        logit_soft_cap=logit_cap or None,
        windows=_windows(fields, architecture, layers),
        windowed_rope_theta=fields.number("rope.freq_base_swa", 10_000.0) if architecture == "gemma3" else None,
        experts=_experts(fields, architecture),
    )


def _windows(fields: ConfigFields, architecture: str, layers: int) -> tuple[int | None, ...]:
    match architecture:
        case "gemma2":
            window, period = fields.integer("attention.sliding_window", 4096), 2
        case "gemma3":
            window, period = fields.integer("attention.sliding_window"), 6
        case _:
            fields.require("attention.sliding_window", None, (None, 0))
            return ()
    pattern = fields.value("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = fields.integer("attention.sliding_window_pattern", period)
        pattern = [(layer + 1) % max(period, 1) != 0 for layer in range(layers)]
    return tuple(window if windowed else None for windowed in pattern)


def _experts(fields: ConfigFields, architecture: str) -> Experts | None:
    if architecture not in ("mixtral", "qwen3_moe"):
        fields.require("expert_count", None, (None, 0))
        return None
    return Experts(
        count=fields.integer("expert_count"),
        used=fields.integer("expert_used_count"),
        intermediate_size=fields.integer(
            "expert_feed_forward_length", fields.integer("feed_forward_length") if architecture == "mixtral" else None
        ),
        normalised=fields.flag("expert_weights_norm", True),
    )


def _rope_scaling(fields: ConfigFields) -> RopeScaling | None:
    old = fields.number_or_none("rope.scale_linear")  # how linear scaling was stored at first
    kind = fields.value("rope.scaling.type") or ("none" if old in (None, 0.0, 1.0) else "linear")
    match kind:
        case "none":
            return None
        case "linear":
            return LinearRopeScaling(fields.number("rope.scaling.factor", old))
        case "yarn":
            factor = fields.number("rope.scaling.factor")
            stretched = 0.1 * log(factor) + 1.0 if factor > 1 else 1.0
            return YarnRopeScaling(
                factor=factor,
                original_max_tokens=fields.integer(
                    "rope.scaling.original_context_length", fields.integer("context_length")
                ),
                beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
                attention_factor=fields.number("rope.scaling.attn_factor", 1.0) * stretched,
                whole_borders=True,
            )
    raise ModelLoadError(f"{_WHERE}: rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn")
