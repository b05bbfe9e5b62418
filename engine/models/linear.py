"""Projections, by how their weights are kept."""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from splitserve.engine.models.platform import Linear
from splitserve.engine.native.kernels import load_kernels

_TINY = 1e-30  # a scale that divides zeros
_PANEL = 16  # outputs that the compiled kernel multiplies together
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
    rounded to 12 bits with a scale per row while multiplying.

    A row's result depends on that row alone, whatever the batch.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Raises NotCompiled where there are no compiled kernels."""
        self.weight = weight
        self.bias = bias
        self._kernels = load_kernels()
        self._outputs = weight.shape[0]

    def pack(self) -> None:
        outputs, inputs = self.weight.shape
        scales = self.weight.abs().amax(dim=1).clamp_min_(_TINY) / 127
        levels = (self.weight / scales[:, None]).round_().to(torch.int8)
        panels = -(-outputs // _PANEL)
        padded = torch.zeros(panels * _PANEL, inputs + inputs % 2, dtype=torch.int8)
        padded[:outputs, :inputs] = levels
        self._weights = padded.view(panels, _PANEL, -1, 2).transpose(1, 2).contiguous()  # [panels, in / 2, 16, 2]
        self._scales = torch.cat((scales, scales.new_zeros(panels * _PANEL - outputs)))
        del self.weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._kernels.int8_linear(rows, self._weights, self._scales, self.bias, self._outputs)


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
