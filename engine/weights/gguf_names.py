"""How each architecture's weights are named and stored in GGUF, against Hugging Face: what llama.cpp's converter does
(``convert_hf_to_gguf.py``), backwards.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GATED = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN = _ATTENTION | _GATED | {"ffn_norm": "post_attention_layernorm"}
_GEMMA = (
    _ATTENTION
    | _GATED
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)


@dataclass(frozen=True, slots=True)
class GgufStorage:
    """One architecture's names within a layer, and what its converter changed in the values."""

    layer: Mapping[str, str]
    experts: Mapping[str, str]  # tensors that hold a weight of all experts, to a pattern of each one's name
    paired_rotary: bool = False  # rows of query and key projections lie in pairs that rotate together
    norm_offset: float = 0.0  # that was added to the weights of all norms

    def hf_name(self, stored: str) -> str:
        """A stored tensor's name on the hub. One without a counterpart stays as it is, to be reported as unexpected."""
        match stored.split("."):
            case [part, kind] if part in _GLOBAL:
                return f"{_GLOBAL[part]}.{kind}"
            case ["blk", layer, part, kind] if part in self.layer:
                return f"model.layers.{layer}.{self.layer[part]}.{kind}"
        return stored

    def expert_pattern(self, stored: str) -> str | None:
        """The same for one that holds a weight of all experts, [experts, out, in]; ``{}`` is an expert's number."""
        match stored.split("."):
            case ["blk", layer, part, "weight"] if part in self.experts and layer.isdecimal():
                return f"model.layers.{layer}.{self.experts[part]}.weight"
        return None


GGUF_STORAGE = {
    "llama": GgufStorage(_PLAIN, {}, paired_rotary=True),
    "mixtral": GgufStorage(
        _PLAIN | {"ffn_gate_inp": "block_sparse_moe.gate"},
        {
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        paired_rotary=True,
    ),
    "qwen2": GgufStorage(_PLAIN, {}),
    "qwen3": GgufStorage(_PLAIN, {}),
    "qwen3_moe": GgufStorage(
        _PLAIN | {"ffn_gate_inp": "mlp.gate"},
        {
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
        },
    ),
    "gemma2": GgufStorage(_GEMMA, {}, norm_offset=1.0),
    "gemma3": GgufStorage(_GEMMA, {}, norm_offset=1.0),
}
