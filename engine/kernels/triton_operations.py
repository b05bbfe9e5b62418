# mypy: allow-untyped-calls
"""The operations of ``engine.operations`` as Triton kernels, for NVIDIA GPUs."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve.engine.batch import StepBatch
from splitserve.engine.kernels import gated, norms
from splitserve.engine.kernels.draw import draw_tokens
from splitserve.engine.kernels.paged_decode import choose_splits, paged_decode
from splitserve.engine.kernels.paged_inputs import DecodingSequences, PagedPlan, PrefillChunks
from splitserve.engine.kernels.paged_prefill import paged_prefill
from splitserve.engine.kernels.rotate_and_write import Places, rotate_and_write
from splitserve.engine.operations import AttentionSpec, Rotary
from splitserve.engine.sampler import Draw
from splitserve.engine.step import Chunk


class TritonOperations:
    """Implements ``Operations``. Places of a page that nobody wrote are never read, so pages need no clearing.

    Kernels are launched on the calling thread's current CUDA device, which must be ``device``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1

    def plan(self, chunks: Sequence[Chunk], page_tokens: int) -> PagedPlan:
        first_rows = np.concatenate(([0], np.cumsum([len(chunk.token_ids) for chunk in chunks])))[:-1]
        decoding = [place for place, chunk in enumerate(chunks) if len(chunk.token_ids) == 1]
        prefill = [place for place, chunk in enumerate(chunks) if len(chunk.token_ids) != 1]
        decoding_chunks, prefill_chunks = [chunks[place] for place in decoding], [chunks[place] for place in prefill]
        return PagedPlan(
            self._decoding(decoding_chunks, first_rows[decoding], page_tokens) if decoding else None,
            self._prefill(prefill_chunks, first_rows[prefill], page_tokens) if prefill else None,
            max((chunk.end for chunk in decoding_chunks), default=0),
        )

    def prepare(self, pool: torch.Tensor, batch: StepBatch) -> None:
        """Nothing: what lies behind a sequence's end is never read."""

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
        return draw_tokens(logits, draws)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        return norms.rms_norm(hidden, weight, eps, offset)

    def add_rms_norm(
        self, residual: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norms.add_rms_norm(residual, hidden, weight, eps, offset), residual

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gated.silu_mul(gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gated.gelu_mul(gate_up)

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
        assert isinstance(plan, PagedPlan)
        rotated = rotate_and_write(query, key, value, rotary, pages, Places(batch.write_pages, batch.write_offsets))
        output = torch.empty_like(rotated)
        if plan.prefill is not None:
            paged_prefill(rotated, pages, plan.prefill, spec, output)
        if plan.decoding is not None:
            # Of a windowed layer only the window is divided.
            longest = min(plan.longest_context_tokens, spec.window or plan.longest_context_tokens)
            splits = choose_splits(len(plan.decoding.rows), pages.shape[2], longest, self._processors)
            paged_decode(rotated, pages, plan.decoding, spec, splits, output)
        return output

    def _decoding(self, chunks: Sequence[Chunk], first_rows: NDArray[np.int64], page_tokens: int) -> DecodingSequences:
        tables = page_tables(chunks, page_tokens)
        tables_sent, rows, contexts = self._sent(tables, first_rows, [chunk.end for chunk in chunks])
        return DecodingSequences(tables_sent, rows, contexts)

    def _prefill(self, chunks: Sequence[Chunk], first_rows: NDArray[np.int64], page_tokens: int) -> PrefillChunks:
        starts = np.concatenate(([0], np.cumsum([len(chunk.token_ids) for chunk in chunks])))
        tables = page_tables(chunks, page_tokens)
        tables_sent, rows, starts_sent, contexts = self._sent(
            tables, first_rows, starts, [chunk.end for chunk in chunks]
        )
        return PrefillChunks(tables_sent, rows, starts_sent, contexts, int(starts[-1]))

    def _sent(self, *parts: NDArray[np.int32] | NDArray[np.int64] | list[int]) -> list[torch.Tensor]:
        """As int32 on the device, by one transfer."""
        arrays = [np.asarray(part, dtype=np.int32) for part in parts]
        together = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(self._device)
        pieces = together.split([array.size for array in arrays])
        return [piece.view(array.shape) for piece, array in zip(pieces, arrays, strict=True)]


def page_tables(chunks: Sequence[Chunk], page_tokens: int) -> NDArray[np.int32]:
    """[chunks, pages of the longest context]; zero behind a context's pages."""
    counts = [-(-chunk.end // page_tokens) for chunk in chunks]
    tables = np.zeros((len(chunks), max(counts)), dtype=np.int32)
    for table, chunk, count in zip(tables, chunks, counts, strict=True):
        table[:count] = chunk.page_table[:count]
    return tables
