"""Plans of byte ranges, carried out on numpy pools and compared with pools filled token by token."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.local_transport import LocalNetwork, LocalTransport
from splitserve.kvtransfer.reshaping import LayoutMismatch, byte_ranges, sender_pages, source_ranks
from splitserve.kvtransfer.transport import PoolMemory, ReadState, TransferError

LAYERS, HEAD_DIM = 2, 2
MAX_TOKENS = 19
POOL_TOKENS = 48
UNTOUCHED = 0xEE
Bytes = NDArray[np.uint8]

# What the model computed, [tokens, layers, 2, kv_heads, bytes of one token in one head]: hardly two bytes alike.
TRUTH = np.random.default_rng(0).integers(0, 200, (MAX_TOKENS, LAYERS, 2, 4, HEAD_DIM * 4), np.uint8)


def shape(kv_heads: int, degree: int, page_tokens: int, dtype: str = "bfloat16") -> PageLayout:
    return PageLayout("m", LAYERS, kv_heads, page_tokens, HEAD_DIM, dtype, degree)


def page_table(layout: PageLayout, seed: int) -> list[int]:
    """Pages of a sequence, here and there side by side."""
    pages = np.arange(POOL_TOKENS // layout.page_tokens)
    return [int(page) for page in np.roll(np.random.default_rng(seed).permutation(pages.reshape(-1, 2)).ravel(), 1)]


def pool(layout: PageLayout, table: list[int], positions: Iterable[int]) -> Bytes:
    """A rank's pool, [bytes], with ``positions`` in place the rest UNTOUCHED: the reference, one token at a time."""
    pages = np.full(
        (POOL_TOKENS // layout.page_tokens, *layout.page_shape[:4], layout.token_bytes), UNTOUCHED, np.uint8
    )
    for token in positions:
        for row, head in enumerate(layout.heads):
            page, slot = table[token // layout.page_tokens], token % layout.page_tokens
            pages[page, :, :, row, slot] = TRUTH[token, :, :, head, : layout.token_bytes]
    return pages.ravel()


def check(sender: PageLayout, receiver: PageLayout, positions: range, left_out: frozenset[int] = frozenset()) -> None:
    """The plan for one rank of the receiver fetches ``positions``, but for those in pages ``left_out``."""
    page_ids, table = page_table(sender, 1), page_table(receiver, 2)
    pages = {index: page for index, page in enumerate(table) if index not in left_out}
    plan = byte_ranges(sender, receiver, positions, page_ids, pages)
    here = pool(receiver, table, range(0))
    covered = np.zeros_like(here, np.int64)
    for rank, rows in plan.items():
        there = pool(sender.rank(rank), page_ids, range(positions.stop))
        for remote, local, length in rows.tolist():
            assert 0 <= remote < remote + length <= there.size
            assert 0 <= local < local + length <= here.size
            here[local : local + length] = there[remote : remote + length]
            covered[local : local + length] += 1
        starts = {(remote, local) for remote, local, _ in rows.tolist()}
        assert not starts & {(remote + length, local + length) for remote, local, length in rows.tolist()}
    whole = any(sender.rank(rank).fingerprint == receiver.fingerprint for rank in plan)
    if whole:  # pages with a wanted position come with all that the sender has in them
        kept = {token // receiver.page_tokens for token in positions} - left_out
        tokens = [token for token in range(positions.stop) if token // receiver.page_tokens in kept]
    else:
        tokens = [token for token in positions if token // receiver.page_tokens not in left_out]
    expected = pool(receiver, table, tokens)
    assert (here == expected).all()
    assert covered.max(initial=0) <= 1
    if not whole:
        assert (covered == (expected != UNTOUCHED)).all()


@pytest.mark.parametrize(("sender_degree", "receiver_degree"), list(product([1, 2, 4, 8], repeat=2)))
@pytest.mark.parametrize(("sender_tokens", "receiver_tokens"), list(product([2, 4, 8], repeat=2)))
def test_every_pair_of_shapes(
    sender_degree: int, receiver_degree: int, sender_tokens: int, receiver_tokens: int
) -> None:
    for kv_heads in (2, 4):
        sender = shape(kv_heads, sender_degree, sender_tokens)
        receiver = shape(kv_heads, receiver_degree, receiver_tokens)
        for rank in range(receiver_degree):
            check(sender, receiver.rank(rank), range(13))


@pytest.mark.parametrize("tokens", range(0, 18))
@pytest.mark.parametrize(("sender_tokens", "receiver_tokens"), [(4, 4), (2, 8), (8, 2)])
def test_b011_every_length_moves_its_tokens_and_no_more(sender_tokens: int, receiver_tokens: int, tokens: int) -> None:
    check(shape(4, 2, sender_tokens), shape(4, 1, receiver_tokens), range(tokens))


@settings(max_examples=150, deadline=None)
@given(
    kv_heads=st.sampled_from([1, 2, 3, 4]),
    degrees=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    page_sizes=st.sampled_from([(1, 4), (4, 1), (3, 6), (6, 3), (2, 2), (8, 4)]),
    ends=st.tuples(st.integers(0, MAX_TOKENS), st.integers(0, MAX_TOKENS)),
    left_out=st.frozensets(st.integers(0, 5)),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
)
def test_any_part_of_a_sequence(
    kv_heads: int,
    degrees: tuple[int, int],
    page_sizes: tuple[int, int],
    ends: tuple[int, int],
    left_out: frozenset[int],
    dtype: str,
) -> None:
    there, here = (degree if not (kv_heads % degree and degree % kv_heads) else kv_heads for degree in degrees)
    sender = shape(kv_heads, there, page_sizes[0], dtype)
    receiver = shape(kv_heads, here, page_sizes[1], dtype)
    for rank in range(here):
        check(sender, receiver.rank(rank), range(min(ends), max(ends)), left_out)


def test_equal_layouts_move_whole_pages_as_one_range_where_adjacent() -> None:
    layout = shape(4, 2, 4).rank(1)
    plan = byte_ranges(layout.rank(0), layout, range(15), [5, 6, 7, 1], {0: 2, 1: 3, 2: 9, 3: 0})
    size = layout.page_bytes
    assert {rank: rows.tolist() for rank, rows in plan.items()} == {
        1: [[5 * size, 2 * size, 2 * size], [7 * size, 9 * size, size], [size, 0, size]]
    }


@pytest.mark.parametrize(
    ("kv_heads", "sender", "receiver", "ranges_a_page"),
    [(4, 1, 2, LAYERS * 2), (4, 2, 1, LAYERS * 2), (8, 2, 4, LAYERS * 2), (8, 4, 2, LAYERS * 2), (2, 4, 4, 1)],
)
def test_heads_that_move_together_are_one_range_for_each_layer(
    kv_heads: int, sender: int, receiver: int, ranges_a_page: int
) -> None:
    plan = byte_ranges(shape(kv_heads, sender, 4), shape(kv_heads, receiver, 4), range(8), [0, 2], {0: 0, 1: 2})
    assert {len(rows) for rows in plan.values()} == {2 * ranges_a_page}


def test_ranks_that_want_the_same_head_share_out_its_holders() -> None:
    sender, receiver = shape(2, 8, 4), shape(2, 4, 4)
    sources = [source_ranks(sender, receiver.rank(rank)) for rank in range(4)]
    assert [list(heads.values()) for heads in sources] == [[[0]], [[0]], [[1]], [[1]]]
    assert len({rank for heads in sources for rank in heads}) == 4


def test_ranks_of_equal_degree_read_from_each_other() -> None:
    layout = shape(2, 8, 4)
    assert [list(source_ranks(layout, layout.rank(rank))) for rank in range(8)] == [[rank] for rank in range(8)]


@pytest.mark.parametrize(
    ("sizes", "positions", "pages", "expected"),
    [
        ((4, 4), range(0, 9), [0, 2], [0, 2]),
        ((2, 8), range(0, 11), [1], [4, 5]),
        ((2, 8), range(3, 11), [0, 1], [1, 2, 3, 4, 5]),
        ((8, 2), range(0, 11), [1, 4, 5], [0, 1]),
        ((8, 2), range(0, 0), [], []),
    ],
)
def test_pages_to_verify(sizes: tuple[int, int], positions: range, pages: list[int], expected: list[int]) -> None:
    assert sender_pages(shape(4, 1, sizes[0]), shape(4, 1, sizes[1]), positions, pages) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "other"), ("layers", 3), ("kv_heads", 8), ("page_tokens", 6), ("head_dim", 4), ("dtype", "float32")],
)
def test_b034_what_is_not_possible_is_refused_naming_both_values(field: str, value: object) -> None:
    sender = shape(4, 1, 4)
    receiver = replace(sender, **{field: value})
    with pytest.raises(LayoutMismatch, match=f"{field}: {value!r} here, {getattr(sender, field)!r} there"):
        byte_ranges(sender, receiver, range(4), [0], {0: 0})


def test_positions_must_be_within_the_senders_pages() -> None:
    with pytest.raises(ValueError, match="positions: 9 tokens need more than 2 pages"):
        byte_ranges(shape(4, 1, 4), shape(4, 1, 8), range(9), [0, 1], {0: 0})
    with pytest.raises(ValueError, match="positions"):
        byte_ranges(shape(4, 1, 4), shape(4, 1, 8), range(0, 8, 2), [0, 1], {0: 0})


def side(network: LocalNetwork, name: str, layout: PageLayout, data: Bytes) -> LocalTransport:
    return LocalTransport(
        name, PoolMemory(data.ctypes.data, layout.page_bytes, data.size // layout.page_bytes, data), network
    )


def test_a_transport_carries_the_plan_out() -> None:
    sender, receiver = shape(4, 2, 2), shape(4, 1, 8)
    page_ids, table, network = page_table(sender, 1), page_table(receiver, 2), LocalNetwork()
    here = pool(receiver, table, range(0))
    reader = side(network, "d", receiver, here)
    plan = byte_ranges(sender, receiver, range(13), page_ids, dict(enumerate(table)))
    for rank, rows in plan.items():
        owner = side(network, f"p{rank}", sender, pool(sender.rank(rank), page_ids, range(13)))
        read = reader.read_ranges(reader.connect(owner.endpoint()), rows)
        for _ in rows:
            assert read.poll() is not ReadState.FAILED
        assert read.poll() is ReadState.DONE
    assert (here == pool(receiver, table, range(13))).all()


@pytest.mark.parametrize("bad", [(0, 0, 0), (-1, 0, 4), (0, -1, 4), (0, 33, 4), (33, 0, 4), (0, 0, -4)])
def test_a_transport_refuses_ranges_outside_the_pools(bad: tuple[int, int, int]) -> None:
    layout, network = PageLayout("m", 1, 1, 1, 2, "bfloat16"), LocalNetwork()
    reader, owner = (side(network, name, layout, np.zeros(36, np.uint8)) for name in "dp")
    peer = reader.connect(owner.endpoint())
    with pytest.raises(TransferError, match="leave the pool"):
        reader.read_ranges(peer, [(0, 0, 4), bad])
    assert reader.open_reads == 0
