"""The way of a request: its phases, and what is lost on it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest
from feed_fakes.loopback_worker import WAIT_S
from feed_fakes.unstaffed_gateway import HASHER, PROMPT, SAMPLING, Client, UnstaffedGateway, handed_over

from splitserve.cluster.api.errors import NoWorker, WorkerLost
from splitserve.cluster.api.service import Tokens
from splitserve.engine.protocol import FinishReason, Role, SamplingParams

LENGTH = FinishReason.LENGTH


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


async def rest(items: AsyncGenerator[Tokens, None]) -> list[int]:
    """All tokens that still come."""
    async with aclosing(items), asyncio.timeout(WAIT_S):
        return [token async for item in items for token in item.token_ids]


# The phases


async def test_place_prefill_hand_over_decode(gateway: UnstaffedGateway, client: Client) -> None:
    reading = client.read()
    prefill = await gateway.prefill.next()
    assert prefill.request.prompt == tuple(PROMPT)
    assert prefill.request.page_hashes == HASHER.chain(PROMPT)
    assert prefill.request.sampling == SAMPLING
    assert gateway.links.sent == [prefill.request.request_id]
    prefill.hand_over(100, b"the ticket")
    assert await reading == Tokens([100], None, 4)

    decode = await gateway.decode.next()
    assert (decode.kind, decode.ticket) == ("decode", b"the ticket")
    assert decode.request.request_id == prefill.request.request_id
    assert decode.request.prompt == (*PROMPT, 100)
    assert decode.request.page_hashes == HASHER.chain([*PROMPT, 100])
    assert decode.request.sampling == SamplingParams(max_tokens=7, temperature=0.5, seed=3)
    decode.say(101, 102, cached_tokens=8)
    assert await client.next() == Tokens([101, 102], None, None)
    decode.say(103, finish=LENGTH)
    assert await client.next() == Tokens([103], LENGTH, None)
    with pytest.raises(StopAsyncIteration):
        await client.next()
    assert gateway.aborted == ([], [])
    assert gateway.recovered == 0


async def test_a_request_that_ends_with_its_first_token_sees_no_decode_worker(
    gateway: UnstaffedGateway, client: Client
) -> None:
    reading = client.read()
    (await gateway.prefill.next()).say(100, finish=FinishReason.STOP, cached_tokens=0)
    assert await reading == Tokens([100], FinishReason.STOP, 0)
    with pytest.raises(StopAsyncIteration):
        await client.next()
    assert gateway.decode.started.empty()
    assert gateway.aborted == ([], [])


async def test_without_a_prefill_worker_the_decode_worker_computes_it_all(
    gateway: UnstaffedGateway, client: Client
) -> None:
    gateway.links.remove("p")
    reading = client.read()
    decode = await gateway.decode.next()
    assert (decode.kind, decode.request.prompt, decode.ticket) == ("decode", tuple(PROMPT), None)
    decode.say(100, cached_tokens=8)
    assert await reading == Tokens([100], None, 8)
    decode.say(101, finish=LENGTH)
    assert await client.next() == Tokens([101], LENGTH, None)


async def test_two_requests_have_names_of_their_own(gateway: UnstaffedGateway, client: Client) -> None:
    other = Client(gateway.run())
    client.read()
    other.read()
    first, second = await gateway.prefill.next(), await gateway.prefill.next()
    assert first.request.request_id != second.request.request_id
    await other.leave()


# A worker is lost


async def test_lost_while_it_prefills(gateway: UnstaffedGateway) -> None:
    reading = asyncio.create_task(rest(gateway.run()))
    first = await gateway.prefill.next()
    gateway.links.remove("p")
    again = gateway.links.add("p2", Role.PREFILL)
    first.leg.lose("worker p is gone")
    second = await again.next()
    assert (second.request.prompt, second.request.sampling) == (tuple(PROMPT), SAMPLING)
    assert second.request.request_id != first.request.request_id
    second.say(100, finish=LENGTH)
    assert await reading == [100]
    assert gateway.recovered == 1


@pytest.mark.parametrize("said", [[], [101], [101, 102, 103]])
async def test_lost_while_it_decodes(gateway: UnstaffedGateway, said: list[int]) -> None:
    """The drawn tokens become part of the prompt, for the next pair of workers."""
    reading = asyncio.create_task(rest(gateway.run()))
    (await gateway.prefill.next()).hand_over(100)
    lost = await gateway.decode.next()
    if said:
        lost.say(*said)
    lost.leg.lose("worker d is gone")
    known = [*PROMPT, 100, *said]
    again = await gateway.prefill.next()
    assert again.request.prompt == tuple(known)
    assert again.request.page_hashes == HASHER.chain(known)
    assert again.request.sampling == SamplingParams(max_tokens=7 - len(said), temperature=0.5, seed=3)
    again.hand_over(104)
    last = await gateway.decode.next()
    assert last.request.prompt == (*known, 104)
    assert last.request.sampling.max_tokens == 6 - len(said)
    last.say(105, finish=LENGTH)
    assert await reading == [100, *said, 104, 105]
    assert gateway.recovered == 1
    lease = [lost.request.request_id] if not said else []
    assert gateway.aborted == (lease, [])


async def test_what_a_later_worker_has_cached_is_not_told(gateway: UnstaffedGateway, client: Client) -> None:
    lost = await handed_over(gateway, client)
    lost.leg.lose("worker d is gone")
    reading = client.read()
    (await gateway.prefill.next()).hand_over(101)
    assert await reading == Tokens([101], None, None)


@pytest.mark.parametrize("finish", [FinishReason.ERROR, FinishReason.ABORT])
async def test_a_worker_that_ends_it_without_an_answer_counts_as_lost(
    gateway: UnstaffedGateway, finish: FinishReason
) -> None:
    reading = asyncio.create_task(rest(gateway.run()))
    first = await gateway.prefill.next()
    first.say(finish=finish, error="refused")
    (await gateway.prefill.next()).hand_over(100)
    decode = await gateway.decode.next()
    decode.say(finish=finish, error="refused")
    (await gateway.prefill.next()).say(101, finish=LENGTH)
    assert await reading == [100, 101]
    assert gateway.aborted == ([decode.request.request_id], [])


async def test_the_decode_worker_is_gone_when_the_ticket_comes(gateway: UnstaffedGateway) -> None:
    """The lease ends at once, and nothing of the request is lost or doubled."""
    reading = asyncio.create_task(rest(gateway.run()))
    first = await gateway.prefill.next()
    gateway.links.remove("d")
    other = gateway.links.add("d2", Role.DECODE)
    first.hand_over(100)
    again = await gateway.prefill.next()
    assert gateway.prefill.aborted == [first.request.request_id]
    assert again.request.prompt == tuple(PROMPT)
    again.hand_over(100)
    (await other.next()).say(101, finish=LENGTH)
    assert await reading == [100, 101]


async def test_the_prefill_worker_is_gone_before_it_is_asked(gateway: UnstaffedGateway) -> None:
    """It is still in the view, its link is not."""
    link = gateway.links.links.pop("p")
    gateway.links.links = {"d": gateway.decode}
    with pytest.raises(WorkerLost, match="worker p is not connected"):
        await rest(gateway.run())
    assert link.started.empty()


async def test_after_so_many_losses_the_client_is_told() -> None:
    gateway = UnstaffedGateway(attempts=3)
    reading = asyncio.create_task(rest(gateway.run()))
    for _ in range(3):
        (await gateway.prefill.next()).leg.lose("worker p is gone")
    with pytest.raises(WorkerLost, match="3 times, at last because: worker p is gone"):
        await reading
    assert gateway.recovered == 2
    assert gateway.links.sent == []


async def test_a_silent_worker_counts_as_lost_and_is_told_to_end_it() -> None:
    gateway = UnstaffedGateway(token_wait_s=0.0, attempts=1)
    with pytest.raises(WorkerLost, match="no word"):
        await rest(gateway.run())
    started = await gateway.prefill.next()
    assert gateway.aborted == ([started.request.request_id], [])


# Nobody is there


async def test_no_worker_comes_in_time() -> None:
    gateway = UnstaffedGateway(placement_wait_s=0.01)
    gateway.links.remove("p")
    gateway.links.remove("d")
    with pytest.raises(NoWorker) as raised:
        await rest(gateway.run())
    assert raised.value.retry_after_s == 5.0


async def test_a_worker_that_comes_meanwhile_is_taken(gateway: UnstaffedGateway) -> None:
    gateway.links.remove("p")
    gateway.links.remove("d")
    reading = asyncio.create_task(rest(gateway.run()))
    await asyncio.sleep(0)
    late = gateway.links.add("late", Role.DECODE)
    (await late.next()).say(100, finish=LENGTH)
    assert await reading == [100]


async def test_nobody_is_left_for_the_rest() -> None:
    gateway = UnstaffedGateway(placement_wait_s=0.0)
    client = Client(gateway.run())
    decode = await handed_over(gateway, client)
    gateway.links.remove("p")
    gateway.links.remove("d")
    decode.leg.lose("worker d is gone")
    with pytest.raises(NoWorker):
        await client.next()
    assert gateway.recovered == 0
