"""Transfers of a peer's generation words: prepared once, posted many times.

Preparing a transfer takes longer than reading a few kilobytes, so the words around those asked for are read along, and
the prepared transfer is kept for the next time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from splitserve.kvtransfer.nixl_descriptors import Region
from splitserve.kvtransfer.nixl_scratch import Scratch, ScratchWords
from splitserve.kvtransfer.page_runs import PageRun, word_spans
from splitserve.kvtransfer.transport import TransferError

WINDOW_WORDS = 4096

Prepare = Callable[[list[PageRun], Region], Any]  # runs of words, to a region of ours: a handle of NIXL's


@dataclass
class WordTransfer:
    """A prepared transfer and where its words arrive; used by one read at a time."""

    handle: Any
    scratch: Scratch
    window: int | None  # whose words these are; None: those of one read, not to be used again

    @property
    def reusable(self) -> bool:
        return self.window is not None and self.handle is not None

    def release(self) -> None:
        """Give the handle back to NIXL. Raises what NIXL raises; not reusable from here on in any case."""
        handle, self.handle = self.handle, None
        handle.release()


@dataclass(frozen=True)
class Placed:
    """A transfer, and where in its words those of the pages asked for arrive."""

    transfer: WordTransfer
    places: list[int]


class PeerWords:
    """The word transfers of one peer. The caller holds the transport's lock."""

    def __init__(self, words: int, scratch: ScratchWords) -> None:
        self._words = words
        self._scratch = scratch
        self._idle: dict[int, list[WordTransfer]] = {}  # by window

    def take(self, pages: Sequence[int], prepare: Prepare) -> Placed:
        """A transfer of the words of ``pages``, ready to be posted. Raises what ``prepare`` raises, and
        TransferError(prepare).
        """
        window = min(pages) // WINDOW_WORDS
        if max(pages) // WINDOW_WORDS != window:
            spans = word_spans(pages)
            return Placed(self._prepared(spans.runs, spans.words, None, prepare), spans.places)
        first = window * WINDOW_WORDS
        idle = self._idle.get(window)
        if idle:
            transfer = idle.pop()
        else:
            count = min(WINDOW_WORDS, self._words - first)
            transfer = self._prepared([PageRun(first, 0, count)], count, window, prepare)
        return Placed(transfer, [page - first for page in pages])

    def give_back(self, transfer: WordTransfer) -> None:
        """After the end of its read."""
        if transfer.reusable:
            assert transfer.window is not None
            self._idle.setdefault(transfer.window, []).append(transfer)
        else:
            self._scratch.give_back(transfer.scratch)

    def release(self) -> None:
        """Let go of all that is idle. Raises what NIXL raises."""
        for transfers in self._idle.values():
            while transfers:
                transfer = transfers.pop()
                self._scratch.give_back(transfer.scratch)
                transfer.release()

    def _prepared(self, runs: list[PageRun], words: int, window: int | None, prepare: Prepare) -> WordTransfer:
        try:
            scratch = self._scratch.take(words)
        except Exception as error:
            raise TransferError("prepare", f"no memory for {words} generations: {error}") from error
        try:
            return WordTransfer(prepare(runs, scratch.region), scratch, window)
        except BaseException:
            self._scratch.give_back(scratch)
            raise
