"""Stored numbers of any GGUF type to float32."""

from functools import cache

import gguf
import numpy as np
import numpy.typing as npt

# Of stored data at once: what stays in the second-level cache with all intermediate results. It takes half the time of
# whole tensors, and next to no memory beside the result.
_SLICE_BYTES = 1 << 16


@cache
def can_dequantize(kind: gguf.GGMLQuantizationType) -> bool:
    """Whether the ``gguf`` package knows how, tried on one block of zeros."""
    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        return True
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def dequantize(stored: npt.NDArray[np.generic], kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """A writable array of its own.

    ``stored`` is [..., row] floats for F32 and F16, else [..., bytes of a row] bytes; rows hold whole blocks. ``kind``
    is one that ``can_dequantize``.
    """
    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        return stored.astype(np.float32)
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = stored.reshape(-1, block_bytes)
    result = np.empty((len(blocks), block_elements), np.float32)
    step = max(1, _SLICE_BYTES // block_bytes)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        result[start : start + step] = gguf.quants.dequantize(part.reshape(1, -1), kind).reshape(-1, block_elements)
    return result.reshape(gguf.quant_shape_from_byte_shape(stored.shape, kind))
