"""Projections, by how their weights are kept."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from splitserve.engine.models.platform import Linear

_TINY = 1e-30  # a scale that divides zeros
_ROW_LEVELS = 63  # rows become integers in [-63, 63], stored from 1 to 127
_ROW_ZERO = 64
_EXPECTED_ROWS = 16  # what oneDNN lays weights out for; from 2 on any number gives a layout good for all batch sizes


class DenseLinear:
    """Implements ``platform.Linear``: weights in the model's dtype, as they come."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def pack(self) -> None:
        pass

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self.weight, self.bias)


class PackedLinear:
    """Implements ``platform.Linear`` on a CPU: weights in the blocked layout of oneDNN, packed once.

    Multiplying 8 to 32 rows, as decoding does, is two to three times as fast as from a plain matrix.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self._packed: torch.Tensor | None = None

    def pack(self) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _EXPECTED_ROWS)
        del self.weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return product


class Int8Linear:
    """Implements ``platform.Linear`` on a CPU for float32 rows: weights as 8-bit integers with a scale per output, rows
    rounded to 7 bits with a scale per row while multiplying.

    A row's result depends on that row alone, whatever the batch. Seven bits, because without VNNI instructions products
    are added in pairs in 16 bits, and eight would overflow there; so every machine computes the same.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self._packed: Any = None

    def pack(self) -> None:
        scales = self.weight.abs().amax(dim=1).clamp_min_(_TINY) / 127
        points = torch.zeros(len(scales), dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # quantised tensors are deprecated; nothing else packs weights
            weight = torch.quantize_per_channel(self.weight, scales.double(), points, 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(weight, None)
        del self.weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        scales = torch.linalg.vector_norm(rows, torch.inf, dim=-1, keepdim=True).clamp_min_(_TINY).div_(_ROW_LEVELS)
        product: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows / scales, 1.0, _ROW_ZERO, self._packed
        )
        product.mul_(scales)
        return product if self.bias is None else product.add_(self.bias)


@dataclass(frozen=True, slots=True)
class Linears:
    """Implements ``platform.MakeLinear`` for projections of one ``kind``."""

    kind: type[DenseLinear] | type[PackedLinear] | type[Int8Linear]
    device: torch.device
    dtype: torch.dtype

    def __call__(self, in_features: int, out_features: int, *, bias: bool = False) -> Linear:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=self.dtype, device=self.device)

        return self.kind(empty(out_features, in_features), empty(out_features) if bias else None)

    def over(self, weight: torch.Tensor) -> Linear:
        return self.kind(weight, None)
