"""Kernels run in Triton's interpreter on CPU tensors. The environment chooses it when triton is first imported."""

import os
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from splitserve.engine.kernels.paged_inputs import DecodingSequences, PrefillChunks


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as integers, and multiplies matrices of them as such: widened here."""
    if not isinstance(tl.sum, interpreter.InterpretedFunction):
        pytest.fail("triton was imported before TRITON_INTERPRET=1 was set")

    multiply = InterpreterBuilder.create_dot

    def create_dot(self: object, a: TensorHandle, b: TensorHandle, *rest: object) -> TensorHandle:
        return multiply(self, _widened(a), _widened(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def _widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


@dataclass(frozen=True)
class PagedContexts:
    """Random contexts in a pool of two layers. Whatever no context owns is NaN; page tables are absurd behind their
    context.
    """

    pages: torch.Tensor  # the second layer's slice
    page_tables: torch.Tensor
    context_tokens: torch.Tensor

    def decoding(self) -> DecodingSequences:
        """The last token of every context, the rows in falling order."""
        rows = torch.arange(len(self.context_tokens), dtype=torch.int32).flip(0).contiguous()
        return DecodingSequences(self.page_tables, rows, self.context_tokens)

    def chunks(self, tokens: list[int], gap: int = 1) -> PrefillChunks:
        """The last ``tokens`` of every context, with ``gap`` foreign rows before each chunk."""
        starts = np.concatenate([[0], np.cumsum(tokens)])
        first_rows = starts[:-1] + gap * np.arange(1, len(tokens) + 1)
        return PrefillChunks(
            self.page_tables,
            torch.tensor(first_rows, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            self.context_tokens,
            int(starts[-1]),
        )


@dataclass(frozen=True)
class Shape:
    """Of the attention under test."""

    group: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype
    kv_heads: int = 2

    def query(self, rows: int) -> torch.Tensor:
        """Random queries."""
        return torch.randn(rows, self.group * self.kv_heads, self.head_dim).to(self.dtype)

    def contexts(self, lengths: list[int]) -> PagedContexts:
        """Contexts of these lengths in pages of no order."""
        counts = [-(-length // self.page_tokens) for length in lengths]
        spare = 3
        inner = (2, self.kv_heads, self.page_tokens, self.head_dim)
        pages = torch.full((sum(counts) + spare, 2, *inner), float("nan"), dtype=self.dtype)[:, 1]
        order = iter(torch.randperm(len(pages)).tolist())
        tables = torch.full((len(lengths), max(counts) + 1), 2**30, dtype=torch.int32)
        for sequence, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            for index in range(count):
                page = tables[sequence, index] = next(order)
                filled = min(self.page_tokens, length - index * self.page_tokens)
                pages[page, :, :, :filled] = torch.randn(2, self.kv_heads, filled, self.head_dim).to(self.dtype)
        return PagedContexts(pages, tables, torch.tensor(lengths, dtype=torch.int32))


@pytest.fixture
def make_shape() -> Callable[..., Shape]:
    """Makes a ``Shape``; seeds what is random about it."""
    torch.manual_seed(7)
    return Shape
