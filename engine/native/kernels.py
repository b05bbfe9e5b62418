"""The functions of ``kernels.cpp`` and ``int8.cpp`` for torch tensors. Shapes and meaning are described there."""

import ctypes
from functools import cache

import torch

from splitserve.engine.attention_plan import DecodeAttention, PrefillAttention
from splitserve.engine.native.compiling import NotCompiled, compiled_library
from splitserve.engine.operations import AttentionSpec, Rotary

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Kernels:
    """All tensors float32 or int64 on the CPU, dense in their last dimension; checked by whoever calls."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, *arguments: type) -> "ctypes._NamedFuncPointer":
            found = library[f"splitserve_{name}"]
            found.argtypes, found.restype = arguments, None
            return found

        self._rms_norm = function("rms_norm", *[_POINTER] * 4, *[_INTEGER] * 2, *[_FLOAT] * 2)
        self._silu_mul = function("silu_mul", *[_POINTER] * 2, *[_INTEGER] * 2)
        self._gelu_mul = function("gelu_mul", *[_POINTER] * 2, *[_INTEGER] * 2)
        self._rotate_and_write = function(
            "rotate_and_write",
            *[_POINTER, _INTEGER] * 3,
            *[_POINTER] * 3,
            _INTEGER,
            *[_POINTER] * 4,
            *[_INTEGER] * 5,
        )
        self._decode_attention = function(
            "decode_attention",
            *[_POINTER] * 4,
            _INTEGER,
            _POINTER,
            _INTEGER,
            _POINTER,
            *[_INTEGER] * 5,
            _FLOAT,
            _INTEGER,
            _FLOAT,
        )
        self._prefill_attention = function(
            "prefill_attention",
            *[_POINTER] * 3,
            _INTEGER,
            _POINTER,
            *[_INTEGER] * 6,
            _FLOAT,
            _INTEGER,
            _FLOAT,
        )

        self._int8_linear = function("int8_linear", *[_POINTER] * 5, *[_INTEGER] * 3)

    def rms_norm(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
    ) -> torch.Tensor:
        """``hidden`` [..., size], ``residual`` of the same shape takes the sum of both."""
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        size = hidden.shape[-1]
        added = None if residual is None else residual.data_ptr()
        self._rms_norm(
            hidden.data_ptr(), added, weight.data_ptr(), out.data_ptr(), hidden.numel() // size, size, eps, offset
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size)
        return out

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._gelu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size)
        return out

    def rotate_and_write(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary,
        pages: torch.Tensor,
        write_pages: torch.Tensor,
        write_offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, contiguous; the pages are written."""
        tokens, heads, head_dim = query.shape
        kv_heads = key.shape[1]
        rotated_query = query.new_empty(tokens, heads, head_dim)
        rotated_key = query.new_empty(tokens, kv_heads, head_dim)
        self._rotate_and_write(
            query.data_ptr(),
            query.stride(0),
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            rotary.cos.data_ptr(),
            rotary.sin.data_ptr(),
            pages.data_ptr(),
            pages.stride(0),
            write_pages.data_ptr(),
            write_offsets.data_ptr(),
            rotated_query.data_ptr(),
            rotated_key.data_ptr(),
            tokens,
            heads,
            kv_heads,
            pages.shape[3],
            head_dim,
        )
        return rotated_query, rotated_key

    def decode_attention(
        self, query: torch.Tensor, out: torch.Tensor, pages: torch.Tensor, decode: DecodeAttention, spec: AttentionSpec
    ) -> None:
        """Fills the rows of ``out`` [tokens, heads, head_dim] that ``decode`` names; ``query`` has the same shape."""
        _, heads, head_dim = query.shape
        sequences, width = decode.pages.shape
        self._decode_attention(
            query.data_ptr(),
            out.data_ptr(),
            decode.rows.data_ptr(),
            pages.data_ptr(),
            pages.stride(0),
            decode.pages.data_ptr(),
            width,
            decode.ends.data_ptr(),
            sequences,
            heads,
            pages.shape[2],
            pages.shape[3],
            head_dim,
            spec.scale,
            spec.window or 0,
            spec.soft_cap or 0.0,
        )

    def prefill_attention(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        pages: torch.Tensor,
        prefill: PrefillAttention,
        spec: AttentionSpec,
    ) -> None:
        """Fills the rows of ``out`` [tokens, heads, head_dim] that are ``prefill``'s; ``query`` has the same shape, and
        head_dim is a multiple of 16.
        """
        _, heads, head_dim = query.shape
        self._prefill_attention(
            query[prefill.rows].data_ptr(),
            out[prefill.rows].data_ptr(),
            pages.data_ptr(),
            pages.stride(0),
            prefill.table.data_ptr(),
            prefill.start,
            prefill.end - prefill.start,
            heads,
            pages.shape[2],
            pages.shape[3],
            head_dim,
            spec.scale,
            spec.window or 0,
            spec.soft_cap or 0.0,
        )

    def int8_linear(
        self, rows: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, outputs: int
    ) -> torch.Tensor:
        """``rows`` [tokens, in] -> [tokens, outputs]. ``weights`` int8 in panels, ``scales`` one for each output."""
        rows = rows.contiguous()
        out = rows.new_empty(rows.shape[0], outputs)
        added = None if bias is None else bias.data_ptr()
        self._int8_linear(
            rows.data_ptr(),
            weights.data_ptr(),
            scales.data_ptr(),
            added,
            out.data_ptr(),
            rows.shape[0],
            rows.shape[1],
            outputs,
        )
        return out


@cache
def load_kernels() -> Kernels:
    """The kernels of this machine. Raises NotCompiled."""
    try:
        return Kernels(ctypes.CDLL(str(compiled_library())))
    except OSError as error:
        raise NotCompiled(f"the compiled kernels cannot be loaded: {error}") from error
