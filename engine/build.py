"""Puts one engine together from its settings: the only file of the engine that names the concrete parts."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitserve.engine.counters import Counters
from splitserve.engine.engine import Engine
from splitserve.engine.handover import Handover, HandoverLimits
from splitserve.engine.page_hash import PageHasher
from splitserve.engine.page_pool import PagePool
from splitserve.engine.protocol import WorkerId
from splitserve.engine.scheduler import SchedulerLimits
from splitserve.engine.settings import EngineSettings, SimulationSettings
from splitserve.engine.simulated_runner import SimulatedRunner
from splitserve.engine.step import Chunk, Runner
from splitserve.kvtransfer.transport import PoolMemory, Transport

SIMULATED_MODEL_TOKENS = 1 << 17
SIMULATED_VOCAB = 32_000  # ids that the gateway's tokenizer knows, whichever it is
LINE_S = 2.0  # between two lines about weights that are being loaded


@dataclass(frozen=True)
class BuiltEngine:
    """An engine and what its owner needs beside it."""

    engine: Engine
    runner: Runner
    transport: Transport
    counters: Counters


def build_engine(
    settings: EngineSettings,
    worker: WorkerId,
    incarnation: int,
    make_transport: Callable[[PoolMemory], Transport],
    progress: Callable[[str], None] = lambda line: None,
) -> BuiltEngine:
    """Load the model, size the pool, register it with a transport. Blocking: seconds to minutes.

    Raises ``weights.ModelLoadError`` for what is wrong with the model's files.
    """
    runner = (
        _simulated_runner(settings, settings.simulation) if settings.simulation else _model_runner(settings, progress)
    )
    transport = make_transport(runner.memory())
    counters = Counters()
    pool = PagePool(runner.num_pages, on_generation=transport.set_generation)
    engine = Engine(
        runner=runner,
        pool=pool,
        hasher=page_hasher(settings),
        limits=SchedulerLimits(
            settings.step_tokens, settings.chunk_tokens, settings.max_running, settings.max_preemptions
        ),
        handover=Handover(
            worker=worker,
            incarnation=incarnation,
            layout=runner.layout,
            pool=pool,
            transport=transport,
            limits=HandoverLimits(settings.transfer.lease_s, settings.transfer.read_s, settings.transfer.leased_share),
            counters=counters,
        ),
        counters=counters,
        clock=time.monotonic,
    )
    return BuiltEngine(engine, runner, transport, counters)


def page_hasher(settings: EngineSettings) -> PageHasher:
    """The hasher that gateways and workers of one configuration share.

    A gateway does not know what ``dtype: auto`` means on each worker's device, so the word itself is in the names. Two
    workers may then have different contents under one name, but never exchange them: a name is looked up in the
    worker's own cache only, and pages move between equal layouts only, which the dtype is part of.
    """
    context = f"{settings.model}\n{settings.dtype}".encode()
    return PageHasher(settings.page_tokens, settings.page_hash_key.encode(), context)


def _simulated_runner(settings: EngineSettings, simulation: SimulationSettings) -> Runner:
    def step_seconds(chunks: Sequence[Chunk]) -> float:
        decoding = sum(1 for chunk in chunks if chunk.start and len(chunk.token_ids) == 1)
        prompt_tokens = sum(len(chunk.token_ids) for chunk in chunks) - decoding
        return simulation.step_s + simulation.prefill_token_s * prompt_tokens + simulation.decode_token_s * decoding

    return SimulatedRunner(
        num_pages=simulation.pages,
        page_tokens=settings.page_tokens,
        vocab_size=SIMULATED_VOCAB,
        max_model_tokens=settings.max_model_tokens or SIMULATED_MODEL_TOKENS,
        step_seconds=step_seconds,
    )


def _model_runner(settings: EngineSettings, progress: Callable[[str], None]) -> Runner:
    # Imported here so that a simulated worker needs neither torch's memory nor its start-up time.
    import torch

    from splitserve.engine.model_runner import ModelRunner
    from splitserve.engine.weights.loading import LoadProgress
    from splitserve.engine.weights.open_model import open_model

    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(settings.threads or os.cpu_count() or 1)

    said_at = time.monotonic()

    def report(loaded: LoadProgress) -> None:
        nonlocal said_at
        if loaded.tensors == loaded.total_tensors or time.monotonic() - said_at >= LINE_S:
            said_at = time.monotonic()
            progress(
                f"weights {loaded.tensors}/{loaded.total_tensors} tensors,"
                f" {loaded.read_bytes / 1e6:.0f}/{loaded.total_bytes / 1e6:.0f} MB"
            )

    return ModelRunner(
        open_model(settings.model),
        page_tokens=settings.page_tokens,
        kv_memory_bytes=settings.kv_memory_bytes,
        dtype=settings.dtype,
        device=device,
        attention=settings.attention,
        graph_sequences=settings.max_running,
        max_model_tokens=settings.max_model_tokens,
        progress=report,
    )
