"""The Llama decoder: grouped-query attention, RMS norms before each part, a gated SiLU network.

Mistral and Qwen2 are the same with what ``ModelConfig.variation`` says: windows, and biases of the projections.
"""

from collections.abc import Iterator

import torch

from splitserve.engine.batch import StepBatch
from splitserve.engine.model_config import ModelConfig
from splitserve.engine.models.decoder import Decoder, FeedForward
from splitserve.engine.models.gated_network import GatedNetwork
from splitserve.engine.models.norm import Norm
from splitserve.engine.models.platform import Linear, Platform
from splitserve.engine.models.self_attention import SelfAttention
from splitserve.engine.operations import Rotary


class PreNormLayer:
    """Implements ``decoder.Layer``: a norm before each part, the part's output added to its input."""

    def __init__(
        self,
        config: ModelConfig,
        platform: Platform,
        attention: SelfAttention,
        network: FeedForward,
        network_name: str = "mlp",
    ) -> None:
        self._attention_norm = Norm(config.hidden_size, config.rms_norm_eps, platform)
        self._attention = attention
        self._network_norm = Norm(config.hidden_size, config.rms_norm_eps, platform)
        self._network = network
        self._network_name = network_name

    def linears(self) -> Iterator[Linear]:
        yield from self._attention.linears()
        yield from self._network.linears()

    def destinations(self) -> dict[str, torch.Tensor]:
        named = {
            "input_layernorm.weight": self._attention_norm.weight,
            "post_attention_layernorm.weight": self._network_norm.weight,
        }
        named |= self._attention.destinations()
        return named | {f"{self._network_name}.{name}": w for name, w in self._network.destinations().items()}

    def forward(self, hidden: torch.Tensor, rotary: Rotary, pages: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        attended = self._attention(self._attention_norm(hidden), rotary, pages, batch)
        normed, hidden = self._network_norm.of_sum(hidden, attended)
        return hidden + self._network(normed)


def llama(config: ModelConfig, platform: Platform) -> Decoder:
    """Allocate a Llama, Mistral or Qwen2 model."""

    def layer(number: int) -> PreNormLayer:
        attention = SelfAttention(config, number, platform)
        activate = platform.operations.silu_mul
        network = GatedNetwork(config.hidden_size, config.intermediate_size, platform, activate)
        return PreNormLayer(config, platform, attention, network)

    layers = [layer(number) for number in range(config.layers)]
    return Decoder(config, platform, layers, Norm(config.hidden_size, config.rms_norm_eps, platform))
