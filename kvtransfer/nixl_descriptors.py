"""Pieces of registered memory in the form that NIXL takes: rows of (address, length, device)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from splitserve.kvtransfer.page_runs import PageRun


class Ends(NamedTuple):
    """The pieces of both ends of a transfer, pairwise."""

    there: Any
    here: Any


@dataclass(frozen=True)
class Region:
    """Equal elements, side by side, in memory that NIXL knows."""

    address: int
    element_bytes: int
    elements: int
    device: int | None = None  # None: host memory; else the index of the CUDA device

    @property
    def kind(self) -> str:
        """NIXL's word for the memory."""
        return "DRAM" if self.device is None else "VRAM"

    @property
    def num_bytes(self) -> int:
        return self.element_bytes * self.elements

    def holds(self, elements: Sequence[int]) -> bool:
        """Whether there are any, and all of them exist."""
        return bool(elements) and min(elements) >= 0 and max(elements) < self.elements

    def holds_bytes(self, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> bool:
        """Whether there are any, none is empty, and all of them lie inside. Both [pieces]."""
        if not len(offsets) or offsets.min() < 0 or lengths.min() < 1 or lengths.max() > self.num_bytes:
            return False
        return bool((offsets <= self.num_bytes - lengths).all())

    def cut_bytes(self, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """``lengths[i]`` bytes from ``offsets[i]`` on, [pieces, 3]."""
        rows = np.empty((len(offsets), 3), np.uint64)
        rows[:, 0] = np.uint64(self.address) + offsets.astype(np.uint64)
        rows[:, 1] = lengths
        rows[:, 2] = self.device or 0
        return rows

    def register(self, agent: Any) -> Any:
        """Make the memory known to NIXL; what ``deregister_memory`` takes. Raises what NIXL raises."""
        return agent.register_memory([(self.address, self.num_bytes, self.device or 0, "")], self.kind)


def ends_of(runs: list[PageRun], source: Region, target: Region) -> Ends:
    """Runs of elements that both regions hold, which are of one size. A loop, since most transfers have few pieces."""
    size = source.element_bytes
    there: list[tuple[int, int, int]] = []
    here: list[tuple[int, int, int]] = []
    for remote, local, elements in runs:
        there.append((source.address + remote * size, elements * size, source.device or 0))
        here.append((target.address + local * size, elements * size, target.device or 0))
    return Ends(there, here)
