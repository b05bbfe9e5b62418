"""One step's chunks as tensors: flat tokens, where their keys and values go, and what each chunk attends to."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from splitserve.engine.step import Chunk


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """A chunk of several tokens."""

    rows: slice  # of the flat tokens
    pages: torch.Tensor | None  # [pages] int64, pages that hold the context; None when the chunk starts its sequence
    context_tokens: int  # positions the last token attends to
    mask: torch.Tensor | None  # [tokens, context_tokens] bool, True = attend; None when plainly causal


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Chunks of one token each, with contexts of similar length, padded to the longest."""

    rows: torch.Tensor  # [sequences] int64, of the flat tokens
    pages: torch.Tensor  # [sequences, pages] int64; padding repeats a sequence's own first page
    mask: torch.Tensor  # [sequences, 1, 1, pages * page_tokens] float32, -inf behind the end of a sequence


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of all chunks, one after the other, on the model's device."""

    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64, absolute
    write_pages: torch.Tensor  # [tokens] int64, page of each token's key and value
    write_offsets: torch.Tensor  # [tokens] int64, place within that page
    fresh_pages: torch.Tensor  # [pages] int64, pages this step begins to fill
    prefills: tuple[PrefillAttention, ...]
    decodes: tuple[DecodeAttention, ...]
    sample_rows: torch.Tensor  # [samples] int64, last token of each chunk that samples


def build_batch(chunks: Sequence[Chunk], page_tokens: int, device: torch.device) -> StepBatch:
    """Lay out ``chunks``; each has at least one token and a page table that covers it."""
    token_ids: list[int] = []
    positions: list[int] = []
    write_pages: list[int] = []
    fresh_pages: list[int] = []
    sample_rows: list[int] = []
    prefills: list[PrefillAttention] = []
    buckets: dict[int, list[tuple[int, Chunk]]] = defaultdict(list)
    for chunk in chunks:
        first_row = len(token_ids)
        token_ids.extend(chunk.token_ids)
        places = range(chunk.start, chunk.end)
        positions.extend(places)
        write_pages.extend(chunk.page_table[place // page_tokens] for place in places)
        fresh_pages.extend(chunk.page_table[place // page_tokens] for place in places if place % page_tokens == 0)
        if chunk.sample is not None:
            sample_rows.append(len(token_ids) - 1)
        if len(chunk.token_ids) == 1:
            # Powers of two: padding at most doubles what is read.
            buckets[_pages(chunk, page_tokens).bit_length()].append((first_row, chunk))
        else:
            prefills.append(_prefill(chunk, first_row, page_tokens, device))
    place_of = torch.tensor(positions, dtype=torch.int64)
    return StepBatch(
        token_ids=_indices(token_ids, device),
        positions=place_of.to(device),
        write_pages=_indices(write_pages, device),
        write_offsets=(place_of % page_tokens).to(device),
        fresh_pages=_indices(fresh_pages, device),
        prefills=tuple(prefills),
        decodes=tuple(_decode(bucket, page_tokens, device) for bucket in buckets.values()),
        sample_rows=_indices(sample_rows, device),
    )


def _prefill(chunk: Chunk, first_row: int, page_tokens: int, device: torch.device) -> PrefillAttention:
    rows = slice(first_row, first_row + len(chunk.token_ids))
    if chunk.start == 0:
        return PrefillAttention(rows, None, chunk.end, None)
    query_places = torch.arange(chunk.start, chunk.end, device=device)
    mask = torch.arange(chunk.end, device=device) <= query_places[:, None]
    pages = _indices(chunk.page_table[: _pages(chunk, page_tokens)], device)
    return PrefillAttention(rows, pages, chunk.end, mask)


def _decode(bucket: list[tuple[int, Chunk]], page_tokens: int, device: torch.device) -> DecodeAttention:
    width = max(_pages(chunk, page_tokens) for _, chunk in bucket)
    tables = []
    for _, chunk in bucket:
        own = list(chunk.page_table[: _pages(chunk, page_tokens)])
        tables.append(own + [chunk.page_table[0]] * (width - len(own)))
    ends = torch.tensor([chunk.end for _, chunk in bucket])
    behind = torch.arange(width * page_tokens) >= ends[:, None]
    mask = torch.zeros(behind.shape).masked_fill(behind, float("-inf"))
    return DecodeAttention(
        rows=_indices([row for row, _ in bucket], device),
        pages=torch.tensor(tables, dtype=torch.int64).to(device),
        mask=mask[:, None, None, :].to(device),
    )


def _pages(chunk: Chunk, page_tokens: int) -> int:
    return -(-chunk.end // page_tokens)


def _indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)
