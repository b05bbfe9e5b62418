"""Which pair of workers a prompt gets."""

from collections import Counter
from random import Random

import pytest
from feed_fakes.reports import report

from splitserve.engine.page_hash import PageHasher
from splitserve.engine.protocol import Load, PageHash, RequestId, Role, WorkerId
from splitserve.router.load_view import LoadView
from splitserve.router.placement import NobodyThere, Placement, place

HASHER = PageHasher(4, b"test")
PROMPT = HASHER.chain(range(40))


def load(**changes: int) -> Load:
    return Load(**{"free_pages": 64, "total_pages": 64, **changes})


def view_of(prefill: dict[str, object], decode: dict[str, object]) -> LoadView:
    """Workers by name, with the fields of their reports."""
    view = LoadView()
    for role, workers in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for worker, fields in workers.items():
            view.update(report(worker, role=role, **fields))  # type: ignore[arg-type]
    return view


def chosen(view: LoadView, names: tuple[PageHash, ...] = PROMPT, tokens: int = 40, seed: int = 0) -> Placement:
    return place(names, tokens, view, Random(seed))


def many(view: LoadView, count: int = 64) -> list[Placement]:
    """Choices for the same prompt, none of them sent."""
    rng = Random(1)
    return [place(PROMPT, 40, view, rng) for _ in range(count)]


def send_many(view: LoadView, count: int, rng: Random, gateway: str = "g") -> list[Placement]:
    """A burst between two reports."""
    placements = []
    for number in range(count):
        placement = place(PROMPT, 40, view, rng)
        request = RequestId(f"{gateway}{number}")
        view.sent(placement.decode, request, PROMPT, 40)
        if placement.prefill is not None:
            view.sent(placement.prefill, request, PROMPT, 40)
        placements.append(placement)
    return placements


def test_both_are_chosen_by_their_role() -> None:
    assert chosen(view_of({"p": {}}, {"d": {}})) == Placement(WorkerId("p"), WorkerId("d"))


def test_a_cached_prefix_decides_between_idle_workers() -> None:
    view = view_of({"cold": {}, "half": {"stored": list(PROMPT[:5])}, "gap": {"stored": list(PROMPT[1:])}}, {"d": {}})
    assert {p.prefill for p in many(view)} == {"half"}


@pytest.mark.parametrize(("waiting_tokens", "expected"), [(19, "warm"), (21, "cold")])
def test_the_work_left_decides_not_the_cache(waiting_tokens: int, expected: str) -> None:
    """Five of ten pages are cached: worth 20 tokens of queue."""
    warm = {"stored": list(PROMPT[:5]), "load": load(waiting_tokens=waiting_tokens)}
    assert {p.prefill for p in many(view_of({"warm": warm, "cold": {}}, {"d": {}}))} == {expected}


def test_a_miss_does_not_go_to_the_smaller_cache_of_a_drowning_worker() -> None:
    """B076."""
    drowning = {"load": load(waiting=20, waiting_tokens=800)}
    idle = {"stored": [PageHash(bytes([n]) * 16) for n in range(50)]}
    assert {p.prefill for p in many(view_of({"drowning": drowning, "idle": idle}, {"d": {}}))} == {"idle"}


def test_what_is_on_its_way_to_a_worker_counts_as_its_uncached_part() -> None:
    """A hot prefix stays where it is as long as computing the tails there is less work than all of it elsewhere."""
    view = view_of({"warm": {"stored": list(PROMPT[:9])}, "cold": {}}, {"d": {}})
    assert Counter(p.prefill for p in send_many(view, 9, Random(0))) == {"warm": 9}
    assert Counter(p.prefill for p in send_many(view, 2, Random(0), "again")) == {"warm": 1, "cold": 1}


def test_the_decode_worker_with_the_fewest_requests_is_taken() -> None:
    decode = {"waits": {"load": load(waiting=2)}, "runs": {"load": load(running=2)}, "idle": {"load": load(running=1)}}
    assert {p.decode for p in many(view_of({"p": {}}, decode))} == {"idle"}


def test_a_decode_worker_without_room_is_taken_only_if_none_has_room() -> None:
    full = {"load": load(free_pages=4, cached_pages=5)}  # 36 tokens
    roomy = {"load": load(free_pages=4, cached_pages=6, running=9)}
    assert {p.decode for p in many(view_of({"p": {}}, {"full": full, "roomy": roomy}))} == {"roomy"}
    assert {p.decode for p in many(view_of({"p": {}}, {"full": full}))} == {"full"}


def test_ties_fall_at_random_and_the_same_with_the_same_seed() -> None:
    view = view_of({"p0": {}, "p1": {}}, {"d0": {}, "d1": {}})
    pairs = Counter((p.prefill, p.decode) for p in many(view, 400))
    assert len(pairs) == 4
    assert min(pairs.values()) > 60
    assert many(view) == many(view)


@pytest.mark.parametrize("seed", range(5))
def test_a_burst_between_two_reports_spreads(seed: int) -> None:
    """B075: the reports stay as they are, four gateways send eight requests each."""
    total: Counter[str | None] = Counter()
    for gateway in range(4):
        view = view_of({"p0": {}, "p1": {}}, {"d0": {}, "d1": {}})
        placements = send_many(view, 8, Random(seed * 10 + gateway))
        assert Counter(p.prefill for p in placements) == {"p0": 4, "p1": 4}
        assert Counter(p.decode for p in placements) == {"d0": 4, "d1": 4}
        total.update(p.prefill for p in placements)
    assert set(total.values()) == {16}


def test_a_burst_spreads_on_top_of_the_load_that_others_made() -> None:
    """B075: the worker that is a little less busy with another gateway's requests does not get all of ours."""
    prefill = {"p0": {"load": load(waiting_tokens=960)}, "p1": {"load": load(waiting_tokens=1000)}}
    decode = {"d0": {"load": load(running=9)}, "d1": {"load": load(running=10)}}
    placements = send_many(view_of(prefill, decode), 9, Random(3))
    assert Counter(p.prefill for p in placements) == {"p0": 5, "p1": 4}
    assert Counter(p.decode for p in placements) == {"d0": 5, "d1": 4}


def test_draining_workers_get_nothing() -> None:
    view = view_of({"p0": {"stored": list(PROMPT)}, "p1": {}}, {"d0": {}, "d1": {"load": load(running=50)}})
    view.set_draining([WorkerId("p0"), WorkerId("d0")])
    assert set(many(view)) == {Placement(WorkerId("p1"), WorkerId("d1"))}


def test_without_prefill_workers_the_decode_workers_compute_whole_requests() -> None:
    view = view_of({}, {"d0": {"load": load(waiting_tokens=100)}, "d1": {}})
    assert set(many(view)) == {Placement(None, WorkerId("d1"))}


def test_without_decode_workers_the_prefill_workers_compute_whole_requests() -> None:
    view = view_of({"p0": {"stored": list(PROMPT)}, "p1": {}}, {})
    assert set(many(view)) == {Placement(None, WorkerId("p0"))}


def test_a_pool_that_only_drains_counts_as_empty() -> None:
    view = view_of({"p": {}}, {"d": {}})
    view.set_draining([WorkerId("p")])
    assert set(many(view)) == {Placement(None, WorkerId("d"))}


def test_nobody_there() -> None:
    view = view_of({"p": {}}, {"d": {}})
    view.set_draining([WorkerId("p"), WorkerId("d")])
    for nobody in (LoadView(), view):
        with pytest.raises(NobodyThere):
            chosen(nobody)


def test_a_dead_workers_cache_attracts_nothing() -> None:
    """B091: nor does the one that comes back in its place."""
    view = view_of({"hot": {"stored": list(PROMPT)}, "cold": {}}, {"d": {}})
    assert chosen(view).prefill == "hot"
    view.remove(WorkerId("hot"))
    assert {p.prefill for p in many(view)} == {"cold"}
    view.update(report("hot", incarnation=2))
    assert {p.prefill for p in many(view)} == {"hot", "cold"}
