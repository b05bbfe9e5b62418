"""Registered host memory of the transport's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from splitserve.kvtransfer.nixl_descriptors import Region

WORD_BYTES = 8
_MEMORY_PAGE_BYTES = 4096

Words = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Scratch:
    """An array, and where it lies."""

    words: Words
    region: Region

    def at(self, places: Sequence[int]) -> list[int]:
        """The words at ``places``."""
        word = self.words.item
        return [word(place) for place in places]


class ScratchWords:
    """Hands out registered arrays of 64-bit words and takes them back for reuse. Nothing is unregistered while the
    agent lives, since registering costs more than the few bytes; there are never more arrays than were in use at once.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._free: dict[int, list[Scratch]] = {}  # by length, a power of two
        self.taken = 0

    def take(self, words: int) -> Scratch:
        """An array of at least ``words`` words. Raises what NIXL raises when registration fails."""
        length = 1 << max(words - 1, 63).bit_length()
        spare = self._free.setdefault(length, [])
        scratch = spare.pop() if spare else self._register(length)
        self.taken += 1
        return scratch

    def give_back(self, scratch: Scratch) -> None:
        """Only after the transport has let go of ``scratch``."""
        self.taken -= 1
        self._free[len(scratch.words)].append(scratch)

    def _register(self, length: int) -> Scratch:
        words = np.zeros(length, np.int64)
        scratch = Scratch(words, Region(words.ctypes.data, WORD_BYTES, length))
        scratch.region.register(self._agent)
        return scratch


def page_aligned_words(count: int) -> Words:
    """Zeros, alone in their memory pages: registering must not expose anything else."""
    per_page = _MEMORY_PAGE_BYTES // WORD_BYTES
    padded = -(-count // per_page) * per_page
    space = np.zeros(padded + per_page, np.int64)
    skip = -space.ctypes.data % _MEMORY_PAGE_BYTES // WORD_BYTES
    return space[skip : skip + padded]
