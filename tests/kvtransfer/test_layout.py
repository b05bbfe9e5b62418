"""Page layouts and their fingerprints."""

from dataclasses import replace

import pytest

from splitserve.kvtransfer.layout import PageLayout


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "other"), ("layers", 2), ("kv_heads", 2), ("page_tokens", 8), ("head_dim", 4), ("dtype", "bfloat16")],
)
def test_b034_each_field_is_compared_and_named(layout: PageLayout, field: str, value: object) -> None:
    other = replace(layout, **{field: value})
    assert other.fingerprint != layout.fingerprint
    [line] = layout.differences(other)
    assert field in line
    assert repr(value) in line
    assert repr(getattr(layout, field)) in line


def test_equal_layouts_agree(layout: PageLayout) -> None:
    assert replace(layout).fingerprint == layout.fingerprint
    assert layout.differences(replace(layout)) == []


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)])
def test_b011_partial_last_page_counts(layout: PageLayout, tokens: int, pages: int) -> None:
    assert layout.pages_for(tokens) == pages


def test_page_bytes_follow_from_the_shape(layout: PageLayout) -> None:
    assert layout.page_shape == (1, 2, 1, 4, 2)
    assert layout.page_bytes == 1 * 2 * 1 * 4 * 2 * 4
