"""Cutting page pairs into runs."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.kvtransfer.page_runs import GAP_WORDS, joined, page_runs, word_spans
from splitserve.kvtransfer.transport import ByteRange


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


pages = st.integers(0, 3) | st.integers(0, 3 * GAP_WORDS) | st.integers(10**6, 10**6 + 2)


@given(st.lists(pages, min_size=1))
def test_every_word_asked_for_is_read_and_found(asked: list[int]) -> None:
    spans = word_spans(asked)
    arrived = [run.remote + i for run in spans.runs for i in range(run.pages)]
    targets = [run.local + i for run in spans.runs for i in range(run.pages)]
    assert targets == list(range(spans.words))
    assert [arrived[place] for place in spans.places] == asked
    assert len(set(arrived)) == len(arrived)
    assert min(arrived) == min(asked)
    assert max(arrived) == max(asked)
    assert len(arrived) <= len(asked) * (GAP_WORDS + 1)


ranges = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 3))


@given(st.lists(ranges, min_size=1))
def test_joined_ranges_name_the_same_bytes_in_order(asked: list[tuple[int, int, int]]) -> None:
    rows = joined([ByteRange(*each) for each in asked])

    def named(of: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
        return [(remote + i, local + i) for remote, local, length in of for i in range(length)]

    assert named([tuple(row) for row in rows.tolist()]) == named(asked)
    for one, other in itertools.pairwise(rows):
        assert tuple(one[:2] + one[2]) != tuple(other[:2])


@pytest.mark.parametrize("bad", [[], [(1, 2)], [1, 2, 3], np.zeros((2, 4), np.int64)])
def test_what_are_no_triples_are_refused(bad: list[ByteRange]) -> None:
    with pytest.raises(ValueError, match="shape"):
        joined(bad)
