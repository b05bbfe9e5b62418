"""What a request's sampling becomes on its way, and what is said of its tokens' probabilities."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from feed_fakes.loopback_worker import WAIT_S
from feed_fakes.reports import report
from feed_fakes.unstaffed_gateway import PROMPT, UnstaffedGateway

from splitserve.cluster.api.service import Tokens
from splitserve.cluster.outbox import merge
from splitserve.cluster.wire import MAX_REPORT_BYTES, frame
from splitserve.engine.protocol import FinishReason, Request, RequestId, SamplingParams, SequenceUpdate, TokenLogprobs
from splitserve.engine.request_check import MAX_PROMPT_LOGPROBS_BYTES, objection

SAMPLING = SamplingParams(max_tokens=8, min_tokens=5, seed=3, logprobs=1, prompt_logprobs=0, presence_penalty=0.5)


def said_of(*tokens: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(token), (token,), (-0.5,)) for token in tokens]


OF_PROMPT = said_of(*PROMPT[1:])


@pytest.fixture
async def gateway() -> AsyncIterator[UnstaffedGateway]:
    gateway = UnstaffedGateway()
    yield gateway
    assert gateway.links.sent == []


async def items(gateway: UnstaffedGateway) -> list[Tokens]:
    async with aclosing(gateway.path.run(PROMPT, SAMPLING)) as found, asyncio.timeout(WAIT_S):
        return [item async for item in found]


async def test_output_stays_output_and_all_logprobs_arrive_when_the_decode_worker_is_lost(
    gateway: UnstaffedGateway,
) -> None:
    reading = asyncio.create_task(items(gateway))
    prefill = await gateway.prefill.next()
    assert (prefill.request.drawn, prefill.request.sampling) == (0, SAMPLING)
    fields: dict[str, Any] = {"finish": FinishReason.HANDED_OVER, "ticket": b"t", "cached_tokens": 0}
    prefill.say(100, logprobs=said_of(100), prompt_logprobs=OF_PROMPT, **fields)

    lost = await gateway.decode.next()
    assert lost.request.drawn == 1
    assert (lost.request.sampling.min_tokens, lost.request.sampling.max_tokens) == (5, 7)
    assert lost.request.sampling.prompt_logprobs is None
    lost.say(101, logprobs=said_of(101))
    lost.say(102, logprobs=said_of(102))
    lost.leg.lose("worker d is gone")

    again = await gateway.prefill.next()
    assert again.request.prompt[-again.request.drawn :] == (100, 101, 102)
    assert again.request.sampling.prompt_logprobs is None
    assert again.request.sampling.presence_penalty == 0.5
    again.say(103, logprobs=said_of(103), finish=FinishReason.HANDED_OVER, ticket=b"t", cached_tokens=8)
    last = await gateway.decode.next()
    assert (last.request.drawn, last.request.sampling.max_tokens) == (4, 4)
    last.say(104, logprobs=said_of(104), finish=FinishReason.STOP)

    found = await reading
    assert [token for item in found for token in item.token_ids] == [100, 101, 102, 103, 104]
    assert [one for item in found for one in item.logprobs or ()] == said_of(100, 101, 102, 103, 104)
    assert [item.prompt_logprobs for item in found] == [OF_PROMPT] + [None] * (len(found) - 1)
    assert [item.cached_tokens for item in found] == [0] + [None] * (len(found) - 1)


async def test_what_is_said_of_the_prompt_is_asked_for_until_it_has_arrived(gateway: UnstaffedGateway) -> None:
    reading = asyncio.create_task(items(gateway))
    first = await gateway.prefill.next()
    first.leg.lose("worker p is gone")
    again = await gateway.prefill.next()
    assert again.request.sampling == SAMPLING
    again.say(100, logprobs=said_of(100), prompt_logprobs=OF_PROMPT, finish=FinishReason.STOP)
    assert await reading == [Tokens([100], FinishReason.STOP, None, said_of(100), OF_PROMPT)]


def update(*tokens: int, **fields: Any) -> SequenceUpdate:
    return SequenceUpdate(RequestId("r"), list(tokens), logprobs=said_of(*tokens) or None, **fields)


def test_updates_that_wait_keep_every_logprob() -> None:
    earlier = report(updates=[update()])
    for later in (update(1, prompt_logprobs=OF_PROMPT), update(2, 3), update(4, finish=FinishReason.LENGTH)):
        merge(earlier, report(facts=None, updates=[later]))
    assert earlier.updates == [update(1, 2, 3, 4, prompt_logprobs=OF_PROMPT, finish=FinishReason.LENGTH)]


@pytest.mark.parametrize("alternatives", [0, 20])
def test_the_longest_prompt_that_is_taken_on_fits_a_report_many_times(alternatives: int) -> None:
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=alternatives)
    tokens = MAX_PROMPT_LOGPROBS_BYTES // (16 + 14 * alternatives)
    assert objection(Request(RequestId("r"), (1,) * tokens, (), sampling)) is None
    assert objection(Request(RequestId("r"), (1,) * (tokens + 1), (), sampling)) is not None
    longest = TokenLogprobs(-1e-300, (2**31 - 1,) * alternatives, (-1e-300,) * alternatives)
    size = len(frame(report(updates=[SequenceUpdate(RequestId("r"), [1], prompt_logprobs=[longest] * tokens)])))
    assert 10 * size < MAX_REPORT_BYTES
