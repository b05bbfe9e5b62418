"""A model of random weights."""

from collections.abc import Iterator

import torch

from splitserve.engine.model_config import ModelConfig
from splitserve.engine.models.registry import build_model
from splitserve.engine.platforms import plain_platform
from splitserve.engine.weights.model_files import TensorInfo


class RandomModel:
    """Implements ``ModelFiles`` without files. Equal config and seed give equal weights."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        shapes = build_model(config, plain_platform(torch.device("meta"), torch.float32)).destinations()
        self.config = config
        self.native_dtype = None
        self.fingerprint = f"random {seed} {config}"
        self.index = {name: TensorInfo(tuple(weight.shape), 4 * weight.numel()) for name, weight in shapes.items()}
        self._seed = seed

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Norms are near one; the rest keeps activations near the size they come in with."""
        generator = torch.Generator().manual_seed(self._seed)
        for name, info in self.index.items():
            values = torch.randn(info.shape, generator=generator)
            yield name, 1.0 + 0.1 * values if len(info.shape) == 1 else values * info.shape[-1] ** -0.5
