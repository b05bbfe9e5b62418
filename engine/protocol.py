"""The words that engine, router and cluster exchange: plain data, no torch, no Ray.

Everything here crosses process borders as msgpack with this fixed schema (``msgspec`` checks types and refuses the
rest); nothing that arrives is ever unpickled.
"""

from enum import StrEnum
from typing import Annotated, NewType

import msgspec

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
PageId = NewType("PageId", int)
PageHash = NewType("PageHash", bytes)
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Alternatives = Annotated[int, msgspec.Meta(ge=0, le=20)]


class Role(StrEnum):
    """What a worker does at the moment. A state of the worker, not a class of its own."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    """Why a sequence ended on a worker."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the gateway asked for it
    HANDED_OVER = "handed_over"  # prefill is done; the ticket says where the pages are
    ERROR = "error"  # the worker could not go on; ``SequenceUpdate.error`` says why


class SamplingParams(msgspec.Struct, frozen=True):
    """How the tokens of one request are drawn, and when to end.

    The draw at absolute position ``p`` depends on ``(seed, p)`` and the logits alone: not on the batch, the worker, or
    what happened before.
    """

    max_tokens: int  # >= 1, new tokens
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0  # 0 = greedy
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0  # draw among the fewest likeliest that reach this share
    seed: int = 0  # 64 bits; the gateway draws one where the client gives none
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=1024)] = ()
    ignore_eos: bool = False
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0  # draw among so many of the likeliest tokens; 0 = among all
    min_p: Share = 0.0  # leave out tokens less likely than this times the likeliest
    # Divides positive and multiplies other logits of tokens seen in prompt or output
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0
    presence_penalty: Penalty = 0.0  # subtracted once from logits of tokens in the output
    frequency_penalty: Penalty = 0.0  # subtracted for each occurrence in the output
    logit_bias: Annotated[tuple[tuple[TokenId, Penalty], ...], msgspec.Meta(max_length=1 << 18)] = ()  # added to logits
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0  # no end-of-sequence or stop token before so many of the output
    logprobs: Alternatives | None = None  # alternatives to report beside each drawn token; None: no log-probabilities
    # The same of the prompt's tokens; such a prompt reads nothing from a cache and is not read from a peer
    prompt_logprobs: Alternatives | None = None


class Request(msgspec.Struct, frozen=True):
    """One sequence to compute.

    ``prompt`` holds all tokens known so far: a request that resumes on another worker carries what it had already
    produced as the tail of its prompt, and less ``max_tokens``.
    """

    request_id: RequestId
    prompt: tuple[TokenId, ...]
    page_hashes: tuple[PageHash, ...]  # of the prompt's full pages, by absolute index
    sampling: SamplingParams
    drawn: int = 0  # so many of ``prompt``'s last tokens are output that was drawn elsewhere
    priority: int = 0  # lower goes first; of equals the older
    cache_salt: str = ""  # only requests with the same salt share pages; part of ``page_hashes``


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Natural logarithms of probabilities at one position, of the model's own distribution: before penalties, bias,
    temperature and cuts.
    """

    logprob: float  # of the token that is there
    top_ids: tuple[int, ...] = ()  # the likeliest tokens, likeliest first, ties by id
    top_logprobs: tuple[float, ...] = ()


class TransferRecord(msgspec.Struct, array_like=True, frozen=True):
    """What moving a prompt's pages to a worker came to."""

    source: WorkerId  # the sender
    pages: int  # read from it
    bytes: int
    reused_pages: int  # of the ticket, found in the receiver's own prefix cache
    hidden_pages: int  # read before the sender had computed the last of them
    seconds: float  # from the first read to the end
    tail_s: float  # from the news that the last page is computed to the end
    cause: str | None = None  # why it failed, as a fixed word; None: it did not


class SequenceUpdate(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step did for one request."""

    request_id: RequestId
    tokens: list[int]
    finish: FinishReason | None = None
    # Encoded ``kvtransfer.ticket.Ticket``, opaque to everyone but workers. Before any token: pages that are about to be
    # filled. With HANDED_OVER: filled pages; none if the receiver of the ticket before has them already
    ticket: bytes | None = None
    error: str | None = None  # with ERROR only
    cached_tokens: int | None = None  # prompt tokens not computed because a prefix was cached; with the first token
    logprobs: list[TokenLogprobs] | None = None  # one for each of ``tokens``, where asked for
    # One for each prompt token but the first, with the first token, where asked for
    prompt_logprobs: list[TokenLogprobs] | None = None
    transfer: TransferRecord | None = None  # of the prompt's pages, with the first update after it ended

    def extend(self, later: "SequenceUpdate") -> None:
        """Add what the steps after this one's did for the same request."""
        self.tokens.extend(later.tokens)
        self.finish, self.ticket, self.error = later.finish, later.ticket, later.error
        if self.cached_tokens is None:
            self.cached_tokens = later.cached_tokens
        if self.transfer is None:
            self.transfer = later.transfer
        if self.prompt_logprobs is None:
            self.prompt_logprobs = later.prompt_logprobs
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            self.logprobs.extend(later.logprobs)


class Load(msgspec.Struct, array_like=True, frozen=True):
    """A worker's load after a step. Pages: free + cached + held = total."""

    waiting: int = 0  # sequences
    waiting_tokens: int = 0  # prompt tokens not yet computed, of waiting and running sequences
    running: int = 0
    free_pages: int = 0
    cached_pages: int = 0  # in the prefix cache, held by nobody: can be taken at once
    held_pages: int = 0  # of sequences, leases and receptions
    total_pages: int = 0
    leased_pages: int = 0  # of those held, offered to peers
    open_leases: int = 0
    claimed_leases: int = 0  # of the open ones, those that a peer has asked for
    held_back: int = 0  # of ``waiting``, those that may not start until peers have fetched what is leased


class Counted(msgspec.Struct, array_like=True, frozen=True):
    """A monotone total since the incarnation began."""

    name: str  # as in Prometheus, *_total
    total: float
    labels: dict[str, str]


class WorkerFacts(msgspec.Struct, array_like=True, frozen=True):
    """What does not change while a worker lives; sent with each snapshot."""

    page_tokens: int
    total_pages: int
    max_model_tokens: int

    @property
    def pool_tokens(self) -> int:
        return self.page_tokens * self.total_pages


class StepReport(msgspec.Struct, array_like=True):
    """One message of a worker's feed. ``number`` rises by one; a snapshot, with ``facts``, starts a new count."""

    worker: WorkerId
    incarnation: int
    role: Role
    number: int
    facts: WorkerFacts | None  # set in a snapshot: ``stored`` is all the worker has; forget what was known
    updates: list[SequenceUpdate]
    stored: list[PageHash]  # pages that became sharable
    removed: list[PageHash]
    load: Load
    step_s: float  # measured duration of the step; 0 when there was none
    prefill_tokens: int  # computed in the step
    decode_tokens: int
    steps: int  # completed since the worker started, warm-up included
    counters: list[Counted] | None  # all of them; None: as in the report before
