"""Pairs of pages that lie side by side on both ends, as one piece each: few large descriptors move faster than many
small ones.
"""

from collections.abc import Sequence
from typing import NamedTuple


class PageRun(NamedTuple):
    """``pages`` consecutive pages, from ``remote`` there to ``local`` here."""

    remote: int
    local: int
    pages: int


def page_runs(remote: Sequence[int], local: Sequence[int]) -> list[PageRun]:
    """Cut the pairs ``(remote[i], local[i])`` into the fewest runs that keep their order. Raises ValueError on unequal
    lengths.
    """
    runs: list[PageRun] = []
    for there, here in zip(remote, local, strict=True):
        last = runs[-1] if runs else None
        if last is not None and (there, here) == (last.remote + last.pages, last.local + last.pages):
            runs[-1] = last._replace(pages=last.pages + 1)
        else:
            runs.append(PageRun(there, here, 1))
    return runs
