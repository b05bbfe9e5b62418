"""The operations of ``engine.operations`` in plain torch: for CPUs, and the reference for the Triton kernels."""

from collections.abc import Sequence

import torch
from torch.nn.functional import gelu, rms_norm, silu

from splitserve.engine.attention import attend_decode, attend_prefill, clear_fresh_pages
from splitserve.engine.attention_plan import AttentionPlan, plan_attention
from splitserve.engine.batch import StepBatch
from splitserve.engine.operations import AttentionSpec, Rotary
from splitserve.engine.sampler import Draw, sample
from splitserve.engine.step import Chunk


class TorchOperations:
    """Implements ``Operations`` on any device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan(self, chunks: Sequence[Chunk], page_tokens: int) -> AttentionPlan:
        return plan_attention(chunks, page_tokens, self._device)

    def prepare(self, pool: torch.Tensor, batch: StepBatch) -> None:
        clear_fresh_pages(pool, batch)

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
        return sample(logits, draws)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        if not offset:
            return rms_norm(hidden, weight.shape, weight, eps)
        normed = rms_norm(hidden.float(), weight.shape, offset + weight.float(), eps)
        return normed.to(hidden.dtype)

    def add_rms_norm(
        self, residual: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + hidden
        return self.rms_norm(total, weight, eps, offset), total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gelu(gate, approximate="tanh") * up

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary,
        pages: torch.Tensor,
        batch: StepBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        plan = batch.attention
        assert isinstance(plan, AttentionPlan)
        query, key = _rotate(query, rotary), _rotate(key, rotary)
        pages[:, 0][batch.write_pages, :, batch.write_offsets] = key
        pages[:, 1][batch.write_pages, :, batch.write_offsets] = value
        output = torch.empty_like(query)
        for prefill in plan.prefills:
            rows = prefill.rows
            output[rows] = attend_prefill(query[rows], key[rows], value[rows], pages, prefill, spec)
        for decode in plan.decodes:
            output[decode.rows] = attend_decode(query[decode.rows], pages, decode, spec)
        return output


def _rotate(heads: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate [tokens, heads, head_dim]; contiguous."""
    cos, sin = rotary.cos[:, None].to(heads.dtype), rotary.sin[:, None].to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
