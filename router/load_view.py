"""What this gateway knows of the workers: their last reports, and what it has sent since.

Plain data, no clock. A report says how things stood when it was made; work sent afterwards is added until the worker's
own reports show it (a request counts here from being sent until its leg on that worker ends).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from splitserve.engine.protocol import Load, PageHash, RequestId, Role, StepReport, WorkerFacts, WorkerId


@dataclass(slots=True)
class WorkerView:
    """One live worker."""

    worker: WorkerId
    incarnation: int
    role: Role
    facts: WorkerFacts
    load: Load = field(default_factory=Load)
    steps: int = 0
    pages: set[PageHash] = field(default_factory=set)  # names in its prefix cache
    sent: dict[RequestId, int] = field(default_factory=dict)  # uncached prompt tokens of this gateway's requests there
    sent_then: tuple[int, int] = (0, 0)  # (requests, tokens) of ``sent`` when the last report came
    draining: bool = False  # Serve has taken it out of routing

    @property
    def sent_tokens(self) -> int:
        return sum(self.sent.values())

    @property
    def requests(self) -> int:
        """Requests there: as last reported and as sent since, and never fewer than this gateway's own."""
        reported = self.load.waiting + self.load.running
        return max(len(self.sent), reported + len(self.sent) - self.sent_then[0])

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens left to compute there, counted like ``requests``."""
        return max(self.sent_tokens, self.load.waiting_tokens + self.sent_tokens - self.sent_then[1])

    @property
    def free_tokens(self) -> int:
        """Room in its pool for tokens of requests that are not there yet."""
        return (self.load.free_pages + self.load.cached_pages) * self.facts.page_tokens

    def leading_pages(self, names: Sequence[PageHash]) -> int:
        """How many of ``names``, from the first without a gap, its prefix cache holds."""
        for count, name in enumerate(names):
            if name not in self.pages:
                return count
        return len(names)

    def uncached_tokens(self, names: Sequence[PageHash], prompt_tokens: int) -> int:
        """What it would have to compute of a prompt whose full pages are called ``names``; at least the last token."""
        return max(1, prompt_tokens - self.leading_pages(names) * self.facts.page_tokens)


class LoadView:
    """All workers whose feed is open. A worker is here from its first snapshot until its feed ends."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, WorkerView] = {}

    def __iter__(self) -> Iterator[WorkerView]:
        return iter(self._workers.values())

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._workers

    def get(self, worker: WorkerId) -> WorkerView | None:
        return self._workers.get(worker)

    def of_role(self, role: Role) -> list[WorkerView]:
        """Workers that take new work of this role."""
        return [w for w in self._workers.values() if w.role is role and not w.draining]

    def update(self, report: StepReport) -> None:
        """Take in one report. Reports of a worker that never sent a snapshot are ignored."""
        view = self._workers.get(report.worker)
        if report.facts is not None:
            fresh = WorkerView(report.worker, report.incarnation, report.role, report.facts)
            if view is not None:
                fresh.draining = view.draining
                fresh.sent = view.sent
            self._workers[report.worker] = view = fresh
        if view is None:
            return
        view.role = report.role
        view.load = report.load
        view.steps = report.steps
        view.sent_then = (len(view.sent), view.sent_tokens)
        view.pages.difference_update(report.removed)
        view.pages.update(report.stored)

    def remove(self, worker: WorkerId) -> None:
        """The worker is gone, and all that was known of its cache."""
        self._workers.pop(worker, None)

    def set_draining(self, workers: Iterable[WorkerId]) -> None:
        """Exactly these take no new work."""
        leaving = set(workers)
        for view in self._workers.values():
            view.draining = view.worker in leaving

    def sent(self, worker: WorkerId, request: RequestId, names: Sequence[PageHash], prompt_tokens: int) -> None:
        view = self._workers.get(worker)
        if view is not None:
            view.sent[request] = view.uncached_tokens(names, prompt_tokens)

    def ended(self, worker: WorkerId, request: RequestId) -> None:
        view = self._workers.get(worker)
        if view is not None:
            view.sent.pop(request, None)
