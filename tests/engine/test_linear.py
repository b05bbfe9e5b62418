"""Projections, however their weights are kept."""

import pytest
import torch
from torch.nn.functional import linear

from splitserve.engine.models.linear import Int8Linear, Linears, PackedLinear
from splitserve.engine.native.compiling import NotCompiled
from splitserve.engine.native.kernels import load_kernels

CPU = torch.device("cpu")
SHAPES = [(8, 24), (576, 1536), (33, 7), (20_000, 17)]  # in, out


@pytest.fixture(autouse=True)
def compiled() -> None:
    try:
        load_kernels()
    except NotCompiled as reason:
        pytest.skip(str(reason))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_projection_is_the_plain_one(shape: tuple[int, int], rows: int, bias: bool) -> None:
    one = Linears(PackedLinear, CPU, torch.float32)(*shape, bias=bias)
    weight = random(shape[1], shape[0], seed=1)
    one.weight.copy_(weight)
    if one.bias is not None:
        one.bias.copy_(random(shape[1], seed=2))
    one.pack()
    x = random(rows, shape[0])
    torch.testing.assert_close(one(x), linear(x, weight, one.bias), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_an_8_bit_projection_errs_by_its_rounding(shape: tuple[int, int], bias: bool) -> None:
    one = Linears(Int8Linear, CPU, torch.float32)(*shape, bias=bias)
    weight = random(shape[1], shape[0], seed=1)
    one.weight.copy_(weight)
    if one.bias is not None:
        one.bias.copy_(random(shape[1], seed=2))
    one.pack()
    x = random(16, shape[0])
    # Half a step of every factor, all errors in the worst direction.
    levels = min(2047, (2**31 - 1) // (127 * shape[0] + 127))
    steps = weight.abs().amax(1) / 127, x.abs().amax(1) / levels
    bound = 0.5 * (steps[1][:, None] * weight.abs().sum(1) + x.abs().sum(1)[:, None] * steps[0])
    bound += 0.25 * shape[0] * steps[1][:, None] * steps[0]
    error = (one(x) - linear(x, weight, one.bias)).abs()
    assert (error <= bound * 1.001 + 1e-3).all()
    assert error.mean() < 0.015 * linear(x, weight).abs().mean()


def test_a_row_of_8_bits_does_not_depend_on_the_batch() -> None:
    """B051: an outlier in one row changes nothing for the others."""
    one = Linears(Int8Linear, CPU, torch.float32)(64, 48)
    one.weight.copy_(random(48, 64, seed=1))
    one.pack()
    rows = random(32, 64)
    rows[7] *= 1000
    together = one(rows)
    assert torch.equal(together, torch.cat([one(row[None]) for row in rows]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_gives_nothing_finite(value: float) -> None:
    one = Linears(Int8Linear, CPU, torch.float32)(16, 8)
    one.weight.copy_(random(8, 16))
    one.pack()
    rows = random(2, 16)
    rows[0, 3] = value
    result = one(rows)
    assert not result[0].isfinite().any()
    assert result[1].isfinite().all()


def test_a_row_of_zeros_gives_zeros() -> None:
    one = Linears(Int8Linear, CPU, torch.float32)(16, 8)
    one.weight.copy_(random(8, 16))
    one.pack()
    assert (one(torch.zeros(1, 16)) == 0).all()


def test_the_largest_sum_there_can_be_does_not_overflow() -> None:
    size = 20_001
    one = Linears(Int8Linear, CPU, torch.float32)(size, 3)
    one.weight.fill_(1.0)
    one.pack()
    torch.testing.assert_close(one(torch.full((2, size), -1.0)), torch.full((2, 3), -float(size)))
