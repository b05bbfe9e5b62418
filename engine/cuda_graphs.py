# mypy: allow-untyped-calls
"""Steps that only decode, recorded once as CUDA graphs and replayed: the host launches one graph, not every kernel.

A graph has a fixed number of rows. A step takes the smallest that holds it; rows in excess are padding that no page
knows of: their context is empty, so that attention reads nothing, and they are written to page -1, which means nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from splitserve.engine.batch import StepBatch
from splitserve.engine.kernels.paged_inputs import DecodingSequences, PagedPlan
from splitserve.engine.models.registry import Model
from splitserve.engine.step import Chunk

_ROWS_APART = 8
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """The largest step that decodes by graph."""

    sequences: int
    max_model_tokens: int
    page_tokens: int

    @property
    def max_pages(self) -> int:
        """Of one sequence."""
        return -(-self.max_model_tokens // self.page_tokens)


def graph_rows(sequences: int) -> tuple[int, ...]:
    """Rows of each graph, so that steps of up to ``sequences`` >= 1 find one: 1, 2, 4, then multiples of 8."""
    if sequences < 1:
        raise ValueError(f"sequences must be at least 1, got {sequences}")
    last = -(-sequences // _ROWS_APART) * _ROWS_APART
    return tuple(rows for rows in (1, 2, 4) if rows < sequences) + (
        tuple(range(_ROWS_APART, last + 1, _ROWS_APART)) if sequences > 4 else (1 << (sequences - 1).bit_length(),)
    )


class DecodeInputs:
    """What a decode step reads, at addresses that do not change.

    A new step is laid out on the host and copied; the caller sees to it that the step before has been computed.
    """

    def __init__(self, limits: DecodeLimits, rows: int, device: torch.device) -> None:
        """``rows`` of the largest step, padding included. Begins as padding alone."""
        self._limits = limits
        pinned = device.type == "cuda"
        self._host_rows = torch.zeros((4, rows), dtype=torch.int64, pin_memory=pinned)
        self._host_tables = torch.zeros((rows, limits.max_pages), dtype=torch.int32, pin_memory=pinned)
        self._host_contexts = torch.zeros(rows, dtype=torch.int32, pin_memory=pinned)
        self._host_rows[2] = _NOWHERE
        self._rows = self._host_rows.to(device, copy=True)
        self._tables = self._host_tables.to(device, copy=True)
        self._contexts = self._host_contexts.to(device, copy=True)
        self._order = torch.arange(rows, device=device)
        self._attention_rows = self._order.int()

    def batch(self, rows: int) -> StepBatch:
        """The first ``rows`` as a step. All its tensors are views of this object's: they follow ``fill``, and live as
        long as a graph needs them.
        """
        token_ids, positions, write_pages, write_offsets = (values[:rows] for values in self._rows)
        decoding = DecodingSequences(self._tables[:rows], self._attention_rows[:rows], self._contexts[:rows])
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            write_pages=write_pages,
            write_offsets=write_offsets,
            fresh_pages=self._order[:0],
            sample_rows=self._order[:rows],
            chunk_rows=tuple(slice(row, row + 1) for row in range(rows)),
            attention=PagedPlan(decoding, None, self._limits.max_model_tokens),
        )

    def fill(self, chunks: Sequence[Chunk], rows: int) -> None:
        """Lay out ``chunks`` of one token each in the first rows, padding in the others up to ``rows``."""
        tables, contexts = self._host_tables.numpy(), self._host_contexts.numpy()
        laid_out = self._host_rows.numpy()
        laid_out[:, :rows] = np.array([[0], [0], [_NOWHERE], [0]])
        contexts[:rows] = 0
        page_tokens = self._limits.page_tokens
        for row, chunk in enumerate(chunks):
            index, offset = divmod(chunk.start, page_tokens)
            laid_out[:, row] = chunk.token_ids[0], chunk.start, chunk.page_table[index], offset
            contexts[row] = chunk.end
            tables[row, : index + 1] = chunk.page_table[: index + 1]
        for target, source in (
            (self._rows, self._host_rows),
            (self._tables[:rows], self._host_tables[:rows]),
            (self._contexts, self._host_contexts),
        ):
            target.copy_(source, non_blocking=True)


class DecodeGraphs:
    """A model's decode steps as CUDA graphs, one for each number of rows in ``graph_rows``.

    Used by one thread, with the model's device current. The model computes with the Triton operations, which know
    padding, and does not wait for the device within a step.
    """

    def __init__(self, model: Model, pool: torch.Tensor, limits: DecodeLimits) -> None:
        """Capture all graphs: seconds. ``pool`` stays where it is for the life of this object. Writes to no page.

        Raises what CUDA raises for a model that can't be captured.
        """
        self._limits = limits
        self._sizes = graph_rows(limits.sequences)
        self._inputs = DecodeInputs(limits, self._sizes[-1], pool.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._computed = torch.cuda.Event()
        stream = torch.cuda.Stream(pool.device)
        stream.wait_stream(torch.cuda.current_stream(pool.device))
        with torch.cuda.stream(stream):
            self._logits = torch.empty_like(_logits(model, pool, self._inputs.batch(self._sizes[-1])))
        memory = None
        for rows in reversed(self._sizes):  # the largest first: the others find its memory
            batch = self._inputs.batch(rows)
            with torch.cuda.stream(stream):
                _logits(model, pool, batch)  # what is compiled or allocated at first use can't be captured
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                self._logits[:rows].copy_(_logits(model, pool, batch))
            memory = memory or graph.pool()
            self._graphs[rows] = graph
        torch.cuda.current_stream(pool.device).wait_stream(stream)

    def fits(self, chunks: Sequence[Chunk]) -> bool:
        """Whether these chunks are a step that there is a graph for."""
        return fits(chunks, self._limits)

    def logits(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute a step that ``fits``: keys and values go into the chunks' pages.

        Returns [chunks, vocab_size] float32, a row after each chunk's token: valid until the next call.
        """
        rows = next(size for size in self._sizes if size >= len(chunks))
        self._computed.synchronize()  # what the step before reads is about to be overwritten
        self._inputs.fill(chunks, rows)
        self._graphs[rows].replay()
        self._computed.record()
        return self._logits[: len(chunks)]


def fits(chunks: Sequence[Chunk], limits: DecodeLimits) -> bool:
    """Whether all of ``chunks`` decode one token, within ``limits``, and ask for nothing but logits."""
    return 0 < len(chunks) <= limits.sequences and all(
        len(chunk.token_ids) == 1 and chunk.end <= limits.max_model_tokens and chunk.prompt_logprobs is None
        for chunk in chunks
    )


def _logits(model: Model, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(model.forward(batch, pool))
