"""The way of a request whose client leaves: nothing of it goes on anywhere, and no lease waits for its deadline."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from feed_fakes.unstaffed_gateway import Client, UnstaffedGateway, handed_over

from splitserve.cluster.api.service import Tokens
from splitserve.engine.protocol import FinishReason

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


async def test_leaving_before_there_is_a_worker(gateway: UnstaffedGateway, client: Client) -> None:
    gateway.links.remove("p")
    gateway.links.remove("d")
    client.read()
    await asyncio.sleep(0)
    await client.leave()
    assert gateway.aborted == ([], [])


async def test_leaving_while_it_prefills(gateway: UnstaffedGateway, client: Client) -> None:
    client.read()
    prefill = await gateway.prefill.next()
    await client.leave()
    assert gateway.aborted == ([prefill.request.request_id], [])


async def test_leaving_as_the_ticket_comes(gateway: UnstaffedGateway, client: Client) -> None:
    """The hand-over has arrived, and nobody has looked at it: the lease must not wait for its deadline."""
    client.read()
    prefill = await gateway.prefill.next()
    prefill.hand_over(100)
    await client.leave()
    assert gateway.aborted == ([prefill.request.request_id], [])
    assert gateway.decode.started.empty()


async def test_leaving_with_the_first_token(gateway: UnstaffedGateway, client: Client) -> None:
    """Neither the lease nor the leg that would fetch its pages stays."""
    decode = await handed_over(gateway, client)
    await client.leave()
    name = decode.request.request_id
    assert gateway.aborted == ([name], [name])


async def test_leaving_while_the_pages_are_fetched(gateway: UnstaffedGateway, client: Client) -> None:
    decode = await handed_over(gateway, client)
    client.read()
    await asyncio.sleep(0)
    await client.leave()
    name = decode.request.request_id
    assert gateway.aborted == ([name], [name])


@pytest.mark.parametrize("waiting", [False, True])
async def test_leaving_while_it_decodes(gateway: UnstaffedGateway, client: Client, waiting: bool) -> None:
    """The lease is settled with the decode worker's first word."""
    decode = await handed_over(gateway, client)
    decode.say(101)
    assert await client.next() == Tokens([101])
    if waiting:
        client.read()
        await asyncio.sleep(0)
    await client.leave()
    assert gateway.aborted == ([], [decode.request.request_id])


async def test_leaving_after_the_last_token(gateway: UnstaffedGateway, client: Client) -> None:
    decode = await handed_over(gateway, client)
    decode.say(101, finish=LENGTH)
    assert await client.next() == Tokens([101], LENGTH)
    await client.leave()
    assert gateway.aborted == ([], [])


async def test_leaving_while_it_is_placed_anew(gateway: UnstaffedGateway, client: Client) -> None:
    decode = await handed_over(gateway, client)
    decode.say(101)
    assert await client.next() == Tokens([101])
    gateway.links.remove("p")
    gateway.links.remove("d")
    decode.leg.lose("worker d is gone")
    client.read()
    await asyncio.sleep(0)
    await client.leave()
    assert gateway.links.sent == []


async def test_leaving_without_a_prefill_worker(gateway: UnstaffedGateway, client: Client) -> None:
    gateway.links.remove("p")
    client.read()
    decode = await gateway.decode.next()
    await client.leave()
    assert gateway.decode.aborted == [decode.request.request_id]
