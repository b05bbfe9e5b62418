"""Drawing tokens from logits.

The draw is a pure function of (seed, position, logits): the random number comes from a hash of seed and position, never
from a generator's state. A request therefore draws the same tokens alone or in a batch, on one worker or moved half-way
to another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

from splitserve.engine.protocol import SamplingParams

_SEED_MASK = (1 << 64) - 1


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
    """Draw one token per row of ``logits`` [len(draws), vocab_size] float32.

    Temperature 0 takes the largest logit, the lowest id among equals. Otherwise: inverse transform over the tokens by
    falling probability (ties by id), cut where ``top_p`` is reached. None for a row that holds NaN or no finite
    maximum: the model computed nonsense for it, and no token would be right.
    """
    greedy = logits.argmax(dim=-1)
    usable = logits.amax(dim=-1).isfinite()  # amax passes NaN on
    tokens: list[int | None] = [
        token if good else None for token, good in zip(greedy.tolist(), usable.tolist(), strict=True)
    ]
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and tokens[row] is not None]
    if drawn:
        for row, token in zip(drawn, _draw(logits[drawn], [draws[row] for row in drawn]), strict=True):
            tokens[row] = token
    return tokens


def _draw(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """``logits`` [rows, vocab_size] float32 with finite maxima; temperatures above 0."""
    settings = [
        (draw.sampling.temperature, draw.sampling.top_p, uniform(draw.sampling.seed, draw.position)) for draw in draws
    ]
    columns = torch.tensor(settings, dtype=torch.float64, device=logits.device)
    temperature, top_p, random = (columns[:, n : n + 1] for n in range(3))  # [rows, 1] each
    ids = _by_falling_logit(logits)
    falling = logits.gather(1, ids).double()
    weights = ((falling - falling[:, :1]) / temperature).exp()
    reached = weights.cumsum(dim=-1)
    kept = (reached < top_p * reached[:, -1:]).sum(dim=-1, keepdim=True)  # index of the last candidate kept
    index = (reached <= random * reached.gather(1, kept)).sum(dim=-1, keepdim=True)
    tokens: list[int] = ids.gather(1, torch.minimum(index, kept)).flatten().tolist()
    return tokens


def _by_falling_logit(logits: torch.Tensor) -> torch.Tensor:
    """Token ids of each row ordered by falling logit, ties by id: [rows, vocab_size] int64.

    Sorts one integer per token, with the logit in the upper and the id in the lower half: on a CPU numpy does that
    about ten times as fast as a stable sort that returns indices.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # signed integers in the order of the floats
    ids = torch.arange(logits.shape[-1], device=logits.device)
    keys = (~rising).long() << 32 | ids
    ordered = (
        torch.from_numpy(np.sort(keys.numpy(), axis=-1)) if keys.device.type == "cpu" else keys.sort(dim=-1).values
    )
    return ordered & 0xFFFFFFFF
