"""The Llama decoder: grouped-query attention with rotary embeddings, RMS norms, and a gated SiLU network."""

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

from splitserve.engine.attention import paged_attention
from splitserve.engine.batch import StepBatch
from splitserve.engine.model_config import ModelConfig
from splitserve.engine.models.layers import Rotary, inverse_frequencies, rotary_at


class LlamaLayer:
    """One decoder layer. Projections that read the same input are one matrix.

    Projections are stored as [in, out]: for a few rows, as in decoding, a CPU multiplies by that order nearly twice as
    fast.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self._heads = config.heads
        self._kv_heads = config.kv_heads
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        attended = config.heads * config.head_dim
        self._widths = [attended, config.kv_heads * config.head_dim, config.kv_heads * config.head_dim]
        self.attention_norm = empty(config.hidden_size)
        self.qkv = empty(config.hidden_size, sum(self._widths))
        self.output = empty(attended, config.hidden_size)
        self.mlp_norm = empty(config.hidden_size)
        self.gate_up = empty(config.hidden_size, 2 * config.intermediate_size)
        self.down = empty(config.intermediate_size, config.hidden_size)

    def destinations(self) -> dict[str, torch.Tensor]:
        """Where each weight belongs, by its Hugging Face name within the layer: views of shape [out, in]."""
        query, key, value = torch.split(self.qkv.t(), self._widths)
        gate, up = self.gate_up.t().chunk(2)
        return {
            "input_layernorm.weight": self.attention_norm,
            "self_attn.q_proj.weight": query,
            "self_attn.k_proj.weight": key,
            "self_attn.v_proj.weight": value,
            "self_attn.o_proj.weight": self.output.t(),
            "post_attention_layernorm.weight": self.mlp_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": self.down.t(),
        }

    def forward(self, hidden: torch.Tensor, rotary: Rotary, pages: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """``hidden`` [tokens, hidden_size] in, the same out. ``pages`` is this layer's slice of the pool; its pages are
        written.
        """
        tokens = hidden.shape[0]
        projected = (self._normed(hidden, self.attention_norm) @ self.qkv).view(tokens, -1, self._head_dim)
        rotated = rotary.rotate(projected[:, : self._heads + self._kv_heads])
        query, key = torch.split(rotated, [self._heads, self._kv_heads], dim=1)
        value = projected[:, self._heads + self._kv_heads :]
        attended = paged_attention(query, key, value, pages, batch)
        hidden = hidden + attended.view(tokens, -1) @ self.output
        gate, up = (self._normed(hidden, self.mlp_norm) @ self.gate_up).chunk(2, dim=-1)
        return hidden + (silu(gate) * up) @ self.down

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, weight.shape, weight, self._eps)


class Llama:
    """Implements ``models.registry.Model``. Parameters are uninitialised until loaded."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        table = (config.vocab_size, config.hidden_size)
        self._eps = config.rms_norm_eps
        self._dtype = dtype
        self._frequencies = inverse_frequencies(config).to(device)
        self.embeddings = torch.empty(table, dtype=dtype, device=device)
        self.layers = [LlamaLayer(config, dtype, device) for _ in range(config.layers)]
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.head = self.embeddings if config.tied_embeddings else torch.empty(table, dtype=dtype, device=device)

    def destinations(self) -> dict[str, torch.Tensor]:
        """Where each weight belongs, by its Hugging Face name."""
        named = {"model.embed_tokens.weight": self.embeddings, "model.norm.weight": self.norm}
        if self.head is not self.embeddings:
            named["lm_head.weight"] = self.head
        for number, layer in enumerate(self.layers):
            named |= {f"model.layers.{number}.{name}": weight for name, weight in layer.destinations().items()}
        return named

    def forward(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        """Compute the step, writing keys and values into ``pool``. Returns the logits of ``batch.sample_rows``,
        float32.
        """
        hidden = embedding(batch.token_ids, self.embeddings)
        rotary = rotary_at(batch.positions, self._frequencies, self._dtype)
        for number, layer in enumerate(self.layers):
            hidden = layer.forward(hidden, rotary, pool[:, number], batch)
        last = hidden.index_select(0, batch.sample_rows)
        return linear(rms_norm(last, self.norm.shape, self.norm, self._eps), self.head).float()
