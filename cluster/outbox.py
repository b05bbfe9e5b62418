"""Reports of one worker on their way to one gateway."""

import asyncio
from collections.abc import AsyncGenerator

from splitserve.engine.protocol import StepReport


def merge(earlier: StepReport, later: StepReport) -> None:
    """Add ``later`` to ``earlier``: as if both had been one step. For reports that wait together, so that a slow
    reader costs neither messages nor memory per step.
    """
    last_of = {update.request_id: update for update in earlier.updates}
    for update in later.updates:
        before = last_of.get(update.request_id)
        if before is None or before.finish is not None:
            earlier.updates.append(update)
        else:
            before.extend(update)
    _merge_pages(earlier, later)
    earlier.load, earlier.role, earlier.steps = later.load, later.role, later.steps
    if later.counters is not None:
        earlier.counters = later.counters
    earlier.step_s += later.step_s
    earlier.prefill_tokens += later.prefill_tokens
    earlier.decode_tokens += later.decode_tokens


def _merge_pages(earlier: StepReport, later: StepReport) -> None:
    """Only the net change stays, so a report that waits for long does not outgrow the cache."""
    if later.facts is not None:
        earlier.facts, earlier.stored, earlier.removed = later.facts, later.stored, later.removed
    elif later.stored or later.removed:
        came, untold = set(earlier.stored), set(earlier.removed)
        back, gone = set(later.stored), set(later.removed)
        earlier.stored = [n for n in earlier.stored if n not in gone] + [n for n in later.stored if n not in untold]
        earlier.removed = [n for n in earlier.removed if n not in back] + [n for n in later.removed if n not in came]


class Outbox:
    """Holds at most one merged report. Used on one event loop."""

    def __init__(self) -> None:
        self._pending: StepReport | None = None
        self._news = asyncio.Event()
        self._number = 0

    def put(self, report: StepReport) -> None:
        if self._pending is None:
            self._pending = report
            self._news.set()
        else:
            merge(self._pending, report)

    async def reports(self) -> AsyncGenerator[StepReport, None]:
        """Everything put here, numbered without gaps; never ends by itself."""
        while True:
            await self._news.wait()
            self._news.clear()
            report, self._pending = self._pending, None
            assert report is not None
            report.number = self._number
            self._number += 1
            yield report
