"""Which operations and which projections a device gets."""

import torch

from splitserve.engine.models.linear import DenseLinears
from splitserve.engine.models.platform import Platform
from splitserve.engine.torch_operations import TorchOperations


def plain_platform(device: torch.device, dtype: torch.dtype) -> Platform:
    """Torch's own operations and weights as they come: works everywhere, the reference for everything faster."""
    return Platform(device, dtype, TorchOperations(device), DenseLinears(device, dtype))
