"""Pages converted for the wire: error bounds, bytes, and the way from pool to pool across shapes."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from splitserve.kvtransfer.layout import DTYPE_BYTES, PageLayout
from splitserve.kvtransfer.narrow_floats import STORED, Floats, narrow, widen
from splitserve.kvtransfer.reshaping import LayoutMismatch
from splitserve.kvtransfer.staged_pages import StagingLayout, StagingRegion, WireDtype, staged_ranges, unstage

SMALL = PageLayout("m", layers=2, kv_heads=4, page_tokens=4, head_dim=2, dtype="float32")
WIRES: tuple[WireDtype, ...] = get_args(WireDtype)
TOKENS = 14
Pages = NDArray[np.generic]

# What the model computed, [tokens, layers, 2, kv_heads, head_dim] float32; heads differ much in size.
TRUTH: Floats = np.random.default_rng(0).standard_normal((TOKENS, 2, 2, 4, 2)).astype(np.float32)
TRUTH *= np.float32(10.0) ** np.arange(-2, 2, dtype=np.float32)[:, None]


def region(layout: StagingLayout) -> StagingRegion:
    return StagingRegion(layout, np.full(layout.region_bytes, 0xEE, np.uint8))


def pool(layout: PageLayout, table: list[int], truth: Floats) -> Pages:
    """``truth`` in a rank's pool, one token at a time; all other places hold 99."""
    pages = np.full((8, *layout.page_shape), 99.0, np.float32)
    for token, row in enumerate(truth):
        pages[table[token // layout.page_tokens], :, :, :, token % layout.page_tokens] = row[:, :, layout.heads]
    return narrow(pages, layout.dtype)


def allowed_error(page: Floats, wire: str) -> Floats:
    """For one page's values ``[..., tokens, head_dim]``."""
    largest = np.abs(page).max(axis=(-2, -1), keepdims=True)
    by_type: dict[str, Any] = {
        "float32": 0.0 * page,
        "bfloat16": np.abs(page) * 2.0**-8,
        "float16": np.abs(page) * 2.0**-11 + 2.0**-25,
        "int8": largest / 127 / 2 + 0.0 * page,
        "float8_e4m3": np.maximum(np.abs(page) * 2.0**-4, largest / 448 * 2.0**-10),
    }
    bound: Floats = by_type[wire]
    return bound * np.float32(1 + 1e-5)


@pytest.mark.parametrize("wire", WIRES)
@given(data=st.data())
def test_errors_are_bounded(wire: WireDtype, data: st.DataObject) -> None:
    seed, exponent = data.draw(st.integers(0, 1 << 30)), data.draw(st.integers(-4, 4) | st.sampled_from([-40, 30]))
    random = np.random.default_rng(seed)
    if wire == "float16":
        exponent = max(-4, min(4, exponent))
    spread = random.uniform(-2, 0, SMALL.page_shape) if exponent > -40 else 0.0
    page = (random.uniform(-1, 1, SMALL.page_shape) * 10.0 ** (exponent + spread)).astype(np.float32)
    staged = region(StagingLayout.of(SMALL, wire, 3))
    staged.stage(1, page, "float32", SMALL.page_tokens)
    # Under the smallest normal number there is no relative precision to keep.
    assert (np.abs(staged.restore(1) - page) <= np.maximum(allowed_error(page, wire), 2.0**-126)).all()


@pytest.mark.parametrize("wire", WIRES)
def test_zeros_stay_zeros(wire: WireDtype) -> None:
    staged = region(StagingLayout.of(SMALL, wire, 1))
    staged.stage(0, np.zeros(SMALL.page_shape, np.float32), "float32", 4)
    assert (staged.restore(0) == 0).all()


@pytest.mark.parametrize("wire", WIRES)
def test_b011_what_lies_after_the_last_token_neither_moves_nor_spoils_the_scale(wire: WireDtype) -> None:
    page = np.full(SMALL.page_shape, 0.5, np.float32)
    clean, dirty = (region(StagingLayout.of(SMALL, wire, 1)) for _ in range(2))
    clean.stage(0, page, "float32", 3)
    page[..., 3, :] = np.nan
    dirty.stage(0, page, "float32", 3)
    np.testing.assert_array_equal(dirty.restore(0), clean.restore(0))
    assert (clean.restore(0)[..., 3, :] == 0).all()
    assert (np.abs(clean.restore(0)[..., :3, :] - 0.5) <= 0.5 / 16).all()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_sent(wire: WireDtype, value: float) -> None:
    page = np.zeros(SMALL.page_shape, np.float32)
    page[1, 0, 2, 3, 1] = value
    with pytest.raises(ValueError, match=wire):
        region(StagingLayout.of(SMALL, wire, 1)).stage(0, page, "float32", 4)


@pytest.mark.parametrize(
    ("dtype", "wire", "ratio"),
    [
        ("float32", "float32", 1.0),
        ("float32", "bfloat16", 0.5),
        ("float32", "int8", 0.25 + 1 / (16 * 64)),
        ("bfloat16", "int8", 0.5 + 2 / (16 * 64)),
        ("bfloat16", "float8_e4m3", 0.5 + 2 / (16 * 64)),
    ],
)
def test_bytes_on_the_wire(dtype: str, wire: WireDtype, ratio: float) -> None:
    pages = PageLayout("m", layers=30, kv_heads=3, page_tokens=16, head_dim=64, dtype=dtype)
    assert StagingLayout.of(pages, wire, 7).wire_ratio(pages) == pytest.approx(ratio)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("slots", [1, 3])
def test_values_and_scales_lie_apart_within_the_region(wire: WireDtype, slots: int) -> None:
    layout = StagingLayout.of(replace(SMALL, layers=1, kv_heads=1, page_tokens=3, head_dim=1), wire, slots)
    memory = np.zeros(layout.region_bytes + 8, np.uint8)
    staged = StagingRegion(layout, memory)
    for array in (staged.values, staged.scales):
        if array is not None:
            array.view(np.uint8)[...] += 1
    assert memory.max() == 1
    assert memory[: layout.region_bytes].sum() == slots * layout.staged_page_bytes
    assert not memory[layout.region_bytes :].any()
    with pytest.raises(ValueError, match="region_bytes"):
        StagingRegion(layout, memory[: layout.region_bytes - 1])


def move(sender: PageLayout, receiver: PageLayout, wire: WireDtype, positions: range) -> Pages:
    """Stage in every rank of the sender, read and unstage in one of the receiver; its pool afterwards."""
    page_ids, table = [6, 2, 7, 1, 0, 3, 5], [3, 4, 0, 7, 6, 2, 1]
    needed = range(positions.start // sender.page_tokens, sender.pages_for(positions.stop))
    sender_slots = {index: slot for slot, index in enumerate(reversed(needed), 1)}
    slots = {index: slot for slot, index in enumerate(needed, 2)}
    there = StagingLayout.of(sender, wire, len(needed) + 1)
    here = StagingLayout.of(receiver, wire, len(needed) + 2, sender.page_tokens)
    arrived = np.zeros(here.region_bytes, np.uint8)
    for rank, rows in staged_ranges(there, here, sender_slots, slots).items():
        layout = sender.rank(rank)
        memory = np.zeros(there.region_bytes, np.uint8)
        source, pages = (
            StagingRegion(replace(there, values=there.values.rank(rank)), memory),
            pool(layout, page_ids, TRUTH),
        )
        for index, slot in sender_slots.items():
            source.stage(slot, pages[page_ids[index]], layout.dtype, min(4, TOKENS - index * sender.page_tokens))
        for remote, local, length in rows.tolist():
            arrived[local : local + length] = memory[remote : remote + length]
    target = pool(receiver, table, TRUTH[:0])
    unstage(StagingRegion(here, arrived), slots, target, receiver, positions, dict(enumerate(table)))
    expected_places = pool(replace(receiver, dtype="float32"), table, np.zeros_like(TRUTH)[: positions.stop])
    before = pool(replace(receiver, dtype="float32"), table, np.zeros_like(TRUTH)[: positions.start])
    untouched = (expected_places != 0) | (before == 0)
    assert (widen(target, receiver.dtype)[untouched] == 99).all()
    return target[[table[index] for index in range(receiver.pages_for(TOKENS))]]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 1), (2, 4), (4, 2), (8, 2), (2, 2)])
@pytest.mark.parametrize("page_tokens", [2, 4, 8])
def test_converted_pages_arrive_in_pools_of_any_shape(wire: WireDtype, there: int, here: int, page_tokens: int) -> None:
    sender = replace(SMALL, tp_degree=there)
    for rank, dtype in zip(range(here), ["float32", "bfloat16", "float16", "float32"], strict=False):
        receiver = replace(SMALL, tp_degree=here, tp_rank=rank, page_tokens=page_tokens, dtype=dtype)
        arrived = widen(move(sender, receiver, wire, range(TOKENS)), dtype)
        for token, row in enumerate(TRUTH):
            first = token - token % SMALL.page_tokens
            scaled = TRUTH[first : first + SMALL.page_tokens].transpose(1, 2, 3, 0, 4)[:, :, receiver.heads]
            error = allowed_error(scaled, wire)[..., token - first, :]
            value = row[:, :, receiver.heads]
            rounding = (np.abs(value) + error) * 2.0**-8 if dtype != "float32" else 0.0
            got = arrived[token // page_tokens, :, :, :, token % page_tokens]
            assert (np.abs(got - value) <= error + rounding).all()


@pytest.mark.parametrize("positions", [range(3, 11), range(4, 8), range(9, 10)])
def test_a_part_of_a_sequence(positions: range) -> None:
    receiver = replace(SMALL, page_tokens=8, tp_degree=2, tp_rank=1)
    arrived = move(SMALL, receiver, "float32", positions)
    for token in positions:
        got = arrived[token // 8, :, :, :, token % 8]
        np.testing.assert_array_equal(got, TRUTH[token][:, :, receiver.heads])


def test_b034_staged_pages_keep_the_senders_page_size() -> None:
    there, here = (StagingLayout.of(SMALL, "int8", 2, page_tokens) for page_tokens in (4, 8))
    with pytest.raises(LayoutMismatch, match="page_tokens: 8 here, 4 there"):
        staged_ranges(there, here, {0: 0}, {0: 0})


def test_b034_both_sides_stage_in_one_type() -> None:
    with pytest.raises(LayoutMismatch, match="dtype: 'bfloat16' here, 'int8' there"):
        staged_ranges(StagingLayout.of(SMALL, "int8", 2), StagingLayout.of(SMALL, "bfloat16", 2), {0: 0}, {0: 0})


def test_a_page_that_is_not_staged_is_named() -> None:
    staged = StagingLayout.of(SMALL, "int8", 2)
    with pytest.raises(ValueError, match="page 1 is not staged"):
        staged_ranges(staged, staged, {0: 0}, {0: 0, 1: 1})


@pytest.mark.parametrize("wire", ["int8", "float8_e4m3"])
def test_a_scale_that_is_not_a_number_is_noticed_on_arrival(wire: WireDtype) -> None:
    staged = region(StagingLayout.of(SMALL, wire, 1))
    staged.stage(0, np.ones(SMALL.page_shape, np.float32), "float32", 4)
    assert staged.scales is not None
    staged.scales[0, 1, 1, 2] = np.nan
    target: Pages = np.zeros((1, *SMALL.page_shape), STORED["float32"])
    with pytest.raises(ValueError, match="not finite"):
        unstage(staged, {0: 0}, target, SMALL, range(4), {0: 0})
    assert not target.any()


def test_every_wire_type_is_a_known_dtype() -> None:
    assert set(WIRES) == set(DTYPE_BYTES)
