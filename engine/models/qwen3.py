"""Qwen3 and Qwen3-MoE: Llama with a norm of each query and key head, and with experts in some or all layers."""

from splitserve.engine.model_config import ModelConfig
from splitserve.engine.models.decoder import Decoder, FeedForward
from splitserve.engine.models.expert_network import ExpertNetwork
from splitserve.engine.models.gated_network import GatedNetwork
from splitserve.engine.models.llama import PreNormLayer
from splitserve.engine.models.norm import Norm
from splitserve.engine.models.platform import Platform
from splitserve.engine.models.self_attention import HeadNorms, SelfAttention


def qwen3(config: ModelConfig, platform: Platform) -> Decoder:
    """Allocate a Qwen3 or Qwen3-MoE model."""

    def norm(size: int) -> Norm:
        return Norm(size, config.rms_norm_eps, platform)

    def layer(number: int) -> PreNormLayer:
        head_norms = HeadNorms(norm(config.head_dim), norm(config.head_dim))
        attention = SelfAttention(config, number, platform, head_norms)
        return PreNormLayer(config, platform, attention, _network(config, number, platform))

    return Decoder(config, platform, [layer(number) for number in range(config.layers)], norm(config.hidden_size))


def _network(config: ModelConfig, number: int, platform: Platform) -> FeedForward:
    experts = config.variation.experts
    if experts is not None and number not in experts.dense_layers:
        return ExpertNetwork(config.hidden_size, experts, platform)
    return GatedNetwork(config.hidden_size, config.intermediate_size, platform, platform.operations.silu_mul)
