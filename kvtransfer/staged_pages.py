"""Pages converted for a slow link: written by the sender into staging memory, moved, and turned back on arrival.

A staged page keeps the sender's tokens per page; degree and heads change on the way, by the same byte ranges as for
unconverted pages, the page size on arrival.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from splitserve.kvtransfer.layout import PageLayout
from splitserve.kvtransfer.narrow_floats import E4M3_MAX, STORED, Floats, from_e4m3, narrow, to_e4m3, widen
from splitserve.kvtransfer.reshaping import LayoutMismatch, Rows, byte_ranges, token_runs

WireDtype = Literal["float32", "bfloat16", "float16", "int8", "float8_e4m3"]

_STORED: dict[str, np.dtype[Any]] = STORED | {"int8": np.dtype(np.int8), "float8_e4m3": np.dtype(np.uint8)}
_INT8_MAX = 127.0
_LARGEST = {"int8": _INT8_MAX, "float8_e4m3": E4M3_MAX}
# A scale below it would lose bits, or be zero.
_SMALLEST_SCALE = np.finfo(np.float32).tiny
_REGION_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class StagingLayout:
    """A rank's staging memory of ``slots`` pages: all their values, ``[slots, *values.page_shape]``, then, for the
    one-byte types, all their scales, float32 ``[slots, layers, 2, heads held]``, one for the places of one head in one
    page and layer, keys and values apart.
    """

    values: PageLayout
    slots: int

    @classmethod
    def of(cls, pages: PageLayout, wire: WireDtype, slots: int, page_tokens: int | None = None) -> "StagingLayout":
        """For pages of ``pages``. The receiver's staging memory needs the sender's ``page_tokens``."""
        return cls(replace(pages, dtype=wire, page_tokens=page_tokens or pages.page_tokens), slots)

    @property
    def scales(self) -> PageLayout | None:
        """The scales of one page as if they were a page of one token; None for types that need none."""
        if self.values.dtype not in _LARGEST:
            return None
        return replace(self.values, page_tokens=1, head_dim=1, dtype="float32")

    @property
    def scales_offset(self) -> int:
        """Where the scales begin, in bytes from the start of the memory."""
        values_bytes = self.slots * self.values.page_bytes
        return values_bytes + -values_bytes % _REGION_ALIGNMENT_BYTES

    @property
    def region_bytes(self) -> int:
        return self.scales_offset + self.slots * (self.scales.page_bytes if self.scales else 0)

    @property
    def staged_page_bytes(self) -> int:
        """What one page costs on the wire."""
        return self.values.page_bytes + (self.scales.page_bytes if self.scales else 0)

    def wire_ratio(self, pages: PageLayout) -> float:
        """Bytes on the wire for each byte of the same tokens and heads in ``pages``."""
        per_token = pages.page_bytes / pages.page_tokens
        return self.staged_page_bytes / self.values.page_tokens / per_token


class StagingRegion:
    """Staging memory seen as arrays, ``memory`` [region_bytes] uint8 at least. Writing to them writes there."""

    def __init__(self, layout: StagingLayout, memory: NDArray[np.uint8]) -> None:
        if memory.nbytes < layout.region_bytes:
            raise ValueError(f"region_bytes: {layout.region_bytes} needed, got {memory.nbytes}")
        self.layout = layout
        shape = layout.values.page_shape
        values = memory[: layout.slots * layout.values.page_bytes]
        self.values = values.view(_STORED[layout.values.dtype]).reshape(layout.slots, *shape)
        self.scales: Floats | None = None
        if layout.scales is not None:
            scales = memory[layout.scales_offset : layout.region_bytes]
            self.scales = scales.view(np.float32).reshape(layout.slots, *shape[:3])

    def stage(self, slot: int, page: NDArray[np.generic], dtype: str, tokens: int) -> None:
        """Convert the first ``tokens`` places of ``page`` (``[layers, 2, heads held, page_tokens, head_dim]``, kept as
        ``STORED[dtype]``) into ``slot``; the other places become zero.

        With a scale, int8 is off by at most half of it; E4M3 by at most 1/16 of the value, or 2**-10 of the scale where
        that is more. Raises ValueError for a value that is not finite or too large for the wire's type.
        """
        wire = self.layout.values.dtype
        wide = widen(page[..., :tokens, :], dtype)
        self.values[slot, ..., tokens:, :] = 0
        if self.scales is None:
            self.values[slot, ..., :tokens, :] = narrow(wide, wire)
            return
        largest = np.abs(wide).max(axis=(-2, -1), initial=0.0)
        if not np.isfinite(largest).all():
            raise ValueError(f"dtype {wire!r} cannot hold a value that is not finite")
        scales = np.maximum(largest / np.float32(_LARGEST[wire]), _SMALLEST_SCALE)
        self.scales[slot] = scales
        scaled = wide / scales[..., None, None]
        self.values[slot, ..., :tokens, :] = np.rint(scaled) if wire == "int8" else to_e4m3(scaled)

    def restore(self, slot: int) -> Floats:
        """The values in ``slot``, float32 ``[layers, 2, heads held, page_tokens, head_dim]``."""
        wire, stored = self.layout.values.dtype, self.values[slot]
        if self.scales is None:
            return widen(stored, wire)
        wide = from_e4m3(stored.view(np.uint8)) if wire == "float8_e4m3" else stored.astype(np.float32)
        restored: Floats = wide * self.scales[slot][..., None, None]
        return restored


def staged_ranges(
    sender: StagingLayout, receiver: StagingLayout, sender_slots: Mapping[int, int], slots: Mapping[int, int]
) -> dict[int, Rows]:
    """What one rank of the receiver reads to have the staged pages ``slots`` (absolute index of the sender's page to
    slot here); ``sender_slots`` says where the sender, in every rank, has staged them.

    Returns rows as ``byte_ranges`` does, relative to the start of the two staging memories. Raises LayoutMismatch, and
    ValueError for a page that the sender has not staged.
    """
    if sender.values.page_tokens != receiver.values.page_tokens:
        raise LayoutMismatch(
            f"page_tokens: {receiver.values.page_tokens} here, {sender.values.page_tokens} there; a staged page keeps "
            "the sender's"
        )
    absent = sorted(set(slots) - set(sender_slots))
    if absent:
        raise ValueError(f"slots: page {absent[0]} is not staged")
    indexes = sorted(slots)
    table = [sender_slots[index] for index in indexes]
    places = {row: slots[index] for row, index in enumerate(indexes)}
    every = range(len(indexes) * sender.values.page_tokens)
    plan = byte_ranges(sender.values, receiver.values, every, table, places)
    if sender.scales is not None and receiver.scales is not None:
        scales = byte_ranges(sender.scales, receiver.scales, range(len(indexes)), table, places)
        shift = np.array([sender.scales_offset, receiver.scales_offset, 0], np.int64)
        plan = {rank: np.concatenate([rows, scales[rank] + shift]) for rank, rows in plan.items()}
    return plan


def unstage(
    region: StagingRegion,
    slots: Mapping[int, int],
    pool: NDArray[np.generic],
    receiver: PageLayout,
    positions: range,
    pages: Mapping[int, int],
) -> None:
    """Write ``positions`` out of the staged pages ``slots`` (absolute index of the sender's page to slot in ``region``)
    into ``pool`` (``[pages, *receiver.page_shape]``, kept as ``STORED[receiver.dtype]``). ``pages`` as in
    ``byte_ranges``. Places of other positions are not touched.

    Raises ValueError for a value that is not finite or too large for the pool: the staged page is not what was sent, or
    the two types do not fit this model. Pages before that one are written by then.
    """
    runs = token_runs(region.layout.values.page_tokens, receiver.page_tokens, positions, pages)
    restored: dict[int, NDArray[np.generic]] = {}
    columns = (runs.sender_page, runs.sender_slot, runs.receiver_page, runs.receiver_slot, runs.tokens)
    for there, first, here, target, tokens in zip(*(column.tolist() for column in columns), strict=True):
        if there not in restored:  # runs come page after page, so that one is enough to keep
            restored = {there: narrow(region.restore(slots[there]), receiver.dtype)}
        pool[pages[here], ..., target : target + tokens, :] = restored[there][..., first : first + tokens, :]
