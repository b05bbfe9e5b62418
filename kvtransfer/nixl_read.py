"""One transfer that NIXL carries out."""

from collections.abc import Callable
from threading import RLock
from typing import Any

from splitserve.kvtransfer.nixl_scratch import Words
from splitserve.kvtransfer.transport import ReadState, TransferError


def nixl_failure(error: Exception, cause: str, peer: str) -> TransferError:
    """``error`` as a TransferError; NIXL's own word for a lost peer takes the place of ``cause``."""
    gone = type(error).__name__ == "nixlRemoteDisconnectError"
    return TransferError("disconnect" if gone else cause, f"{peer}: {error}")


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
            self._handle.release()
        except Exception as late:
            # Without a handle there is nothing more to ask or do; NIXL keeps it and tries again when the agent ends.
            self._error = self._error or nixl_failure(late, "read", self.peer)
            self._state = ReadState.FAILED
        self._agent = self._handle = None
        self._on_end(self)


class NixlGenerationRead(NixlRead):
    """Implements ``GenerationRead``. ``words`` receives the generations and is not used after the end."""

    def __init__(self, agent: Any, handle: Any, *, words: Words, count: int, **options: Any) -> None:
        super().__init__(agent, handle, **options)
        self.words = words
        self._count = count
        self._values: list[int] | None = None

    def values(self) -> list[int]:
        if self._values is None:
            raise RuntimeError("generations are known after DONE only")
        return self._values

    def _end(self, error: TransferError | None) -> None:
        if error is None:
            self._values = self.words[: self._count].tolist()
        super()._end(error)
