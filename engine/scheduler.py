"""Which tokens the next step computes. This file decides; it computes nothing and talks to no one.

What may live here: the order of sequences, the token budget, admission, preemption. How many pages an admission has to
leave is ``headroom.py``; what can be shared is ``prefix_sharing.py``; what goes to peers and comes from them is
``handover.py``; what happens with drawn tokens is ``engine.py``.

Order. Everything goes by ``Sequence.rank``, priority first, then age: who gets the budget, who starts next, who keeps
his pages. A waiting sequence never displaces a running one, and nothing ages: that the less urgent get their share is
for admission at the gateways to see to, which knows all workers.

Pages. A sequence owns pages for all tokens it knows, from its admission on; only decoding makes it need more. When
there are none, the last of the running sequences give up theirs, as few of them as will do, and never one that goes
before the sequence in need. Where all of them together would not do, because leases and receptions hold the rest,
nobody is preempted: the sequence keeps what it has and waits for these to end, which they do by their deadlines.

Prompts in flight. A waiting sequence whose next page is being computed by one that goes before it is passed over until
that page can be shared. Nothing is noted anywhere but in a flag for this step: when the other one is aborted,
preempted or fails, the next step finds nobody who computes the page.

Offers. A prompt whose pages a peer may be reading already is no victim: to compute it anew would be for nothing, and
the peer, who holds pages for it, would wait. It owns all pages it will ever need and goes on by itself, so whoever
waits for its pages waits for a bounded time, and no two workers can wait for each other. While peers have much to fetch
here, prompts that are to be handed over are passed over; all others start as ever.
"""

from bisect import insort
from collections.abc import Sequence as Collection
from dataclasses import dataclass, field
from itertools import takewhile

from splitserve.engine.counters import Counters
from splitserve.engine.headroom import Headroom
from splitserve.engine.page_pool import PagePool
from splitserve.engine.prefix_sharing import is_in_flight, sharable_prefix
from splitserve.engine.protocol import PageId
from splitserve.engine.sequence import Sequence, SequenceState
from splitserve.engine.step import Chunk
from splitserve.engine.waiting_queue import WaitingQueue


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of one step, and of what a request must put up with."""

    step_tokens: int = 512  # most tokens computed in one step, decode tokens included
    chunk_tokens: int = 256  # most prompt tokens of one sequence in one step
    max_running: int = 64  # sequences in one step
    max_preemptions: int = 4  # of one request
    headroom_pages: int = 1  # left for each running sequence when another one starts


@dataclass
class _Draft:
    """A step that is being put together."""

    budget: int  # tokens
    planned: list[tuple[Sequence, Chunk]] = field(default_factory=list)
    prefilling: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Queues of one engine. Decode tokens go first, then prompts under way, then new prompts."""

    def __init__(self, pool: PagePool, page_tokens: int, limits: SchedulerLimits, counters: Counters) -> None:
        self.waiting = WaitingQueue()
        self.to_receive = WaitingQueue()  # with a ticket, and no pages yet to read into
        self.receiving: list[Sequence] = []  # own their pages, and may be waiting for a token from elsewhere
        self.backlog = False  # whether prompts that are to be handed over must wait; set before each step
        self.running: list[Sequence] = []  # by rank
        self._pool = pool
        self._page_tokens = page_tokens
        self._limits = limits
        self._counters = counters
        self._headroom = Headroom(pool, page_tokens, limits.headroom_pages, limits.max_preemptions)
        # Bounds the work of a step when a crowd waits for the same prompt: no more than these could start anyway.
        self._looked_at = 2 * limits.max_running

    def enqueue(self, sequence: Sequence) -> None:
        """Let a sequence that is in no queue wait for its turn."""
        sequence.state = SequenceState.WAITING
        sequence.expects_pages = False
        self._queue_of(sequence).push(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Let a sequence go on where ``remove`` took it out, if its pages are here as one that takes part in steps."""
        if sequence.state is SequenceState.WAITING:
            self.enqueue(sequence)
        elif sequence.state is SequenceState.RECEIVING:
            self.receiving.append(sequence)
        else:
            self._run(sequence)

    def start(self, sequence: Sequence) -> None:
        """Let a sequence that owns its pages take part in steps."""
        if sequence.state in (SequenceState.RECEIVING, SequenceState.AWAITING):
            self.receiving.remove(sequence)
        self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=lambda s: s.rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence; its pages stay with their owner."""
        if sequence.state is SequenceState.WAITING:
            self._queue_of(sequence).remove(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        else:
            self.receiving.remove(sequence)

    def _queue_of(self, sequence: Sequence) -> WaitingQueue:
        return self.waiting if sequence.ticket is None else self.to_receive

    # Receptions

    def start_receptions(self) -> list[Sequence]:
        """Sequences that may read what their tickets offer, into pages that they own from now on."""
        started: list[Sequence] = []
        if not self.to_receive:
            return started
        waiting = [s for s in self.waiting.first(self._looked_at) if not self._is_held_back(s)]
        fetching = [*self.receiving, *(s for s in self.running if s.left_to_compute > 1)]
        for sequence in self.to_receive.first(self._looked_at):
            if _goes_before(waiting, sequence):
                break
            prefix = sharable_prefix(sequence, self._pool.cache, self._page_tokens)
            sequence.expects_pages = is_in_flight(prefix, sequence, fetching)
            if sequence.expects_pages:
                continue
            if not self._reserve(sequence, prefix.pages):
                break
            self.to_receive.remove(sequence)
            sequence.state = SequenceState.RECEIVING
            self.receiving.append(sequence)
            fetching.append(sequence)
            started.append(sequence)
        return started

    def objection_to(self, sequence: Sequence) -> str | None:
        """Why a sequence that waits to receive should rather not: those before it want more pages than there are."""
        if sequence.state is not SequenceState.WAITING or sequence.expects_pages:
            return None
        before = (s for s in self.to_receive if s.rank < sequence.rank)
        wanted, available = sum(self._pages_for(s) for s in before), self._pool.available_pages
        return f"no room: others want {wanted} pages before it, {available} can be had" if wanted > available else None

    # A step

    @property
    def held_back(self) -> int:
        """Waiting sequences that may not start because of the backlog."""
        return sum(map(self._is_held_back, self.waiting)) if self.backlog else 0

    def _is_held_back(self, sequence: Sequence) -> bool:
        return self.backlog and sequence.hand_over

    def plan(self) -> list[tuple[Sequence, Chunk]]:
        """The next step. Empty when nothing can be computed. Pages for what it contains are owned by the sequences."""
        draft = _Draft(self._limits.step_tokens)
        # Receptions may bring more than fit into a step; the first come first, so that each has its turn.
        decoding: list[Sequence] = []
        for sequence in self.running[: self._limits.max_running]:
            (decoding if sequence.left_to_compute == 1 else draft.prefilling).append(sequence)
        self._plan_decoding(draft, decoding)
        draft.prefilling = [s for s in draft.prefilling if s.state is SequenceState.RUNNING]  # not just preempted
        for sequence in draft.prefilling:
            if draft.budget < 1:
                break
            self._plan_chunk(draft, sequence)
        self._admit(draft)
        return draft.planned

    def _plan_decoding(self, draft: _Draft, decoding: list[Sequence]) -> None:
        pages_short = False
        for sequence in decoding:
            if draft.budget < 1 or sequence.state is not SequenceState.RUNNING:
                return  # those that come after a preempted one are preempted too
            pages = sequence.pages
            assert pages is not None
            if sequence.computed % self._page_tokens == 0 and sequence.computed == len(pages) * self._page_tokens:
                # What could not be had for one that goes before can't be had for this one.
                pages_short = pages_short or not self._make_room(sequence)
                if pages_short:
                    continue
                pages.grow(len(pages) + 1)
            self._plan_chunk(draft, sequence)

    def _plan_chunk(self, draft: _Draft, sequence: Sequence) -> None:
        assert sequence.pages is not None
        start, tokens, sampling = sequence.computed, sequence.tokens, sequence.request.sampling
        end = start + min(len(tokens) - start, self._limits.chunk_tokens, draft.budget)
        asked = sampling.prompt_logprobs
        if asked is not None:
            known, wanted = len(sequence.prompt_logprobs), sequence.client_prompt_tokens - 1
            if start < known < wanted:
                end = min(end, known)  # a chunk of what was reported before a preemption ends where that ends
            if not known <= start < wanted:
                asked = None
        chunk = Chunk(
            request_id=sequence.request.request_id,
            token_ids=tokens[start:end],
            start=start,
            page_table=sequence.pages.page_ids,
            sample=sampling if end == len(tokens) else None,
            history=tokens,
            prompt_tokens=sequence.client_prompt_tokens,
            prompt_logprobs=asked,
        )
        draft.planned.append((sequence, chunk))
        draft.budget -= end - start
        if start < sequence.computed_before:
            self._counters.add("splitserve_recomputed_tokens_total", min(end, sequence.computed_before) - start)

    def _admit(self, draft: _Draft) -> None:
        receptions = self.to_receive.first(self._looked_at)
        for sequence in self.waiting.first(self._looked_at):
            if self._is_held_back(sequence):
                self._counters.add("splitserve_held_back_total")
                continue
            if draft.budget < 1 or len(self.running) >= self._limits.max_running:
                return
            if _goes_before(receptions, sequence):
                return
            prefix = sharable_prefix(sequence, self._pool.cache, self._page_tokens)
            sequence.expects_pages = is_in_flight(prefix, sequence, draft.prefilling)
            if sequence.expects_pages:
                continue
            if not self._reserve(sequence, prefix.pages):
                return  # nobody overtakes: the first in line gets the next pages
            self.waiting.remove(sequence)
            self.start(sequence)
            draft.prefilling.append(sequence)
            self._plan_chunk(draft, sequence)

    # Pages

    def _pages_for(self, sequence: Sequence) -> int:
        return self._headroom.pages_for(len(sequence.tokens))

    def _reserve(self, sequence: Sequence, shared: list[PageId]) -> bool:
        """Own ``shared`` and pages for all other tokens. False: not now, and nothing has changed."""
        available = self._pool.available_pages + len(shared) - self._pool.idle_among(shared)
        if not self._headroom.admits(sequence, available, [*self.running, *self.receiving]):
            return False
        sequence.pages = self._pool.hold(shared)
        sequence.pages.grow(self._pages_for(sequence))
        sequence.computed = len(shared) * self._page_tokens
        sequence.sealed = len(shared)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
        return True

    def _make_room(self, sequence: Sequence) -> bool:
        """See to it that a page can be had, preempting the fewest of those that go after ``sequence`` and have offered
        no pages. False: not even all of them would do, and nobody was preempted.
        """
        if self._pool.available_pages:
            return True
        behind = takewhile(lambda s: s is not sequence and not self._headroom.is_protected(s), reversed(self.running))
        candidates = [s for s in behind if s.offer is None]
        gains = self._pool.gains(s.pages for s in candidates if s.pages is not None)
        victims = next((count for count, gained in enumerate(gains, start=1) if gained), 0)
        for victim in candidates[:victims]:
            self._preempt(victim)
        return victims > 0

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages; it computes them anew later, from the prefix cache as far as that still
        holds.
        """
        assert sequence.pages is not None
        self.running.remove(sequence)
        sequence.pages.release()
        sequence.pages = None
        sequence.computed_before = max(sequence.computed_before, sequence.computed)
        sequence.computed = sequence.sealed = 0
        sequence.preemptions += 1
        self._counters.add("splitserve_preemptions_total")
        self.enqueue(sequence)


def _goes_before(queue: Collection[Sequence], sequence: Sequence) -> bool:
    """Whether the first in ``queue`` that waits for pages of its own has its turn before ``sequence``."""
    first = next((s for s in queue if not s.expects_pages), None)
    return first is not None and first.rank < sequence.rank
