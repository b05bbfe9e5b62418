# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Decode attention over paged keys and values: one query token per sequence.

Long contexts are split over programs that each give a partial softmax; a second kernel merges the parts by their
log-sum-exp (Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

import torch
import triton
import triton.language as tl

from splitserve.engine.kernels.paged_inputs import NO_WINDOW, DecodingSequences, check_heads
from splitserve.engine.kernels.tiles import decode_tile, next_power_of_two
from splitserve.engine.operations import AttentionSpec

_MOST_SPLITS = 32
_LEAST_SPLIT_TOKENS = 256  # less is not worth a part's own traffic
_WAVES = 2  # programs to aim at per multiprocessor


# What changes from step to step must not lead to another compilation.
@triton.jit(
    do_not_specialize=("max_pages",),
    do_not_specialize_on_alignment=("page_tables", "rows", "context_tokens"),
)
def attend_split(
    query,
    pages,
    page_tables,
    rows,
    context_tokens,
    output,  # [rows, heads, head_dim], written where SPLITS is 1
    parts,  # [sequences, heads, SPLITS, head_dim] float32, written otherwise
    part_logsums,  # [sequences, heads, SPLITS] float32, base 2, beside ``parts``
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
    SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_CONTEXT: tl.constexpr,
    TILE_HEAD_DIM: tl.constexpr,
):
    """Program (sequence, key head, split): all query heads of one key head against a share of the context."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    context = tl.load(context_tokens + sequence)
    row = tl.load(rows + sequence).to(tl.int64)
    visible_start = tl.maximum(context - window, 0)
    share = tl.cdiv(tl.cdiv(context - visible_start, SPLITS), TILE_CONTEXT) * TILE_CONTEXT
    start = visible_start + split * share
    end = tl.minimum(start + share, context)

    members = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, TILE_HEAD_DIM)
    heads = kv_head * GROUP + members
    own = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query_places = (row * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(query + query_places, mask=own, other=0.0)

    largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    weighted = tl.zeros([TILE_ROWS, TILE_HEAD_DIM], tl.float32)
    table = page_tables + sequence.to(tl.int64) * max_pages
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
        scores = tl.where(inside[None, :], scores * LOG2_E, float("-inf"))

        risen = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - risen[:, None])
        faded = tl.exp2(largest - risen)
        total = total * faded + tl.sum(weights, axis=1)
        values = tl.load(
            pages + key_places[:, None] + KV_HEADS * PAGE_TOKENS * HEAD_DIM + dims[None, :], mask=loaded, other=0.0
        )
        weighted = tl.dot(weights.to(values.dtype), values, weighted * faded[:, None], input_precision="ieee")
        largest = risen

    attended = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLITS == 1:
        tl.store(output + query_places, attended.to(output.dtype.element_ty), mask=own)
    else:
        part = (sequence.to(tl.int64) * (KV_HEADS * GROUP) + heads) * SPLITS + split
        tl.store(parts + part[:, None] * HEAD_DIM + dims[None, :], attended, mask=own)
        logsum = tl.where(total > 0.0, largest + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(part_logsums + part, logsum, mask=members < GROUP)


@triton.jit(do_not_specialize_on_alignment=("rows",))
def merge_splits(
    parts,
    part_logsums,
    rows,
    output,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    TILE_HEAD_DIM: tl.constexpr,
):
    """Program (sequence, head): the parts weighted by their share of the softmax's sum."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(rows + sequence).to(tl.int64)
    splits = tl.arange(0, TILE_SPLITS)
    dims = tl.arange(0, TILE_HEAD_DIM)
    part = (sequence * HEADS + head) * SPLITS + splits
    logsums = tl.load(part_logsums + part, mask=splits < SPLITS, other=float("-inf"))
    largest = tl.max(logsums, axis=0)
    weights = tl.exp2(logsums - tl.where(largest > float("-inf"), largest, 0.0))
    total = tl.sum(weights, axis=0)
    own = (splits < SPLITS)[:, None] & (dims < HEAD_DIM)[None, :]
    attended = tl.load(parts + part[:, None] * HEAD_DIM + dims[None, :], mask=own, other=0.0)
    merged = tl.sum(attended * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    place = (row * HEADS + head) * HEAD_DIM + dims
    tl.store(output + place, merged.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    sequences: DecodingSequences,
    spec: AttentionSpec,
    splits: int,
    output: torch.Tensor,
) -> None:
    """Attend from one token per sequence to its context.

    ``query`` and ``output`` [rows, heads, head_dim] contiguous, ``pages`` a layer's slice of the pool [pages, 2,
    kv_heads, page_tokens, head_dim]; one dtype of float32, float16, bfloat16. Writes the rows of ``output`` that
    ``sequences`` names (zeros where a context is empty) and no others. Each context is divided into ``splits`` parts,
    see ``choose_splits``; the result depends on it in rounding only. Raises ValueError for sizes that do not fit.
    """
    sequences.check()
    check_heads(query, pages)
    check_heads(output, pages)
    if not 1 <= splits <= _MOST_SPLITS:
        raise ValueError(f"splits must lie in [1, {_MOST_SPLITS}], got {splits}")
    count, max_pages = sequences.page_tables.shape
    if count == 0:
        return
    _, heads, head_dim = query.shape
    kv_heads, page_tokens = pages.shape[2:4]
    tile = decode_tile(heads // kv_heads, head_dim, query.dtype)
    parts = logsums = query.new_empty(0, dtype=torch.float32)
    if splits > 1:
        parts = query.new_empty((count, heads, splits, head_dim), dtype=torch.float32)
        logsums = query.new_empty((count, heads, splits), dtype=torch.float32)
    attend_split[(count, kv_heads, splits)](
        query,
        pages,
        sequences.page_tables,
        sequences.rows,
        sequences.context_tokens,
        output,
        parts,
        logsums,
        pages.stride(0),
        max_pages,
        spec.scale,
        NO_WINDOW if spec.window is None else spec.window,
        1.0 if spec.soft_cap is None else spec.soft_cap,
        HAS_SOFT_CAP=spec.soft_cap is not None,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        PAGE_TOKENS=page_tokens,
        HEAD_DIM=head_dim,
        SPLITS=splits,
        TILE_ROWS=tile.rows,
        TILE_CONTEXT=tile.context,
        TILE_HEAD_DIM=tile.head_dim,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        merge_splits[(count, heads)](
            parts,
            logsums,
            sequences.rows,
            output,
            HEADS=heads,
            HEAD_DIM=head_dim,
            SPLITS=splits,
            TILE_SPLITS=next_power_of_two(splits),
            TILE_HEAD_DIM=tile.head_dim,
            num_warps=4,
        )


def choose_splits(sequences: int, kv_heads: int, longest_context_tokens: int, processors: int) -> int:
    """How often to divide each context so that ``processors`` multiprocessors have work: a power of two."""
    wanted = _WAVES * processors // max(1, sequences * kv_heads)
    useful = -(-longest_context_tokens // _LEAST_SPLIT_TOKENS)
    most = max(1, min(wanted, useful, _MOST_SPLITS))
    return 1 << (most.bit_length() - 1)
