"""Reports that wait for a slow gateway: merged as if the worker had made one step."""

import asyncio
from contextlib import aclosing
from copy import deepcopy

from feed_fakes.reports import FACTS, report
from hypothesis import given
from hypothesis import strategies as st

from splitserve.cluster.outbox import Outbox, merge
from splitserve.engine.protocol import (
    Counted,
    FinishReason,
    Load,
    PageHash,
    RequestId,
    Role,
    SequenceUpdate,
    StepReport,
    WorkerId,
)
from splitserve.router.load_view import LoadView

PAGES = [PageHash(bytes([number]) * 16) for number in range(6)]


def delta(**changes: object) -> StepReport:
    return report(facts=None, **changes)  # type: ignore[arg-type]


def update(name: str, *tokens: int, **fields: object) -> SequenceUpdate:
    return SequenceUpdate(RequestId(name), list(tokens), **fields)  # type: ignore[arg-type]


def test_tokens_of_a_request_are_joined_and_its_end_is_kept() -> None:
    earlier = delta(updates=[update("a", 1, cached_tokens=8), update("b", 2)])
    merge(earlier, delta(updates=[update("b", 3), update("a", 4, 5, finish=FinishReason.STOP), update("c", 6)]))
    assert earlier.updates == [
        update("a", 1, 4, 5, finish=FinishReason.STOP, cached_tokens=8),
        update("b", 2, 3),
        update("c", 6),
    ]


def test_ticket_error_and_late_cached_tokens_are_kept() -> None:
    earlier = delta(updates=[update("a"), update("b")])
    handed_over = update("a", 1, finish=FinishReason.HANDED_OVER, ticket=b"t", cached_tokens=4)
    merge(earlier, delta(updates=[handed_over, update("b", finish=FinishReason.ERROR, error="why")]))
    assert earlier.updates == [handed_over, update("b", finish=FinishReason.ERROR, error="why")]


def test_a_request_whose_id_is_used_again_after_its_end_stays_two() -> None:
    earlier = delta(updates=[update("a", 1, finish=FinishReason.ABORT)])
    merge(earlier, delta(updates=[update("a", 2)]))
    assert earlier.updates == [update("a", 1, finish=FinishReason.ABORT), update("a", 2)]


def test_sums_add_up_and_the_rest_is_the_latest() -> None:
    earlier = delta(step_s=0.25, prefill_tokens=10, decode_tokens=1, steps=4, counters=[Counted("x_total", 1, {})])
    load = Load(running=3, total_pages=64)
    merge(earlier, delta(step_s=0.5, prefill_tokens=0, decode_tokens=2, steps=5, load=load, role=Role.DECODE))
    assert (earlier.step_s, earlier.prefill_tokens, earlier.decode_tokens, earlier.steps) == (0.75, 10, 3, 5)
    assert (earlier.load, earlier.role, earlier.counters) == (load, Role.DECODE, [Counted("x_total", 1, {})])
    merge(earlier, delta(counters=[Counted("x_total", 2, {})]))
    assert earlier.counters == [Counted("x_total", 2, {})]


def test_a_snapshot_that_waits_stays_one() -> None:
    earlier = report(stored=PAGES[:2])
    merge(earlier, delta(stored=[PAGES[2]], removed=[PAGES[0]]))
    assert (earlier.facts, earlier.stored, earlier.removed) == (FACTS, PAGES[1:3], [])


def test_a_later_snapshot_takes_the_place_of_all_pages() -> None:
    earlier = delta(stored=[PAGES[0]], removed=[PAGES[1]], updates=[update("a", 1)])
    merge(earlier, report(stored=[PAGES[2]]))
    assert (earlier.facts, earlier.stored, earlier.removed) == (FACTS, [PAGES[2]], [])
    assert earlier.updates == [update("a", 1)]


@st.composite
def feeds(draw: st.DrawFn) -> list[StepReport]:
    """A snapshot and the reports after it, of a worker that has up to six pages and three requests."""
    pages = draw(st.sets(st.sampled_from(PAGES)))
    ended: set[str] = set()
    reports = [report(stored=sorted(pages))]
    for number in range(draw(st.integers(1, 8))):
        now = draw(st.sets(st.sampled_from(PAGES)))
        updates = []
        for name in draw(st.sets(st.sampled_from(["a", "b", "c"]))) - ended:
            finish = draw(st.sampled_from([None, None, FinishReason.LENGTH]))
            updates.append(update(name, number, number + 1, finish=finish))
            if finish:
                ended.add(name)
        if draw(st.integers(0, 4)):
            reports.append(
                delta(stored=sorted(now - pages), removed=sorted(pages - now), updates=updates, steps=number)
            )
        else:
            reports.append(report(stored=sorted(now), updates=updates, steps=number))
        pages = now
    return reports


def seen_by(reports: list[StepReport]) -> tuple[set[PageHash], dict[str, list[int]], dict[str, FinishReason]]:
    """What a gateway knows after these: pages, tokens and ends of requests."""
    view, tokens, ends = LoadView(), dict[str, list[int]](), dict[str, FinishReason]()
    for item in reports:
        view.update(item)
        for entry in item.updates:
            assert entry.request_id not in ends
            tokens.setdefault(entry.request_id, []).extend(entry.tokens)
            if entry.finish is not None:
                ends[entry.request_id] = entry.finish
    worker = view.get(WorkerId("w"))
    assert worker is not None
    return worker.pages, tokens, ends


@given(reports=feeds(), cuts=st.sets(st.integers(1, 8)))
def test_a_gateway_knows_the_same_whatever_was_merged(reports: list[StepReport], cuts: set[int]) -> None:
    merged: list[StepReport] = []
    for number, item in enumerate(deepcopy(reports)):
        if number == 0 or number in cuts:
            merged.append(item)
        else:
            merge(merged[-1], item)
    assert seen_by(merged) == seen_by(reports)
    assert sum(item.step_s for item in merged) == sum(item.step_s for item in reports)
    assert merged[-1].steps == reports[-1].steps


@given(reports=feeds())
def test_a_merged_report_names_a_page_once(reports: list[StepReport]) -> None:
    """So it can't outgrow the cache, and what it says does not depend on an order."""
    for first in (0, 1):
        merged, *rest = deepcopy(reports[first:])
        for item in rest:
            merge(merged, item)
        named = merged.stored + merged.removed
        assert len(named) == len(set(named))
        assert merged.facts is None or not merged.removed


async def test_reports_are_numbered_without_gaps_and_in_order() -> None:
    outbox = Outbox()
    async with aclosing(outbox.reports()) as reports:
        for number in range(3):
            outbox.put(delta(steps=number, number=77))
            taken = await anext(reports)
            assert (taken.number, taken.steps) == (number, number)


async def test_what_waits_together_is_one_report() -> None:
    outbox = Outbox()
    for token in range(5):
        outbox.put(delta(updates=[update("a", token)], prefill_tokens=1))
    async with aclosing(outbox.reports()) as reports:
        taken = await anext(reports)
        assert (taken.number, taken.prefill_tokens) == (0, 5)
        assert taken.updates == [update("a", 0, 1, 2, 3, 4)]
        waiting = asyncio.ensure_future(anext(reports))
        await asyncio.sleep(0)
        assert not waiting.done()
        outbox.put(delta())
        assert (await waiting).number == 1


async def test_a_report_on_its_way_is_not_changed_any_more() -> None:
    outbox = Outbox()
    async with aclosing(outbox.reports()) as reports:
        outbox.put(delta(prefill_tokens=1))
        taken = await anext(reports)
        outbox.put(delta(prefill_tokens=2))
        assert taken.prefill_tokens == 1
