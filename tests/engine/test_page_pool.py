"""The page ledger under random operations: six pages, an alphabet of two tokens, pages of one token.

The model keeps what each page was written with; whoever shares a page must find the prefix he asked for.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splitserve.engine.page_hash import PageHasher
from splitserve.engine.page_pool import NoFreePages, PageHold, PagePool
from splitserve.engine.protocol import PageHash, PageId

PAGES = 6
HASHER = PageHasher(1, b"test")
TOKEN = st.sampled_from([0, 1])
PROMPT = st.lists(TOKEN, min_size=1, max_size=4)


@dataclass(eq=False)
class Owner:
    """A sequence as the pool sees it: page ``i`` holds ``tokens[i]``; pages [0, sealed) can be shared."""

    hold: PageHold
    tokens: list[int]
    sealed: int

    @property
    def names(self) -> tuple[PageHash, ...]:
        return HASHER.chain(self.tokens)


class PoolMachine(RuleBasedStateMachine):
    """Owners come, share, grow, seal and go."""

    def __init__(self) -> None:
        super().__init__()
        self.generations = [0] * PAGES  # as published
        self.pool = PagePool(PAGES, on_generation=self.publish)
        self.owners: list[Owner] = []
        self.content: dict[PageId, tuple[int, ...]] = {}  # the prefix that ends in this page
        self.mirror: set[PageHash] = set()  # the router's index

    def publish(self, page: PageId, generation: int) -> None:
        """Called before new content, for a page that nobody owns."""
        assert page not in self.owned()
        assert generation == self.generations[page] + 1
        self.generations[page] = generation
        self.content.pop(page, None)

    def owned(self) -> set[PageId]:
        return {page for owner in self.owners for page in owner.hold.page_ids}

    def write(self, owner: Owner, start: int) -> None:
        for index in range(start, len(owner.tokens)):
            self.content[owner.hold.page_ids[index]] = tuple(owner.tokens[: index + 1])

    def grow(self, owner: Owner) -> bool:
        """To all of its tokens; whether that was possible. Nothing has changed if not."""
        before = list(owner.hold.page_ids)
        generations, missing = list(self.generations), len(owner.tokens) - len(before)
        available = self.pool.available_pages
        try:
            owner.hold.grow(len(owner.tokens))
        except NoFreePages:
            assert missing > available
            assert (list(owner.hold.page_ids), self.generations) == (before, generations)
            return False
        assert missing <= available
        assert sum(self.generations) == sum(generations) + missing
        assert list(owner.hold.page_ids[: len(before)]) == before
        self.write(owner, len(before))
        return True

    @rule(tokens=PROMPT)
    def open(self, tokens: list[int]) -> None:
        """Share what is there, take the rest."""
        shared = self.pool.cache.leading(HASHER.chain(tokens))
        assert [self.content[page] for page in shared] == [tuple(tokens[: i + 1]) for i in range(len(shared))]
        owner = Owner(self.pool.hold(shared), tokens, sealed=len(shared))
        self.owners.append(owner)
        if not self.grow(owner):
            self.release(owner)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), token=TOKEN)
    def decode(self, data: st.DataObject, token: int) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        owner.tokens.append(token)
        if not self.grow(owner):
            owner.tokens.pop()

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        if owner.sealed < len(owner.tokens):
            name = owner.names[owner.sealed]
            owner.hold.seal(owner.sealed, name)
            owner.sealed += 1
            assert name in self.pool.cache.names()

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(self.owners)))

    def release(self, owner: Owner) -> None:
        self.owners.remove(owner)
        owner.hold.release()
        owner.hold.release()
        assert len(owner.hold) == 0

    @rule(pages=st.integers(1, PAGES))
    def evict(self, pages: int) -> None:
        """Somebody wants pages and shares nothing; what was idle for longest goes first."""
        idle, free = self.pool.cached_pages, self.pool.free_pages
        names = len(self.pool.cache.names())
        hold = self.pool.hold()
        hold.grow(min(pages, self.pool.available_pages))
        evicted = max(0, len(hold) - free)
        assert (self.pool.cached_pages, len(self.pool.cache.names())) == (idle - evicted, names - evicted)
        hold.release()

    @rule()
    def tell(self) -> None:
        """The events are exactly the difference since the last ones."""
        stored, removed = self.pool.cache.drain_events()
        assert len(stored) == len(set(stored))
        assert len(removed) == len(set(removed))
        assert not self.mirror & set(stored)
        assert self.mirror >= set(removed)
        self.mirror = self.mirror - set(removed) | set(stored)
        assert self.mirror == set(self.pool.cache.names())

    @invariant()
    def free_and_cached_and_held_pages_are_all(self) -> None:
        pool, owned = self.pool, self.owned()
        assert pool.free_pages + pool.cached_pages + pool.held_pages == pool.total
        assert pool.available_pages == pool.free_pages + pool.cached_pages
        assert pool.held_pages == len(owned)
        named = {pool.cache.leading([name])[0] for name in pool.cache.names()}
        assert pool.cached_pages == len(named - owned)

    @invariant()
    def nobody_overwrites_what_is_owned(self) -> None:
        assert self.generations == [self.pool.generation(PageId(page)) for page in range(PAGES)]
        for owner in self.owners:
            expected = [tuple(owner.tokens[: index + 1]) for index in range(len(owner.tokens))]
            assert [self.content[page] for page in owner.hold.page_ids] == expected

    @invariant()
    def names_say_what_pages_hold(self) -> None:
        for page, prefix in self.content.items():
            found = self.pool.cache.leading(HASHER.chain(prefix))
            assert page not in found or found.index(page) == len(prefix) - 1

    @invariant()
    def gains_are_what_releasing_would_give(self) -> None:
        """Counted page by page: available once nobody but the pool knows it."""
        counts = Counter(page for owner in self.owners for page in owner.hold.page_ids)
        expected, gained = [], 0
        for owner in self.owners:
            counts.subtract(owner.hold.page_ids)
            gained += sum(1 for page in owner.hold.page_ids if not counts[page])
            expected.append(gained)
        assert list(self.pool.gains(owner.hold for owner in self.owners)) == expected

    @invariant()
    def shared_pages_that_nobody_owns_are_counted(self) -> None:
        pages = [self.pool.cache.leading([name])[0] for name in self.pool.cache.names()]
        assert self.pool.idle_among(pages) == self.pool.cached_pages

    def teardown(self) -> None:
        for owner in list(self.owners):
            self.release(owner)
        assert self.pool.held_pages == 0
        self.tell()
        self.evict(PAGES)
        assert (self.pool.free_pages, self.pool.cache.names()) == (PAGES, [])
        self.tell()
        assert self.mirror == set()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def sealed(pool: PagePool, tokens: list[int]) -> PageHold:
    names = HASHER.chain(tokens)
    hold = pool.hold(pool.cache.leading(names))
    hold.grow(len(tokens))
    for index, name in enumerate(names):
        hold.seal(index, name)
    return hold


def test_the_end_of_a_prefix_is_given_up_before_its_beginning() -> None:
    pool = PagePool(4)
    sealed(pool, [0, 0, 0]).release()
    other = pool.hold()
    other.grow(2)
    assert len(pool.cache.leading(HASHER.chain([0, 0, 0]))) == 2
    other.release()


def test_what_was_shared_last_is_kept_longest() -> None:
    pool = PagePool(3)
    for token in (0, 1, 2):
        sealed(pool, [token]).release()
    pool.hold(pool.cache.leading(HASHER.chain([0]))).release()
    other = pool.hold()
    other.grow(2)
    assert pool.cache.names() == list(HASHER.chain([0]))
    other.release()


def test_a_second_page_of_the_same_content_stays_nameless_and_is_free_at_the_end() -> None:
    pool = PagePool(3)
    first, second = pool.hold(), pool.hold()
    for hold in (first, second):
        hold.grow(1)
        hold.seal(0, HASHER.chain([0])[0])
    second.release()
    assert (pool.free_pages, pool.cached_pages, pool.held_pages) == (2, 0, 1)
    assert pool.cache.leading(HASHER.chain([0])) == list(first.page_ids)
    first.release()
    assert (pool.free_pages, pool.cached_pages, pool.held_pages) == (2, 1, 0)


def test_a_recycled_page_has_lost_its_old_name() -> None:
    """B056."""
    pool = PagePool(1)
    sealed(pool, [0]).release()
    pool.cache.drain_events()
    hold = sealed(pool, [1])
    assert pool.cache.leading(HASHER.chain([0])) == []
    assert pool.cache.drain_events() == (list(HASHER.chain([1])), list(HASHER.chain([0])))
    hold.release()


def test_a_page_that_went_and_came_back_between_two_reports_is_in_neither_list() -> None:
    pool = PagePool(1)
    sealed(pool, [0]).release()
    pool.cache.drain_events()
    sealed(pool, [1]).release()
    sealed(pool, [0]).release()
    assert pool.cache.drain_events() == ([], [])


def test_a_hold_whose_pages_have_other_owners_gains_nothing_alone() -> None:
    """B067: who gives way must be worth it."""
    pool = PagePool(4)
    first = sealed(pool, [0, 0])
    second = sealed(pool, [0, 0])
    third = sealed(pool, [0, 0, 0])
    assert list(pool.gains([first, second])) == [0, 0]
    assert list(pool.gains([third, first, second])) == [1, 1, 3]
    for hold in (first, second, third):
        hold.release()


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0)
