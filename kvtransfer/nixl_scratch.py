"""Registered host memory that generation words are read into."""

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]


class ScratchWords:
    """Hands out registered arrays of 64-bit words and takes them back for reuse. Nothing is unregistered while the
    agent lives, since registering costs more than the few bytes; there are never more arrays than reads at once.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._free: dict[int, list[Words]] = {}  # by length, a power of two
        self.taken = 0

    def take(self, words: int) -> Words:
        """An array of at least ``words`` words. Raises what NIXL raises when registration fails."""
        length = 1 << max(words - 1, 63).bit_length()
        spare = self._free.setdefault(length, [])
        array = spare.pop() if spare else self._register(length)
        self.taken += 1
        return array

    def give_back(self, array: Words) -> None:
        """Only after the transport has let go of ``array``."""
        self.taken -= 1
        self._free[len(array)].append(array)

    def _register(self, length: int) -> Words:
        array = np.zeros(length, np.int64)
        self._agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
        return array
