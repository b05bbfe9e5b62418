"""Root-mean-square norms and their weights."""

import torch

from splitserve.engine.models.platform import Platform


class Norm:
    """A root-mean-square norm over the last dimension. ``offset`` is added to the weight: Gemma's are stored less 1."""

    def __init__(self, size: int, eps: float, platform: Platform, offset: float = 0.0) -> None:
        self._operations = platform.operations
        self._eps = eps
        self._offset = offset
        self.weight = platform.empty(size)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [..., size]."""
        return self._operations.rms_norm(hidden, self.weight, self._eps, self._offset)

    def of_sum(self, residual: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum). May overwrite ``residual``."""
        return self._operations.add_rms_norm(residual, added, self.weight, self._eps, self._offset)
