"""Requests that make no sense are refused with the field's name, in this process and on the wire."""

from math import inf, nan
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from splitserve.engine.protocol import Request, RequestId, SamplingParams
from splitserve.engine.request_check import MAX_PROMPT_LOGPROBS_BYTES, objection

PLAIN = Request(RequestId("r"), (1, 2, 3), (), SamplingParams(max_tokens=4))


def with_sampling(**fields: Any) -> Request:
    return replace(PLAIN, sampling=replace(PLAIN.sampling, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": nan},
        {"temperature": inf},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": nan},
        {"top_k": -1},
        {"min_p": nan},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": nan},
        {"presence_penalty": inf},
        {"frequency_penalty": nan},
        {"logit_bias": ((3, nan),)},
        {"logit_bias": ((-3, 1.0),)},
        {"logit_bias": ((3, 101.0),)},
        {"min_tokens": -1},
        {"logprobs": 21},
        {"logprobs": -1},
        {"prompt_logprobs": 10**9},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": tuple(range(2000))},
    ],
    ids=str,
)
def test_nonsense_is_named_here_and_refused_on_the_wire(fields: dict[str, Any]) -> None:
    bad = with_sampling(**fields)
    ((name, value),) = fields.items()
    said = objection(bad)
    assert said is not None
    assert f"sampling.{name} is {repr(value)[:70]}" in said
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=Request)


@pytest.mark.parametrize("drawn", [-1, 3, 4])
def test_drawn_leaves_something_of_the_prompt(drawn: int) -> None:
    assert f"drawn is {drawn}" in str(objection(replace(PLAIN, drawn=drawn)))


def test_prompt_logprobs_that_would_not_fit_a_report_are_refused() -> None:
    long = replace(with_sampling(prompt_logprobs=20), prompt=tuple([1] * 20_000))
    assert f"more than {MAX_PROMPT_LOGPROBS_BYTES}" in str(objection(long))
    assert objection(replace(long, sampling=replace(long.sampling, prompt_logprobs=1))) is None


def test_sense_has_no_objection() -> None:
    most = with_sampling(
        temperature=0, top_p=1, top_k=10**9, min_p=1, repetition_penalty=2, presence_penalty=-2, logprobs=20,
        logit_bias=tuple((token, -100) for token in range(1000)), min_tokens=9, prompt_logprobs=0, seed=2**64 - 1,
    )  # fmt: skip
    assert objection(PLAIN) is None
    assert objection(replace(most, drawn=2)) is None
