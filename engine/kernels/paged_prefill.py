# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Prefill attention over paged keys and values: causal, several chunks of any length in one launch.

An online softmax over tiles of the context (FlashAttention, arXiv 2205.14135). The rows of a tile of queries are
(token, head of the group), so that a key or value is loaded once for all heads that share it.
"""

import torch
import triton
import triton.language as tl

from splitserve.engine.kernels.paged_inputs import NO_WINDOW, PrefillChunks, check_heads
from splitserve.engine.kernels.tiles import prefill_tile
from splitserve.engine.operations import AttentionSpec


# What changes from step to step must not lead to another compilation.
@triton.jit(
    do_not_specialize=("chunks", "max_pages"),
    do_not_specialize_on_alignment=("page_tables", "first_rows", "query_starts", "context_tokens"),
)
def attend_chunks(
    query,
    pages,
    page_tables,
    first_rows,
    query_starts,
    context_tokens,
    output,
    chunks,
    page_stride,
    max_pages,
    scale,
    window,
    soft_cap,
    HAS_SOFT_CAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_CONTEXT: tl.constexpr,
    TILE_HEAD_DIM: tl.constexpr,
):
    """Program (block, key head): TILE_ROWS // GROUP tokens of one chunk, all query heads of one key head.

    Chunk ``c`` owns the blocks from ``query_starts[c] // TILE_TOKENS + c`` on: never fewer than it needs, so that no
    list of blocks has to be made; the few in excess end at once.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    block = tl.program_id(0)
    kv_head = tl.program_id(1)

    chunk = 0
    behind = chunks
    while behind - chunk > 1:
        middle = (chunk + behind) // 2
        if tl.load(query_starts + middle) // TILE_TOKENS + middle <= block:
            chunk = middle
        else:
            behind = middle

    query_start = tl.load(query_starts + chunk)
    chunk_tokens = tl.load(query_starts + chunk + 1) - query_start
    first_token = (block - query_start // TILE_TOKENS - chunk) * TILE_TOKENS
    if first_token < chunk_tokens:
        context = tl.load(context_tokens + chunk)
        row = tl.load(first_rows + chunk).to(tl.int64)
        members = tl.arange(0, TILE_ROWS)
        dims = tl.arange(0, TILE_HEAD_DIM)
        tokens = first_token + members // GROUP
        positions = context - chunk_tokens + tokens
        asked = (members < TILE_TOKENS * GROUP) & (tokens < chunk_tokens)
        own = asked[:, None] & (dims < HEAD_DIM)[None, :]
        heads = kv_head * GROUP + members % GROUP
        query_places = ((row + tokens) * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
        queries = tl.load(query + query_places, mask=own, other=0.0)

        largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        weighted = tl.zeros([TILE_ROWS, TILE_HEAD_DIM], tl.float32)
        table = page_tables + tl.cast(chunk, tl.int64) * max_pages
        first_position = context - chunk_tokens + first_token
        start = tl.maximum(first_position + 1 - window, 0)
        end = tl.minimum(first_position + TILE_TOKENS, context)
        for first in range(start, end, TILE_CONTEXT):
            places = first + tl.arange(0, TILE_CONTEXT)
            inside = places < end
            page = tl.load(table + places // PAGE_TOKENS, mask=inside, other=0).to(tl.int64)
            key_places = page * page_stride + (kv_head * PAGE_TOKENS + places % PAGE_TOKENS) * HEAD_DIM
            # What lies behind the context belongs to nobody and may be NaN: it is never loaded.
            loaded = inside[:, None] & (dims < HEAD_DIM)[None, :]
            keys = tl.load(pages + key_places[:, None] + dims[None, :], mask=loaded, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            if HAS_SOFT_CAP:
                scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
            distance = positions[:, None] - places[None, :]
            seen = (distance >= 0) & (distance < window) & inside[None, :]
            scores = tl.where(seen, scores * LOG2_E, float("-inf"))

            risen = tl.maximum(largest, tl.max(scores, axis=1))
            base = tl.where(risen > float("-inf"), risen, 0.0)  # a row that has seen nothing yet stays empty
            weights = tl.exp2(scores - base[:, None])
            faded = tl.exp2(largest - base)
            total = total * faded + tl.sum(weights, axis=1)
            values = tl.load(
                pages + key_places[:, None] + KV_HEADS * PAGE_TOKENS * HEAD_DIM + dims[None, :], mask=loaded, other=0.0
            )
            weighted = tl.dot(weights.to(values.dtype), values, weighted * faded[:, None], input_precision="ieee")
            largest = risen

        attended = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(output + query_places, attended.to(output.dtype.element_ty), mask=own)


def paged_prefill(
    query: torch.Tensor, pages: torch.Tensor, chunks: PrefillChunks, spec: AttentionSpec, output: torch.Tensor
) -> None:
    """Attend from every token of ``chunks`` to its sequence's context up to itself.

    ``query`` and ``output`` [rows, heads, head_dim] contiguous, ``pages`` a layer's slice of the pool [pages, 2,
    kv_heads, page_tokens, head_dim], which holds the chunks' own keys and values, too; one dtype of float32, float16,
    bfloat16. Writes the chunks' rows of ``output`` and no others. Raises ValueError for sizes that do not fit.
    """
    chunks.check()
    check_heads(query, pages)
    check_heads(output, pages)
    count, max_pages = chunks.page_tables.shape
    if count == 0:
        return
    _, heads, head_dim = query.shape
    kv_heads, page_tokens = pages.shape[2:4]
    group = heads // kv_heads
    tile = prefill_tile(group, head_dim, query.dtype)
    blocks = chunks.tokens // (tile.rows // group) + count
    attend_chunks[(blocks, kv_heads)](
        query,
        pages,
        chunks.page_tables,
        chunks.first_rows,
        chunks.query_starts,
        chunks.context_tokens,
        output,
        count,
        pages.stride(0),
        max_pages,
        spec.scale,
        NO_WINDOW if spec.window is None else spec.window,
        1.0 if spec.soft_cap is None else spec.soft_cap,
        HAS_SOFT_CAP=spec.soft_cap is not None,
        KV_HEADS=kv_heads,
        GROUP=group,
        PAGE_TOKENS=page_tokens,
        HEAD_DIM=head_dim,
        TILE_ROWS=tile.rows,
        TILE_CONTEXT=tile.context,
        TILE_HEAD_DIM=tile.head_dim,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
