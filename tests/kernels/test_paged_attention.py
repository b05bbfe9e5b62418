"""Attention over pages: the kernels against plain torch, over shapes that do not divide evenly."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from splitserve.engine.kernels import twins
from splitserve.engine.kernels.paged_decode import choose_splits, paged_decode
from splitserve.engine.kernels.paged_prefill import paged_prefill
from splitserve.engine.operations import AttentionSpec

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
UNTOUCHED = 7.0

SHAPES = [
    # group, head_dim, page_tokens, dtype, kv_heads; window, soft_cap
    pytest.param((1, 64, 16, torch.float32, 3), (None, None), id="as many key heads"),
    pytest.param((3, 64, 16, torch.float32, 2), (20, None), id="window"),
    pytest.param((8, 80, 32, torch.float16, 1), (None, None), id="odd head size"),
    pytest.param((3, 128, 32, torch.bfloat16, 2), (17, 3.0), id="bfloat16, window, soft cap"),
    pytest.param((2, 256, 16, torch.float16, 1), (1, None), id="window of one"),
    pytest.param((2, 32, 12, torch.bfloat16, 1), (None, 0.5), id="odd page size, soft cap"),
    pytest.param((24, 64, 16, torch.float16, 1), (130, None), id="large group, window as long as the context"),
]


def _lengths(page_tokens: int) -> list[int]:
    return [1, page_tokens - 1, page_tokens, page_tokens + 1, 130]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("sizes", "variation"), SHAPES)
def test_decode(make_shape: Callable[..., Any], sizes: Any, variation: Any, splits: int) -> None:
    shape = make_shape(*sizes)
    contexts = shape.contexts([*_lengths(shape.page_tokens), 0])
    spec = AttentionSpec(shape.head_dim**-0.5, *variation)
    query = shape.query(6)
    attended, expected = torch.full_like(query, UNTOUCHED), torch.full_like(query, UNTOUCHED)
    paged_decode(query, contexts.pages, contexts.decoding(), spec, splits, attended)
    twins.paged_decode(query, contexts.pages, contexts.decoding(), spec, expected)
    torch.testing.assert_close(attended, expected, atol=TOLERANCE[shape.dtype], rtol=TOLERANCE[shape.dtype])
    assert (attended[0] == 0).all()  # the empty context, in the first row


@pytest.mark.parametrize(("sizes", "variation"), SHAPES)
def test_prefill(make_shape: Callable[..., Any], sizes: Any, variation: Any) -> None:
    shape = make_shape(*sizes)
    contexts = shape.contexts(_lengths(shape.page_tokens))
    chunks = contexts.chunks([1, shape.page_tokens - 1, 3, shape.page_tokens, 70])
    spec = AttentionSpec(shape.head_dim**-0.5, *variation)
    query = shape.query(chunks.tokens + 6)
    attended, expected = torch.full_like(query, UNTOUCHED), torch.full_like(query, UNTOUCHED)
    paged_prefill(query, contexts.pages, chunks, spec, attended)
    twins.paged_prefill(query, contexts.pages, chunks, spec, expected)
    torch.testing.assert_close(attended, expected, atol=TOLERANCE[shape.dtype], rtol=TOLERANCE[shape.dtype])
    foreign = [int(row) - 1 for row in chunks.first_rows] + [len(query) - 1]
    assert (attended[foreign] == UNTOUCHED).all()


def test_the_twin_attends_as_torch_does(make_shape: Callable[..., Any]) -> None:
    shape = make_shape(2, 16, 4, torch.float32)
    contexts = shape.contexts([9])
    query, output = shape.query(9), torch.empty(9, 4, 16)
    twins.paged_prefill(query, contexts.pages, contexts.chunks([9], gap=0), AttentionSpec(0.25), output)
    keys, values = (
        contexts.pages[contexts.page_tables[0, :3].long(), part].transpose(0, 1).flatten(1, 2)[None, :, :9]
        for part in (0, 1)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys, values, is_causal=True, scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(output, expected[0].transpose(0, 1))


def test_a_sequence_does_not_notice_its_batch(make_shape: Callable[..., Any]) -> None:
    shape = make_shape(3, 64, 16, torch.float32)
    contexts = shape.contexts([40, 90, 7])
    query, together, alone = shape.query(3), torch.empty(3, 6, 64), torch.empty(3, 6, 64)
    spec = AttentionSpec(0.125)
    paged_decode(query, contexts.pages, contexts.decoding(), spec, 2, together)
    one = replace(
        contexts.decoding(),
        page_tables=contexts.page_tables[1:2].contiguous(),
        rows=torch.tensor([1], dtype=torch.int32),
        context_tokens=contexts.context_tokens[1:2].contiguous(),
    )
    paged_decode(query, contexts.pages, one, spec, 2, alone)
    assert torch.equal(together[1], alone[1])


def test_pages_lie_further_apart_than_32_bits_count(make_shape: Callable[..., Any]) -> None:
    shape = make_shape(2, 32, 16, torch.float16, 1)
    near = shape.contexts([37])
    inner = near.pages.shape[1:]
    apart = 2**30  # elements; the third page is 2**31 away
    try:
        # Never touched but for three pages. Room before them: an offset that wraps finds something wrong, not nothing.
        room = torch.empty(2**31 + 2 * apart + inner.numel(), dtype=torch.float16)
    except RuntimeError:
        pytest.skip("this machine does not lend 8 GiB of address space")
    far = room.as_strided((3, *inner), (apart, *near.pages.stride()[1:]), 2**31)
    far.copy_(near.pages[near.page_tables[0, :3].long()])
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    query, spec = shape.query(37), AttentionSpec(0.2)
    expected, attended, last = (torch.empty_like(query) for _ in range(3))
    twins.paged_prefill(query, near.pages, near.chunks([37], gap=0), spec, expected)
    paged_prefill(query, far, replace(near.chunks([37], gap=0), page_tables=table), spec, attended)
    torch.testing.assert_close(attended, expected, atol=4e-3, rtol=4e-3)
    sequences = replace(near.decoding(), page_tables=table, rows=torch.tensor([36], dtype=torch.int32))
    paged_decode(query, far, sequences, spec, 1, last)
    torch.testing.assert_close(last[36], expected[36], atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(
    ("sequences", "longest", "splits"),
    [(1, 100, 1), (1, 257, 2), (1, 100_000, 32), (8, 100_000, 4), (256, 100_000, 1), (0, 0, 1)],
)
def test_contexts_are_split_as_long_as_processors_wait_for_work(sequences: int, longest: int, splits: int) -> None:
    assert choose_splits(sequences, kv_heads=8, longest_context_tokens=longest, processors=132) == splits


def test_doors_refuse_what_does_not_fit(make_shape: Callable[..., Any]) -> None:
    shape = make_shape(3, 64, 16, torch.float32)
    contexts = shape.contexts([5])
    query, spec, sequences = shape.query(1), AttentionSpec(1.0), contexts.decoding()
    refused = [
        ("float64", query.double(), contexts.pages, sequences, 1),
        ("contiguous", query[:, ::3], contexts.pages, sequences, 1),
        ("5 query heads", query[:, :5].contiguous(), contexts.pages, sequences, 1),
        ("a page of one layer", query, contexts.pages.transpose(3, 4), sequences, 1),
        ("context_tokens", query, contexts.pages, replace(sequences, context_tokens=torch.tensor([5])), 1),
        ("splits must lie in", query, contexts.pages, sequences, 0),
    ]
    for message, rows, pages, step, splits in refused:
        with pytest.raises(ValueError, match=message):
            paged_decode(rows, pages, step, spec, splits, torch.empty_like(rows))
