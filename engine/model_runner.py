"""Computes steps with a real model: implements ``engine.step.Runner``.

This file owns the pool and says in which order a step happens. How a step is laid out is ``batch``'s, the arithmetic is
``models``' and ``attention``'s, drawing is ``sampler``'s.
"""

from collections.abc import Sequence

import torch

from splitserve.engine.attention import clear_fresh_pages
from splitserve.engine.batch import build_batch
from splitserve.engine.model_config import ModelConfig
from splitserve.engine.models.platform import Platform
from splitserve.engine.models.registry import Model, build_model
from splitserve.engine.platforms import plain_platform
from splitserve.engine.sampler import Draw, sample
from splitserve.engine.step import Chunk, ChunkOutput
from splitserve.engine.weights.loading import Progress, load_weights
from splitserve.engine.weights.model_files import ModelFiles
from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.transport import PoolMemory

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTO_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
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
        max_model_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Load the weights and allocate the pool.

        The pool has ``num_pages`` pages, or as many as fit ``kv_memory_bytes``, or by default 1 GiB on a CPU and most
        of the free memory on a GPU. ``dtype`` "auto" is float32 on a CPU and bfloat16 on a GPU. ``max_model_tokens``
        may lower the model's own limit. Raises ValueError for settings that cannot be, ModelLoadError for the files.
        """
        config = model_files.config
        self._device = torch.device(device)
        name = _dtype_name(dtype, self._device)
        self._max_model_tokens = _limit(config, max_model_tokens)
        self._eos_token_ids = config.eos_token_ids
        self._layout = PageLayout(
            model=f"{model_files.fingerprint} rope {config.rope_key}",
            layers=config.layers,
            kv_heads=config.kv_heads,
            page_tokens=page_tokens,
            head_dim=config.head_dim,
            dtype=name,
        )
        if page_tokens < 1:
            raise ValueError(f"page_tokens must be at least 1, got {page_tokens}")
        self._vocab_size = config.vocab_size
        self._platform = plain_platform(self._device, _DTYPES[name])
        self._model = _loaded(model_files, self._platform, progress)
        pages = _pool_pages(self._layout, num_pages, kv_memory_bytes, self._device)
        self._pool = torch.zeros((pages, *self._layout.page_shape), dtype=_DTYPES[name], device=self._device)

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
        draws = [Draw(chunk.sample, chunk.end) for chunk in chunks if chunk.sample is not None]
        with torch.inference_mode():
            batch = build_batch(chunks, self._layout.page_tokens, self._device, self._platform.operations)
            clear_fresh_pages(self._pool, batch)
            hidden = self._model.forward(batch, self._pool)
            logits = self._model.logits(hidden.index_select(0, batch.sample_rows))
            drawn = iter(sample(logits, draws) if draws else ())
        return [ChunkOutput(next(drawn)) if chunk.sample is not None else ChunkOutput() for chunk in chunks]

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


def _dtype_name(dtype: str, device: torch.device) -> str:
    if device.type not in _AUTO_DTYPE:
        raise ValueError(f"device {device.type!r} is not supported; supported: {', '.join(_AUTO_DTYPE)}")
    name = _AUTO_DTYPE[device.type] if dtype == "auto" else dtype
    if name not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; supported: auto, {', '.join(_DTYPES)}")
    return name


def _limit(config: ModelConfig, wanted: int | None) -> int:
    if wanted is None:
        return config.max_model_tokens
    if not 1 <= wanted <= config.max_model_tokens:
        raise ValueError(f"max_model_tokens must lie in [1, {config.max_model_tokens}], got {wanted}")
    return wanted


def _loaded(files: ModelFiles, platform: Platform, progress: Progress | None) -> Model:
    with torch.inference_mode():
        model = build_model(files.config, platform)
        load_weights(files, model.destinations(), progress)
        model.pack()
    return model


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
