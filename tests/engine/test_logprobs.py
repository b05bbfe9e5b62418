"""Log-probabilities: of the raw distribution, with ties by id, in slices of any size."""

from math import exp
from typing import Any

import pytest
import torch

from splitserve.engine.likeliest import likeliest, likeliest_together
from splitserve.engine.logprobs import prompt_logprobs, token_logprobs
from splitserve.engine.next_tokens import NextTokens
from splitserve.engine.protocol import RequestId, SamplingParams
from splitserve.engine.step import Chunk

VOCAB = 40


def chunk(**sampling: Any) -> Chunk:
    return Chunk(RequestId("r"), [1], 1, [], SamplingParams(max_tokens=9, **sampling), [0, 1], 1)


@pytest.mark.parametrize("count", [0, 1, 5, 39, 40, 1000])
def test_likeliest_is_by_falling_logit_then_by_id(count: int) -> None:
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1)).mul(2).round()
    logits[3] = 0.0
    logits[3, 7] = -0.0
    logits[4, 5:] = float("-inf")
    for row, together in zip(logits, likeliest_together(logits, count).tolist(), strict=True):
        values = row.tolist()
        expected = sorted(range(VOCAB), key=lambda token: (-values[token], token))
        assert likeliest(row.numpy(), count).tolist() == expected[:count]
        assert together == expected[:count]


def test_each_row_reports_as_many_as_it_asks_for() -> None:
    logprobs = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)).log_softmax(dim=-1)
    none, two, all_of_them = token_logprobs(logprobs, [5, 6, 7], [0, 2, 1000])
    assert (none.logprob, none.top_ids, none.top_logprobs) == (logprobs[0, 5].item(), (), ())
    values, ids = logprobs[1].topk(2)
    assert (two.logprob, two.top_ids) == (logprobs[1, 6].item(), tuple(ids.tolist()))
    assert two.top_logprobs == tuple(values.tolist())
    assert len(all_of_them.top_ids) == VOCAB
    assert sum(exp(logprob) for logprob in all_of_them.top_logprobs) == pytest.approx(1)


def test_they_are_of_the_distribution_before_anything_changed_it() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    expected = logits.log_softmax(dim=-1)
    chunks = [
        chunk(temperature=0.1, top_k=1, logprobs=2, logit_bias=((4, 100.0),)),
        chunk(temperature=0),
        chunk(temperature=2.0, logprobs=0, repetition_penalty=3.0, min_tokens=4),
    ]
    biased, silent, plain = NextTokens([2]).draw(logits.clone(), chunks)
    assert biased.token == 4
    assert biased.logprobs is not None
    assert biased.logprobs.logprob == pytest.approx(expected[0, 4].item())
    assert biased.logprobs.top_ids == tuple(expected[0].topk(2).indices.tolist())
    assert silent.logprobs is None
    assert plain.token is not None
    assert plain.logprobs is not None
    assert plain.logprobs.logprob == pytest.approx(expected[2, plain.token].item())


@pytest.mark.parametrize("slice_bytes", [1, 3 * 4 * VOCAB, 1 << 20])
@pytest.mark.parametrize(("start", "end"), [(0, 6), (0, 20), (6, 13), (19, 20), (15, 20), (20, 22)])
def test_a_chunk_reports_the_prompt_tokens_that_follow_its_own(start: int, end: int, slice_bytes: int) -> None:
    """The prompt has 20 tokens and the history 22. The token after the prompt's last one is output."""
    generator = torch.Generator().manual_seed(4)
    head, hidden = torch.randn(VOCAB, 8, generator=generator), torch.randn(22, 8, generator=generator)
    history = torch.randint(VOCAB, (22,), generator=generator).tolist()
    one = Chunk(RequestId("r"), history[start:end], start, [], None, history, 20, prompt_logprobs=3)
    largest = 0

    def to_logits(rows: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, len(rows))
        return rows @ head.T

    found = prompt_logprobs(one, hidden[start:end], to_logits, slice_bytes)
    everything = (hidden @ head.T).log_softmax(dim=-1)
    positions = range(start, min(end, 19))
    assert [f.logprob for f in found] == pytest.approx([everything[p, history[p + 1]].item() for p in positions])
    assert [f.top_ids for f in found] == [tuple(everything[p].topk(3).indices.tolist()) for p in positions]
    assert largest * 4 * VOCAB <= max(slice_bytes, 4 * VOCAB)
