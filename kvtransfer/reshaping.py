"""Which bytes to read where when sender and receiver differ in tensor-parallel degree or page size.

Everything here is arithmetic over layouts and page tables: no memory is touched.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitserve.kvtransfer.layout import PageLayout

Rows = NDArray[np.int64]


class LayoutMismatch(ValueError):
    """The sender's pages cannot be read into the receiver's. The message names each field and both values."""


@dataclass(frozen=True)
class TokenRuns:
    """Consecutive positions that lie in one page on both sides, ``[runs]`` each, int64."""

    sender_page: Rows  # absolute index
    sender_slot: Rows  # first token within that page
    receiver_page: Rows  # absolute index
    receiver_slot: Rows
    tokens: Rows


def token_runs(sender_tokens: int, receiver_tokens: int, positions: range, pages: Collection[int]) -> TokenRuns:
    """Cut ``positions`` (contiguous) at every page border of either side, ``sender_tokens`` and ``receiver_tokens`` to
    a page; keep what lies in the receiver's ``pages`` (absolute indexes).
    """
    _check_positions(positions)
    every = np.arange(positions.start, positions.stop, dtype=np.int64)
    starts = every[(every % sender_tokens == 0) | (every % receiver_tokens == 0) | (every == positions.start)]
    ends = np.append(starts[1:], positions.stop)[: len(starts)]
    wanted = np.isin(starts // receiver_tokens, np.fromiter(pages, np.int64, len(pages)))
    starts, ends = starts[wanted], ends[wanted]
    return TokenRuns(
        sender_page=starts // sender_tokens,
        sender_slot=starts % sender_tokens,
        receiver_page=starts // receiver_tokens,
        receiver_slot=starts % receiver_tokens,
        tokens=ends - starts,
    )


def source_ranks(sender: PageLayout, receiver: PageLayout) -> dict[int, list[int]]:
    """The sender's ranks that the receiver's rank reads from, and the model's heads it takes from each.

    Where several ranks hold a head, ranks of the receiver that want the same one take turns.
    """
    heads_of: dict[int, list[int]] = {}
    for head in receiver.heads:
        holders = [rank for rank in range(sender.tp_degree) if head in sender.rank(rank).heads]
        heads_of.setdefault(holders[receiver.tp_rank % len(holders)], []).append(head)
    return heads_of


def sender_pages(sender: PageLayout, receiver: PageLayout, positions: range, pages: Collection[int]) -> list[int]:
    """The absolute indexes of the sender's pages, ascending, that ``byte_ranges`` with the same arguments reads from:
    those whose generations must be verified, in each rank of ``source_ranks``.
    """
    runs = token_runs(sender.page_tokens, receiver.page_tokens, positions, pages)
    return [int(index) for index in np.unique(runs.sender_page)]


def byte_ranges(
    sender: PageLayout, receiver: PageLayout, positions: range, page_ids: Sequence[int], pages: Mapping[int, int]
) -> dict[int, Rows]:
    """What one rank of the receiver reads to have the keys and values of ``positions`` in its ``pages``.

    ``sender`` is the layout of any rank of the sender; ``page_ids[i]`` is its page, in every rank, at absolute index
    ``i``. ``pages`` maps the receiver's absolute page indexes to pages of its pool; positions in others are left out.

    Returns, for each rank of the sender that is read from, rows of (byte offset in that rank's pool, byte offset in the
    receiver's pool, bytes), ``[ranges, 3]`` int64; what is adjacent on both sides is one row. Bytes of other positions
    are not touched, except between equal layouts, where whole pages move. So whatever lay in the rest of a partial
    page is still there: a receiver that computes with masked places must have cleared it.

    Raises LayoutMismatch for layouts with obstacles or of unequal dtype, ValueError for positions that ``page_ids``
    does not reach.
    """
    _check_layouts(sender, receiver)
    if sender.pages_for(positions.stop) > len(page_ids):
        raise ValueError(f"positions: {positions.stop} tokens need more than {len(page_ids)} pages of the sender")
    runs = token_runs(sender.page_tokens, receiver.page_tokens, positions, pages)
    remote = np.asarray(page_ids, np.int64)[runs.sender_page] * sender.page_bytes
    local = np.asarray([pages[int(index)] for index in runs.receiver_page], np.int64) * receiver.page_bytes
    plan = {}
    for rank, heads in source_ranks(sender, receiver).items():
        source = sender.rank(rank)
        if source.fingerprint == receiver.fingerprint:
            rows = np.stack([remote, local, np.full_like(remote, source.page_bytes)], axis=1)
        else:
            there = _offsets(source, heads, runs.sender_slot) + remote[:, None, None]
            here = _offsets(receiver, heads, runs.receiver_slot) + local[:, None, None]
            length = np.broadcast_to((runs.tokens * source.token_bytes)[:, None, None], there.shape)
            rows = np.stack([there.ravel(), here.ravel(), length.ravel()], axis=1)
        plan[rank] = _joined(rows)
    return plan


def _offsets(layout: PageLayout, heads: Sequence[int], slots: Rows) -> Rows:
    """Where in a page the token ``slots[i]`` begins, ``[slots, layers * 2, heads]`` bytes."""
    rows = np.asarray(heads, np.int64) - layout.heads.start
    planes = np.arange(layout.layers * 2, dtype=np.int64)[:, None] * len(layout.heads) + rows
    offsets: Rows = (planes * layout.page_tokens + slots[:, None, None]) * layout.token_bytes
    return offsets


def _joined(rows: Rows) -> Rows:
    """Rows of (remote, local, bytes) in the same order, those that follow on from their predecessor on both sides made
    one with it.
    """
    if not len(rows):
        return rows
    ends = rows[:-1, :2] + rows[:-1, 2:]
    first = np.flatnonzero(np.append(True, (ends != rows[1:, :2]).any(axis=1)))
    merged: Rows = rows[first]
    merged[:, 2] = np.add.reduceat(rows[:, 2], first)
    return merged


def _check_layouts(sender: PageLayout, receiver: PageLayout) -> None:
    lines = receiver.obstacles(sender)
    if receiver.dtype != sender.dtype:
        lines.append(f"dtype: {receiver.dtype!r} here, {sender.dtype!r} there; bytes are not converted on the way")
    if lines:
        raise LayoutMismatch("; ".join(lines))


def _check_positions(positions: range) -> None:
    if positions.step != 1 or positions.start < 0:
        raise ValueError(f"positions: {positions} is not a contiguous range from 0 up")
