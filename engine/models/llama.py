"""The Llama decoder: grouped-query attention with rotary embeddings, RMS norms, and a gated SiLU network."""

from collections.abc import Iterator

import torch
from torch.nn.functional import embedding

from splitserve.engine.batch import StepBatch
from splitserve.engine.model_config import ModelConfig
from splitserve.engine.models.layers import inverse_frequencies, rotary_at
from splitserve.engine.models.platform import Linear, Platform
from splitserve.engine.operations import AttentionSpec, Rotary


class LlamaLayer:
    """One decoder layer. Projections that read the same input are one matrix."""

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        self._operations = platform.operations
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._spec = AttentionSpec(scale=config.head_dim**-0.5)
        self._heads = [config.heads, config.kv_heads, config.kv_heads]
        self._widths = [heads * config.head_dim for heads in self._heads]
        self.attention_norm = platform.empty(config.hidden_size)
        self.qkv = platform.linear(config.hidden_size, sum(self._widths))
        self.output = platform.linear(self._widths[0], config.hidden_size)
        self.mlp_norm = platform.empty(config.hidden_size)
        self.gate_up = platform.linear(config.hidden_size, 2 * config.intermediate_size)
        self.down = platform.linear(config.intermediate_size, config.hidden_size)

    def linears(self) -> Iterator[Linear]:
        yield from (self.qkv, self.output, self.gate_up, self.down)

    def destinations(self) -> dict[str, torch.Tensor]:
        """Where each weight belongs, by its Hugging Face name within the layer: views of shape [out, in]."""
        query, key, value = torch.split(self.qkv.weight, self._widths)
        gate, up = self.gate_up.weight.chunk(2)
        return {
            "input_layernorm.weight": self.attention_norm,
            "self_attn.q_proj.weight": query,
            "self_attn.k_proj.weight": key,
            "self_attn.v_proj.weight": value,
            "self_attn.o_proj.weight": self.output.weight,
            "post_attention_layernorm.weight": self.mlp_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": self.down.weight,
        }

    def forward(self, hidden: torch.Tensor, rotary: Rotary, pages: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """``hidden`` [tokens, hidden_size] in, the same out. ``pages`` is this layer's slice of the pool; its pages are
        written.
        """
        operations, tokens = self._operations, hidden.shape[0]
        projected = self.qkv(operations.rms_norm(hidden, self.attention_norm, self._eps))
        query, key, value = torch.split(projected.view(tokens, -1, self._head_dim), self._heads, dim=1)
        attended = operations.attend(query, key, value, rotary, pages, batch, self._spec)
        normed, hidden = operations.add_rms_norm(
            hidden, self.output(attended.view(tokens, -1)), self.mlp_norm, self._eps
        )
        return hidden + self.down(operations.silu_mul(self.gate_up(normed)))


class Llama:
    """Implements ``models.registry.Model``. Parameters are uninitialised until loaded."""

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        self._eps = config.rms_norm_eps
        self._operations = platform.operations
        self._frequencies = inverse_frequencies(config).to(platform.device)
        self._tied = config.tied_embeddings
        self.embeddings = platform.empty(config.vocab_size, config.hidden_size)
        self.layers = [LlamaLayer(config, platform) for _ in range(config.layers)]
        self.norm = platform.empty(config.hidden_size)
        tied = config.tied_embeddings
        self.head = platform.linear.over(self.embeddings) if tied else platform.linear(*reversed(self.embeddings.shape))

    def destinations(self) -> dict[str, torch.Tensor]:
        named = {"model.embed_tokens.weight": self.embeddings, "model.norm.weight": self.norm}
        if not self._tied:
            named["lm_head.weight"] = self.head.weight
        for number, layer in enumerate(self.layers):
            named |= {f"model.layers.{number}.{name}": weight for name, weight in layer.destinations().items()}
        return named

    def pack(self) -> None:
        for layer in self.layers:
            for linear in layer.linears():
                linear.pack()
        self.head.pack()

    def forward(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        hidden = embedding(batch.token_ids, self.embeddings)
        rotary = rotary_at(batch.positions, self._frequencies)
        for number, layer in enumerate(self.layers):
            hidden = layer.forward(hidden, rotary, pool[:, number], batch)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self._operations.rms_norm(hidden, self.norm, self._eps)).float()
