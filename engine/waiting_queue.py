"""Sequences that wait, in the order of their turn."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from splitserve.engine.sequence import Rank, Sequence


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class WaitingQueue:
    """Ordered by ``Sequence.rank``. ``push`` and ``remove`` take O(log n) comparisons, whoever is concerned."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.tokens = 0  # of all that wait; nothing of a waiting sequence is computed

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def first(self, count: int) -> list[Sequence]:
        """The ``count`` whose turn is next; the queue may change while the caller goes through them."""
        return list(islice(self._sequences, count))

    def push(self, sequence: Sequence) -> None:
        """Its tokens do not change while it waits."""
        insort(self._sequences, sequence, key=_rank)
        self.tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.rank, key=_rank)
        assert self._sequences[index] is sequence, f"{sequence.request_id} does not wait here"
        del self._sequences[index]
        self.tokens -= len(sequence.tokens)
