"""What lies side by side on both ends, as one piece: few large descriptors move faster than many small ones."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from splitserve.kvtransfer.transport import ByteRanges, Rows

# A read of so many words costs about what a read of one does, over shared memory and over a network.
GAP_WORDS = 256


class PageRun(NamedTuple):
    """``pages`` consecutive pages, from ``remote`` there to ``local`` here."""

    remote: int
    local: int
    pages: int


class WordSpans(NamedTuple):
    """Consecutive words to read, ``runs``, into an array of ``words`` words; the word of the i-th page asked for comes
    to lie at ``places[i]``.
    """

    runs: list[PageRun]
    places: list[int]
    words: int


def page_runs(remote: Sequence[int], local: Sequence[int]) -> list[PageRun]:
    """Cut the pairs ``(remote[i], local[i])`` into the fewest runs that keep their order. Raises ValueError on unequal
    lengths.
    """
    if len(remote) == len(local) == 1:
        return [PageRun(remote[0], local[0], 1)]
    runs: list[PageRun] = []
    first_there = first_here = pages = 0
    for there, here in zip(remote, local, strict=True):
        if pages and there == first_there + pages and here == first_here + pages:
            pages += 1
            continue
        if pages:
            runs.append(PageRun(first_there, first_here, pages))
        first_there, first_here, pages = there, here, 1
    if pages:
        runs.append(PageRun(first_there, first_here, pages))
    return runs


def word_spans(pages: Sequence[int]) -> WordSpans:
    """One word per page, gaps of up to ``GAP_WORDS`` read along rather than cut out."""
    if len(pages) == 1:
        return WordSpans([PageRun(pages[0], 0, 1)], [0], 1)
    runs: list[PageRun] = []
    place_of: dict[int, int] = {}
    first = last = words = 0  # of the span under way: its first and last page, and where in the array it begins
    for page in sorted(set(pages)):
        if place_of and page - last > GAP_WORDS:
            runs.append(PageRun(first, words, last - first + 1))
            words += last - first + 1
            first = page
        elif not place_of:
            first = page
        place_of[page] = words + page - first
        last = page
    runs.append(PageRun(first, words, last - first + 1))
    return WordSpans(runs, [place_of[page] for page in pages], words + last - first + 1)


def joined(ranges: ByteRanges) -> Rows:
    """Ranges as rows of (remote, local, length), ``[ranges, 3]`` int64, in their order; neighbours that are adjacent on
    both ends become one. Raises ValueError for what are not triples.
    """
    rows = np.asarray(ranges, np.int64)
    if rows.ndim != 2 or rows.shape[1] != 3:
        raise ValueError(f"ranges: shape {rows.shape} is not [ranges, 3]")
    if len(rows) < 2:
        return rows
    ends = rows[:-1, :2] + rows[:-1, 2:]
    starts = np.flatnonzero(np.concatenate(([True], (ends != rows[1:, :2]).any(axis=1))))
    merged = rows[starts]
    merged[:, 2] = np.add.reduceat(rows[:, 2], starts)
    return merged
