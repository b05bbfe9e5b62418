"""Which operations and which projections a device gets."""

import logging
from typing import Literal

import torch

from splitserve.engine.models.linear import DenseLinear, Int8Linear, Linears, PackedLinear
from splitserve.engine.models.platform import Platform
from splitserve.engine.native.compiling import NotCompiled
from splitserve.engine.native.kernels import load_kernels
from splitserve.engine.native.native_operations import NativeOperations
from splitserve.engine.operations import Operations
from splitserve.engine.torch_operations import TorchOperations

logger = logging.getLogger(__name__)

Attention = Literal["auto", "torch", "native", "triton"]


def plain_platform(device: torch.device, dtype: torch.dtype) -> Platform:
    """Torch's own operations and weights as they come: works everywhere, the reference for everything faster."""
    return Platform(device, dtype, TorchOperations(device), Linears(DenseLinear, device, dtype))


def choose_platform(
    device: torch.device, dtype: torch.dtype, attention: Attention = "auto", *, int8: bool = False
) -> Platform:
    """What is fastest on ``device``; ``attention`` overrides who computes everything but projections.

    Raises ValueError for what this device cannot do.
    """
    return Platform(device, dtype, _operations(device, dtype, attention), _linears(device, dtype, int8=int8))


def _operations(device: torch.device, dtype: torch.dtype, attention: Attention) -> Operations:
    native = device.type == "cpu" and dtype is torch.float32
    if attention == "torch" or (attention == "auto" and device.type == "cpu" and not native):
        return TorchOperations(device)
    if device.type == "cuda" and attention != "native":
        # Imported here, because Triton does not exist on every system and needs seconds.
        from splitserve.engine.kernels.triton_operations import TritonOperations

        return TritonOperations(device)
    if not native or attention == "triton":
        raise ValueError(f"attention {attention!r} does not work on {device.type} with {dtype}")
    try:
        return NativeOperations(load_kernels())
    except NotCompiled as reason:
        if attention == "native":
            raise ValueError(f"attention 'native' is not possible: {reason}") from reason
        logger.warning("torch's operators are used, which decode more slowly than compiled kernels: %s", reason)
        return TorchOperations(device)


def _linears(device: torch.device, dtype: torch.dtype, *, int8: bool) -> Linears:
    on_cpu = device.type == "cpu" and dtype is torch.float32
    if int8:
        if not on_cpu:
            raise ValueError(f"dtype 'int8' needs a CPU, not {device.type}")
        try:
            load_kernels()
        except NotCompiled as reason:
            raise ValueError(f"dtype 'int8' is not possible: {reason}") from reason
        return Linears(Int8Linear, device, dtype)
    packed = on_cpu and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return Linears(PackedLinear if packed else DenseLinear, device, dtype)
