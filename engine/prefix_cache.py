"""Which page holds which content, and which unowned page to give up first."""

from collections import OrderedDict
from collections.abc import Sequence

from splitserve.engine.protocol import PageHash, PageId


class PrefixCache:
    """Names of sealed pages, both ways, and the idle ones among them in order of last use.

    A page is *idle* when it is named and nobody owns it: its content can be shared again or given up. The owner count
    is the pool's business; this class only knows names. Changes are collected as events for the router's index.
    """

    def __init__(self) -> None:
        self._page_of: dict[PageHash, PageId] = {}
        self._name_of: dict[PageId, PageHash] = {}
        self._idle: OrderedDict[PageId, None] = OrderedDict()  # least recently used first
        self._stored: dict[PageHash, None] = {}  # here, and not when events were last drained
        self._removed: dict[PageHash, None] = {}  # the other way round

    @property
    def idle_pages(self) -> int:
        return len(self._idle)

    def names(self) -> list[PageHash]:
        """Every name there is, for a snapshot."""
        return list(self._page_of)

    def leading(self, names: Sequence[PageHash]) -> list[PageId]:
        """Pages of the longest run of ``names``, from the first, that is here."""
        pages: list[PageId] = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def seal(self, page: PageId, name: PageHash) -> None:
        """Give an owned page its name. Where another page has it already, that one keeps it and this stays nameless."""
        if name in self._page_of or page in self._name_of:
            return
        self._page_of[name] = page
        self._name_of[page] = name
        if name in self._removed:
            del self._removed[name]
        else:
            self._stored[name] = None

    def is_sealed(self, page: PageId) -> bool:
        return page in self._name_of

    def set_idle(self, page: PageId) -> None:
        """Its last owner let go of a sealed page."""
        self._idle[page] = None

    def set_owned(self, page: PageId) -> None:
        """A sealed page has an owner again."""
        self._idle.pop(page, None)

    def evict(self) -> PageId:
        """Give up the content of the idle page that was used longest ago. KeyError when none is idle."""
        page, _ = self._idle.popitem(last=False)
        name = self._name_of.pop(page)
        del self._page_of[name]
        if name in self._stored:
            del self._stored[name]
        else:
            self._removed[name] = None
        return page

    def drain_events(self) -> tuple[list[PageHash], list[PageHash]]:
        """(stored, removed) since the last call. A name that came and went in between, or went and came, is in
        neither.
        """
        stored, removed = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return stored, removed
