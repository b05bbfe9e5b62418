"""Drawing tokens from logits.

The draw is a pure function of (seed, position, logits) and the request's own parameters: the random number comes from a
hash of seed and position, never from a generator's state. A request therefore draws the same tokens alone or in a
batch, on one worker or moved half-way to another.

The rule. A token's weight is exp((logit - largest logit) / temperature). Tokens that stay:

1. of all, the ``top_k`` likeliest;
2. of these the fewest likeliest whose weights reach ``top_p`` of what these have together;
3. of these the ones whose weight is at least ``min_p``, the likeliest one's being 1.

Likeliest is by falling logit, ties by id, so that no cut keeps more than it says. The order of the cuts is that of
transformers' ``TopKLogitsWarper``, ``TopPLogitsWarper`` and ``MinPLogitsWarper``. What stays is laid out by rising id,
each token as long as its weight, and the random number says where to look (inverse transform). By id and not by
probability: logits of the same text differ in their last bits from batch to batch, which swaps tokens of nearly the
same probability in an order by probability, but moves borders between tokens laid out by id no further than it changes
their weights. Nor does it need a sort where nothing is cut.

Weights are float32, whose rounding is smaller than that of the logits they come from; sums are float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve.engine.likeliest import ID_MASK, Logits, TokenIds, keys_by_likelihood, likeliest
from splitserve.engine.protocol import SamplingParams

_SEED_MASK = (1 << 64) - 1
_LEAST_TEMPERATURE = 1e-30  # float32 holds its inverse; below it only the likeliest tokens have any weight anyway
_FIRST_LOOK = 1024  # so many tokens usually reach ``top_p``; where they do not,
_NEXT_LOOK = 16  # so many times as many are looked at, until all are
_BLOCK = 256  # weights that are added up together to find a place faster


@dataclass(frozen=True, slots=True)
class Draw:
    """What decides one draw, beside the logits."""

    sampling: SamplingParams
    position: int  # absolute index of the token that is drawn


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same in every process. ``seed`` counts modulo 2**64."""
    key = (seed & _SEED_MASK).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """Draw one token per row of ``logits`` [len(draws), vocab_size] float32, on any device.

    Temperature 0 takes the largest logit, the lowest id among equals; all else goes by the rule above. None for a row
    that holds NaN or no finite maximum: the model computed nonsense for it, and no token would be right.
    """
    if logits.device.type == "cpu":
        # Row by row: what is in the cache stays there, and a row can't depend on its neighbours.
        return [_draw_row(row, draw) for row, draw in zip(logits.numpy(), draws, strict=True)]
    return draw_together(logits, draws)


def _draw_row(logits: Logits, draw: Draw) -> int | None:
    likeliest_id = int(logits.argmax())  # the first NaN, if there is one
    largest = logits[likeliest_id]
    if not np.isfinite(largest):
        return None
    sampling = draw.sampling
    if sampling.temperature == 0:
        return likeliest_id
    with np.errstate(over="ignore", under="ignore"):
        weights = logits - largest
        weights /= np.float32(max(sampling.temperature, _LEAST_TEMPERATURE))
        np.exp(weights, out=weights)
    if sampling.top_p < 1 or 0 < sampling.top_k < len(logits):
        kept = _kept(logits, weights, sampling)
        weights_of_kept = weights[kept]
        weights.fill(0)
        weights[kept] = weights_of_kept
    if sampling.min_p > 0:
        weights[weights < np.float32(sampling.min_p)] = 0
    return _place(weights, uniform(sampling.seed, draw.position))


def _kept(logits: Logits, weights: NDArray[np.float32], sampling: SamplingParams) -> TokenIds:
    """Ids of the tokens that ``top_k`` and ``top_p`` leave, likeliest first."""
    is_limited = 0 < sampling.top_k < len(logits)
    looked_at = sampling.top_k if is_limited else _FIRST_LOOK
    order = likeliest(logits, looked_at)
    if sampling.top_p < 1:
        reached = weights[order].cumsum(dtype=np.float64)
        total = reached[-1] if is_limited else weights.sum(dtype=np.float64)
        while reached[-1] < sampling.top_p * total and looked_at < len(logits):
            looked_at *= _NEXT_LOOK
            order = likeliest(logits, looked_at)
            reached = weights[order].cumsum(dtype=np.float64)
        order = order[: np.searchsorted(reached, sampling.top_p * total) + 1]
    return order


def _place(weights: NDArray[np.float32], random: float) -> int:
    """Index of the weight within which ``random`` of their sum lies, when they are laid end to end. Never one that is
    zero.
    """
    whole = len(weights) // _BLOCK * _BLOCK
    blocks = weights[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
    ends = np.append(blocks, weights[whole:].sum(dtype=np.float64)).cumsum()
    target = random * ends[-1]
    block = int(np.searchsorted(ends, target, side="right"))
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    # A block's sum and the last of ``inside`` may differ in the last bit: then ``target`` lies on the border.
    target = min(target - (ends[block - 1] if block else 0.0), np.nextafter(inside[-1], 0))
    return block * _BLOCK + int(np.searchsorted(inside, target, side="right"))


def draw_together(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """As ``sample``, all rows at once, for devices where that is faster. Waits for the device once."""
    greedy = logits.argmax(dim=-1)
    largest = logits.amax(dim=-1, keepdim=True)  # NaN where the row has one
    tokens = greedy
    if any(draw.sampling.temperature > 0 for draw in draws):
        drawn = _draw_rows(logits, largest, draws)
        is_greedy = torch.tensor([draw.sampling.temperature == 0 for draw in draws]).to(logits.device)
        tokens = torch.where(is_greedy, greedy, drawn)
    found: list[int] = torch.where(largest.flatten().isfinite(), tokens, -1).tolist()
    return [None if token < 0 else token for token in found]


def _draw_rows(logits: torch.Tensor, largest: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Tokens [rows] int64; of rows with temperature 0 or without finite maximum, any."""
    vocab_size = logits.shape[-1]
    sampled = [draw.sampling for draw in draws]
    columns = [
        [max(s.temperature, _LEAST_TEMPERATURE) for s in sampled],
        [s.top_p for s in sampled],
        [s.min_p for s in sampled],
        [uniform(draw.sampling.seed, draw.position) for draw in draws],
    ]
    numbers = torch.tensor(columns, dtype=torch.float64).to(logits.device).unsqueeze(-1)
    temperature, top_p, min_p, random = numbers  # [rows, 1] each
    weights = ((logits - largest) / temperature.float()).exp()
    if any(s.top_p < 1 or 0 < s.top_k < vocab_size for s in sampled):
        limits = [min(s.top_k or vocab_size, vocab_size) for s in sampled]
        limit = torch.tensor(limits).to(logits.device).unsqueeze(-1)
        keys = keys_by_likelihood(logits)
        ordered = keys.sort(dim=-1).values
        reached = weights.gather(1, ordered & ID_MASK).cumsum(dim=-1, dtype=torch.float64)
        enough = (reached < top_p * reached.gather(1, limit - 1)).sum(dim=-1, keepdim=True) + 1
        count = torch.where(top_p < 1, torch.minimum(enough, limit), limit)
        weights = weights.masked_fill(keys > ordered.gather(1, count - 1), 0)
    weights = weights.masked_fill(weights < min_p.float(), 0)
    reached = weights.cumsum(dim=-1, dtype=torch.float64)
    beyond = (reached > random * reached[:, -1:]) & (weights > 0)
    first: torch.Tensor = beyond.int().argmax(dim=-1)
    return first
