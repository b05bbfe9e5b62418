"""One transfer that NIXL carries out."""

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any

from splitserve.kvtransfer.nixl_words import WordTransfer
from splitserve.kvtransfer.transport import ReadState, TransferError


def nixl_failure(error: Exception, cause: str, peer: str) -> TransferError:
    """``error`` as a TransferError; NIXL's own word for a lost peer takes the place of ``cause``."""
    gone = type(error).__name__ == "nixlRemoteDisconnectError"
    return TransferError("disconnect" if gone else cause, f"{peer}: {error}")


class FinishedRead:
    """Implements ``Read`` and ``GenerationRead`` where the transfer was over as soon as it was posted, as those over
    shared memory are.
    """

    error: TransferError | None = None

    def __init__(self, values: list[int] | None = None) -> None:
        """``values`` are what ``values()`` returns."""
        self._values = values

    def poll(self) -> ReadState:
        return ReadState.DONE

    def abandon(self) -> bool:
        return True

    def values(self) -> list[int]:
        assert self._values is not None
        return self._values


class NixlRead:
    """Implements ``Read``.

    NIXL 1.5 over UCX cannot cancel: releasing the handle of a running transfer, and even removing the remote agent,
    report success while the data goes on arriving. So a running transfer is never released; ``abandon`` waits for its
    end as ``poll`` does.
    """

    def __init__(
        self,
        agent: Any,
        handle: Any,
        *,
        peer: str,
        lock: RLock,
        on_end: Callable[["NixlRead"], None],
        post_error: TransferError | None = None,
    ) -> None:
        """``handle`` has been posted. With ``post_error`` posting failed, but part of it may be under way: it will end
        as FAILED.
        """
        self.peer = peer
        self._agent = agent
        self._handle = handle
        self._lock = lock
        self._on_end = on_end
        self._post_error = post_error
        self._state = ReadState.READING
        self._error: TransferError | None = None

    @property
    def error(self) -> TransferError | None:
        return self._error

    def poll(self) -> ReadState:
        with self._lock:
            if self._state is ReadState.READING:
                self._drive()
            return self._state

    def abandon(self) -> bool:
        return self.poll() is not ReadState.READING

    def drop(self) -> None:
        """End as FAILED without waiting: the agent goes, and with it whatever could still write."""
        with self._lock:
            if self._state is ReadState.READING:
                self._end(TransferError("closed", f"{self.peer}: this transport was closed"))

    def _drive(self) -> None:
        try:
            status = self._agent.check_xfer_state(self._handle)
        except Exception as error:
            self._end(self._post_error or nixl_failure(error, "read", self.peer))
            return
        if status == "DONE":
            self._end(self._post_error)
        elif status != "PROC":
            self._end(self._post_error or TransferError("read", f"{self.peer}: transfer ended as {status}"))

    def _end(self, error: TransferError | None) -> None:
        self._error = error
        self._state = ReadState.DONE if error is None else ReadState.FAILED
        try:
            self._let_go_of_handle()
        except Exception as late:
            # Without a handle there is nothing more to ask or do; NIXL keeps it and tries again when the agent ends.
            self._error = self._error or nixl_failure(late, "read", self.peer)
            self._state = ReadState.FAILED
        self._agent = self._handle = None
        self._on_end(self)

    def _let_go_of_handle(self) -> None:
        self._handle.release()


class NixlGenerationRead(NixlRead):
    """Implements ``GenerationRead``: a transfer of words, of which the one of the i-th page is at ``places[i]``."""

    def __init__(self, agent: Any, transfer: WordTransfer, *, places: Sequence[int], **options: Any) -> None:
        super().__init__(agent, transfer.handle, **options)
        self.transfer = transfer
        self._places = places
        self._values: list[int] | None = None

    def values(self) -> list[int]:
        if self._values is None:
            raise RuntimeError("generations are known after DONE only")
        return self._values

    def _end(self, error: TransferError | None) -> None:
        if error is None:
            self._values = self.transfer.scratch.at(self._places)
        super()._end(error)

    def _let_go_of_handle(self) -> None:
        if self._values is None or not self.transfer.reusable:
            self.transfer.release()
