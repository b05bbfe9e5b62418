"""A request on one worker: what the feed brings is gathered until somebody takes it."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.cluster.leg import Leg, LegLost
from splitserve.engine.protocol import FinishReason, RequestId, SequenceUpdate

R = RequestId("r")
LONG_S = 60.0


def update(*tokens: int, **fields: object) -> SequenceUpdate:
    return SequenceUpdate(R, list(tokens), **fields)  # type: ignore[arg-type]


async def test_updates_that_came_together_are_taken_together() -> None:
    leg = Leg(R)
    leg.push(update(1, cached_tokens=16))
    leg.push(update(2, 3))
    leg.push(update(4, finish=FinishReason.HANDED_OVER, ticket=b"t"))
    taken = await leg.next(LONG_S)
    assert taken == update(1, 2, 3, 4, finish=FinishReason.HANDED_OVER, ticket=b"t", cached_tokens=16)


async def test_a_waiting_reader_gets_what_comes() -> None:
    leg = Leg(R)
    reading = asyncio.create_task(leg.next(LONG_S))
    await asyncio.sleep(0)
    assert not reading.done()
    leg.push(update(1))
    assert await reading == update(1)
    reading = asyncio.create_task(leg.next(LONG_S))
    await asyncio.sleep(0)
    assert not reading.done()
    leg.push(update(2))
    assert await reading == update(2)


async def test_a_leg_is_settled_when_its_last_word_was_taken() -> None:
    leg = Leg(R)
    assert (leg.ended, leg.settled) == (False, False)
    leg.push(update(1, finish=FinishReason.STOP))
    assert (leg.ended, leg.settled) == (True, False)
    await leg.next(LONG_S)
    assert (leg.ended, leg.settled) == (True, True)


async def test_nothing_comes_after_the_last_word() -> None:
    leg = Leg(R)
    leg.push(update(1, finish=FinishReason.LENGTH))
    leg.push(update(2))
    leg.lose("too late")
    assert await leg.next(LONG_S) == update(1, finish=FinishReason.LENGTH)


async def test_a_lost_leg_gives_what_it_had_before_it_says_so() -> None:
    leg = Leg(R)
    leg.push(update(1))
    leg.lose("the worker is gone")
    leg.lose("again")
    assert await leg.next(LONG_S) == update(1)
    for _ in range(2):
        with pytest.raises(LegLost, match="the worker is gone"):
            await leg.next(LONG_S)
    assert leg.settled


async def test_a_waiting_reader_hears_of_the_loss() -> None:
    leg = Leg(R)
    reading = asyncio.create_task(leg.next(LONG_S))
    await asyncio.sleep(0)
    leg.lose("the worker is gone")
    with pytest.raises(LegLost, match="the worker is gone"):
        await reading


async def test_silence_is_a_loss() -> None:
    leg = Leg(R)
    with pytest.raises(LegLost, match="no word"):
        await leg.next(0.0)
    assert not leg.ended


async def test_a_reader_that_is_cancelled_as_news_come_leaves_them_in_the_leg() -> None:
    leg = Leg(R)
    reading = asyncio.create_task(leg.next(LONG_S))
    await asyncio.sleep(0)
    leg.push(update(1, finish=FinishReason.HANDED_OVER, ticket=b"t"))
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not leg.settled
    assert (await leg.next(LONG_S)).ticket == b"t"


@given(batches=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8), reads=st.sets(st.integers(0, 7)))
def test_every_token_arrives_once_and_in_order(batches: list[list[int]], reads: set[int]) -> None:
    """However pushes and reads alternate."""

    async def drive() -> list[int]:
        leg, taken = Leg(R), list[int]()
        for number, tokens in enumerate(batches):
            leg.push(update(*tokens))
            if number in reads:
                taken += (await leg.next(LONG_S)).tokens
        leg.push(update(finish=FinishReason.STOP))
        last = await leg.next(LONG_S)
        assert last.finish is FinishReason.STOP
        return taken + last.tokens

    assert asyncio.run(drive()) == [token for tokens in batches for token in tokens]
