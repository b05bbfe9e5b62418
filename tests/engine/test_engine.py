"""One engine: tokens, ends, caching, preemption, refusal."""

from collections.abc import Callable
from typing import Any

import pytest

from splitserve.engine.engine import RequestRefused
from splitserve.engine.protocol import FinishReason, RequestId
from splitserve.engine.scheduler import SchedulerLimits
from splitserve.engine.step import ChunkOutput

Make = Callable[..., Any]


def alone(make_engine: Make, prompt: list[int], max_tokens: int, seed: int = 7) -> list[int]:
    bench = make_engine()
    bench.engine.add(bench.request("alone", prompt, max_tokens, seed))
    bench.run("alone")
    return list(bench.tokens["alone"])


def test_max_tokens_ends_a_request(make_engine: Make) -> None:
    bench = make_engine()
    bench.engine.add(bench.request("r", [1, 2, 3], max_tokens=1))
    bench.run("r")
    assert bench.finished["r"] is FinishReason.LENGTH
    assert len(bench.tokens["r"]) == 1


def test_stop_tokens_end_a_request_and_ignore_eos_does_not(make_engine: Make) -> None:
    expected = alone(make_engine, [1, 2, 3], 8)
    bench = make_engine()
    bench.engine.add(bench.request("stop", [1, 2, 3], 8, stop_token_ids=(expected[2],)))
    bench.run("stop")
    assert (bench.tokens["stop"], bench.finished["stop"]) == (expected[:3], FinishReason.STOP)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 23, 70])
def test_tokens_do_not_depend_on_chunks_or_on_others(make_engine: Make, length: int) -> None:
    prompt = list(range(length))
    expected = alone(make_engine, prompt, 6)
    bench = make_engine(limits=SchedulerLimits(step_tokens=7, chunk_tokens=3, max_running=4))
    for other in range(3):
        bench.engine.add(bench.request(f"other{other}", [other] * 9, 12, seed=other))
    bench.engine.add(bench.request("r", prompt, 6))
    bench.run("r", "other0", "other1", "other2")
    assert bench.tokens["r"] == expected


@pytest.mark.parametrize("pages", [1, 2, 8])
def test_a_fully_cached_prompt_computes_at_least_its_last_token(make_engine: Make, pages: int) -> None:
    """B054: prompt length an exact multiple of the page."""
    bench = make_engine()
    prompt = list(range(4 * pages))
    for name in ("first", "second"):
        bench.engine.add(bench.request(name, prompt, 3))
        bench.run(name)
    assert bench.tokens["first"] == bench.tokens["second"]
    assert bench.cached["first"] == 0
    assert bench.cached["second"] == 4 * (pages - 1)
    bench.engine.add(bench.request("longer", [*prompt, 999], 3))
    bench.run("longer")
    assert bench.cached["longer"] == 4 * pages


def test_pages_of_the_answer_are_shared_too(make_engine: Make) -> None:
    bench = make_engine()
    bench.engine.add(bench.request("first", [1, 2, 3], 10))
    bench.run("first")
    turn = [1, 2, 3, *bench.tokens["first"], 5, 6]
    bench.engine.add(bench.request("second", turn, 2))
    bench.run("second")
    assert bench.cached["second"] == 12


def test_preempted_requests_end_with_the_same_tokens(make_engine: Make) -> None:
    expected = {seed: alone(make_engine, [seed] * 6, 20, seed) for seed in range(5)}
    bench = make_engine(pages=12)
    for seed in range(5):
        bench.engine.add(bench.request(str(seed), [seed] * 6, 20, seed))
    bench.run(*expected_names(expected))
    assert {seed: bench.tokens[str(seed)] for seed in expected} == expected
    assert bench.total("splitserve_preemptions_total") > 0


def expected_names(expected: dict[int, list[int]]) -> list[str]:
    return [str(seed) for seed in expected]


def test_an_older_request_is_never_preempted_for_a_younger_one(make_engine: Make) -> None:
    """B068."""
    bench = make_engine(pages=10)
    for seed in range(4):
        bench.engine.add(bench.request(str(seed), [seed] * 6, 20, seed))
    bench.run("0")
    assert len(bench.tokens["0"]) >= max(len(bench.tokens.get(str(seed), [])) for seed in range(1, 4))
    bench.run("1", "2", "3")


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "limit"),
    [(0, 1, "at least one prompt token"), (1, 0, "max_tokens")],
)
def test_what_can_never_be_computed_is_refused_and_holds_nothing(
    make_engine: Make, prompt_tokens: int, max_tokens: int, limit: str
) -> None:
    """B053. Sizes that exceed a limit: test_scheduler_limits."""
    bench = make_engine(pages=8)
    with pytest.raises(RequestRefused, match=limit):
        bench.engine.add(bench.request("r", [1] * prompt_tokens, max_tokens))
    assert bench.engine.idle


def test_what_just_fits_is_computed(make_engine: Make) -> None:
    bench = make_engine(pages=8)
    bench.engine.add(bench.request("r", [1] * 30, 3))
    bench.run("r")
    assert len(bench.tokens["r"]) == 3


def test_an_id_in_use_is_refused(make_engine: Make) -> None:
    bench = make_engine()
    bench.engine.add(bench.request("r", [1], 2))
    with pytest.raises(RequestRefused, match="in use"):
        bench.engine.add(bench.request("r", [2], 2))
    bench.run("r")


@pytest.mark.parametrize("steps", range(8))
def test_abort_in_any_state_lets_everything_go(make_engine: Make, steps: int) -> None:
    """B008, B028: before pages, in a chunk, while decoding, after the end."""
    bench = make_engine()
    bench.engine.add(bench.request("r", list(range(40)), 5))
    for _ in range(steps):
        bench.step()
    ended = "r" in bench.finished
    assert bench.engine.abort(RequestId("r")) is not ended
    bench.step()
    assert bench.finished["r"] is (FinishReason.LENGTH if ended else FinishReason.ABORT)
    assert bench.pool.held_pages == 0


def test_abort_of_an_unknown_request_changes_nothing(make_engine: Make) -> None:
    """B005."""
    bench = make_engine()
    assert not bench.engine.abort(RequestId("never seen"))
    assert bench.engine.idle


def test_a_failing_step_ends_its_requests_and_nobody_else(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_engine()
    bench.engine.add(bench.request("bad", [1, 2], 4))

    def fail(chunks: object) -> list[ChunkOutput]:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(bench.engine._runner, "run", fail)
        bench.step()
    assert bench.finished["bad"] is FinishReason.ERROR
    bench.engine.add(bench.request("good", [1, 2], 4))
    bench.run("good")
    assert bench.finished["good"] is FinishReason.LENGTH


def test_a_chunk_without_finite_logits_ends_its_request_alone_and_names_no_page(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_engine()
    bench.engine.add(bench.request("bad", list(range(8)), 4))
    bench.engine.add(bench.request("good", [9] * 8, 4))
    run = bench.engine._runner.run
    with monkeypatch.context() as patch:
        patch.setattr(bench.engine._runner, "run", lambda chunks: [ChunkOutput(), *run(chunks)[1:]])
        bench.step()
    bench.step()
    assert bench.finished["bad"] is FinishReason.ERROR
    bench.run("good")
    bench.engine.add(bench.request("again", list(range(8)), 1))
    bench.run("again")
    assert bench.cached["again"] == 0
