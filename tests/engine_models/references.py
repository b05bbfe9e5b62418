"""Tiny random models of every architecture, as transformers computes them."""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

LAYERS = 3
WINDOW = 6  # shorter than the prompts
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
WINDOWED_TOP = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
SOFT_CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class Reference:
    """A model of transformers: ``Llama`` stands for ``LlamaConfig`` and ``LlamaForCausalLM``."""

    family: str
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """Every parameter is random, norms and biases included; equal calls give equal models."""
        settings: dict[str, Any] = {
            "vocab_size": 131,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "attn_implementation": "eager",
        }
        text = "Text" if self.family == "Gemma3" else ""
        config = getattr(transformers, f"{self.family}{text}Config")(**settings | self.settings)
        model = getattr(transformers, f"{self.family}ForCausalLM")(config).eval()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                # One-dimensional parameters stay near where they start: norms near 1 (or Gemma's 0), biases near 0.
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else parameter + 0.3 * noise)
        return model


REFERENCES = {
    "llama": Reference("Llama"),
    "llama, one key head for all": Reference("Llama", {"num_key_value_heads": 1}),
    "llama, as many key heads": Reference("Llama", {"num_key_value_heads": 6}),
    "llama, tied embeddings": Reference("Llama", {"tie_word_embeddings": True}),
    "llama, head size of its own": Reference("Llama", {"head_dim": 16}),
    "llama, biases": Reference("Llama", {"attention_bias": True}),
    "llama, rope llama3": Reference("Llama", {"rope_parameters": LLAMA3}),
    "llama, rope linear": Reference("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "llama, rope yarn": Reference("Llama", {"rope_parameters": YARN}),
    "llama, rope yarn with all fields": Reference(
        "Llama",
        {
            "rope_parameters": YARN
            | {"beta_fast": 6.0, "beta_slow": 0.5, "mscale": 1.3, "mscale_all_dim": 0.4, "truncate": False}
        },
    ),
    "mistral": Reference("Mistral", {"sliding_window": WINDOW}),
    "mistral, no window": Reference("Mistral", {"sliding_window": None}),
    "qwen2": Reference("Qwen2"),
    "qwen2, tied, windows in upper layers": Reference("Qwen2", WINDOWED_TOP | {"tie_word_embeddings": True}),
    "qwen3": Reference("Qwen3", {"head_dim": 16}),
    "qwen3, biases, windows in upper layers": Reference(
        "Qwen3", WINDOWED_TOP | {"head_dim": 16, "attention_bias": True}
    ),
    "gemma2": Reference("Gemma2", GEMMA | SOFT_CAPS),
    "gemma2, layer types and head of its own": Reference(
        "Gemma2", GEMMA | SOFT_CAPS | {"layer_types": MIXED[::-1], "tie_word_embeddings": False}
    ),
    "gemma3": Reference("Gemma3", GEMMA | {"layer_types": MIXED, "rope_parameters": GEMMA3_ROPE}),
    "gemma3, pattern": Reference(
        "Gemma3", GEMMA | {"sliding_window_pattern": 2, "final_logit_softcapping": 3.0, "num_key_value_heads": 1}
    ),
    "mixtral": Reference("Mixtral", {"num_local_experts": 5}),
    "mixtral, window": Reference("Mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen3 with experts": Reference("Qwen3Moe", EXPERTS | {"head_dim": 16}),
    "qwen3 with experts, normalised, a dense layer": Reference(
        "Qwen3Moe", EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1], "num_key_value_heads": 3}
    ),
    "qwen3 with experts in every second layer, window": Reference(
        "Qwen3Moe", EXPERTS | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": WINDOW}
    ),
}
