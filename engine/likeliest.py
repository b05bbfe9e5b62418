"""The likeliest tokens of a row of logits: by falling logit, ties by id, 0.0 and -0.0 a tie. Logits are float32 without
NaN.
"""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Logits = NDArray[np.float32]
TokenIds = NDArray[np.int64]

Bits = TypeVar("Bits", NDArray[np.int32], torch.Tensor)

ID_MASK = (1 << 32) - 1
_ZERO = np.float32(0)


def likeliest(logits: Logits, count: int) -> TokenIds:
    """Ids of the ``count`` likeliest tokens of ``logits`` [vocab_size], in order; of all, where there are no more."""
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    if count < len(logits):
        least = np.partition(logits, len(logits) - count)[len(logits) - count]
        candidates = np.flatnonzero(logits >= least)
    else:
        candidates = np.arange(len(logits))
    bits = (logits[candidates] + _ZERO).view(np.int32)
    # Sorting one integer per token is several times as fast as a stable sort that returns indices.
    ordered = np.sort((~_rising(bits)).astype(np.int64) << 32 | candidates)
    return ordered[:count] & ID_MASK


def likeliest_together(logits: torch.Tensor, count: int) -> torch.Tensor:
    """As ``likeliest``, of all rows of ``logits`` [rows, vocab_size] at once: int64 [rows, count or vocab_size]."""
    keys = keys_by_likelihood(logits).topk(min(count, logits.shape[-1]), largest=False, sorted=True).values
    return keys & ID_MASK


def keys_by_likelihood(logits: torch.Tensor) -> torch.Tensor:
    """One integer per token, in the tokens' order: the likelier the smaller, no two alike. ``key & ID_MASK`` is the id.

    ``logits`` [rows, vocab_size] in, int64 of the same shape out.
    """
    bits = (logits + 0.0).view(torch.int32)
    return (~_rising(bits)).long() << 32 | torch.arange(logits.shape[-1], device=logits.device)


def _rising(bits: Bits) -> Bits:
    """From the bits of float32 to int32 in the order of the floats. Without -0.0, which adding 0.0 makes 0.0."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
