"""An engine on a random model, which hands pages over within this process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from engine_models.random_model import RandomModel
from splitserve.engine.counters import Counters
from splitserve.engine.engine import Engine
from splitserve.engine.handover import Handover, HandoverLimits
from splitserve.engine.model_config import ModelConfig
from splitserve.engine.model_runner import ModelRunner
from splitserve.engine.page_hash import PageHasher
from splitserve.engine.page_pool import PagePool
from splitserve.engine.protocol import (
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    SequenceUpdate,
    TokenLogprobs,
    WorkerId,
)
from splitserve.engine.scheduler import SchedulerLimits
from splitserve.kvtransfer.local_transport import LocalNetwork, LocalTransport
from splitserve.kvtransfer.ticket import Ticket

PAGE_TOKENS = 4
EOS = (2, 5)
CONFIG = ModelConfig(
    architecture="llama",
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=97,
    max_model_tokens=128,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    tied_embeddings=False,
    eos_token_ids=frozenset(EOS),
)
FILES = RandomModel(CONFIG)
HASHER = PageHasher(PAGE_TOKENS, b"test")


@dataclass
class Answer:
    """All that an engine said of one request."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    ticket: bytes | None = None
    cached_tokens: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None

    def add(self, update: SequenceUpdate) -> None:
        assert self.finish is None, "a request ends once"
        self.tokens += update.tokens
        self.logprobs += update.logprobs or ()
        self.finish, self.ticket, self.error = update.finish, update.ticket, update.error
        if update.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "the prompt is reported once"
            self.prompt_logprobs = list(update.prompt_logprobs)
        if update.cached_tokens is not None:
            self.cached_tokens = update.cached_tokens


class ModelEngine:
    """One engine and what it has answered so far."""

    def __init__(self, pages: int = 128, limits: SchedulerLimits | None = None, network: LocalNetwork | None = None):
        runner = ModelRunner(FILES, page_tokens=PAGE_TOKENS, num_pages=pages)
        self.network = network or LocalNetwork()
        name = WorkerId(f"w{id(self)}")
        transport = LocalTransport(name, runner.memory(), self.network)
        self.counters = Counters()
        self.pool = PagePool(pages, on_generation=transport.set_generation)
        handover = Handover(
            worker=name,
            incarnation=0,
            layout=runner.layout,
            pool=self.pool,
            transport=transport,
            limits=HandoverLimits(lease_s=50.0, read_s=20.0),
            counters=self.counters,
        )
        limits = limits or SchedulerLimits(64, 16, 32)
        self.engine = Engine(runner, self.pool, HASHER, limits, handover, self.counters, lambda: 0.0)
        self.answers: dict[str, Answer] = {}
        self.offers: dict[str, Ticket] = {}  # of prompts that were not computed yet

    def add(self, request: Request, **options: Any) -> None:
        self.answers[request.request_id] = Answer()
        self.engine.add(request, **options)

    def step(self) -> None:
        for update in self.engine.step(self._announced).updates:
            self.answers[update.request_id].add(update)

    def _announced(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            assert update.ticket is not None
            self.offers[update.request_id] = Ticket.decode(update.ticket)

    def run(self, *requests: Request, **options: Any) -> Answer:
        """Add these, then step until everything has ended. The answer to the first."""
        for request in requests:
            self.add(request, **options)
        for _ in range(2000):
            if all(answer.finish is not None for answer in self.answers.values()):
                return self.answers[requests[0].request_id]
            self.step()
        raise AssertionError("no end in 2000 steps")


def request(name: str, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> Request:
    return Request(RequestId(name), tuple(prompt), HASHER.chain(prompt), SamplingParams(max_tokens, **sampling))


def resumed(original: Request, drawn: Sequence[int]) -> Request:
    """As a gateway sends it on after ``drawn``."""
    prompt = (*original.prompt, *drawn)
    left = original.sampling.max_tokens - len(drawn)
    sampling = replace(original.sampling, max_tokens=left, prompt_logprobs=None)
    names = HASHER.chain(prompt)
    return replace(original, prompt=prompt, page_hashes=names, sampling=sampling, drawn=original.drawn + len(drawn))


def through_two(original: Request) -> Answer:
    """Prefill on one engine, decode on another that reads its pages: both answers as one."""
    network = LocalNetwork()
    prefill, decode = ModelEngine(network=network), ModelEngine(network=network)
    answer = prefill.run(original, hand_over=True)
    if answer.finish is FinishReason.HANDED_OVER:
        assert answer.ticket is not None
        ticket = Ticket.decode(answer.ticket)
        rest = decode.run(resumed(original, answer.tokens), ticket=ticket)
        for _ in range(5):
            prefill.step()
        assert prefill.pool.held_pages == 0
        answer.tokens += rest.tokens
        answer.logprobs += rest.logprobs
        answer.finish, answer.error = rest.finish, rest.error
    return answer


def through_two_at_once(original: Request) -> Answer:
    """As ``through_two``, for a prompt of several chunks: its pages are read while the rest is computed."""
    network = LocalNetwork()
    chunks = SchedulerLimits(step_tokens=64, chunk_tokens=3, max_running=32)
    prefill, decode = ModelEngine(limits=chunks, network=network), ModelEngine(network=network)
    prefill.add(original, hand_over=True)
    answer = prefill.answers[original.request_id]
    expected = replace(original, sampling=replace(original.sampling, prompt_logprobs=None))
    while answer.finish is None:
        prefill.step()
        if original.request_id not in decode.answers:
            decode.add(expected, ticket=prefill.offers[original.request_id], awaiting=True)
        decode.step()
    rest = decode.answers[original.request_id]
    if answer.finish is not FinishReason.HANDED_OVER:
        decode.engine.abort(original.request_id)
        return answer
    assert decode.engine.proceed(resumed(original, answer.tokens))
    for _ in range(2000):
        prefill.step()
        decode.step()
        if rest.finish is not None:
            break
    assert (prefill.pool.held_pages, decode.pool.held_pages) == (0, 0)
    assert {c.name: c.total for c in decode.counters.totals()}.get("splitserve_prefill_tokens_total", 0) == 0
    answer.tokens += rest.tokens
    answer.logprobs += rest.logprobs
    answer.finish, answer.error = rest.finish, rest.error
    return answer
