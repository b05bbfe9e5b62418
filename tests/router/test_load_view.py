"""What a gateway believes of its workers, report after report."""

import pytest
from feed_fakes.reports import FACTS, report
from hypothesis import given
from hypothesis import strategies as st

from splitserve.engine.protocol import Load, PageHash, RequestId, Role, WorkerId
from splitserve.router.load_view import LoadView, WorkerView

W = WorkerId("w")
A, B, C = (PageHash(bytes([n]) * 16) for n in (1, 2, 3))


def names_of(view: LoadView, worker: WorkerId = W) -> set[PageHash]:
    return the(view, worker).pages


def the(view: LoadView, worker: WorkerId = W) -> WorkerView:
    found = view.get(worker)
    assert found is not None
    return found


@pytest.fixture
def view() -> LoadView:
    """With one worker, that has page A."""
    view = LoadView()
    view.update(report(stored=[A]))
    return view


def test_a_worker_is_there_from_its_snapshot(view: LoadView) -> None:
    assert W in view
    assert [w.worker for w in view] == [W]
    assert (the(view).incarnation, the(view).facts, the(view).steps) == (1, FACTS, 1)
    assert view.get(WorkerId("other")) is None


def test_a_report_of_an_unknown_worker_makes_none() -> None:
    view = LoadView()
    view.update(report(facts=None, stored=[A]))
    assert W not in view
    assert list(view) == []


def test_later_reports_change_pages_load_and_role(view: LoadView) -> None:
    load = Load(waiting=2, waiting_tokens=30, running=1, free_pages=3, cached_pages=2, held_pages=59, total_pages=64)
    view.update(report(facts=None, stored=[B, C], removed=[A], load=load, role=Role.DECODE, steps=9))
    assert names_of(view) == {B, C}
    assert (the(view).load, the(view).role, the(view).steps) == (load, Role.DECODE, 9)
    assert the(view).free_tokens == (3 + 2) * 4
    assert view.of_role(Role.PREFILL) == []
    assert view.of_role(Role.DECODE) == [the(view)]


def test_a_snapshot_forgets_what_was_known_but_not_what_was_sent(view: LoadView) -> None:
    view.set_draining([W])
    view.sent(W, RequestId("r"), [], 8)
    view.update(report(incarnation=2, stored=[B]))
    assert names_of(view) == {B}
    assert (the(view).incarnation, the(view).draining, the(view).sent) == (2, True, {"r": 8})


def test_a_worker_that_is_gone_leaves_no_page_behind_and_starts_anew_when_it_comes_back(view: LoadView) -> None:
    """B091."""
    view.sent(W, RequestId("r"), [], 8)
    view.remove(W)
    view.remove(W)
    assert list(view) == []
    view.update(report(facts=None, stored=[B]))
    assert W not in view
    view.update(report(incarnation=2))
    assert (names_of(view), the(view).sent) == (set(), {})


def test_exactly_the_named_workers_drain(view: LoadView) -> None:
    other = WorkerId("other")
    view.update(report(other))
    view.set_draining([W])
    assert [w.worker for w in view.of_role(Role.PREFILL)] == [other]
    view.set_draining([other, WorkerId("unknown")])
    assert [w.worker for w in view.of_role(Role.PREFILL)] == [W]
    view.set_draining([])
    assert len(view.of_role(Role.PREFILL)) == 2


@pytest.mark.parametrize(
    ("names", "leading"), [([], 0), ([A], 1), ([A, B], 2), ([A, C, B], 1), ([C, A], 0), ([A, B, C], 2)]
)
def test_only_pages_without_a_gap_before_them_count(view: LoadView, names: list[PageHash], leading: int) -> None:
    view.update(report(facts=None, stored=[B]))
    assert the(view).leading_pages(names) == leading


@pytest.mark.parametrize(
    ("prompt_tokens", "uncached"), [(10, 6), (5, 1), (4, 1)], ids=["more", "one more", "all of it"]
)
def test_a_cached_page_is_no_work_but_the_last_token_always_is(
    view: LoadView, prompt_tokens: int, uncached: int
) -> None:
    assert the(view).uncached_tokens([A, B], prompt_tokens) == uncached
    view.sent(W, RequestId("r"), [A, B], prompt_tokens)
    assert the(view).sent_tokens == uncached


def test_work_sent_since_the_last_report_is_added_to_it(view: LoadView) -> None:
    for name, tokens in (("r", 10), ("s", 20)):
        view.sent(W, RequestId(name), [], tokens)
    assert (the(view).requests, the(view).tokens_ahead) == (2, 30)
    others_too = Load(waiting=3, waiting_tokens=100, running=2, total_pages=64)
    view.update(report(facts=None, load=others_too))
    assert (the(view).requests, the(view).tokens_ahead) == (5, 100)
    view.sent(W, RequestId("t"), [], 5)
    assert (the(view).requests, the(view).tokens_ahead) == (6, 105)
    for name in ("r", "s", "s", "never sent"):
        view.ended(W, RequestId(name))
    assert (the(view).requests, the(view).tokens_ahead) == (4, 75)
    view.update(report(facts=None))
    assert (the(view).requests, the(view).tokens_ahead) == (1, 5)


def test_what_is_sent_to_nobody_is_forgotten(view: LoadView) -> None:
    view.sent(WorkerId("gone"), RequestId("r"), [], 8)
    view.ended(WorkerId("gone"), RequestId("r"))
    assert WorkerId("gone") not in view


@given(changes=st.lists(st.tuples(st.sets(st.integers(0, 5)), st.booleans()), max_size=12))
def test_the_pages_are_those_of_the_worker_after_any_reports(changes: list[tuple[set[int], bool]]) -> None:
    """Each report tells the difference to the one before, or everything."""
    view, before = LoadView(), set[PageHash]()
    view.update(report())
    for numbers, snapshot in changes:
        now = {PageHash(bytes([n]) * 16) for n in numbers}
        if snapshot:
            view.update(report(stored=list(now)))
        else:
            view.update(report(facts=None, stored=list(now - before), removed=list(before - now)))
        assert names_of(view) == now
        before = now
