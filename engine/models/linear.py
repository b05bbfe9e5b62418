"""Projections, by how their weights are kept."""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from splitserve.engine.models.platform import Linear


class DenseLinear:
    """Implements ``platform.Linear``: weights in the model's dtype, as they come."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def pack(self) -> None:
        pass

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class DenseLinears:
    """Implements ``platform.MakeLinear``."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, in_features: int, out_features: int, *, bias: bool = False) -> Linear:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=self.dtype, device=self.device)

        return DenseLinear(empty(out_features, in_features), empty(out_features) if bias else None)

    def over(self, weight: torch.Tensor) -> Linear:
        return DenseLinear(weight, None)
