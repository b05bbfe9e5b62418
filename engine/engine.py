"""The engine: add, abort, step. One thread uses it; it knows nothing of workers' roles, of Ray or of clients.

The life of a sequence::

                       ┌──────── preempted ────────┐
                       ▼                           │
    add ──────────▶ WAITING ──pages──▶ RUNNING ──drawn tokens, finish──▶ gone
      │                ▲                  │
    with a ticket    failed               └──first token, hand_over──▶ gone; its pages wait under a lease
      ▼                │
    WAITING ──pages──▶ RECEIVING ──arrived──▶ RUNNING

A prompt of several chunks that is to be handed over is offered before its first chunk is computed: its update with a
ticket is announced ahead of the step. At the other end the prompt is added as *awaiting*, without the first token::

                             ┌── proceed ──▶ as with a ticket above
    WAITING ──▶ RECEIVING ───┤
       │            │        └── arrived ──▶ AWAITING ──proceed──▶ RUNNING
       └────────────┴── failed, no room ──▶ gone: ERROR, while there is time to go on another way
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve.engine.counters import Counters
from splitserve.engine.handover import Handover
from splitserve.engine.page_hash import PageHasher
from splitserve.engine.page_pool import PagePool
from splitserve.engine.protocol import FinishReason, Load, PageHash, Request, RequestId, SequenceUpdate
from splitserve.engine.request_check import objection
from splitserve.engine.scheduler import Scheduler, SchedulerLimits
from splitserve.engine.sequence import Sequence, SequenceState
from splitserve.engine.step import Chunk, ChunkOutput, Runner
from splitserve.kvtransfer.ticket import Ticket

logger = logging.getLogger(__name__)


class RequestRefused(Exception):
    """A request that this engine can never compute, or one whose id is in use. The message names the limit."""


@dataclass
class StepResult:
    """What one call of ``step`` did."""

    updates: list[SequenceUpdate] = field(default_factory=list)
    stored: list[PageHash] = field(default_factory=list)
    removed: list[PageHash] = field(default_factory=list)
    step_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0

    @property
    def computed(self) -> bool:
        return self.prefill_tokens + self.decode_tokens > 0


class Engine:
    """Computes requests on one runner. ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        runner: Runner,
        pool: PagePool,
        hasher: PageHasher,
        limits: SchedulerLimits,
        handover: Handover,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._hasher = hasher
        self._clock = clock
        self._handover = handover
        self._scheduler = Scheduler(pool, runner.layout.page_tokens, limits, counters)
        self._sequences: dict[RequestId, Sequence] = {}
        self._newly_awaiting: list[Sequence] = []
        self._arrivals = 0
        self._ended: list[SequenceUpdate] = []
        self._stuck = False
        self._counters = counters
        self.steps = 0

    # Requests

    def add(
        self, request: Request, *, hand_over: bool = False, ticket: Ticket | None = None, awaiting: bool = False
    ) -> None:
        """Take a request on. With ``ticket`` the prompt's pages are read from a peer; should that fail they are
        computed here. ``awaiting``: the ticket is for all of the prompt, whose first token is still to be drawn there;
        the request waits for ``proceed``, and should its pages not come it ends with an error.

        Raises RequestRefused; then nothing is held.
        """
        self._check(request, hand_over)
        self._check_ticket(request, ticket, awaiting)
        sequence = Sequence(
            request=request, hand_over=hand_over, ticket=ticket, arrival=self._arrivals, awaiting=awaiting
        )
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        self._scheduler.enqueue(sequence)
        if ticket is not None:
            self._handover.receiving.expect(sequence, self._clock())
        if awaiting:
            self._newly_awaiting.append(sequence)
        self._stuck = False

    def proceed(self, request: Request) -> bool:
        """An awaited first token is there: ``request`` has it at the end of its prompt. Its pages need not be here yet.

        False when no such request is awaiting, because it has ended. One that does not go on from what was awaited
        ends with an error.
        """
        sequence = self._sequences.get(request.request_id)
        if sequence is None or not sequence.awaiting:
            return False
        known = sequence.request.prompt
        if len(request.prompt) <= len(known) or request.prompt[: len(known)] != known:
            wrong = f"what follows {len(known)} awaited tokens does not begin with them"
            self._end(sequence, SequenceUpdate(request.request_id, [], FinishReason.ERROR, error=wrong))
            return False
        self._handover.receiving.complete(sequence, self._clock())
        self._scheduler.remove(sequence)
        sequence.follow(request)
        self._scheduler.put_back(sequence)
        self._stuck = False
        return True

    def abort(self, request_id: RequestId) -> bool:
        """End a request in whatever state it is, its lease included. False when there is nothing to end."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return self._handover.sending.abort(request_id)
        self._end(sequence, SequenceUpdate(request_id, [], FinishReason.ABORT))
        return True

    def _check(self, request: Request, hand_over: bool) -> None:
        if request.request_id in self._sequences:
            raise RequestRefused(f"request id {request.request_id!r} is in use")
        if not request.prompt or request.sampling.max_tokens < 1:
            raise RequestRefused("a request needs at least one prompt token and max_tokens of at least 1")
        reason = objection(request)
        if reason is not None:
            raise RequestRefused(reason)
        new_tokens = 1 if hand_over else request.sampling.max_tokens
        # The last drawn token is never computed, so it needs no place in a page.
        room = self._pool.total * self._runner.layout.page_tokens
        model, pool = self._runner.max_model_tokens, room + 1
        if len(request.prompt) + new_tokens > min(model, pool):
            limit = f"the model's {model} tokens" if model <= pool else f"this worker's pool of {room} tokens"
            raise RequestRefused(f"a prompt of {len(request.prompt)} tokens and {new_tokens} new exceed {limit}")

    def _check_ticket(self, request: Request, ticket: Ticket | None, awaiting: bool) -> None:
        if ticket is None:
            if awaiting:
                raise RequestRefused("a request whose first token is awaited needs a ticket that can be read")
            return
        covered, prompt = ticket.tokens, len(request.prompt)
        if covered != prompt if awaiting else covered >= prompt:
            raise RequestRefused(f"the ticket covers {covered} tokens of a prompt of {prompt}")
        if request.sampling.prompt_logprobs is not None:
            raise RequestRefused("prompt_logprobs need the prompt computed here, and there is a ticket for its pages")

    # A step

    @property
    def idle(self) -> bool:
        """Nothing to compute and nothing under way with peers: ``step`` can wait for a request."""
        return not self._sequences and not self._handover.active and not self._ended

    @property
    def transferring(self) -> bool:
        """Whether a peer or a transfer may need attention soon. Safe to ask from any thread."""
        return self._handover.active

    @property
    def computing(self) -> bool:
        """Whether the next step has something to compute. If not, but not idle either, a peer's pages or word may
        come, or a lease end that holds the pages which everybody waits for.
        """
        return not self._stuck and bool(self._scheduler.running or self._scheduler.waiting)

    def step(self, announce: Callable[[list[SequenceUpdate]], object] = lambda updates: None) -> StepResult:
        """Look after transfers, then compute one step if there is anything to compute. ``announce`` is called before
        that with updates that must not wait for it. Does not raise for a request's sake.
        """
        self._scheduler.backlog = self._handover.sending.backlog
        self._receive()
        self._handover.poll(self._clock(), self._arrived, self._failed)
        plan = self._scheduler.plan()
        self._stuck = not plan
        result = StepResult()
        if plan:
            offers = [self._offer(sequence) for sequence, chunk in plan if is_worth_an_offer(sequence, chunk)]
            if offers:
                announce(offers)
            self._compute(plan, result)
        result.updates = self._ended + result.updates
        self._ended = []
        result.stored, result.removed = self._pool.cache.drain_events()
        return result

    def _compute(self, plan: list[tuple[Sequence, Chunk]], result: StepResult) -> None:
        started = self._clock()
        try:
            outputs = self._runner.run([chunk for _, chunk in plan])
        except Exception:
            # The pages of this step are in doubt, so are the requests that own them; everybody else goes on.
            logger.exception("a step failed; its %d requests end with an error", len(plan))
            self._counters.add("splitserve_failed_steps_total")
            for sequence, _ in plan:
                self._end(
                    sequence, SequenceUpdate(sequence.request_id, [], FinishReason.ERROR, error="the step failed")
                )
            return
        result.step_s = self._clock() - started
        self.steps += 1
        for (sequence, chunk), output in zip(plan, outputs, strict=True):
            self._advance(sequence, chunk, output, result)
        count = self._counters.add
        count("splitserve_steps_total")
        count("splitserve_step_seconds_total", result.step_s)
        count("splitserve_prefill_tokens_total", result.prefill_tokens)
        count("splitserve_decode_tokens_total", result.decode_tokens)

    def _advance(self, sequence: Sequence, chunk: Chunk, output: ChunkOutput, result: StepResult) -> None:
        token = output.token
        if chunk.start and len(chunk.token_ids) == 1:
            result.decode_tokens += 1
        else:
            result.prefill_tokens += len(chunk.token_ids)
        if token is None and chunk.sample is not None:
            # Its pages may hold what made the logits unusable, so they are not named for others.
            self._end(sequence, SequenceUpdate(sequence.request_id, [], FinishReason.ERROR, error="no finite logits"))
            return
        sequence.computed = chunk.end
        self._seal(sequence)
        sequence.prompt_logprobs += output.prompt_logprobs
        if token is None:
            self._handover.sending.sealed(sequence, self._clock())
            return
        sequence.tokens.append(token)
        update = SequenceUpdate(sequence.request_id, [token], self._finish_reason(sequence, token))
        if output.logprobs is not None:
            update.logprobs = [output.logprobs]
        update.transfer, sequence.transfer = sequence.transfer, None
        if sequence.new_tokens == 1:
            update.cached_tokens = sequence.cached_tokens
            if sequence.request.sampling.prompt_logprobs is not None:
                update.prompt_logprobs = sequence.prompt_logprobs
        if update.finish is None and sequence.hand_over:
            update.finish = FinishReason.HANDED_OVER
            update.ticket = self._handover.sending.finish(sequence, self._clock())
        if update.finish is not None:
            self._leave(sequence)
        result.updates.append(update)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        sampling = sequence.request.sampling
        ends = token in sampling.stop_token_ids or (token in self._runner.eos_token_ids and not sampling.ignore_eos)
        # A runner with a model does not even draw such a token any earlier.
        if ends and len(sequence.tokens) - sequence.client_prompt_tokens > sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.new_tokens >= sampling.max_tokens else None

    def _seal(self, sequence: Sequence) -> None:
        """Name every page that is full now, so that others can share it."""
        page_tokens = self._hasher.page_tokens
        assert sequence.pages is not None
        while (sequence.sealed + 1) * page_tokens <= sequence.computed:
            index = sequence.sealed
            if index == len(sequence.names):
                parent = sequence.names[-1] if sequence.names else self._hasher.root_for(sequence.request.cache_salt)
                page = sequence.tokens[index * page_tokens : (index + 1) * page_tokens]
                sequence.names.append(self._hasher.extend(parent, page))
            sequence.pages.seal(index, sequence.names[index])
            sequence.sealed += 1

    # Sending and receiving

    def _offer(self, sequence: Sequence) -> SequenceUpdate:
        return SequenceUpdate(sequence.request_id, [], ticket=self._handover.sending.begin(sequence, self._clock()))

    def _receive(self) -> None:
        for sequence in self._scheduler.start_receptions():
            self._handover.receiving.fetch(sequence, self._clock())
        for sequence in self._newly_awaiting:
            why = self._scheduler.objection_to(sequence) if sequence.awaiting else None
            if why is not None:
                self._end(sequence, SequenceUpdate(sequence.request_id, [], FinishReason.ERROR, error=why))
        self._newly_awaiting = []

    def _arrived(self, sequence: Sequence) -> None:
        sequence.ticket = None
        self._seal(sequence)
        if sequence.awaiting:
            sequence.state = SequenceState.AWAITING
        else:
            self._scheduler.start(sequence)

    def _failed(self, sequence: Sequence, why: str) -> None:
        if sequence.awaiting:
            record = sequence.transfer
            update = SequenceUpdate(sequence.request_id, [], FinishReason.ERROR, error=why, transfer=record)
            self._end(sequence, update)
            return
        self._counters.add("splitserve_kv_recomputed_total")
        self._scheduler.remove(sequence)
        sequence.ticket = None
        self._scheduler.enqueue(sequence)

    # The end

    def _end(self, sequence: Sequence, update: SequenceUpdate) -> None:
        self._leave(sequence)
        self._ended.append(update)

    def _leave(self, sequence: Sequence) -> None:
        """The sequence has reached its terminal state: it is in no queue and owns nothing."""
        self._scheduler.remove(sequence)
        sequence.awaiting = False
        self._handover.sending.withdraw(sequence)
        if sequence.ticket is not None:
            self._handover.receiving.abandon(sequence, self._clock())
        del self._sequences[sequence.request_id]
        if sequence.pages is not None:
            sequence.pages.release()
            sequence.pages = None

    def close(self) -> None:
        """End every request and lease, and let go of the transport."""
        for request_id in list(self._sequences):
            self.abort(request_id)
        self._handover.close(self._clock())

    # What it looks like from outside

    def load(self) -> Load:
        sending = self._handover.sending
        waiting, to_receive, running = self._scheduler.waiting, self._scheduler.to_receive, self._scheduler.running
        return Load(
            waiting=len(waiting) + len(to_receive) + len(self._scheduler.receiving),
            waiting_tokens=waiting.tokens + to_receive.tokens + sum(s.left_to_compute for s in running),
            running=len(running),
            free_pages=self._pool.free_pages,
            cached_pages=self._pool.cached_pages,
            held_pages=self._pool.held_pages,
            total_pages=self._pool.total,
            leased_pages=sending.leased_pages,
            open_leases=sending.open_leases,
            claimed_leases=sending.claimed_leases,
            held_back=self._scheduler.held_back,
        )

    def cached_names(self) -> list[PageHash]:
        """Names of all pages that can be shared now."""
        return self._pool.cache.names()


def is_worth_an_offer(sequence: Sequence, chunk: Chunk) -> bool:
    """Whether a peer could read pages of this prompt while the rest of it is computed."""
    several_chunks = chunk.sample is None and sequence.request.sampling.max_tokens > 1
    return sequence.hand_over and several_chunks and sequence.offer is None
