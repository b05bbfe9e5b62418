"""Parts that decoder models share."""

from math import pi

import torch

from splitserve.engine.model_config import Llama3RopeScaling, ModelConfig, RopeDivisors
from splitserve.engine.operations import Rotary


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each rotary pair, scaling included: [head_dim / 2] float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    match config.rope_scaling:
        case None:
            return plain
        case RopeDivisors(divisors):
            return plain / torch.tensor(divisors, dtype=torch.float32)
        case Llama3RopeScaling() as scaling:
            return _llama3(plain, scaling)


def _llama3(plain: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Long wavelengths divided by the factor, short ones left alone, a linear blend between (the rule published with
    Llama 3.1).
    """
    turns = scaling.original_max_tokens * plain / (2 * pi)  # in the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = blend.clamp(0.0, 1.0)
    return plain * kept + plain / scaling.factor * (1.0 - kept)


def rotary_at(positions: torch.Tensor, frequencies: torch.Tensor) -> Rotary:
    """The rotary embedding at ``positions`` [tokens] int64."""
    angles = positions[:, None].float() * frequencies
    return Rotary(angles.cos(), angles.sin())
