# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Gated activations: ``activation(gate) * up``."""

import torch
import triton
import triton.language as tl

from splitserve.engine.kernels.paged_inputs import FLOATS, described

TILE = 1024


@triton.jit
def silu_gate(gate_up, output, size, TILE: tl.constexpr):
    """Program (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    own = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=own, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=own, other=0.0).to(tl.float32)
    tl.store(output + row * size + columns, (gate * tl.sigmoid(gate) * up).to(output.dtype.element_ty), mask=own)


@triton.jit
def gelu_gate(gate_up, output, size, TILE: tl.constexpr):
    """Program (row, tile of columns). ``(1 + tanh(z)) / 2`` is the logistic function of ``2 * z``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    own = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=own, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=own, other=0.0).to(tl.float32)
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # sqrt(2 / pi)
    activated = gate * tl.sigmoid(2.0 * inner)
    tl.store(output + row * size + columns, (activated * up).to(output.dtype.element_ty), mask=own)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up`` [tokens, 2 * size], gate first, contiguous: [tokens, size].

    float32, float16 or bfloat16; float32 arithmetic, rounded once. Raises ValueError for another shape.
    """
    return _gated(silu_gate, gate_up)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The same with the tanh approximation of GELU (arXiv 1606.08415, section 2)."""
    return _gated(gelu_gate, gate_up)


def _gated(kernel, gate_up: torch.Tensor) -> torch.Tensor:
    if gate_up.dtype not in FLOATS or gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(f"gate_up must be contiguous floats [tokens, 2 * size], got {described(gate_up)}")
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if tokens and size:
        kernel[(tokens, triton.cdiv(size, TILE))](gate_up, output, size, TILE=TILE, num_warps=4)
    return output
