"""Cutting page pairs into runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.kvtransfer.page_runs import page_runs


@pytest.mark.parametrize(
    ("remote", "local", "runs"),
    [
        ([], [], []),
        ([4], [9], [(4, 9, 1)]),
        ([4, 5, 6], [7, 8, 9], [(4, 7, 3)]),
        ([4, 5, 6], [7, 8, 1], [(4, 7, 2), (6, 1, 1)]),
        ([4, 5], [8, 7], [(4, 8, 1), (5, 7, 1)]),
        ([4, 6], [7, 8], [(4, 7, 1), (6, 8, 1)]),
        ([4, 4], [7, 8], [(4, 7, 1), (4, 8, 1)]),
    ],
)
def test_only_what_is_consecutive_on_both_ends_is_joined(
    remote: list[int], local: list[int], runs: list[tuple[int, int, int]]
) -> None:
    assert page_runs(remote, local) == runs


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_runs_cover_every_pair_in_order(pairs: list[tuple[int, int]]) -> None:
    runs = page_runs([there for there, _ in pairs], [here for _, here in pairs])
    assert [(run.remote + i, run.local + i) for run in runs for i in range(run.pages)] == pairs


def test_unequal_lengths_are_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="zip"):
        page_runs([1, 2], [1])
