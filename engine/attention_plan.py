"""How torch's attention goes through a step: prompts one by one, decoding sequences side by side."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from splitserve.engine.step import Chunk


@dataclass(slots=True)
class PrefillAttention:
    """A chunk of several tokens: positions [start, end) of its sequence."""

    rows: slice  # of the flat tokens
    table: torch.Tensor  # [pages] int64, pages that hold the context, this chunk's own included
    start: int
    end: int
    _masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """[tokens, end] bool, True = attend; None where plain causality from position 0 says it all."""
        if window is not None and window >= self.end:
            window = None
        if window not in self._masks:
            self._masks[window] = self._build(window, device)
        return self._masks[window]

    def _build(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        if window is None and self.start == 0:
            return None
        places = torch.arange(self.start, self.end, device=device)[:, None]
        context = torch.arange(self.end, device=device)
        mask = context <= places
        return mask if window is None else mask & (context > places - window)


@dataclass(slots=True)
class DecodeAttention:
    """Chunks of one token each, with contexts of similar length, padded to the longest."""

    rows: torch.Tensor  # [sequences] int64, of the flat tokens
    pages: torch.Tensor  # [sequences, pages] int64; padding repeats a sequence's own first page
    ends: torch.Tensor  # [sequences] int64, tokens of each context
    places: int  # pages * page_tokens
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor:
        """[sequences, 1, 1, places] float32, -inf behind the end of a sequence and before its window."""
        if window is not None and window >= self.places:
            window = None
        if window not in self._masks:
            place = torch.arange(self.places, device=self.ends.device)
            hidden = place >= self.ends[:, None]
            if window is not None:
                hidden |= place < self.ends[:, None] - window
            mask = torch.zeros(hidden.shape, device=self.ends.device).masked_fill(hidden, float("-inf"))
            self._masks[window] = mask[:, None, None, :]
        return self._masks[window]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All of one step."""

    prefills: tuple[PrefillAttention, ...]
    decodes: tuple[DecodeAttention, ...]


def plan_attention(chunks: Sequence[Chunk], page_tokens: int, device: torch.device) -> AttentionPlan:
    """Lay out ``chunks``; each has at least one token and a page table that covers it."""
    prefills: list[PrefillAttention] = []
    buckets: dict[int, list[tuple[int, Chunk]]] = defaultdict(list)
    first_row = 0
    for chunk in chunks:
        if len(chunk.token_ids) == 1:
            # Powers of two: padding at most doubles what is read.
            buckets[_pages(chunk, page_tokens).bit_length()].append((first_row, chunk))
        else:
            prefills.append(_prefill(chunk, first_row, page_tokens, device))
        first_row += len(chunk.token_ids)
    decodes = tuple(_decode(bucket, page_tokens, device) for bucket in buckets.values())
    return AttentionPlan(tuple(prefills), decodes)


def _prefill(chunk: Chunk, first_row: int, page_tokens: int, device: torch.device) -> PrefillAttention:
    table = torch.tensor(chunk.page_table[: _pages(chunk, page_tokens)], dtype=torch.int64, device=device)
    return PrefillAttention(slice(first_row, first_row + len(chunk.token_ids)), table, chunk.start, chunk.end)


def _decode(bucket: list[tuple[int, Chunk]], page_tokens: int, device: torch.device) -> DecodeAttention:
    width = max(_pages(chunk, page_tokens) for _, chunk in bucket)
    tables = []
    for _, chunk in bucket:
        own = list(chunk.page_table[: _pages(chunk, page_tokens)])
        tables.append(own + [chunk.page_table[0]] * (width - len(own)))
    return DecodeAttention(
        rows=torch.tensor([row for row, _ in bucket], dtype=torch.int64, device=device),
        pages=torch.tensor(tables, dtype=torch.int64, device=device),
        ends=torch.tensor([chunk.end for _, chunk in bucket], dtype=torch.int64, device=device),
        places=width * page_tokens,
    )


def _pages(chunk: Chunk, page_tokens: int) -> int:
    return -(-chunk.end // page_tokens)
