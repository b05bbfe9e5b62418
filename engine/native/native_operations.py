"""The operations of ``engine.operations`` by compiled kernels: float32 on a CPU."""

from collections.abc import Sequence

import torch

from splitserve.engine.attention import attend_prefill
from splitserve.engine.attention_plan import AttentionPlan, plan_attention
from splitserve.engine.batch import StepBatch
from splitserve.engine.native.kernels import Kernels
from splitserve.engine.operations import AttentionSpec, Rotary
from splitserve.engine.sampler import Draw, sample
from splitserve.engine.step import Chunk

_CPU = torch.device("cpu")
_HEAD_DIM_STEP = 16  # of the compiled prefill attention; other sizes go through torch


class NativeOperations:
    """Implements ``Operations``. Everything is compiled, for the instructions of this machine."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def plan(self, chunks: Sequence[Chunk], page_tokens: int) -> AttentionPlan:
        return plan_attention(chunks, page_tokens, _CPU)

    def prepare(self, pool: torch.Tensor, batch: StepBatch) -> None:
        """Nothing: what lies behind a sequence's end is never read."""

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
        return sample(logits, draws)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        return self._kernels.rms_norm(hidden, None, weight, eps, offset)

    def add_rms_norm(
        self, residual: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kernels.rms_norm(hidden, residual, weight, eps, offset), residual

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._kernels.silu_mul(gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._kernels.gelu_mul(gate_up)

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
        query, key = self._kernels.rotate_and_write(
            query, key, value, rotary, pages, batch.write_pages, batch.write_offsets
        )
        output = torch.empty_like(query)
        for prefill in plan.prefills:
            if query.shape[2] % _HEAD_DIM_STEP == 0:
                self._kernels.prefill_attention(query, output, pages, prefill, spec)
            else:
                rows = prefill.rows
                output[rows] = attend_prefill(query[rows], key[rows], value[rows], pages, prefill, spec)
        for decode in plan.decodes:
            self._kernels.decode_attention(query, output, pages, decode, spec)
        return output
