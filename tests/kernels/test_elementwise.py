"""Norms, gated activations, rotation and page copies: the kernels against plain torch."""

from collections.abc import Callable

import pytest
import torch

from splitserve.engine.kernels import gated, norms, twins
from splitserve.engine.kernels.page_copy import gather_pages, scatter_pages
from splitserve.engine.kernels.rotate_and_write import Places, rotate_and_write
from splitserve.engine.operations import Rotary

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
FLOATS = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


@FLOATS
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 576, 1024])
def test_norm(dtype: torch.dtype, offset: float, size: int) -> None:
    torch.manual_seed(1)
    hidden, weight = (torch.randn(5, size) * 3).to(dtype), torch.randn(size).to(dtype)
    _close(norms.rms_norm(hidden, weight, 1e-5, offset), twins.rms_norm(hidden, weight, 1e-5, offset))
    residual = torch.randn(5, size).to(dtype)
    summed = residual.clone()
    expected = twins.add_rms_norm(summed, hidden, weight, 1e-5, offset)
    _close(norms.add_rms_norm(residual, hidden, weight, 1e-5, offset), expected)
    _close(residual, summed)  # the interpreter cuts to bfloat16 where a GPU rounds


def test_norm_of_heads_inside_a_projection() -> None:
    projected = torch.randn(4, 7, 80)
    query, weight = projected[:, 2:5], torch.randn(80)
    normed = norms.rms_norm(query, weight, 1e-6)
    _close(normed, twins.rms_norm(query, weight, 1e-6))
    assert normed.is_contiguous()


def test_the_twin_of_the_norm_is_torchs() -> None:
    hidden, weight = torch.randn(3, 8), torch.randn(8)
    _close(twins.rms_norm(hidden, weight, 1e-5), torch.nn.functional.rms_norm(hidden, (8,), weight, 1e-5))


@FLOATS
@pytest.mark.parametrize("size", [1, 1500])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gated_activation(dtype: torch.dtype, size: int, name: str) -> None:
    torch.manual_seed(2)
    gate_up = (torch.randn(3, 2 * size) * 6).to(dtype)
    activate: Callable[[torch.Tensor], torch.Tensor] = getattr(gated, name)
    twin: Callable[[torch.Tensor], torch.Tensor] = getattr(twins, name)
    _close(activate(gate_up), twin(gate_up))


@FLOATS
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (20, 20, 80), (1, 1, 256)])
def test_rotation_and_write(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    torch.manual_seed(3)
    tokens, page_tokens = 5, 4
    projected = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    query, key, value = projected.split([heads, kv_heads, kv_heads], dim=1)
    angles = torch.rand(tokens, head_dim // 2) * 50
    rotary = Rotary(angles.cos(), angles.sin())
    places = Places(torch.tensor([3, 3, -1, 0, 2]), torch.tensor([2, 3, 0, 0, 1]))
    memory = torch.full((5, 2, 2, kv_heads, page_tokens, head_dim), float("nan"), dtype=dtype)
    pool, expected_pool = memory[1:], memory[1:].clone()
    rotated = rotate_and_write(query, key, value, rotary, pool[:, 1], places)
    _close(rotated, twins.rotate_and_write(query, key, value, rotary, expected_pool[:, 1], places))
    _close(pool, expected_pool)
    written = pool[:, 1].isfinite().any(dim=-1).all(dim=1).all(dim=1)
    assert written.nonzero().tolist() == [[0, 0], [2, 1], [3, 2], [3, 3]]
    assert pool[:, 0].isnan().all()
    assert memory[0].isnan().all()  # a row of padding wrote nothing before the pool


@pytest.mark.parametrize("inner", [(3, 2, 5), (2, 2100)], ids=str)
def test_pages_go_into_a_buffer_and_come_back(inner: tuple[int, ...]) -> None:
    torch.manual_seed(4)
    pool = torch.randn(6, *inner).half()
    before = pool.clone()
    staging = torch.zeros(4, *inner).half()
    page_ids = torch.tensor([5, 0, 3])
    gather_pages(pool, page_ids, staging)
    assert torch.equal(staging[:3], pool[page_ids])
    assert (staging[3] == 0).all()
    scatter_pages(pool, torch.tensor([1, 2, 5]), staging)
    assert torch.equal(pool[[1, 2, 5]], before[[5, 0, 3]])
    assert torch.equal(pool[[0, 3, 4]], before[[0, 3, 4]])


def test_doors_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"weight must be \[8\]"):
        norms.rms_norm(torch.ones(2, 8), torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="must be alike and contiguous"):
        norms.add_rms_norm(torch.ones(2, 16)[:, ::2], torch.ones(2, 8), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match=r"\[tokens, 2 \* size\]"):
        gated.silu_mul(torch.ones(2, 7))
    with pytest.raises(ValueError, match="staging holds 1 pages, 2 are listed"):
        gather_pages(torch.ones(4, 3), torch.tensor([1, 2]), torch.ones(1, 3))
    with pytest.raises(ValueError, match="page_ids must be contiguous int64"):
        scatter_pages(torch.ones(4, 3), torch.tensor([1.0]), torch.ones(1, 3))
