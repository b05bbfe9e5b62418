"""How NIXL's answers are read, on an agent that answers as told."""

from threading import RLock
from typing import Any

import numpy as np
import pytest

from splitserve.kvtransfer.nixl_descriptors import Region
from splitserve.kvtransfer.nixl_read import NixlGenerationRead, NixlRead
from splitserve.kvtransfer.nixl_scratch import ScratchWords
from splitserve.kvtransfer.nixl_words import WINDOW_WORDS, PeerWords, WordTransfer
from splitserve.kvtransfer.page_runs import PageRun
from splitserve.kvtransfer.transport import ReadState, TransferError


class nixlRemoteDisconnectError(Exception):
    pass


class FakeAgent:
    """Answers a transfer's state with ``answers``, one after the other; exceptions are raised."""

    def __init__(self, *answers: str | Exception) -> None:
        self.answers = list(answers)
        self.registered = 0

    def check_xfer_state(self, handle: "FakeHandle") -> str:
        assert handle.releases == 0
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def register_memory(self, regions: Any, kind: str) -> None:
        self.registered += 1


class FakeHandle:
    def __init__(self, error: Exception | None = None) -> None:
        self.releases = 0
        self.error = error

    def release(self) -> None:
        self.releases += 1
        if self.error:
            raise self.error


def read_of(agent: FakeAgent, handle: FakeHandle, ended: list[NixlRead], **options: Any) -> NixlRead:
    return NixlRead(agent, handle, peer="p", lock=RLock(), on_end=ended.append, **options)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ("ERR", "read"),
        ("CANCELLED", "read"),
        ("TIMEOUT", "read"),
        ("", "read"),
        ("done", "read"),
        (RuntimeError("x"), "read"),
        (nixlRemoteDisconnectError("x"), "disconnect"),
    ],
)
def test_b030_only_done_completes(answer: str | Exception, cause: str) -> None:
    ended: list[NixlRead] = []
    handle = FakeHandle()
    read = read_of(FakeAgent("PROC", answer), handle, ended)
    assert read.poll() is ReadState.READING
    assert handle.releases == 0
    assert read.poll() is ReadState.FAILED
    assert read.poll() is ReadState.FAILED
    assert read.error is not None
    assert read.error.cause == cause
    assert (handle.releases, ended) == (1, [read])


def test_b030_done_releases_the_handle_once() -> None:
    ended: list[NixlRead] = []
    handle = FakeHandle()
    read = read_of(FakeAgent("DONE"), handle, ended)
    assert [read.poll(), read.poll(), read.abandon()] == [ReadState.DONE, ReadState.DONE, True]
    assert read.error is None
    assert (handle.releases, ended) == (1, [read])


def test_abandon_waits_for_the_end_and_never_releases_a_running_transfer() -> None:
    handle = FakeHandle()
    read = read_of(FakeAgent("PROC", "PROC", "DONE"), handle, [])
    assert [read.abandon(), read.abandon()] == [False, False]
    assert handle.releases == 0
    assert read.abandon() is True
    assert handle.releases == 1


def test_b023_a_transfer_posted_in_part_fails_after_its_end() -> None:
    handle = FakeHandle()
    read = read_of(FakeAgent("PROC", "DONE"), handle, [], post_error=TransferError("post", "part 3"))
    assert read.poll() is ReadState.READING
    assert read.poll() is ReadState.FAILED
    assert read.error is not None
    assert read.error.cause == "post"


def test_a_handle_that_cannot_be_released_fails_the_read() -> None:
    ended: list[NixlRead] = []
    read = read_of(FakeAgent("DONE"), FakeHandle(RuntimeError("x")), ended)
    assert read.poll() is ReadState.FAILED
    assert ended == [read]


def prepare(runs: list[PageRun], target: Region) -> FakeHandle:
    assert sum(run.pages for run in runs) <= target.elements
    return FakeHandle()


def generations_of(transfer: WordTransfer, places: list[int], words: PeerWords, *answers: str) -> NixlGenerationRead:
    return NixlGenerationRead(
        FakeAgent(*answers),
        transfer,
        places=places,
        peer="p",
        lock=RLock(),
        on_end=lambda read: words.give_back(transfer),
    )


def test_values_are_taken_before_the_words_are_reused() -> None:
    words = PeerWords(8, ScratchWords(FakeAgent()))
    placed = words.take([7, 2, 7], prepare)
    placed.transfer.scratch.words[:8] = range(10, 18)
    read = generations_of(placed.transfer, placed.places, words, "DONE")
    assert read.poll() is ReadState.DONE
    again = words.take([1], prepare).transfer
    assert again is placed.transfer
    assert again.handle.releases == 0
    again.scratch.words[:] = 0
    assert read.values() == [17, 12, 17]


def test_a_failed_transfer_of_words_is_not_used_again() -> None:
    scratch = ScratchWords(FakeAgent())
    words = PeerWords(8, scratch)
    placed = words.take([7], prepare)
    handle = placed.transfer.handle
    assert generations_of(placed.transfer, placed.places, words, "ERR").poll() is ReadState.FAILED
    assert (handle.releases, scratch.taken) == (1, 0)
    assert words.take([7], prepare).transfer is not placed.transfer


def test_two_reads_of_words_at_once_share_nothing_and_a_dropped_peer_keeps_nothing() -> None:
    scratch = ScratchWords(FakeAgent())
    words = PeerWords(3 * WINDOW_WORDS, scratch)
    taken = [words.take(pages, prepare).transfer for pages in ([1], [2], [WINDOW_WORDS], [1, 2 * WINDOW_WORDS])]
    assert len({id(transfer.scratch.words) for transfer in taken}) == len(taken)
    handles = [transfer.handle for transfer in taken]
    for transfer in taken:
        read = generations_of(transfer, [0], words, "DONE")
        assert read.poll() is ReadState.DONE
    assert [handle.releases for handle in handles] == [0, 0, 0, 1]
    words.release()
    assert [handle.releases for handle in handles] == [1, 1, 1, 1]
    assert scratch.taken == 0


def test_words_that_cannot_be_prepared_leave_nothing_taken() -> None:
    def refuse(runs: list[PageRun], target: Region) -> FakeHandle:
        raise TransferError("prepare", "x")

    scratch = ScratchWords(FakeAgent())
    with pytest.raises(TransferError):
        PeerWords(8, scratch).take([1], refuse)
    assert scratch.taken == 0


def test_scratch_is_registered_once_per_read_at_a_time() -> None:
    agent = FakeAgent()
    scratch = ScratchWords(agent)
    first, second = scratch.take(1), scratch.take(64)
    assert len(first.words) == len(second.words) == 64
    assert not np.shares_memory(first.words, second.words)
    scratch.give_back(first)
    assert scratch.take(30) is first
    assert len(scratch.take(65).words) == 128
    assert (agent.registered, scratch.taken) == (3, 3)
