"""Log-probabilities of tokens, by the model's own distribution: before bias, penalties, temperature and cuts."""

from collections.abc import Callable, Iterator, Sequence

import torch

from splitserve.engine.likeliest import likeliest, likeliest_together
from splitserve.engine.protocol import TokenLogprobs
from splitserve.engine.step import Chunk

SLICE_BYTES = 32 << 20  # of a prompt's logits at a time; their logarithms take as much again

ToLogits = Callable[[torch.Tensor], torch.Tensor]


def token_logprobs(
    logprobs: torch.Tensor, tokens: Sequence[int], alternatives: Sequence[int]
) -> Iterator[TokenLogprobs]:
    """What ``logprobs`` [rows, vocab_size] float32 says of one token per row, and of the likeliest in that row:
    ``alternatives`` of them, or all where there are not so many.
    """
    if not tokens:
        return
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device).unsqueeze(-1)).flatten().tolist()
    top_ids, top_values = _likeliest(logprobs, alternatives)
    for value, ids, values in zip(chosen, top_ids, top_values, strict=True):
        yield TokenLogprobs(value, tuple(ids), tuple(values))


def prompt_logprobs(
    chunk: Chunk, hidden: torch.Tensor, to_logits: ToLogits, slice_bytes: int = SLICE_BYTES
) -> tuple[TokenLogprobs, ...]:
    """Of each prompt token that follows one of ``chunk``'s, by what the model makes of the tokens before it.

    ``hidden`` [len(chunk.token_ids), hidden_size] is the last layer's output for the chunk; ``to_logits`` takes rows of
    it to [rows, vocab_size] float32, about ``slice_bytes`` of them at a time. Needs ``chunk.prompt_logprobs``.
    """
    alternatives = chunk.prompt_logprobs
    assert alternatives is not None
    following = chunk.history[chunk.start + 1 : min(chunk.end + 1, chunk.prompt_tokens)]
    found: list[TokenLogprobs] = []
    rows = 1  # the first slice tells how large a row is
    while len(found) < len(following):
        tokens = following[len(found) : len(found) + rows]
        logits = to_logits(hidden[len(found) : len(found) + len(tokens)])
        found += token_logprobs(logits.log_softmax(dim=-1), tokens, [alternatives] * len(tokens))
        rows = max(1, slice_bytes // (logits.element_size() * logits.shape[-1]))
    return tuple(found)


def _likeliest(logprobs: torch.Tensor, counts: Sequence[int]) -> "tuple[list[list[int]], list[list[float]]]":
    """Per row, ids and log-probabilities of so many tokens as ``counts`` says, likeliest first."""
    if logprobs.device.type == "cpu":
        rows = logprobs.numpy()
        ids = [likeliest(row, count) for row, count in zip(rows, counts, strict=True)]
        return [own.tolist() for own in ids], [row[own].tolist() for row, own in zip(rows, ids, strict=True)]
    most = likeliest_together(logprobs, max(counts))
    both = zip(most.tolist(), logprobs.gather(1, most).tolist(), counts, strict=True)
    cut = [(own_ids[:count], values[:count]) for own_ids, values, count in both]
    return [own_ids for own_ids, _ in cut], [values for _, values in cut]
