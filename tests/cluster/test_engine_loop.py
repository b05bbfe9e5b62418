"""The engine's thread: commands before steps, reports after them, and its end."""

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from splitserve.cluster import engine_loop
from splitserve.cluster.engine_loop import Add, EngineLoop, GoOn, LoopReport, Remove, Snapshot, Stop
from splitserve.engine.build import build_engine
from splitserve.engine.counters import Counters
from splitserve.engine.engine import RequestRefused, StepResult
from splitserve.engine.protocol import (
    Counted,
    FinishReason,
    Load,
    PageHash,
    Request,
    RequestId,
    SamplingParams,
    SequenceUpdate,
    WorkerId,
)
from splitserve.engine.settings import EngineSettings, SimulationSettings, TransferSettings
from splitserve.kvtransfer.local_transport import LocalNetwork, LocalTransport

WAIT_S = 10.0
A = PageHash(b"a" * 16)


def request(name: str, max_tokens: int = 3) -> Request:
    return Request(RequestId(name), (1, 2, 3), (), SamplingParams(max_tokens=max_tokens))


class FakeEngine:
    """Notes what is asked of it, and refuses requests called "bad"."""

    steps = 0

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.results: list[StepResult | Exception] = []
        self.announced: list[list[SequenceUpdate]] = []
        self.stepped: queue.Queue[int] = queue.Queue()
        self.computing = False
        self.idle = True
        self.closed = 0

    def add(self, request: Request, *, hand_over: bool, ticket: object, awaiting: bool) -> None:
        if request.request_id == "bad":
            raise RequestRefused("too long for this pool")
        self.calls.append(("add", request.request_id, "over" if hand_over else "awaiting" if awaiting else ""))

    def proceed(self, request: Request) -> bool:
        self.calls.append(("proceed", request.request_id))
        return True

    def abort(self, request_id: RequestId) -> bool:
        self.calls.append(("abort", request_id))
        return True

    def step(self, announce: Callable[[list[SequenceUpdate]], None]) -> StepResult:
        if self.announced:
            announce(self.announced.pop(0))
        self.calls.append(("step",))
        self.steps += 1
        self.stepped.put(self.steps)
        result = self.results.pop(0) if self.results else StepResult()
        if isinstance(result, Exception):
            raise result
        return result

    def load(self) -> Load:
        return Load(free_pages=5, held_pages=3, total_pages=8)

    def cached_names(self) -> list[PageHash]:
        return [A]

    def close(self) -> None:
        self.closed += 1


class Running:
    """A loop over an engine, and what it has published."""

    def __init__(self, engine: object, counters: Counters) -> None:
        self.reports: queue.Queue[LoopReport] = queue.Queue()
        self.counters = counters
        self.ended = 0
        self.loop = EngineLoop(engine, counters, self.reports.put, self.count_end)  # type: ignore[arg-type]

    def count_end(self) -> None:
        self.ended += 1

    def next(self) -> LoopReport:
        return self.reports.get(timeout=WAIT_S)

    def until(self, condition: Callable[[LoopReport], object]) -> LoopReport:
        while True:
            found = self.next()
            if condition(found):
                return found


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def running(engine: FakeEngine) -> Iterator[Running]:
    """Not started yet; at the end the thread is gone and has said so, and the engine is closed, each once."""
    running = Running(engine, Counters())
    yield running
    if running.loop.alive:
        assert running.loop.stop(WAIT_S)
    assert (engine.closed, running.ended) == (1, 1)


def test_commands_are_taken_in_order_and_before_the_next_step(engine: FakeEngine, running: Running) -> None:
    running.loop.post(Add(request("a"), hand_over=True, ticket=None))
    running.loop.post(Add(request("b"), hand_over=False, ticket=None))
    running.loop.post(Remove(RequestId("a")))
    running.loop.start()
    running.next()
    assert engine.calls[:4] == [("add", "a", "over"), ("add", "b", ""), ("abort", "a"), ("step",)]


def test_an_awaiting_request_is_added_and_goes_on(engine: FakeEngine, running: Running) -> None:
    running.loop.post(Add(request("a"), hand_over=False, ticket=None, awaiting=True))
    running.loop.post(GoOn(request("a")))
    running.loop.start()
    running.next()
    assert engine.calls[:3] == [("add", "a", "awaiting"), ("proceed", "a"), ("step",)]


def test_what_is_announced_is_reported_before_the_step(engine: FakeEngine, running: Running) -> None:
    early, late = SequenceUpdate(RequestId("a"), [], ticket=b"t"), SequenceUpdate(RequestId("a"), [7])
    engine.announced, engine.results = [[early]], [StepResult(updates=[late], prefill_tokens=3)]
    running.loop.start()
    first, second = running.next(), running.next()
    assert (first.result, first.steps) == (StepResult(updates=[early]), 0)
    assert (second.result.updates, second.steps) == ([late], 1)


def test_a_command_wakes_an_idle_engine(engine: FakeEngine, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_POLL_S", 60.0)
    running.loop.start()
    assert engine.stepped.get(timeout=WAIT_S) == 1
    running.loop.post(Add(request("a"), hand_over=False, ticket=None))
    assert engine.stepped.get(timeout=WAIT_S) == 2
    assert ("add", "a", "") in engine.calls


def test_a_report_says_what_the_step_did(engine: FakeEngine, running: Running) -> None:
    update = SequenceUpdate(RequestId("a"), [7])
    engine.results = [StepResult(updates=[update], stored=[A], step_s=0.5, decode_tokens=1)]
    running.loop.start()
    report = running.next()
    assert report.result == StepResult(updates=[update], stored=[A], step_s=0.5, decode_tokens=1)
    assert (report.load, report.steps, report.names) == (engine.load(), 1, None)
    assert running.loop.held_pages == 3


def test_a_snapshot_names_every_page_and_counter(engine: FakeEngine, running: Running) -> None:
    running.counters.add("x_total", 2.0)
    running.loop.start()
    running.next()
    running.loop.post(Snapshot())
    report = running.until(lambda report: report.names is not None)
    assert report.names == [A]
    assert report.counters == [Counted("x_total", 2.0, {})]


def test_counters_are_sent_when_they_have_changed(engine: FakeEngine, running: Running) -> None:
    news = StepResult(stored=[A])
    engine.results = [news, news]
    running.counters.add("x_total")
    running.loop.start()
    assert [running.next().counters for _ in range(2)] == [[Counted("x_total", 1.0, {})], None]
    running.counters.add("x_total")
    running.loop.post(Add(request("bad"), hand_over=False, ticket=None))
    assert running.next().counters == [Counted("x_total", 2.0, {})]


def test_nothing_new_is_no_report(engine: FakeEngine, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "IDLE_POLL_S", 0.0)
    monkeypatch.setattr(engine_loop, "BEAT_S", 3600.0)
    running.loop.start()
    running.next()
    while engine.stepped.get(timeout=WAIT_S) < 20:
        pass
    assert running.reports.empty()


def test_a_living_loop_is_heard_of_at_every_beat(
    engine: FakeEngine, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop, "BEAT_S", 0.01)
    running.loop.start()
    assert [running.next().result for _ in range(3)] == [StepResult()] * 3


def test_a_refused_request_ends_with_its_reason_and_others_go_on(engine: FakeEngine, running: Running) -> None:
    engine.results = [StepResult(updates=[SequenceUpdate(RequestId("good"), [7])])]
    running.loop.post(Add(request("bad"), hand_over=False, ticket=None))
    running.loop.post(Add(request("good"), hand_over=False, ticket=None))
    running.loop.start()
    assert running.next().result.updates == [
        SequenceUpdate(RequestId("bad"), [], FinishReason.ERROR, error="too long for this pool"),
        SequenceUpdate(RequestId("good"), [7]),
    ]


def test_an_engine_that_raises_ends_the_thread_and_is_closed(
    engine: FakeEngine, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    engine.results = [RuntimeError("device lost")]
    running.loop.start()
    running.loop._thread.join(WAIT_S)
    assert not running.loop.alive
    assert "device lost" in caplog.text
    running.loop.post(Snapshot())  # nobody takes it, nobody is hurt
    assert running.loop.stop(WAIT_S)


def test_stop_leaves_later_commands_alone(engine: FakeEngine, running: Running) -> None:
    running.loop.post(Stop())
    running.loop.post(Add(request("a"), hand_over=False, ticket=None))
    running.loop.start()
    assert running.loop.stop(WAIT_S)
    assert engine.calls == []


def test_an_engine_that_does_not_come_back_is_not_waited_for(engine: FakeEngine, running: Running) -> None:
    release = threading.Event()
    engine.load = lambda: Load(held_pages=int(release.wait(WAIT_S)))  # type: ignore[method-assign]
    running.loop.start()
    engine.stepped.get(timeout=WAIT_S)
    assert not running.loop.stop(0.0)
    assert running.loop.alive
    release.set()
    assert running.loop.stop(WAIT_S)


# With an engine


@pytest.fixture
def simulated() -> Iterator[Running]:
    """Over a simulated engine of eight pages, whose steps take no time."""
    settings = EngineSettings(
        page_tokens=4, simulation=SimulationSettings(pages=8), transfer=TransferSettings(lease_s=3600.0)
    )
    built = build_engine(settings, WorkerId("w"), 1, lambda memory: LocalTransport("w", memory, LocalNetwork()))
    running = Running(built.engine, built.counters)
    running.loop.start()
    yield running
    assert running.loop.stop(WAIT_S)
    assert built.engine.load().held_pages == 0
    assert built.engine.idle or not built.engine.step().computed


def test_tokens_of_a_request(simulated: Running) -> None:
    simulated.loop.post(Add(request("a", max_tokens=6), hand_over=False, ticket=None))
    tokens: list[int] = []
    finish = None
    while finish is None:
        for update in simulated.next().result.updates:
            tokens += update.tokens
            finish = update.finish
    assert (len(tokens), finish) == (6, FinishReason.LENGTH)
    simulated.loop.post(Snapshot())
    assert len(simulated.until(lambda report: report.names is not None).names or []) == 2


def test_a_request_that_never_fits_is_refused_by_the_engine(simulated: Running) -> None:
    simulated.loop.post(Add(request("a", max_tokens=100), hand_over=False, ticket=None))
    (update,) = simulated.until(lambda report: report.result.updates).result.updates
    assert update.finish is FinishReason.ERROR
    assert "pool of 32" in (update.error or "")


def test_stopping_frees_the_pages_of_an_open_lease(simulated: Running) -> None:
    simulated.loop.post(Add(request("a"), hand_over=True, ticket=None))
    simulated.until(lambda report: any(u.ticket for u in report.result.updates))
    assert simulated.loop.held_pages == 1


def test_a_dead_thread_frees_the_pages_of_its_requests() -> None:
    settings = EngineSettings(page_tokens=4, simulation=SimulationSettings(pages=8))
    built = build_engine(settings, WorkerId("w"), 1, lambda memory: LocalTransport("w", memory, LocalNetwork()))
    held: list[int] = []

    def publish(report: LoopReport) -> None:
        held.append(report.load.held_pages)
        if report.result.computed:
            raise RuntimeError("the event loop is closed")

    loop = EngineLoop(built.engine, built.counters, publish)
    loop.post(Add(request("a", max_tokens=20), hand_over=False, ticket=None))
    loop.start()
    loop._thread.join(WAIT_S)
    assert not loop.alive
    assert held[-1] > 0
    assert built.engine.load().held_pages == 0
