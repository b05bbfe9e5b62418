# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Rotary embedding of queries and keys, and the way of keys and values into their pages, in one pass."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from splitserve.engine.kernels.paged_inputs import check_pages, described
from splitserve.engine.kernels.tiles import next_power_of_two
from splitserve.engine.operations import Rotary

_MOST_TILE_HEADS = 16


@dataclass(frozen=True, slots=True)
class Places:
    """Where each token's key and value go. int64 [tokens], contiguous."""

    pages: torch.Tensor  # -1: nowhere, a row of padding
    offsets: torch.Tensor  # places within the pages


@triton.jit(do_not_specialize_on_alignment=("write_pages", "write_offsets"))
def rotate_write(
    query,
    key,
    value,
    cos,
    sin,
    pages,
    write_pages,
    write_offsets,
    rotated,
    query_stride,
    key_stride,
    value_stride,
    page_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,
):
    """Program (token): all of its heads."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, TILE_HALF)
    cosines = tl.load(cos + token * HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    sines = tl.load(sin + token * HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    members = tl.arange(0, TILE_HEADS)

    for first in tl.static_range(0, HEADS, TILE_HEADS):
        heads = first + members
        own = (heads < HEADS)[:, None] & (pairs < HALF)[None, :]
        places = heads[:, None] * HEAD_DIM + pairs[None, :]
        low = tl.load(query + token * query_stride + places, mask=own, other=0.0).to(tl.float32)
        high = tl.load(query + token * query_stride + places + HALF, mask=own, other=0.0).to(tl.float32)
        target = rotated + token * (HEADS * HEAD_DIM) + places
        tl.store(target, (low * cosines - high * sines).to(rotated.dtype.element_ty), mask=own)
        tl.store(target + HALF, (high * cosines + low * sines).to(rotated.dtype.element_ty), mask=own)

    page = tl.load(write_pages + token)
    if page >= 0:
        offset = tl.load(write_offsets + token)
        for first in tl.static_range(0, KV_HEADS, TILE_HEADS):
            heads = first + members
            own = (heads < KV_HEADS)[:, None] & (pairs < HALF)[None, :]
            places = heads[:, None] * HEAD_DIM + pairs[None, :]
            target = pages + page * page_stride + (heads[:, None] * PAGE_TOKENS + offset) * HEAD_DIM + pairs[None, :]
            low = tl.load(key + token * key_stride + places, mask=own, other=0.0).to(tl.float32)
            high = tl.load(key + token * key_stride + places + HALF, mask=own, other=0.0).to(tl.float32)
            tl.store(target, (low * cosines - high * sines).to(pages.dtype.element_ty), mask=own)
            tl.store(target + HALF, (high * cosines + low * sines).to(pages.dtype.element_ty), mask=own)
            target += KV_HEADS * PAGE_TOKENS * HEAD_DIM
            tl.store(target, tl.load(value + token * value_stride + places, mask=own, other=0.0), mask=own)
            source = value + token * value_stride + places + HALF
            tl.store(target + HALF, tl.load(source, mask=own, other=0.0), mask=own)


def rotate_and_write(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotary: Rotary, pages: torch.Tensor, places: Places
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values into their pages; returns the queries, contiguous.

    ``query`` [tokens, heads, head_dim], ``key`` and ``value`` [tokens, kv_heads, head_dim]: the heads of one token
    contiguous, tokens any stride apart. ``rotary`` [tokens, head_dim / 2] float32 contiguous; pairs are (i, i +
    head_dim / 2); float32 arithmetic, rounded once. ``pages`` a layer's slice of the pool. Places must lie in the pool:
    they are not checked, they live on the device. Raises ValueError for sizes that do not fit.
    """
    check_pages(pages)
    tokens, heads, head_dim = query.shape
    kv_heads, page_tokens = pages.shape[2:4]
    _check_rows("query", query, (tokens, heads, pages.shape[4]), pages.dtype)
    _check_rows("key", key, (tokens, kv_heads, head_dim), pages.dtype)
    _check_rows("value", value, (tokens, kv_heads, head_dim), pages.dtype)
    for name, tensor in (("cos", rotary.cos), ("sin", rotary.sin)):
        shape = (tokens, head_dim // 2)
        if tensor.dtype is not torch.float32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous float32 {list(shape)}, got {described(tensor)}")
    for name, tensor in (("pages", places.pages), ("offsets", places.offsets)):
        if tensor.dtype is not torch.int64 or tuple(tensor.shape) != (tokens,) or not tensor.is_contiguous():
            raise ValueError(f"write {name} must be contiguous int64 [{tokens}], got {described(tensor)}")
    rotated = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    if tokens == 0:
        return rotated
    rotate_write[(tokens,)](
        query,
        key,
        value,
        rotary.cos,
        rotary.sin,
        pages,
        places.pages,
        places.offsets,
        rotated,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        pages.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        PAGE_TOKENS=page_tokens,
        HEAD_DIM=head_dim,
        TILE_HEADS=tile_heads(heads),
        TILE_HALF=next_power_of_two(head_dim // 2),
        num_warps=4,
    )
    return rotated


def tile_heads(heads: int) -> int:
    """Heads that one turn of the loop rotates."""
    return min(_MOST_TILE_HEADS, next_power_of_two(heads))


def _check_rows(name: str, rows: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    fits = rows.dtype is dtype and tuple(rows.shape) == shape and shape[2] % 2 == 0
    if not fits or tuple(rows.stride()[1:]) != (shape[2], 1):
        raise ValueError(f"{name} must be {dtype} {list(shape)} with contiguous tokens, got {described(rows)}")
