"""Computes steps with a real model: implements ``engine.step.Runner``.

This file owns the pool and says in which order a step happens. How a step is laid out is ``batch``'s, the arithmetic is
``models``' and ``attention``'s, what comes after the logits is ``next_tokens``'.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from splitserve.engine.batch import build_batch
from splitserve.engine.logprobs import prompt_logprobs
from splitserve.engine.model_config import ModelConfig
from splitserve.engine.model_dtype import DTYPES, choose_dtype
from splitserve.engine.next_tokens import NextTokens
from splitserve.engine.platforms import Attention, choose_platform
from splitserve.engine.step import Chunk, ChunkOutput
from splitserve.engine.weights.loading import Progress, load_model
from splitserve.engine.weights.model_files import ModelFiles
from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.transport import PoolMemory

if TYPE_CHECKING:
    from splitserve.engine.cuda_graphs import DecodeGraphs

_DEFAULT_CPU_BYTES = 1 << 30
_DEFAULT_CUDA_SHARE = 0.8  # of what is free after the weights; the rest is for activations


class ModelRunner:
    """One model on one device, and its pool of pages ``[pages, layers, 2, kv_heads, page_tokens, head_dim]``."""

    def __init__(
        self,
        model_files: ModelFiles,
        *,
        page_tokens: int,
        num_pages: int | None = None,
        kv_memory_bytes: int | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        attention: Attention = "auto",
        max_model_tokens: int | None = None,
        graph_sequences: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """Load the weights and allocate the pool.

        The pool has ``num_pages`` pages, or as many as fit ``kv_memory_bytes``, or by default 1 GiB on a CPU and most
        of the free memory on a GPU. ``dtype`` is as in ``model_dtype``, or "int8": float32 with projections in 8 bits.
        ``max_model_tokens`` may lower the model's own limit. On a GPU, steps that decode up to ``graph_sequences``
        sequences are recorded as CUDA graphs, which takes seconds; a mixture of experts can't be. Raises ValueError for
        settings that cannot be, ModelLoadError for the files.
        """
        config = model_files.config
        self._device = torch.device(device)
        int8 = dtype == "int8"
        name = choose_dtype("float32" if int8 else dtype, self._device, model_files.native_dtype)
        self._max_model_tokens = _limit(config, max_model_tokens)
        self._eos_token_ids = config.eos_token_ids
        self._layout = PageLayout(
            model=f"{model_files.fingerprint} {config.cache_key}{' int8' if int8 else ''}",
            layers=config.layers,
            kv_heads=config.kv_heads,
            page_tokens=page_tokens,
            head_dim=config.head_dim,
            dtype=name,
        )
        if page_tokens < 1:
            raise ValueError(f"page_tokens must be at least 1, got {page_tokens}")
        self._vocab_size = config.vocab_size
        self._platform = choose_platform(self._device, DTYPES[name], attention, int8=int8)
        self._next_tokens = NextTokens(config.eos_token_ids, self._platform.operations.draw)
        self._model = load_model(model_files, self._platform, progress)
        pages = _pool_pages(self._layout, num_pages, kv_memory_bytes, self._device)
        self._pool = torch.zeros((pages, *self._layout.page_shape), dtype=DTYPES[name], device=self._device)
        self._graphs: DecodeGraphs | None = None
        if graph_sequences and self._device.type == "cuda" and attention in ("auto", "triton"):
            self._graphs = self._recorded(config, graph_sequences)

    @property
    def layout(self) -> PageLayout:
        return self._layout

    @property
    def num_pages(self) -> int:
        return int(self._pool.shape[0])

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def max_model_tokens(self) -> int:
        return self._max_model_tokens

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def memory(self) -> PoolMemory:
        """The pool's memory. Stays at this address for the runner's life."""
        index = (self._device.index or 0) if self._device.type == "cuda" else None
        return PoolMemory(self._pool.data_ptr(), self._layout.page_bytes, self.num_pages, self._pool, index)

    def run(self, chunks: Sequence[Chunk]) -> list[ChunkOutput]:
        """Compute every chunk and draw one token after each that samples.

        Raises ValueError for a chunk that is empty, out of range, or longer than its page table.
        """
        if not chunks:
            return []
        for chunk in chunks:
            self._check(chunk)
        with torch.inference_mode():
            sampling = [chunk for chunk in chunks if chunk.sample is not None]
            if self._graphs is not None and self._graphs.fits(chunks) and len(sampling) == len(chunks):
                return self._next_tokens.draw(self._graphs.logits(chunks), chunks)
            batch = build_batch(chunks, self._layout.page_tokens, self._device, self._platform.operations)
            self._platform.operations.prepare(self._pool, batch)
            hidden = self._model.forward(batch, self._pool)
            drawn: Iterator[ChunkOutput] = iter(())
            if sampling:
                logits = self._model.logits(hidden.index_select(0, batch.sample_rows))
                drawn = iter(self._next_tokens.draw(logits, sampling))
            elif self._device.type == "cuda":
                # Drawing waits for the device. Without it the pages must not count as filled before they are.
                torch.cuda.current_stream(self._device).synchronize()
            outputs = [ChunkOutput() if chunk.sample is None else next(drawn) for chunk in chunks]
            for place, (chunk, rows) in enumerate(zip(chunks, batch.chunk_rows, strict=True)):
                if chunk.prompt_logprobs is not None:
                    found = prompt_logprobs(chunk, hidden[rows], self._model.logits)
                    outputs[place] = ChunkOutput(outputs[place].token, outputs[place].logprobs, found)
        return outputs

    def _recorded(self, config: ModelConfig, sequences: int) -> "DecodeGraphs | None":
        # Imported here, because it needs Triton, which does not exist on every system.
        from splitserve.engine.cuda_graphs import DecodeGraphs, DecodeLimits

        if config.variation.experts is not None:
            return None
        limits = DecodeLimits(sequences, self._max_model_tokens, self._layout.page_tokens)
        return DecodeGraphs(self._model, self._pool, limits)

    def _check(self, chunk: Chunk) -> None:
        if not chunk.token_ids or chunk.start < 0:
            raise ValueError(f"{chunk.request_id}: a chunk needs tokens and a start of at least 0")
        if chunk.end > self._max_model_tokens:
            raise ValueError(f"{chunk.request_id}: position {chunk.end - 1} exceeds {self._max_model_tokens} tokens")
        table = chunk.page_table
        if len(table) < self._layout.pages_for(chunk.end):
            raise ValueError(f"{chunk.request_id}: {len(table)} pages do not hold {chunk.end} tokens")
        if min(table) < 0 or max(table) >= self.num_pages:
            raise ValueError(f"{chunk.request_id}: the page table leaves the pool of {self.num_pages} pages")
        if min(chunk.token_ids) < 0 or max(chunk.token_ids) >= self._vocab_size:
            raise ValueError(f"{chunk.request_id}: a token lies outside the vocabulary of {self._vocab_size}")


def _limit(config: ModelConfig, wanted: int | None) -> int:
    if wanted is None:
        return config.max_model_tokens
    if not 1 <= wanted <= config.max_model_tokens:
        raise ValueError(f"max_model_tokens must lie in [1, {config.max_model_tokens}], got {wanted}")
    return wanted


def _pool_pages(layout: PageLayout, num_pages: int | None, memory_bytes: int | None, device: torch.device) -> int:
    if num_pages is not None and memory_bytes is not None:
        raise ValueError("give num_pages or kv_memory_bytes, not both")
    if num_pages is None:
        if memory_bytes is None:
            memory_bytes = _DEFAULT_CPU_BYTES
            if device.type == "cuda":
                memory_bytes = int(torch.cuda.mem_get_info(device)[0] * _DEFAULT_CUDA_SHARE)
        num_pages = memory_bytes // layout.page_bytes
    if num_pages < 1:
        raise ValueError(f"the pool needs at least one page of {layout.page_bytes} bytes")
    return num_pages
