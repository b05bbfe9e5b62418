"""Mixtral: Mistral with experts in place of the gated network."""

from splitserve.engine.model_config import ModelConfig
from splitserve.engine.models.decoder import Decoder
from splitserve.engine.models.expert_network import ExpertNetwork
from splitserve.engine.models.gated_network import GatedNames
from splitserve.engine.models.llama import PreNormLayer
from splitserve.engine.models.norm import Norm
from splitserve.engine.models.platform import Platform
from splitserve.engine.models.self_attention import SelfAttention

_NAMES = GatedNames(gate="w1", up="w3", down="w2")


def mixtral(config: ModelConfig, platform: Platform) -> Decoder:
    """Allocate a Mixtral model."""
    experts = config.variation.experts
    assert experts is not None

    def layer(number: int) -> PreNormLayer:
        network = ExpertNetwork(config.hidden_size, experts, platform, _NAMES)
        return PreNormLayer(config, platform, SelfAttention(config, number, platform), network, "block_sparse_moe")

    layers = [layer(number) for number in range(config.layers)]
    return Decoder(config, platform, layers, Norm(config.hidden_size, config.rms_norm_eps, platform))
