"""Two engines: pages leave one under a lease and arrive at the other, or the prompt is computed anew."""

from collections.abc import Callable
from typing import Any

import pytest

from splitserve.engine.engine import RequestRefused
from splitserve.engine.protocol import FinishReason, Request, RequestId
from splitserve.engine.scheduler import SchedulerLimits

Make = Callable[..., Any]
LENGTHS = [1, 3, 4, 5, 8, 23, 33]


def following(bench: Any, request: Request, first: int) -> Request:
    """What the gateway asks of the decode worker after the first token."""
    return bench.request(
        request.request_id, [*request.prompt, first], request.sampling.max_tokens - 1, request.sampling.seed
    )


def prefilled(prefill: Any, name: str, prompt: list[int], max_tokens: int = 6) -> Request:
    request = prefill.request(name, prompt, max_tokens)
    prefill.engine.add(request, hand_over=True)
    prefill.run(name)
    assert prefill.finished[name] is FinishReason.HANDED_OVER
    return request


def decoded(prefill: Any, decode: Any, request: Request) -> list[int]:
    """Tokens of the whole request, after the decode worker's part."""
    name = request.request_id
    first = prefill.tokens[name][0]
    decode.engine.add(following(decode, request, first), ticket=prefill.ticket(name))
    decode.run(name)
    prefill.step()
    return [first, *decode.tokens[name]]


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_those_of_one_engine_and_pages_really_move(make_engine: Make, length: int) -> None:
    """B011, B012: every length around page and chunk borders."""
    one, prefill, decode = make_engine("one"), make_engine("p"), make_engine("d")
    one.engine.add(one.request("r", list(range(length)), 6))
    one.run("r")
    request = prefilled(prefill, "r", list(range(length)))
    assert decoded(prefill, decode, request) == one.tokens["r"]
    assert decode.total("splitserve_kv_transfer_pages_total") == -(-length // 4)
    assert decode.total("splitserve_kv_transfer_bytes_total") == -(-length // 4) * 4 * 8
    assert prefill.pool.held_pages == 0


def test_a_shared_prefix_moves_less_and_a_repeated_prompt_nothing(make_engine: Make) -> None:
    """B009: the sender hears of a full hit at once."""
    prefill, decode = make_engine("p"), make_engine("d")
    prompt = list(range(16))
    decoded(prefill, decode, prefilled(prefill, "first", prompt))
    assert decode.total("splitserve_kv_transfer_pages_total") == 4
    decoded(prefill, decode, prefilled(prefill, "again", prompt))
    assert decode.total("splitserve_kv_transfer_pages_total") == 4
    assert prefill.pool.held_pages == 0
    decoded(prefill, decode, prefilled(prefill, "longer", [*prompt[:8], 99, 98, 97, 96]))
    assert decode.total("splitserve_kv_transfer_pages_total") == 5


def test_a_request_that_ends_with_its_first_token_is_not_handed_over(make_engine: Make) -> None:
    """B036."""
    prefill = make_engine("p")
    prefill.engine.add(prefill.request("r", [1, 2], max_tokens=1), hand_over=True)
    prefill.run("r")
    assert prefill.finished["r"] is FinishReason.LENGTH
    assert prefill.tickets == {}
    assert prefill.pool.held_pages == 0


def test_an_expired_lease_leads_to_recomputation_when_the_pages_were_reused(make_engine: Make) -> None:
    """B021: never tokens from another prompt's pages."""
    one, prefill, decode = make_engine("one"), make_engine("p", pages=8), make_engine("d")
    one.engine.add(one.request("r", list(range(20)), 6))
    one.run("r")
    request = prefilled(prefill, "r", list(range(20)))
    prefill.clock.now = 6.0
    prefill.step()
    assert prefill.pool.held_pages == 0
    prefill.engine.add(prefill.request("other", [5] * 28, 2))
    prefill.run("other")
    assert decoded(prefill, decode, request) == one.tokens["r"]
    assert decode.total("splitserve_kv_recomputed_total") == 1
    assert decode.total("splitserve_kv_transfer_pages_total") == 0


@pytest.mark.parametrize("fault", ["refuse_connect", "fail_prepare", "fail_post", "fail_poll", "raise_foreign", "hang"])
def test_every_transfer_fault_leads_to_recomputation(make_engine: Make, fault: str) -> None:
    """B022: same tokens, one count, nothing held on either side."""
    one, prefill, decode = make_engine("one"), make_engine("p"), make_engine("d")
    one.engine.add(one.request("r", list(range(10)), 6))
    one.run("r")
    request = prefilled(prefill, "r", list(range(10)))
    setattr(decode.transport.faults, fault, True)
    decode.engine.add(following(decode, request, prefill.tokens["r"][0]), ticket=prefill.ticket("r"))
    decode.step()
    decode.clock.now = 3.0  # past the read's deadline
    decode.run("r")
    assert [prefill.tokens["r"][0], *decode.tokens["r"]] == one.tokens["r"]
    assert decode.total("splitserve_kv_transfer_failures_total") == 1
    setattr(decode.transport.faults, fault, False)
    prefill.clock.now = 6.0


def test_pages_of_an_abandoned_read_stay_out_of_use_until_the_transport_lets_go(make_engine: Make) -> None:
    """B003."""
    prefill, decode = make_engine("p"), make_engine("d")
    request = prefilled(prefill, "r", list(range(12)))
    decode.transport.faults.hang = True
    decode.transport.faults.abandon_polls = 3
    decode.engine.add(following(decode, request, prefill.tokens["r"][0]), ticket=prefill.ticket("r"))
    decode.step()
    held = decode.pool.held_pages
    assert held == 4
    decode.engine.abort(RequestId("r"))
    decode.step()
    assert decode.finished["r"] is FinishReason.ABORT
    assert decode.pool.held_pages == held
    for _ in range(4):
        decode.step()
    assert decode.pool.held_pages == 0


def test_abort_before_the_decode_worker_has_come_ends_the_lease(make_engine: Make) -> None:
    prefill = make_engine("p")
    prefilled(prefill, "r", list(range(9)))
    assert prefill.pool.held_pages == 3
    assert prefill.engine.abort(RequestId("r"))
    assert prefill.pool.held_pages == 0
    assert not prefill.engine.abort(RequestId("r"))


def test_abort_while_the_decode_worker_has_no_pages_tells_the_sender(make_engine: Make) -> None:
    prefill, decode = make_engine("p"), make_engine("d", pages=8)
    decode.engine.add(decode.request("big", [7] * 20, 9))
    decode.step()
    decode.step()
    request = prefilled(prefill, "r", list(range(12)))
    decode.engine.add(following(decode, request, prefill.tokens["r"][0]), ticket=prefill.ticket("r"))
    decode.step()
    assert prefill.pool.held_pages == 3
    decode.engine.abort(RequestId("r"))
    prefill.step()
    assert prefill.pool.held_pages == 0
    decode.run("big", "r")


def test_a_ticket_for_more_than_the_prompt_is_refused(make_engine: Make) -> None:
    prefill, decode = make_engine("p"), make_engine("d")
    request = prefilled(prefill, "r", list(range(9)))
    with pytest.raises(RequestRefused, match="the ticket covers 9 tokens"):
        decode.engine.add(request, ticket=prefill.ticket("r"))
    prefill.engine.abort(RequestId("r"))


def test_the_sender_is_gone(make_engine: Make) -> None:
    one, prefill, decode = make_engine("one"), make_engine("p"), make_engine("d")
    one.engine.add(one.request("r", list(range(10)), 6))
    one.run("r")
    request = prefilled(prefill, "r", list(range(10)))
    ticket, first = prefill.ticket("r"), prefill.tokens["r"][0]
    prefill.engine.close()
    decode.engine.add(following(decode, request, first), ticket=ticket)
    decode.run("r")
    assert [first, *decode.tokens["r"]] == one.tokens["r"]
    assert decode.total("splitserve_kv_recomputed_total") == 1


def test_receptions_do_not_overtake_an_older_request_that_waits_for_pages(make_engine: Make) -> None:
    """The oldest gets the next pages, also while tickets for younger requests keep coming."""
    prefill, decode = make_engine("p"), make_engine("d", pages=12)

    def hand_on(name: str) -> None:
        request = prefilled(prefill, name, [int(name)] * 5, max_tokens=12)
        decode.engine.add(following(decode, request, prefill.tokens[name][0]), ticket=prefill.ticket(name))

    hand_on("0")
    decode.step()
    decode.engine.add(decode.request("old", [7] * 40, 2))
    for number in range(1, 40):
        hand_on(str(number))
        for _ in range(6):
            decode.step()
            prefill.step()
    assert "old" in decode.finished
    decode.run("old", *map(str, range(40)))


def test_a_step_has_no_more_sequences_than_allowed_however_many_arrive(make_engine: Make) -> None:
    prefill = make_engine("p", pages=128)
    decode = make_engine("d", pages=128, limits=SchedulerLimits(64, 16, max_running=3))
    names = [str(number) for number in range(10)]
    for name in names:
        request = prefilled(prefill, name, [int(name)] * 5, max_tokens=9)
        decode.engine.add(following(decode, request, prefill.tokens[name][0]), ticket=prefill.ticket(name))
    while len(decode.finished) < len(names):
        assert decode.step().decode_tokens <= 3
    prefill.step()
    assert decode.total("splitserve_kv_transfers_total") == len(names)
