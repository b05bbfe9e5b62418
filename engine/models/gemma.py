"""Gemma 2 and Gemma 3: norms before and after each part, weights of norms stored less 1, scaled embeddings, a gated
network with GELU. Gemma 3 has a norm of each query and key head as well. Windows, soft caps and the scale of the scores
are in ``ModelConfig.variation``.
"""

from collections.abc import Iterator

import torch

from splitserve.engine.batch import StepBatch
from splitserve.engine.model_config import ModelConfig
from splitserve.engine.models.decoder import Decoder
from splitserve.engine.models.gated_network import GatedNetwork
from splitserve.engine.models.norm import Norm
from splitserve.engine.models.platform import Linear, Platform
from splitserve.engine.models.self_attention import HeadNorms, SelfAttention
from splitserve.engine.operations import Rotary


class GemmaLayer:
    """Implements ``decoder.Layer``: a part's output is normed before it is added to the part's input."""

    def __init__(self, config: ModelConfig, platform: Platform, attention: SelfAttention) -> None:
        size = config.hidden_size
        self._attention_norm = _norm(config, size, platform)
        self._attention = attention
        self._attended_norm = _norm(config, size, platform)
        self._network_norm = _norm(config, size, platform)
        self._network = GatedNetwork(size, config.intermediate_size, platform, platform.operations.gelu_mul)
        self._output_norm = _norm(config, size, platform)

    def linears(self) -> Iterator[Linear]:
        yield from self._attention.linears()
        yield from self._network.linears()

    def destinations(self) -> dict[str, torch.Tensor]:
        named = {
            "input_layernorm.weight": self._attention_norm.weight,
            "post_attention_layernorm.weight": self._attended_norm.weight,
            "pre_feedforward_layernorm.weight": self._network_norm.weight,
            "post_feedforward_layernorm.weight": self._output_norm.weight,
        }
        named |= self._attention.destinations()
        return named | {f"mlp.{name}": weight for name, weight in self._network.destinations().items()}

    def forward(self, hidden: torch.Tensor, rotary: Rotary, pages: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        attended = self._attention(self._attention_norm(hidden), rotary, pages, batch)
        normed, hidden = self._network_norm.of_sum(hidden, self._attended_norm(attended))
        return hidden + self._output_norm(self._network(normed))


def gemma2(config: ModelConfig, platform: Platform) -> Decoder:
    """Allocate a Gemma 2 model."""
    return _decoder(config, platform, [SelfAttention(config, number, platform) for number in range(config.layers)])


def gemma3(config: ModelConfig, platform: Platform) -> Decoder:
    """Allocate a Gemma 3 model, without the part that sees."""

    def attention(number: int) -> SelfAttention:
        head_norms = HeadNorms(_norm(config, config.head_dim, platform), _norm(config, config.head_dim, platform))
        return SelfAttention(config, number, platform, head_norms)

    return _decoder(config, platform, [attention(number) for number in range(config.layers)])


def _decoder(config: ModelConfig, platform: Platform, attentions: list[SelfAttention]) -> Decoder:
    # The scale is rounded to the model's dtype, as it was in training: in bfloat16 sqrt(3072) is 55.5.
    scale = float(torch.tensor(config.hidden_size**0.5, dtype=platform.dtype))
    layers = [GemmaLayer(config, platform, attention) for attention in attentions]
    return Decoder(config, platform, layers, _norm(config, config.hidden_size, platform), scale)


def _norm(config: ModelConfig, size: int, platform: Platform) -> Norm:
    return Norm(size, config.rms_norm_eps, platform, offset=1.0)
