"""A model over the Triton operations computes what it computes over torch's, step by step and padded for a graph."""

import pytest
import torch

from engine_models.random_model import RandomModel
from splitserve.engine.batch import StepBatch, build_batch
from splitserve.engine.cuda_graphs import DecodeInputs, DecodeLimits, fits, graph_rows
from splitserve.engine.kernels.triton_operations import TritonOperations
from splitserve.engine.model_config import ModelConfig
from splitserve.engine.models.linear import DenseLinear, Linears
from splitserve.engine.models.platform import Platform
from splitserve.engine.models.registry import Model, build_model
from splitserve.engine.operations import Operations
from splitserve.engine.protocol import PageId, RequestId
from splitserve.engine.step import Chunk
from splitserve.engine.torch_operations import TorchOperations
from splitserve.engine.weights.loading import load_weights

CPU = torch.device("cpu")
PAGE_TOKENS = 4
PAGES = 9
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=24,
    intermediate_size=40,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=8,
    max_model_tokens=32,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tied_embeddings=True,
    eos_token_ids=frozenset(),
)
TOKENS = {"a": [5, 9, 33, 2, 17, 60, 1, 8, 21, 7], "b": [3, 3, 40], "c": [11]}
TABLES = {"a": [7, 1, 4], "b": [2], "c": [5]}
OWNED = [7, 1, 4, 2, 5]


def _model(operations: Operations) -> Model:
    platform = Platform(CPU, torch.float32, operations, Linears(DenseLinear, CPU, torch.float32))
    model = build_model(CONFIG, platform)
    load_weights(RandomModel(CONFIG), model.destinations())
    model.pack()
    return model


def _chunk(name: str, start: int, end: int) -> Chunk:
    return Chunk(RequestId(name), TOKENS[name][start:end], start, [PageId(page) for page in TABLES[name]], None)


STEPS = [
    [_chunk("a", 0, 5), _chunk("c", 0, 1), _chunk("b", 0, 2)],
    [_chunk("a", 5, 9), _chunk("b", 2, 3)],
]
DECODING = [_chunk("a", 9, 10), _chunk("c", 0, 1), _chunk("b", 2, 3)]


def _pool(fill: float) -> torch.Tensor:
    return torch.full((PAGES, CONFIG.layers, 2, CONFIG.kv_heads, PAGE_TOKENS, CONFIG.head_dim), fill)


def _logits(model: Model, pool: torch.Tensor, batch: StepBatch) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(model.forward(batch, pool))


def test_a_model_computes_the_same_and_reads_nothing_that_nobody_wrote() -> None:
    triton, plain = TritonOperations(CPU), TorchOperations(CPU)
    model, reference = _model(triton), _model(plain)
    pool, reference_pool = _pool(float("nan")), _pool(0.0)
    for chunks in [*STEPS, DECODING]:
        logits = _logits(model, pool, build_batch(chunks, PAGE_TOKENS, CPU, triton))
        expected = _logits(reference, reference_pool, build_batch(chunks, PAGE_TOKENS, CPU, plain))
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_rows_of_padding_change_nothing() -> None:
    operations, plain = TritonOperations(CPU), TorchOperations(CPU)
    model, reference = _model(operations), _model(plain)
    pool = _pool(0.0)
    for chunks in STEPS:
        _logits(reference, pool, build_batch(chunks, PAGE_TOKENS, CPU, plain))
    unowned = [page for page in range(PAGES) if page not in OWNED]
    pool[unowned] = float("nan")
    plain_pool, padded_pool = pool.clone(), pool.clone()
    expected = _logits(model, plain_pool, build_batch(DECODING, PAGE_TOKENS, CPU, operations))

    inputs = DecodeInputs(DecodeLimits(8, 32, PAGE_TOKENS), rows=8, device=CPU)
    batch = inputs.batch(4)
    longer = [_chunk("a", 8, 9)] * 4
    inputs.fill(longer, 4)  # a step before, whose rows must leave nothing behind
    inputs.fill(DECODING, 4)
    logits = _logits(model, padded_pool, batch)
    torch.testing.assert_close(logits[:3], expected)
    assert logits[3].isfinite().all()
    torch.testing.assert_close(padded_pool, plain_pool, equal_nan=True)
    assert padded_pool[unowned].isnan().all()


def test_inputs_begin_as_padding() -> None:
    pool = _pool(float("nan"))
    model = _model(TritonOperations(CPU))
    logits = _logits(model, pool, DecodeInputs(DecodeLimits(2, 32, PAGE_TOKENS), rows=2, device=CPU).batch(2))
    assert logits.isfinite().all()
    assert pool.isnan().all()


@pytest.mark.parametrize(
    ("sequences", "rows"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 4)),
        (4, (1, 2, 4)),
        (5, (1, 2, 4, 8)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 16)),
        (24, (1, 2, 4, 8, 16, 24)),
    ],
)
def test_graphs_for_every_number_of_sequences(sequences: int, rows: tuple[int, ...]) -> None:
    assert graph_rows(sequences) == rows


def test_no_graphs_for_no_sequences() -> None:
    with pytest.raises(ValueError, match="got 0"):
        graph_rows(0)


def test_which_steps_fit_a_graph() -> None:
    limits = DecodeLimits(sequences=2, max_model_tokens=10, page_tokens=PAGE_TOKENS)
    decoding = _chunk("a", 9, 10)
    assert fits([decoding], limits)
    assert not fits([], limits)
    assert not fits([decoding] * 3, limits)
    assert not fits([_chunk("a", 0, 2)], limits)
    assert not fits([decoding], DecodeLimits(2, 9, PAGE_TOKENS))
