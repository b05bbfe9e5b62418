"""Rotary position embeddings: frequencies and their scalings."""

from math import ceil, floor, log, pi

import torch

from splitserve.engine.model_config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelConfig,
    RopeDivisors,
    RopeScaling,
    YarnRopeScaling,
)
from splitserve.engine.operations import Rotary


class RotaryEmbedding:
    """The rotary embedding of some layers: one base, one scaling."""

    def __init__(self, theta: float, scaling: RopeScaling | None, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(theta, scaling, head_dim).to(device)
        self._amplitude = scaling.attention_factor if isinstance(scaling, YarnRopeScaling) else 1.0

    def at(self, positions: torch.Tensor) -> Rotary:
        """``positions`` [tokens] int64."""
        angles = positions[:, None].float() * self._frequencies
        return Rotary(angles.cos() * self._amplitude, angles.sin() * self._amplitude)


class LayerRotaries:
    """Which rotary embedding each layer of a model has."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        local = config.variation.windowed_rope_theta
        self._kinds = [RotaryEmbedding(config.rope_theta, config.rope_scaling, config.head_dim, device)]
        if local is not None:
            self._kinds.append(RotaryEmbedding(local, None, config.head_dim, device))
        self._kind_of = [int(local is not None and config.window(layer) is not None) for layer in range(config.layers)]

    def at(self, positions: torch.Tensor) -> list[Rotary]:
        """One per layer; layers of a kind share theirs."""
        kinds = [kind.at(positions) for kind in self._kinds]
        return [kinds[kind] for kind in self._kind_of]


def inverse_frequencies(theta: float, scaling: RopeScaling | None, head_dim: int) -> torch.Tensor:
    """Radians per position of each rotary pair, scaling included: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (theta**exponents)
    match scaling:
        case None:
            return plain
        case RopeDivisors(divisors):
            return plain / torch.tensor(divisors, dtype=torch.float32)
        case LinearRopeScaling(factor):
            return plain / factor
        case Llama3RopeScaling():
            return _llama3(plain, scaling)
        case YarnRopeScaling():
            return _yarn(plain, scaling, theta)


def _llama3(plain: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Long wavelengths divided by the factor, short ones left alone, a linear blend between (the rule published with
    Llama 3.1).
    """
    turns = scaling.original_max_tokens * plain / (2 * pi)  # in the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = blend.clamp(0.0, 1.0)
    return plain * kept + plain / scaling.factor * (1.0 - kept)


def _yarn(plain: torch.Tensor, scaling: YarnRopeScaling, theta: float) -> torch.Tensor:
    """As in Llama 3, but linear in the number of the pair rather than in its turns (arXiv 2309.00071, section 3.2)."""
    pairs = plain.shape[0]

    def pair_that_turns(times: float) -> float:
        return pairs * log(scaling.original_max_tokens / (times * 2 * pi)) / log(theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.whole_borders:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    ramp = (torch.arange(pairs, dtype=torch.float32) - first) / max(last - first, 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    return plain * (1.0 - stretched) + plain / scaling.factor * stretched
