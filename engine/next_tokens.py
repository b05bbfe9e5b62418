"""From a step's logits to the next token of each sequence: log-probabilities, then penalties, then the draw.

This file says in which order these happen. What each does is ``logprobs``', ``penalties``' and ``sampler``'s.
"""

from collections.abc import Callable, Collection, Sequence

import torch

from splitserve.engine.logprobs import token_logprobs
from splitserve.engine.penalties import Penalties, changes_logits
from splitserve.engine.protocol import TokenLogprobs
from splitserve.engine.sampler import Draw, sample
from splitserve.engine.step import Chunk, ChunkOutput

Sample = Callable[[torch.Tensor, Sequence[Draw]], list[int | None]]


class NextTokens:
    """Draws for all sequences of a step at once. Remembers nothing that a result depends on."""

    def __init__(self, eos_token_ids: Collection[int], sample: Sample = sample) -> None:
        """``sample`` draws one token per row of logits."""
        self._sample = sample
        self._penalties = Penalties(eos_token_ids)

    def draw(self, logits: torch.Tensor, chunks: Sequence[Chunk]) -> list[ChunkOutput]:
        """One token for each of ``chunks``, all of which sample, and its log-probabilities where asked for.

        ``logits`` [len(chunks), vocab_size], contiguous float32, are overwritten. A row without finite maximum gives
        no token, whatever is changed about it.
        """
        asked = [row for row, chunk in enumerate(chunks) if chunk.sample and chunk.sample.logprobs is not None]
        logprobs = logits[asked].log_softmax(dim=-1) if asked else None
        if any(map(changes_logits, chunks)):
            broken = ~logits.amax(dim=-1, keepdim=True).isfinite()
            self._penalties.apply(logits, chunks)
            logits.masked_fill_(broken, float("nan"))
        tokens = self._sample(logits, [Draw(chunk.sample, chunk.end) for chunk in chunks if chunk.sample is not None])
        reports = {} if logprobs is None else _reports(logprobs, asked, tokens, chunks)
        return [ChunkOutput(token, reports.get(row)) for row, token in enumerate(tokens)]


def _reports(
    logprobs: torch.Tensor, rows: Sequence[int], tokens: Sequence[int | None], chunks: Sequence[Chunk]
) -> dict[int, TokenLogprobs]:
    """By row of the step; ``logprobs`` [len(rows), vocab_size]. Of rows without a token nothing is said."""
    drawn, counts, places = [], [], []
    for place, row in enumerate(rows):
        token, sampling = tokens[row], chunks[row].sample
        if token is not None and sampling is not None and sampling.logprobs is not None:
            drawn.append(token)
            counts.append(sampling.logprobs)
            places.append(place)
    kept = logprobs if len(places) == len(rows) else logprobs[places]
    return dict(zip((rows[place] for place in places), token_logprobs(kept, drawn, counts), strict=True))
