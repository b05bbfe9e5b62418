"""A thread that keeps a transport going while its owner computes.

A peer's first contact, and over TCP every read, needs the passive side to look after its transport. The owner's own
loop does so between steps; this thread does during them. It sleeps between looks: a spinning one would take a core.
"""

import logging
import threading
from collections.abc import Callable

from splitserve.kvtransfer.transport import TransferError

logger = logging.getLogger(__name__)

ACTIVE_POLL_S = 0.001
IDLE_POLL_S = 0.02
JOIN_TIMEOUT_S = 5.0


class ProgressThread:
    """``progress`` must be safe to call beside the owner's own calls; ``active`` says whether a peer may be waiting."""

    def __init__(self, progress: Callable[[], None], active: Callable[[], bool]) -> None:
        self._progress = progress
        self._active = active
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; call it before the transport is closed."""
        self._stop.set()
        self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stop.wait(ACTIVE_POLL_S if self._active() else IDLE_POLL_S):
            try:
                self._progress()
            except TransferError as error:
                logger.warning("the transport makes no progress by itself any more: %s", error)
                return
