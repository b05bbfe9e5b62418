"""Attention over paged keys and values in plain torch.

The pool is ``[pages, layers, 2, kv_heads, page_tokens, head_dim]``; what a layer sees here is its slice
``[pages, 2, kv_heads, page_tokens, head_dim]``, keys at index 0 and values at 1.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from splitserve.engine.batch import DecodeAttention, PrefillAttention, StepBatch


def clear_fresh_pages(pool: torch.Tensor, batch: StepBatch) -> None:
    """Zero the pages that ``batch`` begins to fill, in all layers.

    Places after a sequence's end are read and weighted with zero; a NaN left there by an earlier owner of the page
    would survive that and reach another request.
    """
    if batch.fresh_pages.numel():
        pool.index_fill_(0, batch.fresh_pages, 0)


def paged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, batch: StepBatch
) -> torch.Tensor:
    """Write the step's keys and values into their pages, then attend, causally, to each sequence's whole context.

    ``query`` [tokens, heads, head_dim], ``key`` and ``value`` [tokens, kv_heads, head_dim], ``pages`` the layer's slice
    of the pool, all in the model's dtype. Returns [tokens, heads, head_dim].
    """
    pages[:, 0][batch.write_pages, :, batch.write_offsets] = key
    pages[:, 1][batch.write_pages, :, batch.write_offsets] = value
    output = torch.empty_like(query)
    for prefill in batch.prefills:
        rows = prefill.rows
        output[rows] = _attend_prefill(query[rows], key[rows], value[rows], pages, prefill)
    for decode in batch.decodes:
        output[decode.rows] = _attend_decode(query[decode.rows], pages, decode)
    return output


def _attend_prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, prefill: PrefillAttention
) -> torch.Tensor:
    if prefill.pages is None:
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
    else:
        # [pages, 2, kv_heads, page_tokens, head_dim] -> [2, kv_heads, context_tokens, head_dim]
        gathered = pages.index_select(0, prefill.pages).permute(1, 2, 0, 3, 4).flatten(2, 3)
        keys, values = gathered[:, :, : prefill.context_tokens].unbind(0)
    attended = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=prefill.mask,
        is_causal=prefill.mask is None,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _attend_decode(query: torch.Tensor, pages: torch.Tensor, decode: DecodeAttention) -> torch.Tensor:
    """Scores and weighted values page by page, one softmax over all of a sequence's pages.

    To lay the pages of a sequence side by side, as the fused kernel wants them, costs more than the fused kernel saves.
    """
    sequences, width = decode.pages.shape
    _, _, kv_heads, page_tokens, head_dim = pages.shape
    places = decode.pages.flatten()
    keys = pages[:, 0].index_select(0, places).view(-1, page_tokens, head_dim)  # [sequences * width * kv_heads, ...]
    values = pages[:, 1].index_select(0, places).view(-1, page_tokens, head_dim)
    grouped = query.view(sequences, 1, kv_heads, -1, head_dim)  # query heads that share a key head
    group = grouped.shape[3]
    repeated = grouped.expand(-1, width, -1, -1, -1).reshape(-1, group, head_dim)
    scores = torch.bmm(repeated, keys.transpose(1, 2)).view(sequences, width, kv_heads, group, page_tokens)
    by_place = scores.permute(0, 2, 3, 1, 4).flatten(3).float()  # [sequences, kv_heads, group, width * page_tokens]
    weights = (by_place * head_dim**-0.5 + decode.mask).softmax(dim=-1).to(query.dtype)
    by_page = weights.view(sequences, kv_heads, group, width, page_tokens).permute(0, 3, 1, 2, 4)
    parts = torch.bmm(by_page.reshape(-1, group, page_tokens), values).view(sequences, width, kv_heads, group, head_dim)
    return parts.sum(dim=1).view_as(query)
