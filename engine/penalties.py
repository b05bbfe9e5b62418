"""What changes logits before a token is drawn: bias, penalties, the minimum length.

In this order, which gives what transformers' processors and vLLM give where they have the same fields:

1. ``logit_bias`` is added (OpenAI API reference, "logit_bias").
2. ``repetition_penalty``: a logit of a token that is anywhere in prompt or output is divided by it where positive and
   multiplied where not (CTRL, Keskar et al. 2019; transformers' ``RepetitionPenaltyLogitsProcessor``).
3. ``frequency_penalty`` times the token's count in the output, and ``presence_penalty`` where that is not 0, are
   subtracted (OpenAI API guide, "Frequency and presence penalties"). The prompt does not count.
4. Until the output has ``min_tokens``, tokens that would end the answer are out of reach: ``stop_token_ids`` and all
   end-of-sequence tokens. With ``ignore_eos`` the latter do not end it, so they can be drawn (vLLM holds one back).

All logits are changed at once, by sparse updates: a step costs what changes and not what the vocabulary holds.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve.engine.protocol import SamplingParams
from splitserve.engine.step import Chunk

Ids = NDArray[np.int64]
Amounts = NDArray[np.float32]

_REMEMBERED = 64  # sequences beside those of the step whose counts are kept; others are counted anew


@dataclass(slots=True)
class _Counts:
    """How often tokens occur in the output of one sequence; with 0, those of the prompt that matter too."""

    ids: Ids
    amounts: Amounts
    places: dict[int, int]  # of each token in ``ids``
    size: int  # of ``ids`` and ``amounts`` so much is used
    vocab_size: int

    @classmethod
    def of(cls, prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> "_Counts":
        tokens = np.asarray([*prompt, *output], dtype=np.int64)
        is_output = np.arange(len(tokens)) >= len(prompt)
        known = tokens < vocab_size
        ids, place_of = np.unique(tokens[known], return_inverse=True)
        amounts = np.bincount(place_of, weights=is_output[known], minlength=len(ids)).astype(np.float32)
        return cls(ids, amounts, dict(zip(ids.tolist(), range(len(ids)), strict=True)), len(ids), vocab_size)

    def add(self, output: Iterable[int]) -> None:
        for token in output:
            if token >= self.vocab_size:
                continue
            place = self.places.setdefault(token, self.size)
            if place == self.size:
                if place == len(self.ids):
                    self.ids = np.resize(self.ids, 2 * place + 16)
                    self.amounts = np.resize(self.amounts, 2 * place + 16)
                self.ids[place], self.amounts[place] = token, 0
                self.size += 1
            self.amounts[place] += 1


@dataclass(slots=True)
class _SequenceState:
    """What of one sequence would cost too much to work out in each step."""

    chunk: Chunk  # the one it was made for: holds on to what the key of this state is made of
    bias_ids: Ids
    bias: Amounts
    counts: _Counts | None  # None: nothing depends on what came before
    counted: int  # tokens of the history that ``counts`` has seen

    def fits(self, chunk: Chunk) -> bool:
        return self.chunk.prompt_tokens == chunk.prompt_tokens and self.counted <= chunk.end


@dataclass(slots=True)
class _Changes:
    """Places in a step's logits, [rows * vocab_size], and what happens there."""

    bias_places: list[Ids] = field(default_factory=list)
    bias: list[Amounts] = field(default_factory=list)
    places: list[Ids] = field(default_factory=list)
    factors: list[Amounts] = field(default_factory=list)  # repetition penalties
    amounts: list[Amounts] = field(default_factory=list)  # subtracted
    out_of_reach: list[Ids] = field(default_factory=list)


def changes_logits(chunk: Chunk) -> bool:
    """Whether anything here concerns the token that ``chunk`` draws."""
    sampling = chunk.sample
    return sampling is not None and (
        bool(sampling.logit_bias) or _has_penalties(sampling) or chunk.end - chunk.prompt_tokens < sampling.min_tokens
    )


class Penalties:
    """Remembers counts between steps; what it does depends on its arguments alone."""

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = sorted(eos_token_ids)
        self._states: OrderedDict[tuple[int, int], _SequenceState] = OrderedDict()

    def apply(self, logits: torch.Tensor, chunks: Sequence[Chunk]) -> None:
        """Change ``logits`` [len(chunks), vocab_size], contiguous float32, one row for each chunk, all of which sample.

        A chunk's ``history`` holds its sequence's tokens; the same object may only grow from one step to the next. Ids
        outside the vocabulary are passed over.
        """
        changes = _Changes()
        for row, chunk in enumerate(chunks):
            if changes_logits(chunk):
                self._collect(changes, chunk, row * logits.shape[-1], logits.shape[-1])
        flat, device = logits.view(-1), logits.device
        if changes.bias:
            flat[_joined(changes.bias_places, device)] += _joined(changes.bias, device)
        if changes.places:
            places = _joined(changes.places, device)
            factors, values = _joined(changes.factors, device), flat[places]
            values = torch.where(values > 0, values / factors, values * factors)
            flat[places] = values - _joined(changes.amounts, device)
        if changes.out_of_reach:
            flat[_joined(changes.out_of_reach, device)] = float("-inf")
        while len(self._states) > len(chunks) + _REMEMBERED:
            self._states.popitem(last=False)

    def _collect(self, changes: _Changes, chunk: Chunk, first: int, vocab_size: int) -> None:
        sampling = chunk.sample
        assert sampling is not None
        state = self._state_of(chunk, sampling, vocab_size)
        if len(state.bias_ids):
            changes.bias_places.append(state.bias_ids + first)
            changes.bias.append(state.bias)
        counts = state.counts
        if counts is not None and counts.size:
            ids, amounts = counts.ids[: counts.size], counts.amounts[: counts.size]
            changes.places.append(ids + first)
            changes.factors.append(np.full(counts.size, sampling.repetition_penalty, dtype=np.float32))
            presence = np.where(amounts > 0, np.float32(sampling.presence_penalty), np.float32(0))
            changes.amounts.append(amounts * np.float32(sampling.frequency_penalty) + presence)
        if chunk.end - chunk.prompt_tokens < sampling.min_tokens:
            ends = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)]
            known = [first + token for token in ends if 0 <= token < vocab_size]
            changes.out_of_reach.append(np.array(known, dtype=np.int64))

    def _state_of(self, chunk: Chunk, sampling: SamplingParams, vocab_size: int) -> _SequenceState:
        # These objects live as long as the state that is found by them, so nothing else can have their ids.
        key = (id(chunk.history), id(sampling))
        state = self._states.get(key)
        if state is None or not state.fits(chunk):
            state = self._states[key] = _new_state(chunk, sampling, vocab_size)
        self._states.move_to_end(key)
        if state.counts is not None:
            state.counts.add(chunk.history[state.counted : chunk.end])
            state.counted = chunk.end
        return state


def _new_state(chunk: Chunk, sampling: SamplingParams, vocab_size: int) -> _SequenceState:
    bias: dict[int, float] = {}
    for token, amount in sampling.logit_bias:
        if token < vocab_size:
            bias[token] = bias.get(token, 0.0) + amount
    counts = None
    if _has_penalties(sampling):
        prompt = () if sampling.repetition_penalty == 1 else chunk.history[: chunk.prompt_tokens]
        counts = _Counts.of(prompt, chunk.history[chunk.prompt_tokens : chunk.end], vocab_size)
    return _SequenceState(
        chunk=chunk,
        bias_ids=np.array(list(bias), dtype=np.int64),
        bias=np.array(list(bias.values()), dtype=np.float32),
        counts=counts,
        counted=chunk.end,
    )


def _has_penalties(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _joined(parts: "Sequence[Ids] | Sequence[Amounts]", device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device)
