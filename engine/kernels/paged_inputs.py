"""What the attention kernels are told about a step: which rows belong to whom, and which pages hold the context."""

from dataclasses import dataclass

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NO_WINDOW = 2**31 - 1  # wider than any context


@dataclass(frozen=True, slots=True)
class DecodingSequences:
    """Sequences with one query token each. All tensors int32, contiguous, on the pool's device."""

    page_tables: torch.Tensor  # [sequences, max_pages], page ids; what lies behind a context's pages is not read
    rows: torch.Tensor  # [sequences], row of each sequence's token among the queries
    context_tokens: torch.Tensor  # [sequences], positions the token sees, its own included; 0: a row of padding

    def check(self) -> None:
        """Raises ValueError for shapes or dtypes that do not fit each other."""
        sequences = self.page_tables.shape[0]
        check_int32("page_tables", self.page_tables, (sequences, self.page_tables.shape[1]))
        check_int32("rows", self.rows, (sequences,))
        check_int32("context_tokens", self.context_tokens, (sequences,))


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """Chunks of any length, each in rows of its own. All tensors int32, contiguous, on the pool's device."""

    page_tables: torch.Tensor  # [chunks, max_pages], page ids; what lies behind a context's pages is not read
    first_rows: torch.Tensor  # [chunks], row of each chunk's first token among the queries
    query_starts: torch.Tensor  # [chunks + 1], tokens of the chunks before each, the last entry is ``tokens``
    context_tokens: torch.Tensor  # [chunks], positions that the chunk's last token sees, its own included
    tokens: int  # of all chunks

    def check(self) -> None:
        """Raises ValueError for shapes or dtypes that do not fit each other."""
        chunks = self.page_tables.shape[0]
        check_int32("page_tables", self.page_tables, (chunks, self.page_tables.shape[1]))
        check_int32("first_rows", self.first_rows, (chunks,))
        check_int32("query_starts", self.query_starts, (chunks + 1,))
        check_int32("context_tokens", self.context_tokens, (chunks,))


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """What the attention of one step needs, the same for all layers."""

    decoding: DecodingSequences | None  # chunks of one token
    prefill: PrefillChunks | None  # the others
    longest_context_tokens: int  # of ``decoding``, or a bound on it


def check_int32(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless ``tensor`` is contiguous int32 of ``shape``."""
    if tensor.dtype is not torch.int32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous int32 {list(shape)}, got {described(tensor)}")


def check_heads(query: torch.Tensor, pages: torch.Tensor) -> None:
    """``query`` [rows, heads, head_dim] contiguous, ``pages`` [pages, 2, kv_heads, page_tokens, head_dim] with every
    page contiguous, one dtype. Raises ValueError.
    """
    check_pages(pages)
    if query.dim() != 3 or not query.is_contiguous():
        raise ValueError(f"query must be contiguous [rows, heads, head_dim], got {described(query)}")
    if query.dtype is not pages.dtype or query.shape[2] != pages.shape[4]:
        raise ValueError(f"query {described(query)} does not fit pages {described(pages)}")
    if query.shape[1] % pages.shape[2]:
        raise ValueError(f"{query.shape[1]} query heads can't share {pages.shape[2]} key heads")


def check_pages(pages: torch.Tensor) -> None:
    """A layer's slice of the pool, [pages, 2, kv_heads, page_tokens, head_dim]. Raises ValueError."""
    if pages.dim() != 5 or pages.shape[1] != 2 or pages.dtype not in FLOATS:
        raise ValueError(f"pages must be floats [pages, 2, kv_heads, page_tokens, head_dim], got {described(pages)}")
    _, _, kv_heads, page_tokens, head_dim = pages.shape
    inner = (kv_heads * page_tokens * head_dim, page_tokens * head_dim, head_dim, 1)
    if tuple(pages.stride()[1:]) != inner:
        raise ValueError(f"a page of one layer must be contiguous, got strides {pages.stride()}")


def described(tensor: torch.Tensor) -> str:
    """Dtype, shape and strides, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} with strides {tensor.stride()}"
