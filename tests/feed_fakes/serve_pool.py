"""What a link uses of a Serve deployment's handle: ``pool.endpoint.remote(target=...)``."""

from collections.abc import Awaitable, Callable, Generator
from typing import Any

from splitserve.cluster.wire import WorkerEndpoint


class FakeResponse:
    """Awaitable, and can be cancelled."""

    def __init__(self, answer: Awaitable[WorkerEndpoint]) -> None:
        self._answer = answer
        self.cancelled = False

    def __await__(self) -> Generator[Any, None, WorkerEndpoint]:
        return self._answer.__await__()

    def cancel(self) -> None:
        self.cancelled = True


class FakePool:
    """``answer`` is called with the target of each call."""

    def __init__(
        self, answer: Callable[[str | None], Awaitable[WorkerEndpoint]], deployment_name: str = "PrefillPool"
    ) -> None:
        self.deployment_name = deployment_name
        self.targets: list[str | None] = []
        self.responses: list[FakeResponse] = []
        self._answer = answer

    @property
    def endpoint(self) -> "FakePool":
        return self

    def remote(self, *, target: str | None) -> FakeResponse:
        self.targets.append(target)
        self.responses.append(FakeResponse(self._answer(target)))
        return self.responses[-1]
