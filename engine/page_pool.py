"""Who owns which page: the ledger of a worker's KV memory.

The life of a page::

    free ──take──▶ held ──release, no name──▶ free
     ▲              │ ▲
     │          seal│ │share            (a held page may have several owners once it is sealed:
     │              ▼ │                  they read it, nobody writes it any more)
     └──take──── cached ◀──release of the last owner, named──

``free + cached + held = total`` at any time. A page's *generation* rises whenever it is taken for new content, before
anything can be written to it, so that a peer which still reads the old content notices.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from splitserve.engine.prefix_cache import PrefixCache
from splitserve.engine.protocol import PageHash, PageId


class NoFreePages(Exception):
    """Fewer pages can be taken at the moment than asked for."""


class PageHold:
    """Pages owned together, by absolute page index. Ends in one ``release``; after that it owns nothing."""

    def __init__(self, pool: "PagePool", pages: list[PageId]) -> None:
        self._pool = pool
        self._pages = pages

    @property
    def page_ids(self) -> Sequence[PageId]:
        return self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def grow(self, pages: int) -> None:
        """Own at least ``pages`` pages. Raises NoFreePages, then nothing has changed."""
        missing = pages - len(self._pages)
        if missing > 0:
            self._pages.extend(self._pool.take(missing))

    def seal(self, index: int, name: PageHash) -> None:
        """The page at ``index`` is full and will not be written again: let others share it under ``name``."""
        self._pool.cache.seal(self._pages[index], name)

    def release(self) -> None:
        """Let go of all pages. Idempotent."""
        pages, self._pages = self._pages, []
        self._pool.release(pages)


class PagePool:
    """Owns the numbers [0, total) and says who holds each. Used by the engine's thread only."""

    def __init__(self, total: int, on_generation: Callable[[PageId, int], None] | None = None) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one page, got {total}")
        self.total = total
        self.cache = PrefixCache()
        self._free = [PageId(i) for i in reversed(range(total))]
        self._owners = [0] * total
        self._generations = [0] * total
        self._on_generation = on_generation or (lambda page, generation: None)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def cached_pages(self) -> int:
        return self.cache.idle_pages

    @property
    def held_pages(self) -> int:
        return self.total - len(self._free) - self.cache.idle_pages

    @property
    def available_pages(self) -> int:
        """Pages that ``take`` can give."""
        return len(self._free) + self.cache.idle_pages

    def idle_among(self, shared: Sequence[PageId]) -> int:
        """How many of the sealed pages ``shared`` nobody owns: sharing them makes fewer available."""
        return sum(1 for page in shared if self._owners[page] == 0)

    def gains(self, holds: Iterable[PageHold]) -> Iterator[int]:
        """How many pages more would be available once the first of ``holds`` was released, the first two, and so on.
        A page with other owners counts with the last of them.
        """
        owners_left: dict[PageId, int] = {}
        gained = 0
        for hold in holds:
            for page in hold.page_ids:
                owners_left[page] = owners_left.get(page, self._owners[page]) - 1
                gained += owners_left[page] == 0
            yield gained

    def generation(self, page: PageId) -> int:
        return self._generations[page]

    def hold(self, shared: Sequence[PageId] = ()) -> PageHold:
        """A new owner of the sealed pages ``shared``, as found by ``cache.leading``."""
        for page in shared:
            if self._owners[page] == 0:
                self.cache.set_owned(page)
            self._owners[page] += 1
        return PageHold(self, list(shared))

    def take(self, count: int) -> list[PageId]:
        """``count`` pages for new content, each with one owner: free ones first, then idle cached ones, oldest use
        first.
        """
        if count > self.available_pages:
            raise NoFreePages(f"{count} pages wanted, {self.available_pages} of {self.total} available")
        pages: list[PageId] = []
        for _ in range(count):
            page = self._free.pop() if self._free else self.cache.evict()
            self._owners[page] = 1
            self._generations[page] += 1
            self._on_generation(page, self._generations[page])
            pages.append(page)
        return pages

    def release(self, pages: Sequence[PageId]) -> None:
        """One owner of each of ``pages`` lets go. Later pages of a prefix go idle first, so that they are given up
        first.
        """
        for page in reversed(pages):
            assert self._owners[page] > 0, f"page {page} released without an owner"
            self._owners[page] -= 1
            if self._owners[page]:
                continue
            if self.cache.is_sealed(page):
                self.cache.set_idle(page)
            else:
                self._free.append(page)
