"""float32 to and from the shorter types that numpy does not have, and to those it has, with overflow refused.

Rounding is to nearest, ties to even.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

E4M3_MAX = 448.0
_E4M3_SMALLEST_NORMAL = 2.0**-6
_E4M3_STEP_BELOW = 2.0**-9  # between the numbers under the smallest normal one
_E4M3_NAN = 0x7F

# How an array of a page dtype is kept in numpy.
STORED: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


def widen(stored: NDArray[np.generic], dtype: str) -> Floats:
    """The values of an array kept as ``STORED[dtype]``, exactly."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def narrow(values: Floats, dtype: str) -> NDArray[np.generic]:
    """``values`` kept as ``STORED[dtype]``. Raises ValueError where one is not finite, or is beyond that type."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        stored: NDArray[np.generic] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        finite = (stored.view(np.uint16) & 0x7F80) != 0x7F80
    else:
        with np.errstate(over="ignore"):
            stored = values.astype(STORED[dtype])
        finite = np.isfinite(stored.astype(np.float32))
    if not (finite & np.isfinite(values)).all():
        raise ValueError(f"dtype {dtype!r} cannot hold a value that is not finite or too large for it")
    return stored


def to_e4m3(values: Floats) -> NDArray[np.uint8]:
    """The nearest number of fp8 E4M3 (1 sign, 4 exponent and 3 mantissa bits, bias 7, no infinities; OCP 8-bit Floating
    Point Specification, revision 1.0). Beyond 448 the nearest is 448; NaN stays NaN.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    sign = (bits >> 24) & 0x80
    size = np.minimum(np.abs(values), np.float32(E4M3_MAX))
    size_bits = size.view(np.uint32)
    # The top 12 bits of a positive float32 are exponent and 3 mantissa bits: E4M3 with another bias.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    with np.errstate(invalid="ignore"):
        below = np.rint(size / np.float32(_E4M3_STEP_BELOW)).astype(np.uint32)
    code = np.where(size < _E4M3_SMALLEST_NORMAL, below, normal)
    code = np.where(np.isnan(values), _E4M3_NAN, code)
    codes: NDArray[np.uint8] = (code | sign).astype(np.uint8)
    return codes


def from_e4m3(codes: NDArray[np.uint8]) -> Floats:
    """The numbers that ``codes`` stand for, exactly."""
    values: Floats = _E4M3_VALUES[codes]
    return values


def _e4m3_values() -> Floats:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(
        exponent == 0, mantissa * _E4M3_STEP_BELOW, np.ldexp(1.0 + mantissa / 8.0, exponent.astype(np.int32) - 7)
    )
    size[(code & 0x7F) == _E4M3_NAN] = np.nan
    return np.where(code & 0x80, -size, size).astype(np.float32)


_E4M3_VALUES = _e4m3_values()
