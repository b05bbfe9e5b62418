"""Grouped-query attention with rotary embeddings: one layer's."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from splitserve.engine.batch import StepBatch
from splitserve.engine.model_config import ModelConfig
from splitserve.engine.models.norm import Norm
from splitserve.engine.models.platform import Linear, Platform
from splitserve.engine.operations import AttentionSpec, Rotary


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each query head and of each key head, before rotation."""

    query: Norm
    key: Norm


class SelfAttention:
    """Projections, optional norms of each query and key head, attention, output projection."""

    def __init__(
        self, config: ModelConfig, layer: int, platform: Platform, head_norms: HeadNorms | None = None
    ) -> None:
        variation = config.variation
        self._operations = platform.operations
        self._head_dim = config.head_dim
        self._heads = [config.heads, config.kv_heads, config.kv_heads]
        self._widths = [heads * config.head_dim for heads in self._heads]
        scale = config.head_dim**-0.5 if variation.attention_scale is None else variation.attention_scale
        self._spec = AttentionSpec(scale, config.window(layer), variation.attention_soft_cap)
        self._head_norms = head_norms
        self._qkv = platform.linear(config.hidden_size, sum(self._widths), bias=variation.projection_bias)
        self._output = platform.linear(self._widths[0], config.hidden_size, bias=variation.output_bias)

    def linears(self) -> Iterator[Linear]:
        yield from (self._qkv, self._output)

    def destinations(self) -> dict[str, torch.Tensor]:
        """By the Hugging Face name within the layer; weights are views of shape [out, in]."""
        parts = ("q_proj", "k_proj", "v_proj")
        named = dict(
            zip((f"{part}.weight" for part in parts), torch.split(self._qkv.weight, self._widths), strict=True)
        )
        if self._qkv.bias is not None:
            named |= dict(
                zip((f"{part}.bias" for part in parts), torch.split(self._qkv.bias, self._widths), strict=True)
            )
        named["o_proj.weight"] = self._output.weight
        if self._output.bias is not None:
            named["o_proj.bias"] = self._output.bias
        if self._head_norms is not None:
            named |= {"q_norm.weight": self._head_norms.query.weight, "k_norm.weight": self._head_norms.key.weight}
        return {f"self_attn.{name}": weight for name, weight in named.items()}

    def __call__(self, normed: torch.Tensor, rotary: Rotary, pages: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """``normed`` [tokens, hidden_size] in, the same shape out. ``pages`` is this layer's slice of the pool; its
        pages are written.
        """
        tokens = normed.shape[0]
        projected = self._qkv(normed).view(tokens, -1, self._head_dim)
        query, key, value = torch.split(projected, self._heads, dim=1)
        if self._head_norms is not None:
            query, key = self._head_norms.query(query), self._head_norms.key(key)
        attended = self._operations.attend(query, key, value, rotary, pages, batch, self._spec)
        return self._output(attended.view(tokens, -1))
