"""Several answers to one prompt."""

import pytest

from splitserve.engine.fan_out import fan_out
from splitserve.engine.protocol import Request, RequestId, SamplingParams

REQUEST = Request(RequestId("r"), (1, 2, 3), (), SamplingParams(max_tokens=4, seed=7, prompt_logprobs=1))


def test_the_first_is_the_plain_request_and_the_others_have_seeds_of_their_own() -> None:
    first, *others = fan_out(REQUEST, 4)
    assert first.sampling == REQUEST.sampling
    assert [one.request_id for one in (first, *others)] == ["r-0", "r-1", "r-2", "r-3"]
    assert len({one.sampling.seed for one in (first, *others)}) == 4
    assert all(0 <= one.sampling.seed < 2**64 and one.sampling.prompt_logprobs is None for one in others)
    assert fan_out(REQUEST, 4) == [first, *others]
    assert fan_out(REQUEST, 2) == [first, others[0]]


def test_seeds_next_to_each_other_share_none() -> None:
    seeds = [
        one.sampling.seed
        for seed in range(50)
        for one in fan_out(Request(RequestId("r"), (1,), (), SamplingParams(max_tokens=1, seed=seed)), 20)
    ]
    assert len(set(seeds)) == 1000


def test_none_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0"):
        fan_out(REQUEST, 0)
