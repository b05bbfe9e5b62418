"""Which tokens the next step computes. This file decides; it computes nothing and talks to no one.

What may live here: the order of sequences, the token budget, admission by pages, preemption. Reading pages from peers
is ``handover.py``; what happens with drawn tokens is ``engine.py``.
"""

from collections import deque
from dataclasses import dataclass

from splitserve.engine.counters import Counters
from splitserve.engine.page_pool import NoFreePages, PagePool
from splitserve.engine.sequence import Sequence, SequenceState
from splitserve.engine.step import Chunk


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of one step."""

    step_tokens: int = 512  # most tokens computed in one step, decode tokens included
    chunk_tokens: int = 256  # most prompt tokens of one sequence in one step
    max_running: int = 64  # sequences in one step


class Scheduler:
    """Queues of one engine. Decode tokens go first, then prompts under way, then new prompts, oldest first."""

    def __init__(self, pool: PagePool, page_tokens: int, limits: SchedulerLimits, counters: Counters) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self._pool = pool
        self._page_tokens = page_tokens
        self._limits = limits
        self._counters = counters

    def enqueue(self, sequence: Sequence) -> None:
        """Put a new, preempted or failed-to-receive sequence where its age belongs: older ones go first."""
        sequence.state = SequenceState.WAITING
        place = len(self.waiting)
        while place and self.waiting[place - 1].arrival > sequence.arrival:
            place -= 1
        self.waiting.insert(place, sequence)

    def start(self, sequence: Sequence) -> None:
        """Let a sequence that owns its pages take part in steps."""
        sequence.state = SequenceState.RUNNING
        place = len(self.running)
        while place and self.running[place - 1].arrival > sequence.arrival:
            place -= 1
        self.running.insert(place, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence; its pages stay with their owner."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)

    def plan(self) -> list[tuple[Sequence, Chunk]]:
        """The next step. Empty when nothing can be computed. Pages for what it contains are owned by the sequences."""
        budget = self._limits.step_tokens
        planned: list[tuple[Sequence, Chunk]] = []
        # Receptions may bring more than fit into a step; the oldest come first, so that each has its turn.
        oldest = self.running[: self._limits.max_running]
        decoding = [s for s in oldest if s.left_to_compute == 1]
        prefilling = [s for s in oldest if s.left_to_compute > 1]
        for sequence in decoding + prefilling:
            if budget < 1:
                break
            if sequence.state is not SequenceState.RUNNING or not self._grow(sequence):
                continue
            budget -= self._plan_chunk(planned, sequence, budget)
        while budget >= 1 and self.waiting and len(self.running) < self._limits.max_running:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break  # nobody overtakes: the oldest gets the next pages
            budget -= self._plan_chunk(planned, sequence, budget)
        # A sequence planned early may have been preempted for an older one planned later.
        return [(s, chunk) for s, chunk in planned if s.state is SequenceState.RUNNING]

    def _plan_chunk(self, planned: list[tuple[Sequence, Chunk]], sequence: Sequence, budget: int) -> int:
        count = min(sequence.left_to_compute, self._limits.chunk_tokens, budget)
        end = sequence.computed + count
        assert sequence.pages is not None
        chunk = Chunk(
            request_id=sequence.request_id,
            token_ids=sequence.tokens[sequence.computed : end],
            start=sequence.computed,
            page_table=sequence.pages.page_ids,
            sample=sequence.request.sampling if end == len(sequence.tokens) else None,
            history=sequence.tokens,
        )
        planned.append((sequence, chunk))
        return count

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    def _grow(self, sequence: Sequence) -> bool:
        """Pages for all of the sequence's tokens, preempting younger sequences where needed."""
        assert sequence.pages is not None
        while True:
            try:
                sequence.pages.grow(self._pages_for(len(sequence.tokens)))
                return True
            except NoFreePages:
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is sequence:
                    return False

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages; it computes them anew later, from the prefix cache as far as that still
        holds.
        """
        assert sequence.pages is not None
        self.running.remove(sequence)
        sequence.pages.release()
        sequence.pages = None
        sequence.computed = sequence.sealed = 0
        sequence.preemptions += 1
        self._counters.add("splitserve_preemptions_total")
        self.enqueue(sequence)

    def _admit(self, sequence: Sequence) -> bool:
        """Move the first waiting sequence to running if its tokens' pages can be had now."""
        if not self.reserve(sequence, keep_last_token=True):
            return False
        self.waiting.popleft()
        self.start(sequence)
        return True

    def reserve(self, sequence: Sequence, keep_last_token: bool) -> bool:
        """Own pages for all of the sequence's tokens, sharing what the prefix cache holds. False: not enough pages now.

        With ``keep_last_token`` at least one token stays to be computed, as a step has to produce logits.
        """
        usable = (len(sequence.tokens) - (1 if keep_last_token else 0)) // self._page_tokens
        shared = self._pool.cache.leading(sequence.names[:usable])
        hold = self._pool.hold(shared)
        try:
            hold.grow(self._pages_for(len(sequence.tokens)))
        except NoFreePages:
            hold.release()
            return False
        sequence.pages = hold
        sequence.computed = len(shared) * self._page_tokens
        sequence.sealed = len(shared)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
        return True
