"""Random requests over a prefill and a decode engine in two processes, pages over NIXL, while everything goes wrong.

Clients leave, legs and leases are ended behind the gateway's back, steps are slow, processes are frozen, and every few
hundred requests one of them is killed and started again. Simulated tokens are a function of seed and position, and
pages name the tokens they were computed from, so every answer and every page that is read is checked. After each kill,
and at the end, both workers have to come to rest with nothing held.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from random import Random

from splitserve.bench.chaos_request import Asked, Client, Ending, Way
from splitserve.bench.chaos_worker import WorkerProcess
from splitserve.engine.build import SIMULATED_VOCAB, page_hasher
from splitserve.engine.protocol import SamplingParams
from splitserve.engine.settings import EngineSettings, SimulationSettings, TransferSettings

SETTINGS = EngineSettings(
    page_tokens=16,
    step_tokens=128,
    chunk_tokens=64,
    max_running=16,
    max_model_tokens=1024,
    transfer=TransferSettings(lease_s=2.0, read_s=1.0),
    simulation=SimulationSettings(pages=96, step_s=2e-4, prefill_token_s=5e-6),
)
NAMES = ("left", "right")  # prefill on the left and decode on the right, mostly
CLIENTS = 24  # requests under way at the same time
KILL_EVERY = 250  # requests
MOST_PROMPT_TOKENS = 400
MOST_NEW_TOKENS = 30
PREFIXES = 6
SHARED_SHARE = 0.6
BACKWARDS_SHARE = 0.15  # from right to left
LEAVING_SHARE = 0.1
LEAVING_S = 1.0  # the latest
KEEPING_SHARE = 0.2  # of requests whose leases are left to their deadline
FAULT_S = 0.1  # mean time between two faults
FREEZE_SHARE = 0.03  # of these faults; others end a leg or a lease
SHORTEST_FREEZE_S = 0.05
LONGEST_FREEZE_S = 3.0  # longer than a lease
FROZEN_KILL_SHARE = 0.3
DOWN_S = 0.5  # the longest time between a kill and a new start
QUIET_S = 20.0  # many times a lease


@dataclass
class Found:
    """What a run came to."""

    requests: int = 0
    leaked_pages: int = 0
    wrong_tokens: int = 0  # a step that met a foreign page counts as one
    unfinished: int = 0  # requests without an end; legs on living workers with no end, or with more than one
    kills: int = 0

    @property
    def clean(self) -> bool:
        return not (self.leaked_pages or self.wrong_tokens or self.unfinished)


class Chaos:
    """One run. The seed fixes requests and faults, not how they meet."""

    def __init__(self, seed: int, longest_freeze_s: float = LONGEST_FREEZE_S) -> None:
        self.found = Found()
        self._random = Random(seed)
        self._longest_freeze_s = longest_freeze_s
        self._workers: dict[str, WorkerProcess] = {}
        self._incarnations = 0
        self._client = Client(self._workers, page_hasher(SETTINGS))
        self._prefixes = [self._tokens(MOST_PROMPT_TOKENS) for _ in range(PREFIXES)]
        self.totals: Counter[str] = Counter()  # of the workers' counters
        self._endings = dict.fromkeys(Ending, 0)

    async def run(self, requests: int, kill_every: int) -> Found:
        await asyncio.gather(*map(self._start, NAMES))
        try:
            while self.found.requests < requests:
                await self._round(min(kill_every, requests - self.found.requests))
        finally:
            for worker in self._workers.values():
                self._count(worker)
                with suppress(TimeoutError):
                    await worker.stop()
                await worker.kill()
        self.found.wrong_tokens += self._client.wrong_tokens
        return self.found

    async def _round(self, requests: int) -> None:
        """Some requests with a kill among them, then peace."""
        started = time.monotonic()
        asked = [self._ask(self.found.requests + number) for number in range(requests)]
        todo, kill_at = list(reversed(asked)), self._random.randrange(requests)
        faults = asyncio.create_task(self._disturb())
        killed: list[asyncio.Task[None]] = []

        async def clients() -> None:
            while todo:
                if len(todo) == requests - kill_at:
                    killed.append(asyncio.create_task(self._kill()))
                ending = await self._client.run(todo.pop())
                self._endings[ending] += 1
                self.found.unfinished += ending is Ending.STUCK

        await asyncio.gather(*(clients() for _ in range(CLIENTS)))
        faults.cancel()
        with suppress(asyncio.CancelledError):
            await faults
        await asyncio.gather(*killed)
        self.found.requests += requests
        busy_s = time.monotonic() - started
        await self._rest()
        endings = ", ".join(f"{count} {ending.value}" for ending, count in self._endings.items())
        at_rest_s = time.monotonic() - started - busy_s
        print(f"{endings}; {busy_s:.1f} s, at rest after {at_rest_s:.1f} s more; {self.found}", file=sys.stderr)

    async def _rest(self) -> None:
        """Wait until nothing runs and nothing is held, and count what does not come to that."""
        end = time.monotonic() + QUIET_S
        while time.monotonic() < end and not all(worker.quiet for worker in self._workers.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        for name, worker in list(self._workers.items()):
            load = worker.load
            leaked = load.total_pages - load.free_pages - load.cached_pages
            if worker.alive and worker.quiet and not leaked:
                continue
            print(f"{name} did not come to rest: alive {worker.alive}, {load}, open {worker.open}", file=sys.stderr)
            self.found.leaked_pages += max(leaked, load.held_pages)
            self.found.unfinished += len(worker.open) + load.open_leases + (not worker.alive)
            self._count(worker)
            await worker.kill()  # what is wrong with it counts once
            await self._start(name)

    def _count(self, worker: WorkerProcess) -> None:
        self.totals.update(worker.totals)
        self.found.wrong_tokens += worker.failed_steps
        self.found.unfinished += worker.surplus_words

    # Faults

    async def _disturb(self) -> None:
        frozen: WorkerProcess | None = None
        try:
            while True:
                await asyncio.sleep(self._random.expovariate(1 / FAULT_S))
                worker = self._workers[self._random.choice(NAMES)]
                if self._random.random() < FREEZE_SHARE:
                    frozen = worker
                    worker.freeze()
                    await asyncio.sleep(self._random.uniform(SHORTEST_FREEZE_S, self._longest_freeze_s))
                    worker.thaw()
                elif worker.recent:
                    worker.end_behind_the_back(self._random.choice(worker.recent))
        finally:
            if frozen is not None:
                frozen.thaw()

    async def _kill(self) -> None:
        worker = self._workers[self._random.choice(NAMES)]
        if self._random.random() < FROZEN_KILL_SHARE:
            worker.freeze()
            await asyncio.sleep(self._random.uniform(SHORTEST_FREEZE_S, self._longest_freeze_s))
        await worker.kill()
        self._count(worker)
        self.found.kills += 1
        await asyncio.sleep(self._random.uniform(0, DOWN_S))
        await self._start(worker.name)

    async def _start(self, name: str) -> None:
        self._incarnations += 1
        self._workers[name] = await WorkerProcess.start(name, self._incarnations, SETTINGS)

    # Requests

    def _ask(self, number: int) -> Asked:
        draw = self._random
        length, shared = draw.randint(1, MOST_PROMPT_TOKENS), 0
        if draw.random() < SHARED_SHARE:
            shared = draw.randint(0, length)
        prompt = (*draw.choice(self._prefixes)[:shared], *self._tokens(length - shared))
        backwards = draw.random() < BACKWARDS_SHARE
        prefill, decode = reversed(NAMES) if backwards else NAMES
        return Asked(
            name=f"r{number}",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=draw.randint(1, MOST_NEW_TOKENS), seed=draw.getrandbits(63)),
            way=draw.choices(list(Way), weights=(1, 3, 6))[0],
            prefill=prefill,
            decode=decode,
            gives_up=draw.random() >= KEEPING_SHARE,
            leaves_after_s=draw.uniform(0, LEAVING_S) if draw.random() < LEAVING_SHARE else None,
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(SIMULATED_VOCAB) for _ in range(count))

    @property
    def losses(self) -> list[str]:
        """Why attempts were lost, most frequent first."""
        return [f"{count} x {why}" for why, count in self._client.losses.most_common(12)]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--requests", type=int, default=1000)
    arguments.add_argument("--kill-every", type=int, default=KILL_EVERY, help="requests, %(default)s")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--json", action="store_true", help="print one JSON line")
    given = arguments.parse_args()
    chaos = Chaos(given.seed)
    found = asyncio.run(chaos.run(given.requests, given.kill_every))
    for line in chaos.losses:
        print(line, file=sys.stderr)
    for name, total in sorted(chaos.totals.items()):
        print(f"{name} {total}", file=sys.stderr)
    print(json.dumps(asdict(found)) if given.json else found)
    sys.exit(not found.clean)


if __name__ == "__main__":
    main()
