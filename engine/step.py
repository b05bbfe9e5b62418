"""One step of the engine as plain data: what the scheduler decides and a runner computes."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from splitserve.engine.protocol import PageId, RequestId, SamplingParams, TokenLogprobs
from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.transport import PoolMemory


class Chunk(msgspec.Struct, frozen=True):
    """The tokens of one sequence that a step computes: positions [start, start + len(token_ids))."""

    request_id: RequestId
    token_ids: Sequence[int]
    start: int
    page_table: Sequence[PageId]  # covers at least positions [0, start + len(token_ids)), by absolute page index
    sample: SamplingParams | None  # None: the prompt goes on in a later chunk, draw nothing
    history: Sequence[int] = ()  # the sequence's tokens; at least [0, end)
    prompt_tokens: int = 0  # ``history`` from here on is output: what penalties and ``min_tokens`` count
    prompt_logprobs: int | None = None  # alternatives to report of the tokens that follow this chunk's in the prompt

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class ChunkOutput(msgspec.Struct, frozen=True):
    """What a step made of one chunk."""

    token: int | None = None  # drawn; None where the chunk does not sample, or its logits were not finite
    logprobs: TokenLogprobs | None = None  # of ``token``, where ``sample`` asks for it
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of ``history[start + 1 : end + 1]`` as far as it is prompt


class Runner(Protocol):
    """Computes steps over a pool of pages that it owns. Used by one thread; nothing here is safe to call from two."""

    @property
    def layout(self) -> PageLayout:
        """Shape of one page."""

    @property
    def num_pages(self) -> int:
        """Pages in the pool, measured or configured at start."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence (prompt and output) the model can hold."""

    def memory(self) -> PoolMemory:
        """The pool's memory, for registration with a transport. Stays at this address for the runner's life."""

    def run(self, chunks: Sequence[Chunk]) -> list[ChunkOutput]:
        """Compute every chunk, write its keys and values into the pages, and draw one token after each chunk that
        samples.

        Blocking: on return the pages hold what was computed, also for peers that read them past this process. Returns
        one entry per chunk, in order. No token for a chunk that samples means that its logits were not finite: that
        sequence can't go on, the others can. Within a step no page is written by two chunks. Raises only on our own
        mistakes or a failing device; the step then counts as not done.
        """
