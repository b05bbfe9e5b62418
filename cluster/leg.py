"""One request on one worker, as the gateway sees it."""

import asyncio

from splitserve.engine.protocol import RequestId, SequenceUpdate


class LegLost(Exception):
    """The worker, or the way to it, is gone, or it has been silent for too long; nothing is known of the request
    there.
    """


class Leg:
    """Gathers a worker's updates until they are taken. Used on one event loop."""

    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self.ended = False  # the worker has said its last word, or is lost
        self._pending: SequenceUpdate | None = None
        self._lost: str | None = None
        self._news = asyncio.Event()

    @property
    def settled(self) -> bool:
        """The worker's last word was taken, so that nothing can be left there which nobody knows of."""
        return self.ended and self._pending is None

    def push(self, update: SequenceUpdate) -> None:
        """Take in what the worker's feed brought."""
        if self.ended:
            return
        self.ended = update.finish is not None
        if self._pending is None:
            self._pending = update
        else:
            self._pending.extend(update)
        self._news.set()

    def lose(self, why: str) -> None:
        """Nothing more will come."""
        if not self.ended:
            self.ended = True
            self._lost = why
            self._news.set()

    async def next(self, timeout_s: float) -> SequenceUpdate:
        """All that came since the last call; waits for something to come. Raises LegLost."""
        if self._pending is None and self._lost is None:
            self._news.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                raise LegLost(f"no word of the request for {timeout_s:.0f} s") from None
        update, self._pending = self._pending, None
        if update is None:
            raise LegLost(self._lost or "lost")
        return update
