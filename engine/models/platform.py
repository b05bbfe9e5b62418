"""Where and with what a model computes: what every architecture is built from."""

from dataclasses import dataclass
from typing import Protocol

import torch

from splitserve.engine.operations import Operations


class Linear(Protocol):
    """A projection ``y = x @ weight.T + bias``. Parameters are uninitialised until loaded; ``pack`` comes before the
    first call.
    """

    weight: torch.Tensor  # [out, in], possibly a strided view: where to load; gone after ``pack``
    bias: torch.Tensor | None  # [out]

    def pack(self) -> None:
        """All parameters are loaded: bring them into the form that is fastest here."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` [tokens, in] -> [tokens, out], model dtype."""


class MakeLinear(Protocol):
    """Makes projections of one kind."""

    def __call__(self, in_features: int, out_features: int, *, bias: bool = False) -> Linear: ...

    def over(self, weight: torch.Tensor) -> Linear:
        """One whose ``weight`` [out, in] is somebody else's and stays theirs: an output head tied to the embeddings."""


@dataclass(frozen=True, slots=True)
class Platform:
    """A device, the model's dtype, and who computes what on it."""

    device: torch.device
    dtype: torch.dtype
    operations: Operations
    linear: MakeLinear

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised parameter."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
