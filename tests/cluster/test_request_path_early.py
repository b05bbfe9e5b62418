"""The way of a request that is offered while its prompt is computed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from feed_fakes.loopback_worker import WAIT_S
from feed_fakes.unstaffed_gateway import HASHER, PROMPT, SAMPLING, Client, Started, UnstaffedGateway

from splitserve.cluster.api.errors import WorkerLost
from splitserve.cluster.api.service import Tokens
from splitserve.engine.protocol import FinishReason, Role, SamplingParams, TransferRecord, WorkerId

LENGTH, ERROR = FinishReason.LENGTH, FinishReason.ERROR
RECORD = TransferRecord(WorkerId("p"), 3, 3072, 1, 2, 0.02, 0.005, None)


@pytest.fixture
async def gateway() -> AsyncIterator[UnstaffedGateway]:
    """Whatever happened, nothing counts as sent at the end."""
    gateway = UnstaffedGateway()
    yield gateway
    assert gateway.links.sent == []


@pytest.fixture
async def client(gateway: UnstaffedGateway) -> AsyncIterator[Client]:
    client = Client(gateway.run())
    yield client
    await client.leave()


async def answer(gateway: UnstaffedGateway) -> list[int]:
    async with aclosing(gateway.run()) as items, asyncio.timeout(WAIT_S):
        return [token async for item in items for token in item.token_ids]


async def offered(gateway: UnstaffedGateway) -> tuple[Started, Started]:
    """The prefill leg after its early ticket, and the leg that expects its pages."""
    prefill = await gateway.prefill.next()
    prefill.offer(b"early ticket")
    return prefill, await gateway.decode.next()


async def test_expect_then_proceed_then_decode(gateway: UnstaffedGateway, client: Client) -> None:
    reading = client.read()
    prefill, decode = await offered(gateway)
    assert (decode.kind, decode.ticket, decode.request) == ("expect", b"early ticket", prefill.request)
    assert sorted(gateway.links.sent) == [prefill.request.request_id] * 2
    prefill.hand_over(100, b"final ticket")
    assert await reading == Tokens([100], None, 4)
    (following,) = gateway.decode.proceeded
    assert following.request_id == prefill.request.request_id
    assert (following.prompt, following.drawn) == ((*PROMPT, 100), 1)
    assert following.page_hashes == HASHER.chain([*PROMPT, 100])
    assert following.sampling == SamplingParams(max_tokens=7, temperature=0.5, seed=3)
    decode.say(101, 102, cached_tokens=8, transfer=RECORD)
    assert await client.next() == Tokens([101, 102], None, None)
    decode.say(103, finish=LENGTH)
    assert await client.next() == Tokens([103], LENGTH, None)
    with pytest.raises(StopAsyncIteration):
        await client.next()
    assert gateway.aborted == ([], [])
    assert gateway.recovered == 0
    assert gateway.telemetry.transfers == {decode.request.request_id: RECORD}


async def test_the_first_token_is_not_held_back_by_the_decode_worker(gateway: UnstaffedGateway, client: Client) -> None:
    reading = client.read()
    prefill, _ = await offered(gateway)
    prefill.hand_over(100)
    assert await reading == Tokens([100], None, 4)
    assert len(gateway.decode.proceeded) == 1


async def test_both_tickets_at_once_are_one_hand_over(gateway: UnstaffedGateway, client: Client) -> None:
    reading = client.read()
    prefill = await gateway.prefill.next()
    prefill.offer(b"early")
    prefill.hand_over(100, b"final")
    assert await reading == Tokens([100], None, 4)
    decode = await gateway.decode.next()
    assert (decode.kind, decode.ticket) == ("decode", b"final")


@pytest.mark.parametrize("early", [True, False])
async def test_without_the_leg_it_goes_on_with_the_final_ticket(gateway: UnstaffedGateway, early: bool) -> None:
    """No room, a revoked lease, a failed read: before or after the first token."""
    reading = asyncio.create_task(answer(gateway))
    prefill, expecting = await offered(gateway)
    if early:
        expecting.say(finish=ERROR, error="no room")
        prefill.hand_over(100, b"final")
    else:
        prefill.hand_over(100, b"final")
        async with asyncio.timeout(WAIT_S):
            await gateway.decode.went_on.wait()
        expecting.say(finish=ERROR, error="torn")
    decode = await gateway.decode.next()
    assert (decode.kind, decode.ticket, decode.request.prompt) == ("decode", b"final", (*PROMPT, 100))
    assert decode.request.request_id != expecting.request.request_id
    assert len(gateway.decode.proceeded) == (0 if early else 1)
    decode.say(101, finish=LENGTH)
    assert await reading == [100, 101]
    assert gateway.aborted == ([], [])
    assert gateway.recovered == 0


async def test_a_ticket_without_need_of_pages_may_be_none(gateway: UnstaffedGateway) -> None:
    """The decode worker had them all, and then could not go on."""
    reading = asyncio.create_task(answer(gateway))
    prefill, expecting = await offered(gateway)
    prefill.say(100, finish=FinishReason.HANDED_OVER)
    expecting.say(finish=ERROR, error="the step failed")
    decode = await gateway.decode.next()
    assert (decode.kind, decode.ticket) == ("decode", None)
    decode.say(101, finish=LENGTH)
    assert await reading == [100, 101]


async def test_another_decode_worker_takes_the_final_ticket(gateway: UnstaffedGateway) -> None:
    reading = asyncio.create_task(answer(gateway))
    prefill, expecting = await offered(gateway)
    gateway.links.remove("d")
    other = gateway.links.add("d2", Role.DECODE)
    expecting.leg.lose("worker d is gone")
    prefill.hand_over(100, b"final")
    decode = await other.next()
    assert (decode.kind, decode.ticket) == ("decode", b"final")
    decode.say(101, finish=LENGTH)
    assert await reading == [100, 101]
    assert gateway.recovered == 0
    assert gateway.prefill.aborted == []


async def test_no_decode_worker_when_the_early_ticket_comes(gateway: UnstaffedGateway) -> None:
    reading = asyncio.create_task(answer(gateway))
    prefill = await gateway.prefill.next()
    link = gateway.links.links.pop("d")
    prefill.offer()
    await asyncio.sleep(0.01)
    gateway.links.links["d"] = link
    prefill.hand_over(100, b"final")
    decode = await gateway.decode.next()
    assert (decode.kind, decode.ticket) == ("decode", b"final")
    decode.say(101, finish=LENGTH)
    assert await reading == [100, 101]


async def test_a_leg_lost_after_its_first_tokens_is_a_loss(gateway: UnstaffedGateway) -> None:
    reading = asyncio.create_task(answer(gateway))
    prefill, expecting = await offered(gateway)
    prefill.hand_over(100)
    expecting.say(101)
    expecting.leg.lose("worker d is gone")
    again = await gateway.prefill.next()
    assert again.request.prompt == (*PROMPT, 100, 101)
    again.say(102, finish=LENGTH)
    assert await reading == [100, 101, 102]
    assert gateway.recovered == 1


@pytest.mark.parametrize("finish", [FinishReason.STOP, LENGTH])
async def test_an_answer_of_one_token_ends_the_expecting_leg(
    gateway: UnstaffedGateway, client: Client, finish: FinishReason
) -> None:
    reading = client.read()
    prefill, expecting = await offered(gateway)
    prefill.say(100, finish=finish)
    assert await reading == Tokens([100], finish)
    with pytest.raises(StopAsyncIteration):
        await client.next()
    assert gateway.aborted == ([], [expecting.request.request_id])
    assert gateway.decode.proceeded == []


@pytest.mark.parametrize("end", ["lost", "error"])
async def test_a_prefill_that_is_lost_ends_the_expecting_leg(gateway: UnstaffedGateway, end: str) -> None:
    reading = asyncio.create_task(answer(gateway))
    prefill, expecting = await offered(gateway)
    if end == "lost":
        prefill.leg.lose("worker p is gone")
    else:
        prefill.say(finish=ERROR, error="the step failed")
    (await gateway.prefill.next()).say(100, finish=LENGTH)
    assert await reading == [100]
    assert gateway.aborted == ([], [expecting.request.request_id])
    assert gateway.recovered == 1


async def test_a_silent_expecting_leg_is_ended_before_another_starts() -> None:
    gateway = UnstaffedGateway(token_wait_s=0.05, attempts=1)
    reading = asyncio.create_task(answer(gateway))
    prefill, expecting = await offered(gateway)
    prefill.hand_over(100)
    final = await gateway.decode.next()
    assert gateway.decode.aborted == [expecting.request.request_id]
    with pytest.raises(WorkerLost):
        await reading
    assert gateway.decode.aborted == [expecting.request.request_id, final.request.request_id]
    assert gateway.prefill.aborted == [prefill.request.request_id]


@pytest.mark.parametrize("when", ["prefill", "first", "decode"])
async def test_leaving_ends_what_runs(gateway: UnstaffedGateway, client: Client, when: str) -> None:
    reading = client.read()
    prefill, expecting = await offered(gateway)
    name = prefill.request.request_id
    if when != "prefill":
        prefill.hand_over(100)
        await reading
    if when == "decode":
        expecting.say(101)
        await client.next()
    await client.leave()
    assert gateway.aborted == ([] if when == "decode" else [name], [name])


async def test_log_probabilities_of_the_prompt_are_asked_of_the_prefill_worker_alone(
    gateway: UnstaffedGateway,
) -> None:
    sampling = SamplingParams(max_tokens=4, prompt_logprobs=2)
    client = Client(gateway.path.run(PROMPT, sampling))
    client.read()
    prefill, expecting = await offered(gateway)
    assert prefill.request.sampling == sampling
    assert expecting.request.sampling == SamplingParams(max_tokens=4)
    await client.leave()


async def test_what_was_asked_is_what_is_expected(gateway: UnstaffedGateway, client: Client) -> None:
    client.read()
    _, expecting = await offered(gateway)
    assert expecting.request.sampling == SAMPLING
