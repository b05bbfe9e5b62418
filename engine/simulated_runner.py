"""A runner without a model: the engine's scheduler, pages and hand-over at any speed, on any machine.

Tokens are a function of (seed, position). A page's content names what it was computed from: every token slot holds a
64-bit digest of all tokens up to and including its own, so a page that belongs to another prompt, or to another place
in this one, is noticed when it is read. (The digest names the tokens and not the request, because requests share the
pages of a common prefix.)
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from splitserve.engine.protocol import RequestId, TokenLogprobs
from splitserve.engine.step import Chunk, ChunkOutput
from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.transport import PoolMemory

MASK = (1 << 64) - 1
CERTAIN = TokenLogprobs(0.0)
REMEMBERED_REQUESTS = 4096  # digests of this many sequences are kept; others are computed anew


class ForeignPage(Exception):
    """A page holds something else than the keys and values of the tokens it should hold."""


def mix(value: int) -> int:
    """A bijection of 64 bits that looks random (the finaliser of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


class SimulatedRunner:
    """Implements ``engine.step.Runner``. ``step_seconds`` gives a step's duration, ``sleep`` spends it (or moves a
    virtual clock).
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_tokens: int,
        vocab_size: int,
        max_model_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        step_seconds: Callable[[Sequence[Chunk]], float] = lambda chunks: 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.layout = PageLayout(
            model=f"simulated-{vocab_size}", layers=1, kv_heads=1, page_tokens=page_tokens, head_dim=1, dtype="float32"
        )
        self.num_pages = num_pages
        self.eos_token_ids = eos_token_ids
        self.max_model_tokens = max_model_tokens
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._sleep = sleep
        # [pages, page_tokens]: one digest takes the place of the two float32 values (key, value) of a token
        self._pool: NDArray[np.uint64] = np.zeros((num_pages, page_tokens), dtype=np.uint64)
        self._digests: OrderedDict[RequestId, list[int]] = OrderedDict()

    def memory(self) -> PoolMemory:
        return PoolMemory(
            address=self._pool.ctypes.data,
            page_bytes=self.layout.page_bytes,
            num_pages=self.num_pages,
            owner=self._pool,
        )

    def run(self, chunks: Sequence[Chunk]) -> list[ChunkOutput]:
        seconds = self._step_seconds(chunks)
        for chunk in chunks:
            self._check_and_write(chunk)
        if seconds > 0:
            self._sleep(seconds)
        return [self._output(chunk) for chunk in chunks]

    def _output(self, chunk: Chunk) -> ChunkOutput:
        """Whoever asks for log-probabilities hears that every token was certain."""
        said = 0 if chunk.prompt_logprobs is None else min(chunk.end, chunk.prompt_tokens - 1) - chunk.start
        prompt = (CERTAIN,) * max(0, said)
        if chunk.sample is None:
            return ChunkOutput(prompt_logprobs=prompt)
        logprobs = None if chunk.sample.logprobs is None else CERTAIN
        return ChunkOutput(self._draw(chunk.sample.seed, chunk.end), logprobs, prompt)

    def _draw(self, seed: int, position: int) -> int:
        token = mix(mix(seed & MASK) + position) % self._vocab_size
        while token in self.eos_token_ids:
            token = (token + 1) % self._vocab_size
        return token

    def _check_and_write(self, chunk: Chunk) -> None:
        page_tokens = self.layout.page_tokens
        known = chunk.request_id in self._digests
        digests = self._digests_of(chunk)
        if chunk.start:
            last = chunk.start - 1
            # Everything at first sight; later the newest token, and one of the older pages in turn.
            positions = [last, chunk.end * 7919 % chunk.start] if known else range(chunk.start)
            for position in positions:
                page = chunk.page_table[position // page_tokens]
                if int(self._pool[page, position % page_tokens]) != digests[position]:
                    raise ForeignPage(f"page {page} does not hold position {position} of {chunk.request_id}")
        for position in range(chunk.start, chunk.end):
            page = chunk.page_table[position // page_tokens]
            self._pool[page, position % page_tokens] = digests[position]

    def _digests_of(self, chunk: Chunk) -> list[int]:
        digests = self._digests.setdefault(chunk.request_id, [])
        self._digests.move_to_end(chunk.request_id)
        if len(self._digests) > REMEMBERED_REQUESTS:
            self._digests.popitem(last=False)
        digest = digests[-1] if digests else 0
        for position in range(len(digests), chunk.end):
            digest = mix(digest ^ mix(chunk.history[position] + 1))
            digests.append(digest)
        return digests
