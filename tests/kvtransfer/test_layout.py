"""Page layouts: fingerprints, heads of ranks, and which pairs fit together."""

from dataclasses import replace

import pytest

from splitserve.kvtransfer.layout import PageLayout

FIELDS = [
    ("model", "other"),
    ("layers", 2),
    ("kv_heads", 2),
    ("page_tokens", 8),
    ("head_dim", 4),
    ("dtype", "bfloat16"),
]
BRIDGED = ("page_tokens", "dtype")


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_b034_each_field_is_compared_and_named(layout: PageLayout, field: str, value: object) -> None:
    other = replace(layout, **{field: value})
    assert other.fingerprint != layout.fingerprint
    [line] = layout.differences(other)
    assert field in line
    assert repr(value) in line
    assert repr(getattr(layout, field)) in line


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_b034_what_cannot_be_bridged_is_named(layout: PageLayout, field: str, value: object) -> None:
    other = replace(layout, **{field: value})
    bridged = field in BRIDGED
    assert layout.obstacles(other) == (
        [] if bridged else [f"{field}: {getattr(layout, field)!r} here, {value!r} there"]
    )
    assert bool(other.obstacles(layout)) is not bridged


@pytest.mark.parametrize(("ours", "theirs", "fit"), [(4, 6, False), (6, 4, False), (3, 4, False), (3, 6, True)])
def test_b034_one_page_size_is_a_multiple_of_the_other(layout: PageLayout, ours: int, theirs: int, fit: bool) -> None:
    lines = replace(layout, page_tokens=ours).obstacles(replace(layout, page_tokens=theirs))
    assert [line.split(";")[0] for line in lines] == ([] if fit else [f"page_tokens: {ours} here, {theirs} there"])


def test_b034_every_obstacle_gets_a_line(layout: PageLayout) -> None:
    other = PageLayout("other", layers=2, kv_heads=2, page_tokens=3, head_dim=4, dtype="float16", tp_degree=2)
    named = [line.split(":")[0] for line in layout.obstacles(other)]
    assert named == ["model", "layers", "kv_heads", "head_dim", "page_tokens"]


def test_equal_layouts_agree(layout: PageLayout) -> None:
    assert replace(layout).fingerprint == layout.fingerprint
    assert layout.differences(replace(layout)) == layout.obstacles(replace(layout)) == []


@pytest.mark.parametrize(
    ("kv_heads", "degree", "heads"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (2, 2, [[0], [1]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 3, [[0], [0], [0]]),
        (9, 3, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
    ],
)
def test_ranks_share_out_the_heads(layout: PageLayout, kv_heads: int, degree: int, heads: list[list[int]]) -> None:
    first = replace(layout, kv_heads=kv_heads, tp_degree=degree)
    ranks = [first.rank(rank) for rank in range(degree)]
    assert [list(rank.heads) for rank in ranks] == heads
    for one in ranks:
        assert one.page_shape == (1, 2, len(one.heads), 4, 2)
        for two in ranks:
            assert (one.fingerprint == two.fingerprint) == (one.heads == two.heads)
            assert one.obstacles(two) == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *((name, 0, f"{name} must be at least 1, got 0") for name in ("layers", "kv_heads", "page_tokens", "head_dim")),
        ("tp_degree", 0, "tp_degree must be at least 1, got 0"),
        ("tp_rank", 1, r"tp_rank 1 is outside \[0, 1\)"),
        ("tp_rank", -1, r"tp_rank -1 is outside"),
        ("dtype", "complex64", "dtype 'complex64' is not one of float32"),
    ],
)
def test_values_that_no_pool_can_have(layout: PageLayout, field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(layout, **{field: value})


@pytest.mark.parametrize(("kv_heads", "degree"), [(3, 2), (4, 6), (2, 3)])
def test_heads_that_cannot_be_shared_out(layout: PageLayout, kv_heads: int, degree: int) -> None:
    with pytest.raises(ValueError, match=f"tp_degree {degree} .* kv_heads {kv_heads}"):
        replace(layout, kv_heads=kv_heads, tp_degree=degree)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)])
def test_b011_partial_last_page_counts(layout: PageLayout, tokens: int, pages: int) -> None:
    assert layout.pages_for(tokens) == pages


def test_page_bytes_follow_from_the_shape(layout: PageLayout) -> None:
    assert layout.page_shape == (1, 2, 1, 4, 2)
    assert layout.page_bytes == 1 * 2 * 1 * 4 * 2 * 4
