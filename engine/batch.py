"""One step's chunks as tensors: flat tokens, and where their keys and values go."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from splitserve.engine.operations import Operations
from splitserve.engine.step import Chunk


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of all chunks, one after the other, on the model's device."""

    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64, absolute
    write_pages: torch.Tensor  # [tokens] int64, page of each token's key and value
    write_offsets: torch.Tensor  # [tokens] int64, place within that page
    fresh_pages: torch.Tensor  # [pages] int64, pages this step begins to fill
    sample_rows: torch.Tensor  # [samples] int64, last token of each chunk that samples
    chunk_rows: tuple[slice, ...]  # of each chunk among the tokens
    attention: object  # what the operations planned for this step


def build_batch(chunks: Sequence[Chunk], page_tokens: int, device: torch.device, operations: Operations) -> StepBatch:
    """Lay out ``chunks``; each has at least one token and a page table that covers it."""
    token_ids: list[int] = []
    positions: list[int] = []
    write_pages: list[int] = []
    fresh_pages: list[int] = []
    sample_rows: list[int] = []
    chunk_rows: list[slice] = []
    for chunk in chunks:
        first_row = len(token_ids)
        token_ids.extend(chunk.token_ids)
        places = range(chunk.start, chunk.end)
        positions.extend(places)
        write_pages.extend(chunk.page_table[place // page_tokens] for place in places)
        fresh_pages.extend(chunk.page_table[place // page_tokens] for place in places if place % page_tokens == 0)
        chunk_rows.append(slice(first_row, len(token_ids)))
        if chunk.sample is not None:
            sample_rows.append(len(token_ids) - 1)
    place_of = torch.tensor(positions, dtype=torch.int64)
    return StepBatch(
        token_ids=_indices(token_ids, device),
        positions=place_of.to(device),
        write_pages=_indices(write_pages, device),
        write_offsets=(place_of % page_tokens).to(device),
        fresh_pages=_indices(fresh_pages, device),
        sample_rows=_indices(sample_rows, device),
        chunk_rows=tuple(chunk_rows),
        attention=operations.plan(chunks, page_tokens),
    )


def _indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)
