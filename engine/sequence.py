"""One request inside the engine."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from splitserve.engine.page_pool import PageHold
from splitserve.engine.protocol import PageHash, Request, RequestId, TokenLogprobs, TransferRecord
from splitserve.kvtransfer.ticket import Ticket


class SequenceState(Enum):
    """Where a sequence is; each but RUNNING waits in a queue of its own."""

    WAITING = "waiting"  # for pages and a place in a step
    RECEIVING = "receiving"  # its pages are being read from a peer
    AWAITING = "awaiting"  # they are here, but its first token is not
    RUNNING = "running"  # takes part in steps


class Rank(NamedTuple):
    """Whose turn it is: the smaller goes first. A preempted sequence keeps its rank, so it goes before newcomers."""

    priority: int
    arrival: int


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens known, tokens computed, pages owned. ``len(tokens) - computed`` tokens are left to compute: 1 while
    decoding.
    """

    request: Request
    hand_over: bool  # stop after the first token and offer the pages to a peer
    ticket: Ticket | None  # where the prompt's pages can be had; None once tried
    arrival: int  # order of arrival on this worker; smaller is older
    awaiting: bool = False  # its first token is drawn by the sender of the ticket; in no step until ``follow``
    rank: Rank = field(init=False)
    client_prompt_tokens: int = field(init=False)  # what the client gave; all tokens that follow were drawn somewhere
    longest: int = field(init=False)  # most positions it can ever compute here; the last drawn token is not computed
    tokens: list[int] = field(init=False)
    names: list[PageHash] = field(init=False)  # of full pages known so far
    state: SequenceState = SequenceState.WAITING
    pages: PageHold | None = None  # in every state but WAITING
    computed: int = 0  # positions [0, computed) have their keys and values in ``pages``
    sealed: int = 0  # pages [0, sealed) are named in the prefix cache
    expects_pages: bool = False  # while WAITING: another sequence is computing or fetching its next page
    offer: str | None = None  # id of the ticket under which its pages were offered before they were filled
    transfer: TransferRecord | None = None  # not yet reported
    preemptions: int = 0
    computed_before: int = 0  # positions [0, computed_before) had been computed when it was preempted
    cached_tokens: int | None = None  # of the prompt, found in the prefix cache at first admission
    # Of the prompt's tokens from the second on, as far as they are computed; where the request asks for them
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.request
        self.rank = Rank(request.priority, self.arrival)
        self.client_prompt_tokens = len(request.prompt) - request.drawn
        self.longest = len(request.prompt) + (1 if self.hand_over else request.sampling.max_tokens) - 1
        self.tokens = list(request.prompt)
        self.names = list(request.page_hashes)

    def follow(self, request: Request) -> None:
        """Go on as ``request``, whose prompt is this one's and the first tokens after it. While in no queue."""
        names = self.names
        self.request, self.awaiting = request, False
        self.client_prompt_tokens = len(request.prompt) - request.drawn
        self.longest = len(request.prompt) + request.sampling.max_tokens - 1
        self.tokens = list(request.prompt)
        self.names = max(list(request.page_hashes), names, key=len)

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def new_tokens(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def left_to_compute(self) -> int:
        return len(self.tokens) - self.computed
