"""The gated feed-forward network of a layer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from splitserve.engine.models.platform import Linear, Platform


@dataclass(frozen=True, slots=True)
class GatedNames:
    """How checkpoints name the three projections."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class GatedNetwork:
    """``down(activation(gate(x)) * up(x))``; gate and up read the same input and are one matrix."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        platform: Platform,
        activate: Callable[[torch.Tensor], torch.Tensor],
        names: GatedNames | None = None,
    ) -> None:
        """``activate`` is ``silu_mul`` or ``gelu_mul`` of the operations."""
        self._activate = activate
        self._names = names or GatedNames()
        self._gate_up = platform.linear(hidden_size, 2 * intermediate_size)
        self._down = platform.linear(intermediate_size, hidden_size)

    def linears(self) -> Iterator[Linear]:
        yield from (self._gate_up, self._down)

    def destinations(self) -> dict[str, torch.Tensor]:
        """By the Hugging Face name within the network."""
        gate, up = self._gate_up.weight.chunk(2)
        names = self._names
        named = {names.gate: gate, names.up: up, names.down: self._down.weight}
        return {f"{name}.weight": weight for name, weight in named.items()}

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` [tokens, hidden_size] in, the same shape out."""
        return self._down(self._activate(self._gate_up(rows)))
