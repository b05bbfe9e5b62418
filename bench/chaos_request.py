"""One request of the chaos run: what it asks for, the way it takes, and whether its answer is right.

The way is that of ``cluster/request_path.py``, with dice in place of a placement.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from enum import Enum

from msgspec.structs import replace

from splitserve.bench.chaos_worker import WorkerProcess
from splitserve.cluster.leg import Leg, LegLost
from splitserve.cluster.wire import Decode, LegCommand, Prefill, Proceed
from splitserve.engine.build import SIMULATED_VOCAB
from splitserve.engine.page_hash import PageHasher
from splitserve.engine.protocol import FinishReason, Request, RequestId, SamplingParams, SequenceUpdate
from splitserve.engine.simulated_runner import mix

REQUEST_S = 60.0  # longer than every deadline and fault together: a request that takes it is stuck
ATTEMPTS = 20


class Way(Enum):
    """How a request gets from its prompt to its answer."""

    ONE_WORKER = "one worker"
    WHEN_COMPUTED = "handed over when its prompt is computed"
    WHILE_COMPUTED = "offered while its prompt is computed"


class Ending(Enum):
    """How a request ended for its client."""

    ANSWERED = "answered"
    LEFT = "left"  # the client went away
    STUCK = "stuck"


@dataclass(frozen=True)
class Asked:
    """A request, drawn with all that is going to happen to it."""

    name: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    way: Way
    prefill: str  # names of workers
    decode: str
    leaves_after_s: float | None  # the client
    gives_up: bool  # a lease that is of no use any more; else that ends by its deadline, as when a gateway dies


class Answer:
    """Tokens as they come, each compared with the only right one."""

    def __init__(self, asked: Asked) -> None:
        self.tokens: list[int] = []
        self.wrong = 0
        self._asked = asked

    def take(self, update: SequenceUpdate) -> bool:
        """Whether this was the end. Raises LegLost when the worker could not go on."""
        if update.finish in (FinishReason.ERROR, FinishReason.ABORT):
            raise LegLost(update.error or "the worker ended it")
        sampling = self._asked.sampling
        for token in update.tokens:
            position = len(self._asked.prompt) + len(self.tokens)
            self.wrong += token != expected_token(sampling.seed, position)
            self.tokens.append(token)
        ended = update.finish not in (None, FinishReason.HANDED_OVER)
        surplus = len(self.tokens) - sampling.max_tokens
        self.wrong += abs(surplus) if ended else max(0, surplus)
        return ended


def expected_token(seed: int, position: int) -> int:
    """What a simulated model draws, as ``engine/simulated_runner.py`` says."""
    return mix(mix(seed) + position) % SIMULATED_VOCAB


class Client:
    """Leads requests over two workers. ``workers`` is looked at anew at each attempt."""

    def __init__(self, workers: Mapping[str, WorkerProcess], hasher: PageHasher) -> None:
        self._workers = workers
        self._hasher = hasher
        self.wrong_tokens = 0
        self.losses: Counter[str] = Counter()  # attempts that were lost

    async def run(self, asked: Asked) -> Ending:
        """Until the answer is there, the client leaves, or it is clear that no answer will come."""
        answer = Answer(asked)
        try:
            async with asyncio.timeout(REQUEST_S if asked.leaves_after_s is None else asked.leaves_after_s):
                for attempt in range(ATTEMPTS):
                    try:
                        request = self._request(asked, answer, attempt)
                        async with aclosing(self._attempt(asked, request)) as updates:
                            async for update in updates:
                                if answer.take(update):
                                    return Ending.ANSWERED
                    except LegLost as lost:
                        self.losses[str(lost)] += 1
                        await self._alive(asked)
            return Ending.STUCK
        except TimeoutError:
            return Ending.STUCK if asked.leaves_after_s is None else Ending.LEFT
        finally:
            self.wrong_tokens += answer.wrong

    def _request(self, asked: Asked, answer: Answer, attempt: int) -> Request:
        original = Request(RequestId(""), asked.prompt, self._hasher.chain(asked.prompt), asked.sampling)
        return replace(self._advanced(original, answer.tokens), request_id=RequestId(f"{asked.name}-{attempt}"))

    async def _alive(self, asked: Asked) -> None:
        while not (self._workers[asked.prefill].alive and self._workers[asked.decode].alive):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _attempt(self, asked: Asked, request: Request) -> AsyncGenerator[SequenceUpdate, None]:
        prefill, decode = self._workers[asked.prefill], self._workers[asked.decode]
        with ExitStack() as legs:
            if asked.way is Way.ONE_WORKER:
                leg = legs.enter_context(following_leg(decode, request, Decode(request, None)))
                while True:
                    yield await leg.next(REQUEST_S)
            update, early = await self._prefill(asked, request, legs)
            yield update
            if update.finish is not FinishReason.HANDED_OVER:
                return  # the answer, or LegLost raised by whoever took it
            following, ticket = self._advanced(request, update.tokens), update.ticket
            with lease(prefill, request.request_id, asked.gives_up) as held:
                if early is None:
                    leg = legs.enter_context(following_leg(decode, following, Decode(following, ticket)))
                else:
                    leg = early
                    if not leg.ended:
                        decode.send(Proceed(following))
                try:
                    while True:
                        update = await leg.next(REQUEST_S)
                        if early is not None and update.finish in (FinishReason.ERROR, FinishReason.ABORT):
                            raise LegLost(update.error or "the worker ended it")
                        held.ended = True
                        yield update
                except LegLost:
                    if early is None or held.ended:
                        raise
                again = replace(following, request_id=RequestId(f"{request.request_id}-final"))
                leg = legs.enter_context(following_leg(self._workers[asked.decode], again, Decode(again, ticket)))
                while True:
                    update = await leg.next(REQUEST_S)
                    held.ended = True
                    yield update

    async def _prefill(self, asked: Asked, request: Request, legs: ExitStack) -> tuple[SequenceUpdate, Leg | None]:
        early: Leg | None = None
        with following_leg(self._workers[asked.prefill], request, Prefill(request)) as leg:
            update = await leg.next(REQUEST_S)
            while update.finish is None:
                if early is None and update.ticket is not None and asked.way is Way.WHILE_COMPUTED:
                    expect = Decode(request, update.ticket, awaiting=True)
                    early = legs.enter_context(following_leg(self._workers[asked.decode], request, expect))
                update = await leg.next(REQUEST_S)
        return update, early

    def _advanced(self, request: Request, drawn: list[int]) -> Request:
        if not drawn:
            return request
        prompt = (*request.prompt, *drawn)
        rest = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(drawn))
        names = self._hasher.chain(prompt, request.page_hashes)
        return replace(request, prompt=prompt, page_hashes=names, sampling=rest, drawn=request.drawn + len(drawn))


@contextmanager
def following_leg(worker: WorkerProcess, request: Request, command: LegCommand) -> Iterator[Leg]:
    """A request on one worker; ended there if it has not ended by itself."""
    leg = worker.leg(request, command)
    try:
        yield leg
    finally:
        if not leg.settled:
            worker.leave(request.request_id)


class Held:
    """What is known of a lease: whether the decode worker has settled the matter."""

    ended = False


@contextmanager
def lease(worker: WorkerProcess, request_id: RequestId, gives_up: bool) -> Iterator[Held]:
    """Pages that wait on a worker; given up there unless whoever they were for has settled the matter."""
    held = Held()
    try:
        yield held
    finally:
        if gives_up and not held.ended:
            worker.leave(request_id)
