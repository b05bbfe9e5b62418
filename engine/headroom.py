"""Whether a sequence may take pages now, seen what those that run will ask for.

A sequence starts when its tokens have their pages and some are left for running sequences to grow into; otherwise it
would be admitted only to be preempted a few steps later, and its prompt computed for nothing. How many are left: for
each sequence that runs, and for the new one, ``headroom_pages`` or what it can still grow by, whichever is less. Each
preemption of a sequence quadruples what it waits for. After ``max_preemptions`` of them it starts for good: only when
the pool holds, at their full lengths, that sequence and all that go before it. From then on nobody who goes before it
can need its pages, and whoever wants to start before it must leave that promise intact. So a request is preempted at
most ``max_preemptions`` times, and, as a single request always fits the pool, its turn comes.
"""

from collections.abc import Sequence as Collection

from splitserve.engine.page_pool import PagePool
from splitserve.engine.sequence import Sequence

PREEMPTION_SHIFT = 2  # as a power of two


class Headroom:
    """Arithmetic over a pool; changes nothing."""

    def __init__(self, pool: PagePool, page_tokens: int, headroom_pages: int, max_preemptions: int) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._headroom_pages = headroom_pages
        self._max_preemptions = max_preemptions

    def is_protected(self, sequence: Sequence) -> bool:
        """Whether the sequence has been preempted as often as may be."""
        return sequence.preemptions >= self._max_preemptions

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    def admits(self, sequence: Sequence, available: int, active: Collection[Sequence]) -> bool:
        """Whether the sequence may take pages for all of its tokens. ``available``: pages it can use, those it shares
        included. ``active``: all that own pages for a step or read them from a peer.
        """
        needed = self.pages_for(len(sequence.tokens))
        if needed > available or not self._keeps_promises(sequence, active):
            return False
        if self.is_protected(sequence):
            return True
        ahead = self._headroom_pages << (PREEMPTION_SHIFT * sequence.preemptions)
        left = available - needed - min(ahead, self.pages_for(sequence.longest) - needed)
        for other in active:
            if left < 0:
                return False
            assert other.pages is not None
            left -= min(ahead, self.pages_for(other.longest) - len(other.pages))
        return left >= 0

    def _keeps_promises(self, sequence: Sequence, active: Collection[Sequence]) -> bool:
        protected = [s.rank for s in (sequence, *active) if self.is_protected(s) and s.rank >= sequence.rank]
        if not protected:
            return True
        last = max(protected)
        full = sum(self.pages_for(s.longest) for s in active if s.rank <= last)
        return full + self.pages_for(sequence.longest) <= self._pool.total
