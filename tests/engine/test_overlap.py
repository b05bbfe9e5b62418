"""Two engines and a prompt of several chunks: its pages move while it is computed, and whatever goes wrong, the answer
is that of one engine and nothing is held in the end.
"""

from collections.abc import Callable
from typing import Any

import pytest

from splitserve.engine.engine import RequestRefused
from splitserve.engine.protocol import FinishReason, Request, RequestId
from splitserve.engine.scheduler import SchedulerLimits
from splitserve.engine.sequence import SequenceState
from splitserve.engine.step import ChunkOutput

Make = Callable[..., Any]
ERROR = FinishReason.ERROR
ROUNDS = 400
PROMPT = list(range(64))


class Way:
    """One request from prefill to the end of decoding, as a gateway leads it: early where there is an offer, with the
    final ticket where that failed.
    """

    def __init__(self, prefill: Any, decode: Any, prompt: list[int], max_tokens: int = 6, name: str = "r") -> None:
        self.prefill, self.decode, self.name = prefill, decode, name
        self.request: Request = prefill.request(name, prompt, max_tokens)
        self.last_name = name  # of the leg that decodes
        self.expecting = self.proceeded = False
        prefill.engine.add(self.request, hand_over=True)

    @property
    def following(self) -> Request:
        first, sampling = self.prefill.tokens[self.name], self.request.sampling
        prompt = [*self.request.prompt, *first]
        return self.decode.request(self.last_name, prompt, sampling.max_tokens - 1, sampling.seed)  # type: ignore[no-any-return]

    @property
    def done(self) -> bool:
        finish = self.prefill.finished.get(self.name)
        if finish is FinishReason.HANDED_OVER:
            return self.last_name in self.decode.finished and self.decode.finished[self.last_name] is not ERROR
        return finish is not None

    @property
    def tokens(self) -> list[int]:
        return [*self.prefill.tokens[self.name], *self.decode.tokens.get(self.last_name, [])]

    def act(self) -> None:
        """What the gateway does about the latest news."""
        if self.name in self.prefill.offers and not self.expecting:
            self.expecting = True
            self.decode.engine.add(self.request, ticket=self.prefill.offer(self.name), awaiting=True)
        if self.prefill.finished.get(self.name) is not FinishReason.HANDED_OVER:
            return
        if self.expecting and not self.proceeded:
            self.proceeded = True
            self.decode.engine.proceed(self.following)
        elif self.decode.finished.get(self.last_name) is ERROR or not self.expecting:
            self.expecting = self.proceeded = True
            self.last_name = RequestId(f"{self.name}-again")
            ticket = self.prefill.ticket(self.name) if self.name in self.prefill.tickets else None
            self.decode.engine.add(self.following, ticket=ticket)

    def round(self, steps_s: float = 0.0) -> None:
        self.prefill.step()
        self.act()
        for _ in range(3):  # reads, then generations, then what follows
            self.decode.step()
        self.act()
        for bench in (self.prefill, self.decode):
            bench.clock.now += steps_s

    def run(self, steps_s: float = 0.0) -> list[int]:
        for _ in range(ROUNDS):
            if self.done:
                self.prefill.step()
                return self.tokens
            self.round(steps_s)
        raise AssertionError(f"{self.prefill.finished}, {self.decode.finished} after {ROUNDS} rounds")


def alone(make_engine: Make, prompt: list[int], max_tokens: int = 6) -> list[int]:
    one = make_engine("one", pages=128)
    one.engine.add(one.request("r", prompt, max_tokens))
    one.run("r")
    return list(one.tokens["r"])


def chunks_of(tokens: int) -> SchedulerLimits:
    return SchedulerLimits(step_tokens=4 * tokens, chunk_tokens=tokens, max_running=8)


@pytest.fixture
def pair(make_engine: Make) -> tuple[Any, Any]:
    return make_engine("p", limits=chunks_of(8)), make_engine("d")


# What it brings


def test_most_pages_have_moved_when_the_prompt_is_computed(make_engine: Make) -> None:
    """With chunks of a sixteenth of the prompt."""
    prefill, decode = make_engine("p", pages=128, limits=chunks_of(16)), make_engine("d", pages=128)
    prompt = list(range(256))
    way = Way(prefill, decode, prompt)
    assert way.run() == alone(make_engine, prompt)
    record = decode.transfers["r"]
    assert (record.source, record.pages, record.reused_pages, record.cause) == ("p", 64, 0, None)
    assert record.bytes == 64 * 4 * 8
    assert record.hidden_pages >= 0.8 * record.pages
    assert prefill.total("splitserve_kv_leases_total") == 1
    assert decode.total("splitserve_prefill_tokens_total") == 0


@pytest.mark.parametrize("length", [9, 12, 15, 16, 17, 31, 32, 33, 64])
def test_every_length_gives_the_tokens_of_one_engine(make_engine: Make, pair: tuple[Any, Any], length: int) -> None:
    """B011, B054: partial last pages and exact multiples, of the page and of the chunk."""
    prefill, decode = pair
    assert Way(prefill, decode, list(range(length))).run() == alone(make_engine, list(range(length)))
    assert decode.transfers["r"].pages == -(-length // 4)
    assert decode.total("splitserve_prefill_tokens_total") == 0


def test_a_prompt_of_one_chunk_goes_the_plain_way(make_engine: Make, pair: tuple[Any, Any]) -> None:
    prefill, decode = pair
    assert Way(prefill, decode, list(range(8))).run() == alone(make_engine, list(range(8)))
    assert prefill.offers == {}


def test_an_only_token_makes_no_offer(pair: tuple[Any, Any]) -> None:
    prefill, decode = pair
    way = Way(prefill, decode, PROMPT, max_tokens=1)
    way.run()
    assert prefill.offers == {}
    assert prefill.finished["r"] is FinishReason.LENGTH


def test_b009_a_receiver_that_has_all_ends_the_lease_before_the_prompt_is_computed(pair: tuple[Any, Any]) -> None:
    """All full pages are shared, the last one included: the token after them is drawn elsewhere."""
    prefill, decode = pair
    decode.engine.add(decode.request("before", PROMPT, 1))
    decode.run("before")
    way = Way(prefill, decode, PROMPT)
    way.round()
    prefill.step()
    assert prefill.engine.load().open_leases == 0
    assert "r" not in prefill.finished
    way.run()
    assert "r" not in prefill.tickets
    assert prefill.pool.held_pages == 0
    assert (decode.transfers["r"].pages, decode.transfers["r"].reused_pages) == (0, 16)


def test_only_what_is_missing_moves(pair: tuple[Any, Any]) -> None:
    prefill, decode = pair
    decode.engine.add(decode.request("before", PROMPT[:20], 1))
    decode.run("before")
    Way(prefill, decode, PROMPT).run()
    assert (decode.transfers["r"].pages, decode.transfers["r"].reused_pages) == (11, 5)


def test_what_the_sender_has_cached_can_be_read_at_once(pair: tuple[Any, Any]) -> None:
    prefill, _ = pair
    prefill.engine.add(prefill.request("before", PROMPT[:40], 1))
    prefill.run("before")
    prefill.engine.add(prefill.request("r", PROMPT), hand_over=True)
    prefill.step()
    assert prefill.offer("r").sealed == 40
    prefill.engine.abort(RequestId("r"))


def test_the_first_token_may_come_before_the_last_pages(make_engine: Make, pair: tuple[Any, Any]) -> None:
    prefill, decode = pair
    way = Way(prefill, decode, PROMPT)
    way.round()
    decode.transport.faults.hang = True
    while "r" not in prefill.finished:
        way.round()
    assert way.proceeded
    assert decode.tokens.get("r", []) == []
    decode.transport.faults.hang = False
    assert way.run() == alone(make_engine, PROMPT)
    assert decode.transfers["r"].cause is None


def test_pages_wait_for_the_first_token(pair: tuple[Any, Any]) -> None:
    prefill, decode = pair
    request = prefill.request("r", PROMPT)
    prefill.engine.add(request, hand_over=True)
    prefill.step()
    decode.engine.add(request, ticket=prefill.offer("r"), awaiting=True)
    decode.step()
    prefill.run("r")
    for _ in range(30):
        decode.step()
    prefill.step()
    assert prefill.pool.held_pages == 0
    assert decode.engine._sequences["r"].state is SequenceState.AWAITING
    assert not decode.engine.computing
    assert decode.engine.proceed(decode.request("r", [*PROMPT, *prefill.tokens["r"]], 3))
    decode.run("r")
    assert len(decode.tokens["r"]) == 3


# What goes wrong


@pytest.mark.parametrize("fault", ["lose_notices", "double_notices", "overtake_notices"])
@pytest.mark.parametrize("side", ["p", "d", "both"])
def test_notices_that_go_astray_cost_time_only(make_engine: Make, pair: tuple[Any, Any], fault: str, side: str) -> None:
    """A lost word that pages are sealed is made good by the gateway's that the first token is there."""
    prefill, decode = pair
    for bench in pair:
        if side in (bench.transport.endpoint().decode()[0], "both"):
            setattr(bench.transport.faults, fault, True)
    assert Way(prefill, decode, PROMPT).run() == alone(make_engine, PROMPT)
    assert decode.total("splitserve_prefill_tokens_total") == 0
    prefill.clock.now += 6.0


@pytest.mark.parametrize("fault", ["refuse_connect", "fail_prepare", "fail_post", "fail_poll", "raise_foreign"])
def test_a_failed_reception_says_so_and_the_final_ticket_is_used(
    make_engine: Make, pair: tuple[Any, Any], fault: str
) -> None:
    prefill, decode = pair
    way = Way(prefill, decode, PROMPT)
    setattr(decode.transport.faults, fault, True)
    for _ in range(4):
        way.round()
    assert decode.finished["r"] is ERROR
    assert decode.errors["r"]
    assert "r" not in prefill.finished
    setattr(decode.transport.faults, fault, False)
    assert way.run() == alone(make_engine, PROMPT)
    assert decode.transfers["r-again"].pages == 16
    assert decode.total("splitserve_kv_recomputed_total") == 0
    prefill.clock.now += 6.0


def test_a_frozen_transport_ends_by_the_deadline(make_engine: Make, pair: tuple[Any, Any]) -> None:
    """After the first token is here it is too late for the sender's pages: they are computed here."""
    prefill, decode = pair
    decode.transport.faults.hang = True
    way = Way(prefill, decode, PROMPT)
    assert way.run(steps_s=0.3) == alone(make_engine, PROMPT)
    assert decode.total("splitserve_kv_recomputed_total") == 1
    assert decode.transfers["r"].cause == "timeout"
    decode.transport.faults.hang = False
    prefill.clock.now += 6.0


@pytest.mark.parametrize("rounds", range(12))
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_abort_of_either_side_at_any_time_leaves_nothing(pair: tuple[Any, Any], side: str, rounds: int) -> None:
    """The fixture sees to it that nothing is held."""
    prefill, decode = pair
    way = Way(prefill, decode, PROMPT)
    for _ in range(rounds):
        way.round()
    getattr(way, side).engine.abort(RequestId("r"))
    for _ in range(3):
        prefill.step()
        decode.step()
    for bench in (prefill, decode):
        bench.engine.abort(RequestId("r"))
        bench.step()
    prefill.step()
    decode.step()
    assert (prefill.pool.held_pages, decode.pool.held_pages) == (0, 0)


def test_a_prefill_that_is_aborted_tells_the_receiver(pair: tuple[Any, Any]) -> None:
    prefill, decode = pair
    way = Way(prefill, decode, PROMPT)
    way.round()
    way.round()
    prefill.engine.abort(RequestId("r"))
    decode.step()
    assert decode.finished["r"] is ERROR
    assert "gave it up" in decode.errors["r"]
    assert decode.transfers["r"].cause == "revoked"


def test_a_step_that_fails_at_the_sender_tells_the_receiver(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    way = Way(prefill, decode, PROMPT)
    way.round()

    def fail(chunks: object) -> list[ChunkOutput]:
        raise RuntimeError("device lost")

    monkeypatch.setattr(prefill.engine._runner, "run", fail)
    way.round()
    decode.step()
    assert (prefill.finished["r"], decode.finished["r"]) == (ERROR, ERROR)
    assert prefill.pool.held_pages == 0


def test_a_first_token_that_is_the_last_takes_the_offer_back(make_engine: Make, pair: tuple[Any, Any]) -> None:
    prefill, decode = pair
    first = alone(make_engine, PROMPT)[0]
    request = prefill.request("r", PROMPT, stop_token_ids=(first,))
    prefill.engine.add(request, hand_over=True)
    prefill.step()
    decode.engine.add(request, ticket=prefill.offer("r"), awaiting=True)
    decode.step()
    prefill.run("r")
    assert prefill.finished["r"] is FinishReason.STOP
    assert prefill.pool.held_pages == 0
    decode.step()
    assert decode.finished["r"] is ERROR


def test_a_lease_that_ends_early_does_not_disturb_the_prefill(make_engine: Make, pair: tuple[Any, Any]) -> None:
    """B021: pages are the sequence's own, and it offers them anew when it is done."""
    prefill, decode = pair
    way = Way(prefill, decode, PROMPT)
    prefill.step()
    prefill.clock.now += 6.0
    prefill.step()
    assert prefill.engine.load().open_leases == 0
    assert way.run() == alone(make_engine, PROMPT)
    assert prefill.ticket("r").ticket_id != prefill.offer("r").ticket_id


def test_the_sender_is_gone_in_the_middle(make_engine: Make, pair: tuple[Any, Any]) -> None:
    prefill, decode = pair
    way = Way(prefill, decode, PROMPT)
    way.round()
    prefill.engine.close()
    decode.clock.now += 6.0
    decode.step()
    assert decode.finished["r"] is ERROR


# Room


def test_a_receiver_without_pages_keeps_the_lease_until_it_has_some(make_engine: Make) -> None:
    """B021: longer than the lease."""
    prefill, decode = make_engine("p", limits=chunks_of(8)), make_engine("d", pages=20)
    decode.engine.add(decode.request("big", [7] * 40, 38))
    decode.step()
    decode.step()
    way = Way(prefill, decode, PROMPT)
    for _ in range(9):
        prefill.step()
        way.act()
        decode.engine._handover.poll(decode.clock(), lambda s: None, lambda s, why: None)
        for bench in (prefill, decode):
            bench.clock.now += 1.0
    assert prefill.finished["r"] is FinishReason.HANDED_OVER
    assert way.run() == alone(make_engine, PROMPT)
    assert decode.transfers["r"].pages == 16
    decode.run("big")


def test_a_receiver_that_has_promised_its_pages_says_so_at_once(make_engine: Make) -> None:
    prefill, decode = make_engine("p", pages=128, limits=chunks_of(8)), make_engine("d", pages=20)
    decode.engine.add(decode.request("big", [7] * 40, 38))
    decode.step()
    decode.step()
    first = Way(prefill, decode, PROMPT, name="1")
    first.round()
    second = Way(prefill, decode, [5, *PROMPT], name="2")
    second.round()
    assert decode.finished["2"] is ERROR
    assert "no room: others want 16 pages" in decode.errors["2"]
    assert "1" not in decode.finished
    assert "2" not in prefill.finished
    for way in (first, second):
        way.run()
    decode.run("big")


def test_two_workers_do_not_hold_each_others_pages_for_ever(make_engine: Make) -> None:
    """Each waits for pages that it keeps for the other: their leases end by their deadlines."""
    pair = [make_engine(name, pages=8) for name in "pd"]
    prompts = {"p": list(range(24)), "d": list(range(50, 74))}
    for bench, name in zip(pair, prompts, strict=True):
        bench.engine.add(bench.request(name, prompts[name], 3), hand_over=True)
        bench.run(name)
    for sender, receiver, name in ((*pair, "p"), (*pair[::-1], "d")):
        following = receiver.request(f"{name}-2", [*prompts[name], *sender.tokens[name]], 2)
        receiver.engine.add(following, ticket=sender.ticket(name))
    for _ in range(40):
        for bench in pair:
            bench.step()
            bench.clock.now += 0.5
    assert ("d-2" in pair[0].finished, "p-2" in pair[1].finished) == (True, True)


def test_b072_nothing_more_is_computed_for_peers_while_they_fetch_nothing(make_engine: Make) -> None:
    prefill = make_engine("p", pages=32, limits=SchedulerLimits(16, 16, 8), leased_share=0.5)
    for number in range(4):
        prefill.engine.add(prefill.request(str(number), [number] * 28), hand_over=True)
    for _ in range(20):
        prefill.step()
    load = prefill.engine.load()
    assert sorted(prefill.finished) == ["0", "1", "2"]
    assert (load.leased_pages, load.held_back, load.waiting) == (21, 1, 1)
    assert prefill.total("splitserve_held_back_total") > 0
    prefill.engine.add(prefill.request("own", [9] * 20, 3))
    prefill.run("own")
    assert "3" not in prefill.finished
    prefill.engine.abort(RequestId("0"))
    prefill.run("3")
    for name in "123":
        prefill.engine.abort(RequestId(name))


def test_an_offered_prompt_is_no_victim(make_engine: Make) -> None:
    """Sequences before it that want to grow wait until it is done."""
    prefill, decode = make_engine("p", pages=24, limits=chunks_of(4)), make_engine("d")
    for number in range(2):
        prefill.engine.add(prefill.request(str(number), [number] * 6, 30))
    prefill.step()
    way = Way(prefill, decode, PROMPT)
    for _ in range(12):
        way.round()
        offered = prefill.engine._sequences.get("r")
        assert offered is None or offered.preemptions == 0
    assert way.run() == alone(make_engine, PROMPT)
    assert len(prefill.offers) == 1
    prefill.run("0", "1")


# What is refused


@pytest.mark.parametrize("extra", [-1, 1])
def test_an_awaiting_request_needs_a_ticket_for_exactly_its_prompt(pair: tuple[Any, Any], extra: int) -> None:
    prefill, decode = pair
    prefill.engine.add(prefill.request("r", PROMPT), hand_over=True)
    prefill.step()
    other = decode.request("r", [*PROMPT, 1][: len(PROMPT) + extra])
    with pytest.raises(RequestRefused, match="the ticket covers 64 tokens"):
        decode.engine.add(other, ticket=prefill.offer("r"), awaiting=True)
    with pytest.raises(RequestRefused, match="needs a ticket"):
        decode.engine.add(other, awaiting=True)
    prefill.engine.abort(RequestId("r"))


def test_proceeding_with_what_nobody_awaits_is_false(pair: tuple[Any, Any]) -> None:
    _, decode = pair
    assert not decode.engine.proceed(decode.request("never seen", PROMPT))
    decode.engine.add(decode.request("r", PROMPT))
    assert not decode.engine.proceed(decode.request("r", [*PROMPT, 1]))
    decode.run("r")
    assert not decode.engine.proceed(decode.request("r", [*PROMPT, 1]))


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:10], [*PROMPT[:-1], 99, 1]])
def test_what_does_not_follow_ends_with_an_error(pair: tuple[Any, Any], prompt: list[int]) -> None:
    prefill, decode = pair
    way = Way(prefill, decode, PROMPT)
    way.round()
    assert not decode.engine.proceed(decode.request("r", prompt))
    decode.step()
    assert decode.finished["r"] is ERROR
    way.run()
