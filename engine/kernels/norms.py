# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Root-mean-square norms: plain, and with the addition of the residual before it."""

import torch
import triton
import triton.language as tl

from splitserve.engine.kernels.paged_inputs import FLOATS, described
from splitserve.engine.kernels.tiles import next_power_of_two

_LARGEST_SIZE = 32_768  # one program holds a row in registers


@triton.jit
def normalize(
    hidden,
    weight,
    output,
    outer_stride,
    inner_stride,
    inner_rows,
    eps,
    offset,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row): row ``outer * inner_rows + inner`` begins at ``outer * outer_stride + inner * inner_stride``."""
    row = tl.program_id(0)
    columns = tl.arange(0, TILE)
    own = columns < SIZE
    begin = (row // inner_rows).to(tl.int64) * outer_stride + (row % inner_rows).to(tl.int64) * inner_stride
    values = tl.load(hidden + begin + columns, mask=own, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    factors = tl.load(weight + columns, mask=own, other=0.0).to(tl.float32) + offset
    normed = (values * inverse * factors).to(output.dtype.element_ty)
    tl.store(output + row.to(tl.int64) * SIZE + columns, normed, mask=own)


@triton.jit
def add_normalize(
    residual,
    hidden,
    weight,
    output,
    eps,
    offset,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row): ``residual`` becomes the sum; the norm is that of the sum as stored."""
    begin = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, TILE)
    own = columns < SIZE
    values = tl.load(residual + begin + columns, mask=own, other=0.0).to(tl.float32)
    values += tl.load(hidden + begin + columns, mask=own, other=0.0).to(tl.float32)
    stored = values.to(residual.dtype.element_ty)
    tl.store(residual + begin + columns, stored, mask=own)
    values = stored.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    factors = tl.load(weight + columns, mask=own, other=0.0).to(tl.float32) + offset
    normed = (values * inverse * factors).to(output.dtype.element_ty)
    tl.store(output + begin + columns, normed, mask=own)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    """``hidden / sqrt(mean(hidden**2) + eps) * (weight + weight_offset)`` over the last dimension (arXiv 1910.07467).

    ``hidden`` [rows, size] or [rows, heads, size], the last dimension contiguous, the others any stride apart;
    ``weight`` [size]; one dtype of float32, float16, bfloat16. ``weight_offset`` is 1 for Gemma. float32 arithmetic,
    rounded once. Returns a contiguous tensor. Raises ValueError for sizes that do not fit.
    """
    size = _checked_size(hidden, weight)
    if hidden.dim() not in (2, 3) or (size > 1 and hidden.stride(-1) != 1):
        raise ValueError(f"hidden must be [rows, size] or [rows, heads, size], got {described(hidden)}")
    output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    inner_rows = hidden.shape[1] if hidden.dim() == 3 else 1
    rows = hidden.shape[0] * inner_rows
    if rows:
        normalize[(rows,)](
            hidden,
            weight,
            output,
            hidden.stride(0),
            hidden.stride(1) if hidden.dim() == 3 else 0,
            inner_rows,
            eps,
            weight_offset,
            SIZE=size,
            TILE=next_power_of_two(size),
            num_warps=row_warps(size),
        )
    return output


def add_rms_norm(
    residual: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> torch.Tensor:
    """Add ``hidden`` to ``residual`` in place and return ``rms_norm`` of the sum.

    ``residual`` and ``hidden`` [rows, size], contiguous. Raises ValueError for sizes that do not fit.
    """
    size = _checked_size(hidden, weight)
    if not (residual.is_contiguous() and hidden.is_contiguous()) or residual.shape != hidden.shape:
        raise ValueError(f"residual {described(residual)} and hidden {described(hidden)} must be alike and contiguous")
    if residual.dtype is not hidden.dtype:
        raise ValueError(f"residual is {residual.dtype}, hidden is {hidden.dtype}")
    output = torch.empty_like(hidden)
    rows = hidden.numel() // size
    if rows:
        add_normalize[(rows,)](
            residual,
            hidden,
            weight,
            output,
            eps,
            weight_offset,
            SIZE=size,
            TILE=next_power_of_two(size),
            num_warps=row_warps(size),
        )
    return output


def row_warps(size: int) -> int:
    """Warps for a row of ``size``: about 16 elements per thread."""
    return min(16, max(1, next_power_of_two(size) // (32 * 16)))


def _checked_size(hidden: torch.Tensor, weight: torch.Tensor) -> int:
    size = hidden.shape[-1]
    if hidden.dtype not in FLOATS or weight.dtype is not hidden.dtype or not weight.is_contiguous():
        raise ValueError(f"hidden {described(hidden)} and weight {described(weight)} must be contiguous and one dtype")
    if tuple(weight.shape) != (size,) or not 1 <= size <= _LARGEST_SIZE:
        raise ValueError(f"weight must be [{size}] and at most {_LARGEST_SIZE} long, got {described(weight)}")
    return size
