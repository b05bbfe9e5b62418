"""What the kernels compute, said in plain torch: slow, and easy to believe. ``draw``'s twin is ``engine.sampler``."""

import torch
from torch.nn.functional import gelu, silu

from splitserve.engine.kernels.paged_inputs import DecodingSequences, PrefillChunks
from splitserve.engine.kernels.rotate_and_write import Places
from splitserve.engine.operations import AttentionSpec, Rotary


def paged_decode(
    query: torch.Tensor, pages: torch.Tensor, sequences: DecodingSequences, spec: AttentionSpec, output: torch.Tensor
) -> None:
    """As ``paged_decode.paged_decode``."""
    for table, row, context in zip(
        sequences.page_tables, sequences.rows.tolist(), sequences.context_tokens.tolist(), strict=True
    ):
        output[row] = 0
        if context:
            output[row : row + 1] = _attend(query[row : row + 1], pages, table, context, spec)


def paged_prefill(
    query: torch.Tensor, pages: torch.Tensor, chunks: PrefillChunks, spec: AttentionSpec, output: torch.Tensor
) -> None:
    """As ``paged_prefill.paged_prefill``."""
    counts = chunks.query_starts.diff().tolist()
    for table, row, tokens, context in zip(
        chunks.page_tables, chunks.first_rows.tolist(), counts, chunks.context_tokens.tolist(), strict=True
    ):
        output[row : row + tokens] = _attend(query[row : row + tokens], pages, table, context, spec)


def _attend(
    query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, context: int, spec: AttentionSpec
) -> torch.Tensor:
    """``query`` [tokens, heads, head_dim] at the last positions of ``context``; float32 throughout."""
    tokens, heads, head_dim = query.shape
    kv_heads, page_tokens = pages.shape[2:4]
    own = table[: -(-context // page_tokens)].long()
    gathered = pages[own].float().permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :context]
    keys, values = gathered.repeat_interleave(heads // kv_heads, dim=1).unbind(0)  # [heads, context, head_dim]
    scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * spec.scale
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    distance = torch.arange(context - tokens, context, device=query.device)[:, None] - torch.arange(
        context, device=query.device
    )
    seen = distance >= 0
    if spec.window is not None:
        seen &= distance < spec.window
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return (weights @ values).transpose(0, 1).to(query.dtype)


def rotate_and_write(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotary: Rotary, pages: torch.Tensor, places: Places
) -> torch.Tensor:
    """As ``rotate_and_write.rotate_and_write``."""
    written = places.pages >= 0
    page, offset = places.pages[written], places.offsets[written]
    pages[:, 0][page, :, offset] = _rotated(key, rotary)[written]
    pages[:, 1][page, :, offset] = value[written]
    return _rotated(query, rotary)


def _rotated(heads: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    cos, sin = rotary.cos[:, None], rotary.sin[:, None]
    low, high = heads.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(heads.dtype)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    """As ``norms.rms_norm``."""
    values = hidden.float()
    inverse = (values.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (values * inverse * (weight.float() + weight_offset)).to(hidden.dtype)


def add_rms_norm(
    residual: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> torch.Tensor:
    """As ``norms.add_rms_norm``."""
    residual += hidden
    return rms_norm(residual, weight, eps, weight_offset)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As ``gated.silu_mul``."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As ``gated.gelu_mul``."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
