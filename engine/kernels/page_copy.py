# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Pages into one contiguous buffer and back, for transports that want contiguous memory."""

import torch
import triton
import triton.language as tl

from splitserve.engine.kernels.paged_inputs import described

TILE = 2048


@triton.jit
def gather(pool, page_ids, staging, page_words, TILE: tl.constexpr):
    """Program (listed page, tile of words)."""
    listed = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    page = tl.load(page_ids + listed)
    copied = tl.load(pool + page * page_words + words, mask=words < page_words, other=0)
    tl.store(staging + listed * page_words + words, copied, mask=words < page_words)


@triton.jit
def scatter(pool, page_ids, staging, page_words, TILE: tl.constexpr):
    """Program (listed page, tile of words)."""
    listed = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    page = tl.load(page_ids + listed)
    copied = tl.load(staging + listed * page_words + words, mask=words < page_words, other=0)
    tl.store(pool + page * page_words + words, copied, mask=words < page_words)


def gather_pages(pool: torch.Tensor, page_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy the pages ``page_ids`` of ``pool``, in this order, into ``staging``.

    ``pool`` [pages, ...] and ``staging`` [at least len(page_ids), ...] contiguous, alike but for their first
    dimension; ``page_ids`` int64 [listed], within the pool: not checked, they live on the device. Raises ValueError for
    sizes that do not fit.
    """
    _copy(gather, pool, page_ids, staging)


def scatter_pages(pool: torch.Tensor, page_ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy ``staging`` into the pages ``page_ids`` of ``pool``: the way back. No page may be listed twice."""
    _copy(scatter, pool, page_ids, staging)


def _copy(kernel, pool: torch.Tensor, page_ids: torch.Tensor, staging: torch.Tensor) -> None:
    alike = pool.dtype is staging.dtype and pool.shape[1:] == staging.shape[1:]
    if not (alike and pool.is_contiguous() and staging.is_contiguous()):
        raise ValueError(f"pool {described(pool)} and staging {described(staging)} must be alike and contiguous")
    if page_ids.dtype is not torch.int64 or page_ids.dim() != 1 or not page_ids.is_contiguous():
        raise ValueError(f"page_ids must be contiguous int64 [listed], got {described(page_ids)}")
    listed = page_ids.shape[0]
    if listed > staging.shape[0]:
        raise ValueError(f"staging holds {staging.shape[0]} pages, {listed} are listed")
    if listed == 0:
        return
    pool_words, staging_words = pool.flatten(1), staging.flatten(1)
    page_bytes = pool_words.shape[1] * pool.element_size()
    word = next(
        dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.int8) if page_bytes % dtype.itemsize == 0
    )
    pool_words, staging_words = pool_words.view(word), staging_words.view(word)
    page_words = pool_words.shape[1]
    kernel[(listed, triton.cdiv(page_words, TILE))](
        pool_words, page_ids, staging_words, page_words, TILE=TILE, num_warps=8
    )
