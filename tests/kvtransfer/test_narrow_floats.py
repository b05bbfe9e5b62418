"""Short floating-point types against torch's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitserve.kvtransfer.narrow_floats import E4M3_MAX, STORED, from_e4m3, narrow, to_e4m3, widen

# All float32 of 12 leading bits, with endings that lie on, before and after every rounding border of E4M3 and bfloat16.
HEADS = np.arange(1 << 12, dtype=np.uint32) << 20
ENDINGS = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFF, 0x80000, 0x80001, 0xFFFFF], np.uint32)
ALL = (HEADS[:, None] | ENDINGS).ravel().view(np.float32)
FINITE = ALL[np.isfinite(ALL)]


def test_every_e4m3_code_means_what_torch_says() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(from_e4m3(codes), expected)


def test_values_round_to_e4m3_as_in_torch() -> None:
    values = FINITE[np.abs(FINITE) <= E4M3_MAX]
    expected = torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(to_e4m3(values), expected)


def test_e4m3_has_no_infinity_and_keeps_nan() -> None:
    values = np.array([448.1, 1e30, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(from_e4m3(to_e4m3(values)), np.array([448, 448, 448, -448, np.nan], np.float32))


@given(st.floats(2.0**-6, E4M3_MAX, width=32), st.sampled_from([1, -1]))
def test_e4m3_is_off_by_a_sixteenth_at_most(size: float, sign: int) -> None:
    value = np.array([size * sign], np.float32)
    assert abs(from_e4m3(to_e4m3(value))[0] - value[0]) <= size / 16


@pytest.mark.parametrize("dtype", list(STORED))
def test_page_types_round_as_in_torch_and_come_back_exactly(dtype: str) -> None:
    torch_dtype = getattr(torch, dtype)
    rounded = torch.from_numpy(FINITE.copy()).to(torch_dtype)
    held = rounded.isfinite()
    stored = narrow(FINITE[held.numpy()], dtype)
    assert stored.dtype == STORED[dtype]
    assert (torch.from_numpy(stored.view(np.uint8)) == rounded[held].view(torch.uint8)).all()
    np.testing.assert_array_equal(widen(stored, dtype), rounded[held].float().numpy())


# The last one is the NaN whose bits rounding to bfloat16 would carry over into a number.
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.uint32(0xFFFFFFFF).view(np.float32)])
@pytest.mark.parametrize("dtype", list(STORED))
def test_what_is_not_finite_is_refused(dtype: str, value: float | np.float32) -> None:
    with pytest.raises(ValueError, match=dtype):
        narrow(np.array([1.0, value], np.float32), dtype)


@pytest.mark.parametrize(("dtype", "value"), [("float16", 65520.0), ("bfloat16", 3.4e38)])
def test_what_is_too_large_is_refused(dtype: str, value: float) -> None:
    with pytest.raises(ValueError, match=dtype):
        narrow(np.array([value], np.float32), dtype)
