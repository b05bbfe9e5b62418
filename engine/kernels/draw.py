# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Draws one token per row of logits by the rule of ``engine.sampler``, without sorting.

A float's bits, read as a signed integer after a flip of the negative ones, rise with the float. Where ``top_k`` and
``top_p`` cut is found by bisection over these integers, one pass over the row per step, about log2(vocab_size) of them:
every step moves to a logit that exists. Equal logits have equal weights, so what happens among them is arithmetic.

Weights are whole numbers, 2**44 for the likeliest token: their sums do not depend on the order of addition, and neither
does the token drawn. A weight comes from a float32 exponential, as in ``engine.sampler``, but from another
implementation of it: the two may differ where a border lies within about 1e-6 of where the random number falls. A token
less likely than 2**-44 times the likeliest is never drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from splitserve.engine.kernels.paged_inputs import described
from splitserve.engine.sampler import Draw, uniform

TILE = 4096
WARPS = 8
_MOST_TOKENS = 1 << 18  # so many weights of 2**44 add up in 63 bits


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """How each row is drawn."""

    numbers: torch.Tensor  # [rows, 4] float64: temperature (0 = greedy), top_p, min_p, uniform number in [0, 1)
    top_k: torch.Tensor  # [rows] int32, 0: all

    @classmethod
    def of(cls, draws: Sequence[Draw], device: torch.device) -> "DrawSettings":
        """One row per draw."""
        numbers, top_k = [], []
        for draw in draws:
            sampling = draw.sampling
            random = uniform(sampling.seed, draw.position)
            numbers.append((sampling.temperature, sampling.top_p, sampling.min_p, random))
            top_k.append(min(sampling.top_k, _MOST_TOKENS))
        return cls(
            torch.tensor(numbers, dtype=torch.float64).reshape(-1, 4).to(device),
            torch.tensor(top_k, dtype=torch.int32).to(device),
        )


@triton.jit
def _rising(values):
    """int32 in the order of the floats; 0.0 and -0.0 are the same."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of(rising):
    """The float of which ``rising`` is the integer."""
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(values, largest, temperature, least):
    """Whole numbers, 2**44 for the largest logit, 0 for fewer than ``least`` (a float in [0, 1]) of it."""
    weights = tl.exp((values - largest) / temperature)
    return (tl.where(weights >= least, weights, 0.0) * 17592186044416.0).to(tl.int64)


@triton.jit
def _bisect(logits, vocab_size, low, high, wanted, largest, temperature, OF_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """The largest logit (as its integer, in [low, high)) such that it and all larger ones come to ``wanted`` or more,
    and what the larger ones alone come to. Counts tokens, or adds up weights.
    """
    above = tl.zeros([], tl.int64)
    while high - low > 1:
        middle = ((low + high) >> 1).to(tl.int32)
        sums = tl.zeros([TILE], tl.int64)
        next_above = tl.full([TILE], 0x7FFFFFFF, tl.int32)
        next_below = tl.full([TILE], -0x80000000, tl.int32)
        for first in range(0, vocab_size, TILE):
            ids = first + tl.arange(0, TILE)
            values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
            rising = _rising(values)
            reached = rising >= middle
            if OF_WEIGHT:
                sums += tl.where(reached, _weights(values, largest, temperature, 0.0), 0)
            else:
                sums += reached.to(tl.int64)
            next_above = tl.minimum(next_above, tl.where(reached, rising, 0x7FFFFFFF))
            next_below = tl.maximum(next_below, tl.where(reached, -0x80000000, rising))
        sum_reached = tl.sum(sums, axis=0)
        if sum_reached >= wanted:
            low = tl.min(next_above, axis=0).to(tl.int64)
        else:
            high = tl.max(next_below, axis=0).to(tl.int64) + 1
            above = sum_reached
    return low, above


@triton.jit
def _kept_weights(values, ids, cut, last_equal, largest, temperature, least):
    """Weights of the tokens that stay: logits above ``cut``, and those equal to it up to the id ``last_equal``."""
    rising = _rising(values)
    kept = (rising > cut) | ((rising == cut) & (ids <= last_equal))
    return tl.where(kept, _weights(values, largest, temperature, least), 0)


@triton.jit
def _kept_sum(logits, vocab_size, cut, last_equal, largest, temperature, least, TILE: tl.constexpr):
    """What the tokens that stay come to."""
    sums = tl.zeros([TILE], tl.int64)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        sums += _kept_weights(values, ids, cut, last_equal, largest, temperature, least)
    return tl.sum(sums, axis=0)


@triton.jit
def _place(logits, vocab_size, passed, cut, last_equal, largest, temperature, least, TILE: tl.constexpr):
    """Id of the token within which ``passed`` lies when the weights that stay are laid end to end by id."""
    found = tl.zeros([], tl.int64)
    before = tl.zeros([], tl.int64)
    begin = tl.zeros([], tl.int32)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        added = tl.sum(_kept_weights(values, ids, cut, last_equal, largest, temperature, least), axis=0)
        here = (found <= passed) & (passed < found + added)
        begin = tl.where(here, first, begin)
        before = tl.where(here, found, before)
        found += added
    ids = begin + tl.arange(0, TILE)
    values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
    weights = _kept_weights(values, ids, cut, last_equal, largest, temperature, least)
    return tl.min(tl.where(before + tl.cumsum(weights, axis=0) > passed, ids, 0x7FFFFFFF), axis=0)


@triton.jit
def _nth_equal(logits, vocab_size, wanted, nth, TILE: tl.constexpr):
    """Id of the ``nth`` token, from 0 by id, whose logit's integer is ``wanted``."""
    found = tl.zeros([], tl.int64)
    before = tl.zeros([], tl.int64)
    begin = tl.zeros([], tl.int32)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        added = tl.sum((_rising(values) == wanted).to(tl.int64), axis=0)
        here = (found <= nth) & (nth < found + added)
        begin = tl.where(here, first, begin)
        before = tl.where(here, found, before)
        found += added
    ids = begin + tl.arange(0, TILE)
    values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
    match = _rising(values) == wanted
    rank = before + tl.cumsum(match.to(tl.int32), axis=0) - 1
    return tl.min(tl.where(match & (rank == nth), ids, 0x7FFFFFFF), axis=0)


@triton.jit(do_not_specialize_on_alignment=("numbers", "top_k", "tokens"))
def draw_rows(logits, numbers, top_k, tokens, vocab_size, row_stride, TILE: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    temperature = tl.load(numbers + row * 4)
    top_p = tl.load(numbers + row * 4 + 1)
    least = tl.load(numbers + row * 4 + 2).to(tl.float32)
    random = tl.load(numbers + row * 4 + 3)
    limit = tl.load(top_k + row)

    peaks = tl.full([TILE], float("-inf"), tl.float32)
    broken = tl.zeros([TILE], tl.int32)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        peaks = tl.maximum(peaks, values)
        broken |= (values != values).to(tl.int32)
    largest = tl.max(peaks, axis=0)
    highest = _rising(largest)
    none = tl.zeros([], tl.int64)
    if (tl.max(broken, axis=0) > 0) | (largest == float("inf")) | (largest == float("-inf")):
        tl.store(tokens + row, -1)
    elif temperature == 0.0:
        tl.store(tokens + row, _nth_equal(logits, vocab_size, highest, none, TILE))
    else:
        warmth = tl.maximum(temperature, 1e-30).to(tl.float32)
        high = highest.to(tl.int64) + 1
        # ``cut``: the last logit that stays; ``equals``: how many tokens with that logit do, by id.
        cut = none - 2139095041  # the integer of -inf, whose weight is 0
        equals = none
        if (limit > 0) & (limit < vocab_size):
            cut, larger = _bisect(logits, vocab_size, cut, high, limit.to(tl.int64), largest, warmth, False, TILE)
            equals = limit - larger
        if top_p < 1.0:
            above = _kept_sum(logits, vocab_size, cut.to(tl.int32), -1, largest, warmth, 0.0, TILE)
            each = _weights(_value_of(cut.to(tl.int32)), largest, warmth, 0.0)
            total = above + equals * each
            enough = tl.maximum(tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total), 1)
            if enough <= above:
                cut, above = _bisect(logits, vocab_size, cut, high, enough, largest, warmth, True, TILE)
                each = _weights(_value_of(cut.to(tl.int32)), largest, warmth, 0.0)
            equals = (enough - above + each - 1) // tl.maximum(each, 1)
        last_equal = tl.full([], -1, tl.int32)
        if equals > 0:
            last_equal = _nth_equal(logits, vocab_size, cut.to(tl.int32), equals - 1, TILE)
        total = _kept_sum(logits, vocab_size, cut.to(tl.int32), last_equal, largest, warmth, least, TILE)
        passed = tl.minimum((random * total.to(tl.float64)).to(tl.int64), total - 1)
        token = _place(logits, vocab_size, passed, cut.to(tl.int32), last_equal, largest, warmth, least, TILE)
        tl.store(tokens + row, token)


def draw(logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """Token ids [rows] int32; -1 for a row that holds NaN or has no finite maximum.

    ``logits`` [rows, vocab_size] float32, rows any stride apart, -inf for tokens that can't be drawn. Which tokens
    stay, and where the uniform number falls among them: the rule of ``engine.sampler``. Raises ValueError for sizes
    that do not fit.
    """
    if logits.dim() != 2 or logits.dtype is not torch.float32 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits must be float32 [rows, vocab_size] with contiguous rows, got {described(logits)}")
    rows, vocab_size = logits.shape
    if not 1 <= vocab_size <= _MOST_TOKENS:
        raise ValueError(f"vocab_size must lie in [1, {_MOST_TOKENS}], got {vocab_size}")
    numbers, top_k = settings.numbers, settings.top_k
    if numbers.dtype is not torch.float64 or tuple(numbers.shape) != (rows, 4) or not numbers.is_contiguous():
        raise ValueError(f"numbers must be contiguous float64 [{rows}, 4], got {described(numbers)}")
    if top_k.dtype is not torch.int32 or tuple(top_k.shape) != (rows,) or not top_k.is_contiguous():
        raise ValueError(f"top_k must be contiguous int32 [{rows}], got {described(top_k)}")
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        draw_rows[(rows,)](logits, numbers, top_k, tokens, vocab_size, logits.stride(0), TILE=TILE, num_warps=WARPS)
    return tokens


def draw_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """As ``engine.sampler.sample``; waits for the device."""
    tokens: list[int] = draw(logits, DrawSettings.of(draws, logits.device)).tolist()
    return [None if token < 0 else token for token in tokens]
