"""Attention over paged keys and values, in plain torch: runs on every device.

A layer's slice of the pool is ``[pages, 2, kv_heads, page_tokens, head_dim]``, keys at index 0 and values at 1.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from splitserve.engine.attention_plan import DecodeAttention, PrefillAttention
from splitserve.engine.batch import StepBatch
from splitserve.engine.operations import AttentionSpec


def clear_fresh_pages(pool: torch.Tensor, batch: StepBatch) -> None:
    """Zero the pages that ``batch`` begins to fill, in all layers.

    Places after a sequence's end are read and weighted with zero; a NaN left there by an earlier owner of the page
    would survive that and reach another request.
    """
    if batch.fresh_pages.numel():
        pool.index_fill_(0, batch.fresh_pages, 0)


def attend_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    prefill: PrefillAttention,
    spec: AttentionSpec,
) -> torch.Tensor:
    """One chunk against its context. ``query`` [tokens, heads, head_dim], ``key`` and ``value`` the chunk's own
    [tokens, kv_heads, head_dim], which are in ``pages``, too. Returns [tokens, heads, head_dim].
    """
    if prefill.start == 0:
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
    else:
        # [pages, 2, kv_heads, page_tokens, head_dim] -> [2, kv_heads, context_tokens, head_dim]
        gathered = pages.index_select(0, prefill.table).permute(1, 2, 0, 3, 4).flatten(2, 3)
        keys, values = gathered[:, :, : prefill.end].unbind(0)
    queries, mask = query.transpose(0, 1), prefill.mask(spec.window, query.device)
    if spec.soft_cap is not None:
        return _soft_capped(queries, keys, values, mask, spec.scale, spec.soft_cap).transpose(0, 1)
    attended = scaled_dot_product_attention(
        queries[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=spec.scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _soft_capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """``query`` [heads, tokens, head_dim], ``keys`` and ``values`` [kv_heads, context, head_dim]."""
    heads, tokens, head_dim = query.shape
    grouped = query.reshape(keys.shape[0], -1, tokens, head_dim)
    scores = capped(grouped @ keys[:, None].transpose(-1, -2) * scale, cap).float()
    if mask is None:
        mask = torch.ones(tokens, keys.shape[1], dtype=torch.bool, device=query.device).tril()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1).to(query.dtype)
    return (weights @ values[:, None]).view(heads, tokens, head_dim)


def capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """``scores`` squeezed into (-cap, cap)."""
    return torch.tanh(scores / cap) * cap


def attend_decode(
    query: torch.Tensor, pages: torch.Tensor, decode: DecodeAttention, spec: AttentionSpec
) -> torch.Tensor:
    """Scores and weighted values page by page, one softmax over all of a sequence's pages.

    ``query`` [sequences, heads, head_dim]; the same comes back. To lay the pages of a sequence side by side, as the
    fused kernel wants them, costs more than the fused kernel saves.
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
    by_place = scores.permute(0, 2, 3, 1, 4).flatten(3).float() * spec.scale  # [sequences, kv_heads, group, places]
    if spec.soft_cap is not None:
        by_place = capped(by_place, spec.soft_cap)
    weights = (by_place + decode.mask(spec.window)).softmax(dim=-1).to(query.dtype)
    by_page = weights.view(sequences, kv_heads, group, width, page_tokens).permute(0, 3, 1, 2, 4)
    parts = torch.bmm(by_page.reshape(-1, group, page_tokens), values).view(sequences, width, kv_heads, group, head_dim)
    return parts.sum(dim=1).view_as(query)
